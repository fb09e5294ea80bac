"""Whatever a peer sends: an error of ours, the old weights, a bounded amount of memory, and the next update works."""

import contextlib
import threading
import tracemalloc

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bridge.errors import WireError
from fp8bridge.receiver import Receiver
from fp8bridge.staging import StagedWeights
from fp8bridge.transport.zmq import ZmqTransport
from fp8bridge.wire import BucketHeader, decode, encode, max_header_nbytes

from .fuzzing import (
    GOOD,
    LIMIT,
    MANIFEST,
    NEW,
    OLD,
    PACKED,
    SERVER_SAYS,
    feed_body,
    feed_frame,
    feed_receiver,
    feed_sender,
)
from .support import FP8_LAYOUT, assert_same_bits
from .test_wire import MESSAGES

ANY_MESSAGE = st.one_of(MESSAGES, st.builds(BucketHeader, st.integers(0, 9), st.integers(0, 1 << 14), st.binary()))
NUMBER = st.integers(-(1 << 63), (1 << 64) - 1)


@st.composite
def streams(draw):
    """An honest sender's stream, changed in one to five places."""
    stream = [list(message) for message in GOOD]
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(stream) - 1))
        other = draw(st.integers(0, len(stream) - 1))
        match draw(st.sampled_from(["flip", "cut", "grow", "drop", "twice", "swap", "frames", "message", "header"])):
            case "flip":
                frame = bytearray(stream[at][-1])
                if frame:
                    frame[draw(st.integers(0, len(frame) - 1))] ^= draw(st.integers(1, 255))
                stream[at][-1] = bytes(frame)
            case "cut":
                stream[at][-1] = stream[at][-1][: draw(st.integers(0, len(stream[at][-1])))]
            case "grow":
                stream[at][-1] += draw(st.binary(max_size=9))
            case "drop":
                stream[at] = stream[at][:-1] or [b""]
            case "twice":
                stream.insert(other, stream[at])
            case "swap":
                stream[at], stream[other] = stream[other], stream[at]
            case "frames":
                stream[at] = [*stream[at], draw(st.binary(max_size=40))]
            case "message":
                stream.insert(at, [encode(draw(ANY_MESSAGE))])
            case "header":
                data = msgpack.unpackb(stream[at][0], strict_map_key=False) if len(stream[at]) > 1 else {}
                if isinstance(data, dict) and "index" in data:
                    key = draw(st.sampled_from(["index", "nbytes", "checksums", "kind", "protocol"]))
                    data[key] = draw(st.one_of(NUMBER, st.binary(max_size=9), st.text(max_size=5)))
                    stream[at][0] = msgpack.packb(data)
    return stream


def test_the_honest_stream_comes_whole():
    assert feed_receiver(GOOD)


@settings(max_examples=100, deadline=None)
@given(streams())
def test_a_changed_stream_never_harms_the_receiver(stream):
    feed_receiver(stream)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.one_of(st.binary(max_size=60), ANY_MESSAGE.map(encode)), min_size=1, max_size=3)))
def test_any_frames_never_harm_the_receiver(stream):
    assert not feed_receiver(stream)
    for message in stream:
        for frame in message:
            feed_frame(frame)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"", b"a", b"b"]), st.one_of(st.binary(), ANY_MESSAGE.map(encode)))))
def test_any_answers_never_harm_the_sender(said):
    feed_sender([SERVER_SAYS[0], *([identity, frame] for identity, frame in said)], PACKED)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.one_of(st.binary(max_size=99), ANY_MESSAGE.map(encode)), min_size=1), max_size=20))
def test_an_honest_server_is_served_amid_noise_on_real_sockets(noise):
    transport = ZmqTransport("127.0.0.1", bucket_timeout_s=20)
    endpoint = transport.open({"server": "token"}, MANIFEST, [b.index for b in MANIFEST.buckets])
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(endpoint)
    for message in noise:
        stranger.send_multipart(message)
    weights = StagedWeights(dict(OLD), FP8_LAYOUT)
    weights.begin(MANIFEST)
    pull = threading.Thread(
        target=lambda: Receiver(weights, "server").pull([endpoint], "token", MANIFEST.hash, timeout_s=20)
    )
    pull.start()
    transport.connect(timeout_s=20, gone=lambda _: None)
    for packed in PACKED:
        transport.send(packed)
    for packed in PACKED:
        transport.wait(packed.bucket.index)
    pull.join(20)
    transport.close()
    context.destroy(linger=0)
    assert not transport.failures
    weights.commit()
    assert_same_bits(weights.tensors, NEW)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    *("mode", "lease_s", "rid", "abort_all", "selector", "session", "manifest_hash", "weight_version", "whosever"),
    *("endpoints", "timeout_s", "action", "name", "names", "layout", "buckets", "block", "ignored", "entries"),
]
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)


@settings(max_examples=100, deadline=None)
@given(JSON | BODIES, st.data())
def test_any_control_body_is_read_or_refused(body, data):
    feed_body(body)
    manifest = MANIFEST.as_dict()
    bucket = manifest["buckets"][data.draw(st.integers(0, len(manifest["buckets"]) - 1))]
    where, keys = data.draw(st.sampled_from([(manifest, list(manifest)), (bucket, list(bucket))]))
    where[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    feed_body(manifest)


# --- memory

ONE_BYTE_EACH = {
    "maps": b"\x80",
    "lists": b"\x90",
    "nothing": b"\xc0",
    "small numbers": b"\x01",
    "nested lists": b"\x91",
}


def peak_nbytes(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ONE_BYTE_EACH)
def test_a_message_of_a_tiny_plan_costs_little_memory_whatever_is_in_it(kind):
    """A byte can become seventy, so the frame itself is bounded by the plan."""
    nbytes = max_header_nbytes(20)
    inside = ONE_BYTE_EACH[kind] * (nbytes - 40)
    frame = b"\x83\xa4kind\xa7Welcome\xa8protocol\x01\xa7buckets\xdd" + len(inside).to_bytes(4, "big") + inside

    def work():
        with contextlib.suppress(WireError):
            decode(frame[:nbytes], nbytes)

    assert peak_nbytes(work) < 80 * nbytes


def test_a_frame_longer_than_the_plan_allows_is_not_even_parsed():
    nbytes = max_header_nbytes(20)
    frame = bytes(50 << 20)

    def work():
        with pytest.raises(WireError, match=f"at most {nbytes} are read"):
            decode(frame, nbytes)

    assert peak_nbytes(work) < 100_000


@pytest.mark.parametrize(
    "frame",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\xa4kind\xdd\xff\xff\xff\xff",
    ],
)
def test_a_count_that_lies_takes_no_memory(frame):
    def work():
        with pytest.raises(WireError):
            decode(frame)

    assert peak_nbytes(work) < 1_000_000


@settings(max_examples=30, deadline=None)
@given(streams())
def test_a_changed_stream_takes_no_more_memory_than_the_honest_one(stream):
    honest = peak_nbytes(lambda: feed_receiver(GOOD))
    assert peak_nbytes(lambda: feed_receiver(stream)) < honest + 2 * LIMIT
