"""The zmq transport against receivers that behave, and against peers that do not."""

import dataclasses
import threading
import time

import pytest
import torch
import zmq

from fp8bridge import BridgeConfig
from fp8bridge.errors import ServerTimeoutError, ServerUnreachableError, TransportError, WireError
from fp8bridge.plan import Manifest
from fp8bridge.planner import make_plan
from fp8bridge.protocols import PackedBucket
from fp8bridge.receiver import Receiver
from fp8bridge.staging import StagedWeights, bucket_checksums
from fp8bridge.transport.zmq import ZmqTransport
from fp8bridge.wire import Ack, BucketHeader, Hello, Ping, Refuse, Welcome, decode, encode
from tests.support import FP8_LAYOUT, SplitSource, assert_same_bits, expected_wire, tiny_model

DESCRIBED = [SplitSource(tiny_model(), 0, 1).describe()]
MANIFEST = make_plan(DESCRIBED, FP8_LAYOUT, BridgeConfig(bucket_nbytes=60_000)).manifest
NEW = expected_wire(tiny_model(seed=5))
ALL = [b.index for b in MANIFEST.buckets]


def packed(index):
    bucket = MANIFEST.buckets[index]
    memory = torch.cat([NEW[e.name].contiguous().reshape(-1).view(torch.uint8) for e in bucket.entries])
    return PackedBucket(bucket, memory, bucket_checksums(bucket, memory))


def nobody_gone(_):
    return None


@pytest.fixture
def transport():
    made = ZmqTransport("127.0.0.1", bucket_timeout_s=1.0)
    yield made
    made.close("test over")


class Pull(threading.Thread):
    """A receiving server in a thread."""

    def __init__(self, endpoints, token, *, manifest_hash=MANIFEST.hash, name="a", timeout_s=5.0):
        super().__init__(daemon=True)
        self.weights = StagedWeights(expected_wire(tiny_model(seed=4)), FP8_LAYOUT)
        self.weights.begin(MANIFEST)
        self.stop = False
        self.error = None
        self._args = (endpoints, token, manifest_hash, timeout_s)
        self._receiver = Receiver(self.weights, name, should_stop=lambda: self.stop)
        self.start()

    def run(self):
        endpoints, token, manifest_hash, timeout_s = self._args
        try:
            self.nbytes = self._receiver.pull(endpoints, token, manifest_hash, timeout_s=timeout_s)
        except TransportError as err:
            self.error = err


class Raw:
    """A server's socket under the test's hand."""

    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(endpoint)

    def say(self, message):
        self.socket.send(encode(message))
        return self

    def hear(self, timeout_ms=3000):
        assert self.socket.poll(timeout_ms), "silence"
        message = decode(self.socket.recv())
        self.payload = self.socket.recv() if self.socket.getsockopt(zmq.RCVMORE) else b""
        return self.hear(timeout_ms) if isinstance(message, Ping) else message

    def close(self):
        self.socket.close(linger=0)


def send_all(transport, indexes=ALL):
    for index in indexes:
        transport.send(packed(index))
    for index in indexes:
        transport.wait(index)


def test_two_senders_and_two_servers(transport):
    second = ZmqTransport("127.0.0.1", bucket_timeout_s=5.0)
    tokens = {"a": "token-a", "b": "token-b"}
    half = len(ALL) // 2
    endpoints = [transport.open(tokens, MANIFEST, ALL[:half]), second.open(tokens, MANIFEST, ALL[half:])]
    pulls = [Pull(endpoints, token, name=name) for name, token in tokens.items()]
    for t in (transport, second):
        t.connect(timeout_s=5, gone=nobody_gone)
    send_all(transport, ALL[:half])
    send_all(second, ALL[half:])
    for pull in pulls:
        pull.join(5)
        assert pull.error is None
        assert pull.nbytes == MANIFEST.nbytes
        pull.weights.commit()
        assert_same_bits(pull.weights.tensors, NEW)
    assert not transport.failures
    assert not second.failures
    second.close()


@pytest.mark.parametrize("frame_nbytes", [1000, 39_168, 1 << 20])
def test_a_bucket_may_travel_in_any_number_of_frames(transport, monkeypatch, frame_nbytes):
    monkeypatch.setattr("fp8bridge.transport.zmq.FRAME_NBYTES", frame_nbytes)
    monkeypatch.setattr("fp8bridge.receiver.FRAME_NBYTES", frame_nbytes)
    pull = Pull([transport.open({"a": "t"}, MANIFEST, ALL)], "t")
    transport.connect(timeout_s=5, gone=nobody_gone)
    send_all(transport)
    pull.join(5)
    assert (pull.error, transport.failures) == (None, {})
    pull.weights.commit()
    assert_same_bits(pull.weights.tensors, NEW)


STREAMS = 3


@pytest.fixture
def wide():
    """A sender whose servers make several connections."""
    made = ZmqTransport("127.0.0.1", bucket_timeout_s=1.0, streams=STREAMS)
    yield made
    made.close("test over")


def test_a_server_is_fed_over_several_connections_at_once(wide):
    """None waits for another: what is sent over the last two arrives while the first is full."""
    for _ in range(2):
        pull = Pull([wide.open({"a": "t"}, MANIFEST, ALL)], "t")
        wide.connect(timeout_s=5, gone=nobody_gone)
        [peer] = wide._peers.values()
        assert len({s.identity for s in peer.streams}) == STREAMS
        for index in ALL:
            wide.send(packed(index))
        for index in reversed(ALL):
            wide.wait(index)
        pull.join(5)
        assert (pull.error, wide.failures, pull.nbytes) == (None, {}, MANIFEST.nbytes)
        pull.weights.commit()
        assert_same_bits(pull.weights.tensors, NEW)
        wide.close()


def test_connections_are_shared_out_among_senders_and_never_more_than_buckets(wide):
    halves = Manifest(MANIFEST.layout, tuple(dataclasses.replace(b, owner=b.index % 2) for b in MANIFEST.buckets))
    for manifest, mine, streams in (
        (MANIFEST, ALL, 3),
        (MANIFEST, ALL[:2], 2),
        (MANIFEST, [], 1),
        (halves, ALL[::2], 2),
    ):
        wide.open({"a": "t"}, manifest, mine)
        assert wide._streams == streams
        wide.close()


def test_the_buckets_of_a_connection_are_told_to_it_alone(wide):
    endpoint = wide.open({"a": "t"}, MANIFEST, ALL)
    raws = [Raw(endpoint).say(Hello("t", MANIFEST.hash, "a", 2, stream)) for stream in range(STREAMS)]
    assert [raw.hear() for raw in raws] == [Welcome(tuple(ALL[i::STREAMS]), STREAMS) for i in range(STREAMS)]
    wide.connect(timeout_s=5, gone=nobody_gone)
    for index in ALL:
        wide.send(packed(index))
    assert [raw.hear().index for raw in raws] == ALL[:STREAMS]
    raws[1].say(Ack(ALL[0], True, ""))
    wide.wait(ALL[0])
    assert "acknowledged bucket 0, which it was not sent" in str(wide.failures["a"]), "not over this connection"
    for raw in raws:
        while not isinstance(raw.hear(), Refuse):
            pass  # buckets that were on their way; then each connection is told
        raw.close()


@pytest.mark.parametrize("stream", [-1, STREAMS, 1 << 40])
def test_a_connection_that_was_not_asked_for_is_refused(wide, stream):
    raw = Raw(wide.open({"a": "t"}, MANIFEST, ALL)).say(Hello("t", MANIFEST.hash, "a", 2, stream))
    assert raw.hear() == Refuse(f"there is no connection {stream} of {STREAMS}")
    raw.close()


def test_a_server_with_a_connection_missing_is_not_connected(wide):
    raw = Raw(wide.open({"a": "t"}, MANIFEST, ALL)).say(Hello("t", MANIFEST.hash, "a", 2, 0))
    raw.hear()
    wide.connect(timeout_s=0.3, gone=nobody_gone)
    assert isinstance(wide.failures["a"], ServerTimeoutError)
    raw.close()


def test_an_error_on_one_connection_ends_the_others_and_is_the_one_that_is_told(wide, monkeypatch):
    """The others have nothing to receive, and would wait for their time limit."""
    pull = Pull([wide.open({"a": "t"}, MANIFEST, ALL)], "t", timeout_s=30)
    wide.connect(timeout_s=5, gone=nobody_gone)
    bad = packed(ALL[1])
    wide.send(dataclasses.replace(bad, checksums=bytes(len(bad.checksums))))
    wide.wait(ALL[1])
    pull.join(5)
    assert "changed on the way" in str(pull.error)
    assert "changed on the way" in str(wide.failures["a"])


def test_ipv6_loopback():
    transport = ZmqTransport("::1", bucket_timeout_s=5.0)
    endpoint = transport.open({"a": "t"}, MANIFEST, ALL)
    assert endpoint.startswith("tcp://[::1]:")
    transport.close()


def test_an_address_of_another_host_is_refused():
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        ZmqTransport("192.0.2.1", bucket_timeout_s=1).open({}, MANIFEST, [])


def test_a_transport_is_reused_update_after_update_and_leaves_nothing(transport):
    before = threading.active_count()
    for _ in range(20):
        pull = Pull([transport.open({"a": "t"}, MANIFEST, ALL)], "t")
        transport.connect(timeout_s=5, gone=nobody_gone)
        send_all(transport)
        pull.join(5)
        transport.close()
        assert pull.error is None
    assert threading.active_count() <= before


def test_a_server_that_never_connects_is_named_with_what_to_check(transport):
    transport.open({"a": "t"}, MANIFEST, ALL)
    transport.connect(timeout_s=0.3, gone=nobody_gone)
    assert isinstance(transport.failures["a"], ServerTimeoutError)
    assert "a did not connect to this trainer at 127.0.0.1" in str(transport.failures["a"])
    send_all(transport)


def test_a_server_known_to_be_gone_is_not_waited_for(transport):
    transport.open({"a": "t"}, MANIFEST, ALL)
    start = time.monotonic()
    transport.connect(timeout_s=30, gone=lambda name: ServerUnreachableError(f"{name} was killed", server=name))
    assert time.monotonic() - start < 2
    assert str(transport.failures["a"]) == "a was killed"


def test_a_stranger_is_refused_and_harms_nobody(transport):
    endpoint = transport.open({"a": "token"}, MANIFEST, ALL)
    stranger = Raw(endpoint).say(Hello("guess", MANIFEST.hash, "x", 2, 0))
    assert "not a session" in stranger.hear().message
    noise = Raw(endpoint)
    noise.socket.send(b"\x00\xff not msgpack")
    noise.socket.send_multipart([b"", b"more", b"frames"])
    noise.say(Ack(0, True, "")).say(Ping())
    pull = Pull([endpoint], "token")
    transport.connect(timeout_s=5, gone=nobody_gone)
    second = Raw(endpoint).say(Hello("token", MANIFEST.hash, "a", 2, 0))
    assert "already connected" in second.hear().message
    send_all(transport)
    pull.join(5)
    assert pull.error is None
    assert not transport.failures
    for raw in (stranger, noise, second):
        raw.close()


def test_another_plan_hash_is_refused_on_both_sides(transport):
    pull = Pull([transport.open({"a": "t"}, MANIFEST, ALL)], "t", manifest_hash="0" * 32)
    transport.connect(timeout_s=5, gone=nobody_gone)
    pull.join(5)
    assert "plan hash differs" in str(pull.error)
    assert "a has plan 0000" in str(transport.failures["a"])


def test_credits_bound_what_is_in_flight(transport):
    raw = Raw(transport.open({"a": "t"}, MANIFEST, ALL)).say(Hello("t", MANIFEST.hash, "a", 2, 0))
    assert raw.hear() == Welcome(tuple(ALL), 1)
    transport.connect(timeout_s=5, gone=nobody_gone)
    for index in ALL[:4]:
        transport.send(packed(index))
    first, second = raw.hear(), raw.hear()
    assert (first.index, second.index) == (0, 1)
    assert not [m for m in iter_messages(raw, 300) if isinstance(m, BucketHeader)], "no third without an Ack"
    raw.say(Ack(0, True, ""))
    assert raw.hear().index == 2
    transport.wait(0)
    raw.close()


def iter_messages(raw, for_ms):
    end = time.monotonic() + for_ms / 1000
    while (left := end - time.monotonic()) > 0:
        if raw.socket.poll(int(left * 1000)):
            yield decode(raw.socket.recv_multipart()[0])


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (Ack(0, False, "disk is full"), TransportError, "did not take bucket 0: disk is full"),
        (Ack(7, True, ""), WireError, "acknowledged bucket 7, which it was not sent"),
        (Refuse("out of memory"), TransportError, "gave up: out of memory"),
        (Welcome((), 1), WireError, "unexpected Welcome"),
        (None, ServerTimeoutError, "did not acknowledge bucket 0 in 1 s"),
    ],
)
def test_every_wrong_answer_loses_that_server_and_wait_returns(transport, answer, kind, says):
    endpoint = transport.open({"bad": "t1", "good": "t2"}, MANIFEST, ALL)
    raw = Raw(endpoint).say(Hello("t1", MANIFEST.hash, "bad", 2, 0))
    pull = Pull([endpoint], "t2", name="good")
    transport.connect(timeout_s=5, gone=nobody_gone)
    transport.send(packed(0))
    assert isinstance(raw.hear(), Welcome)
    assert raw.hear().index == 0
    if answer:
        raw.say(answer)
    send_all(transport, ALL[1:])
    transport.wait(0)
    assert type(transport.failures["bad"]) is kind
    assert says in str(transport.failures["bad"])
    assert isinstance(raw.hear(), BucketHeader | Refuse)
    pull.join(5)
    assert pull.error is None, "the other server is not disturbed"
    raw.close()


def test_a_server_whose_connection_drops_is_noticed_without_waiting_for_the_timeout():
    transport = ZmqTransport("127.0.0.1", bucket_timeout_s=60)
    raw = Raw(transport.open({"a": "t"}, MANIFEST, ALL)).say(Hello("t", MANIFEST.hash, "a", 2, 0))
    raw.hear()
    transport.connect(timeout_s=5, gone=nobody_gone)
    transport.send(packed(0))
    assert raw.hear().index == 0
    raw.close()
    start = time.monotonic()
    transport.wait(0)
    assert time.monotonic() - start < 5
    assert isinstance(transport.failures["a"], ServerUnreachableError)
    assert "a is gone" in str(transport.failures["a"])
    transport.close("over")


# --- the receiving side


def sender(tokens=("t",)):
    """A ROUTER under the test's hand, and its endpoint."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return socket, f"tcp://127.0.0.1:{port}"


def greet(socket, indexes=ALL):
    assert socket.poll(5000)
    identity, frame = socket.recv_multipart()
    assert decode(frame).session == "t"
    socket.send_multipart([identity, encode(Welcome(tuple(indexes), 1))])
    return identity


def bucket_frames(number, **change):
    p = packed(number)
    sums = change.get("sums", p.checksums)
    header = encode(BucketHeader(change.get("index", number), change.get("nbytes", p.bucket.nbytes), sums))
    return [header, change.get("payload", bytes(p.memory.numpy()))]


NO_SUMS = bytes(8 * len(MANIFEST.buckets[0].entries))
BAD_SENDERS = {
    "silence": (lambda: [], "heard nothing from the trainer"),
    "gives up": (lambda: [[encode(Refuse("NaN in the trainer"))]], "the sender gave up: NaN in the trainer"),
    "wrong order": (lambda: [bucket_frames(1)], "bucket 1 came, 0 was next"),
    "duplicate": (lambda: [bucket_frames(0), bucket_frames(0)], "bucket 0 came, 1 was next"),
    "no payload": (lambda: [bucket_frames(0)[:1]], "has a payload of 0 bytes"),
    "short payload": (lambda: [bucket_frames(0, payload=b"123")], "has a payload of 3 bytes"),
    "long payload": (lambda: [bucket_frames(0, payload=bytes(MANIFEST.buckets[0].nbytes + 1))], "has a payload of"),
    "two payloads": (lambda: [[*bucket_frames(0), b"x"]], "has a payload of"),
    "lies about the size": (lambda: [bucket_frames(0, nbytes=1 << 60)], "says 1152921504606846976 bytes"),
    "unknown bucket": (lambda: [bucket_frames(0, index=1 << 40)], "came, 0 was next"),
    "corrupt byte": (
        lambda: [bucket_frames(0, sums=NO_SUMS)],
        "changed on the way",
    ),
    "too few checksums": (lambda: [bucket_frames(0, sums=b"")], "0 checksums"),
    "not a message": (lambda: [[b"\xc1\xc1"]], "not msgpack"),
    "not its turn": (lambda: [[encode(Welcome((), 1))]], "expected a bucket, got Welcome"),
}


@pytest.mark.parametrize("case", BAD_SENDERS)
def test_a_receiver_refuses_every_bad_sender_and_tells_it_why(case):
    frames, says = BAD_SENDERS[case]
    socket, endpoint = sender()
    pull = Pull([endpoint], "t", timeout_s=0.6)
    old = dict(pull.weights.tensors)
    identity = greet(socket)
    for message in frames():
        socket.send_multipart([identity, *message])
    pull.join(5)
    assert says in str(pull.error)
    assert_same_bits(pull.weights.tensors, old)
    last = None
    while socket.poll(500):
        last = decode(socket.recv_multipart()[-1])
    assert isinstance(last, Refuse)
    assert says in last.message
    socket.close(linger=0)


@pytest.mark.parametrize("streams", [0, -1, 17, 1 << 40])
def test_a_sender_that_asks_for_no_sane_number_of_connections_is_refused(streams):
    socket, endpoint = sender()
    pull = Pull([endpoint], "t")
    assert socket.poll(5000)
    identity, _ = socket.recv_multipart()
    socket.send_multipart([identity, encode(Welcome(tuple(ALL), streams))])
    pull.join(5)
    assert f"asks for {streams} connections; 1 to 16 are made" in str(pull.error)
    socket.close(linger=0)


@pytest.mark.parametrize("promised", [ALL[:-1], [*ALL, 99], [ALL[0], *ALL], []])
def test_senders_must_promise_exactly_the_plan(promised):
    socket, endpoint = sender()
    pull = Pull([endpoint], "t")
    greet(socket, promised)
    pull.join(5)
    assert "the senders promise buckets" in str(pull.error)
    socket.close(linger=0)


def test_a_receiver_refused_or_unanswered_says_by_whom():
    socket, endpoint = sender()
    pull = Pull([endpoint], "t")
    identity, _ = socket.recv_multipart()
    socket.send_multipart([identity, encode(Refuse("not a session"))])
    pull.join(5)
    assert f"sender {endpoint} refused a: not a session" in str(pull.error)
    silent = Pull([endpoint], "t", timeout_s=0.3)
    silent.join(5)
    assert f"no answer from sender {endpoint}" in str(silent.error)
    socket.close(linger=0)


def test_an_endpoint_that_is_none():
    pull = Pull(["pigeon://roof"], "t")
    pull.join(5)
    assert "cannot connect to sender pigeon://roof" in str(pull.error)


def test_pings_keep_a_slow_sender_alive_and_stop_ends_it():
    socket, endpoint = sender()
    pull = Pull([endpoint], "t", timeout_s=0.5)
    identity = greet(socket)
    for _ in range(6):
        time.sleep(0.2)
        socket.send_multipart([identity, encode(Ping())])
    assert pull.is_alive()
    pull.stop = True
    pull.join(2)
    assert "was aborted" in str(pull.error)
    socket.close(linger=0)
