"""Who may send, who can read along, and what a stranger can make a process do."""

import os
import stat

import pytest
import torch
import zmq

import fp8bridge
from fp8bridge import BridgeConfig
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ConfigError, TransportError
from fp8bridge.keys import load_key_pair, load_public_key, make_keys, split_key, with_key
from fp8bridge.receiver import Receiver

from .support import FP8_CONFIG, FP8_LAYOUT, Tap, ZmqThreadServer, assert_same_bits, expected_wire, tiny_model


class PinnedServer(ZmqThreadServer):
    """Takes weights from the holder of `trainer_key` alone."""

    def __init__(self, name, trainer_key):
        super().__init__(name, layout=FP8_LAYOUT)
        self.trainer_key, self.addresses = trainer_key, []

    def receive(self, addresses, token, manifest_hash, *, timeout_s):
        self.addresses = addresses
        Receiver(self.weights, self.name, trainer_key=self.trainer_key).pull(
            addresses, token, manifest_hash, timeout_s=timeout_s
        )


@pytest.fixture
def keys(tmp_path):
    return make_keys(tmp_path / "mine")


def connect(servers, model=None, **options):
    settings = {"bucket_nbytes": 60_000, "open_timeout_s": 2, "bucket_timeout_s": 2}
    return fp8bridge.connect(StateDictSource(model or tiny_model(), FP8_CONFIG), servers, **settings | options)


def test_keys_are_made_once_and_the_secret_is_the_owners_alone(keys, tmp_path):
    public, secret = keys
    assert stat.S_IMODE(os.stat(secret).st_mode) == 0o600
    assert load_key_pair(secret).public == load_public_key(public) == load_public_key(secret)
    assert load_key_pair(secret).secret not in public.read_bytes()
    before = secret.read_bytes()
    with pytest.raises(ConfigError, match="servers may already know that key"):
        make_keys(tmp_path / "mine")
    assert secret.read_bytes() == before


def test_an_address_carries_its_key(keys):
    public = load_public_key(keys[0])
    assert split_key(with_key("tcp://[::1]:5", public)) == ("tcp://[::1]:5", public)
    assert split_key("tcp://10.0.0.1:5") == ("tcp://10.0.0.1:5", None)
    for wrong in ("tcp://h:1#curve=zz", "tcp://h:1#curve=00ff", "tcp://h:1#curve="):
        with pytest.raises(ConfigError, match="tcp://h:1 comes with a CURVE key that is none"):
            split_key(wrong)


@pytest.mark.parametrize("pinned", [False, True])
def test_an_encrypted_update_arrives_bit_for_bit(keys, pinned):
    model = tiny_model()
    server = PinnedServer("a", load_public_key(keys[0]) if pinned else None)
    with connect([server], model, curve_key_file=str(keys[1])) as bridge:
        for version in (1, 2):
            bridge.update_weights(version=version)
        bridge.verify()
    assert_same_bits(server.tensors, expected_wire(model))
    assert "#curve=" in server.addresses[0]


def test_nothing_of_the_weights_can_be_read_on_the_wire(keys):
    """A tap between trainer and server sees the weights of a plain update, and not those of an encrypted one."""
    model = tiny_model()
    needle = model["model.norm.weight"].view(torch.uint8).numpy().tobytes()
    for options, seen in (({}, True), ({"curve_key_file": str(keys[1])}, False)):
        tap = Tap()
        server = PinnedServer("a", None)
        server.receive = _through(server, tap)
        with connect([server], model, **options) as bridge:
            bridge.update_weights(version=1)
        assert (needle in tap.bytes) is seen


def _through(server, tap):
    def receive(addresses, token, manifest_hash, *, timeout_s):
        moved = [tap.in_front_of(address) for address in addresses]
        Receiver(server.weights, server.name).pull(moved, token, manifest_hash, timeout_s=timeout_s)

    return receive


def test_a_trainer_with_another_key_or_none_is_refused_by_a_server_that_knows_its_own(keys, tmp_path):
    other = make_keys(tmp_path / "theirs")[1]
    server = PinnedServer("a", load_public_key(keys[0]))
    for options, says in (({"curve_key_file": str(other)}, "has another key"), ({}, "has no key")):
        with connect([server], **options) as bridge:
            with pytest.raises(TransportError, match=says):
                bridge.update_weights(version=1)
            assert (server.weight_version, server.paused) == ("default", False)


def test_a_man_in_the_middle_with_a_key_of_his_own_gets_no_word(keys, tmp_path):
    """He answers at the sender's address; the server encrypts to the sender's key and hears nothing."""
    thief = load_key_pair(make_keys(tmp_path / "theirs")[1])
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = thief
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    server = PinnedServer("a", None)
    address = with_key(f"tcp://127.0.0.1:{port}", load_public_key(keys[0]))
    with pytest.raises(TransportError, match=r"no answer from sender .*CURVE key"):
        Receiver(server.weights, "a").pull([address], "token", "hash", timeout_s=1)
    assert not socket.poll(0)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "10.0.0.1"}, "would travel unencrypted; set curve_key_file"),
        ({"transport": "loopback", "curve_key_file": "k"}, "'loopback' would ignore it"),
    ],
)
def test_configs_that_would_be_less_safe_than_they_look_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        BridgeConfig(**options)
    assert BridgeConfig(host="10.0.0.1", curve_key_file="k")
    assert BridgeConfig(host="10.0.0.1", allow_plaintext=True)


@pytest.mark.parametrize("content", [None, "", "metadata\ncurve\n", "no key here"])
def test_a_key_file_that_is_none_is_named(tmp_path, content):
    path = tmp_path / "x.key_secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.key_secret"):
        connect([PinnedServer("a", None)], curve_key_file=str(path))


def test_the_public_file_is_no_secret(keys):
    with pytest.raises(ConfigError, match=r"has no secret key; give the file that ends in \.key_secret"):
        connect([PinnedServer("a", None)], curve_key_file=str(keys[0]))
