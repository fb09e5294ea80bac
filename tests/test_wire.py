"""Messages: round trips, and nothing but messages gets through."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bridge.errors import WireError
from fp8bridge.wire import PROTOCOL, Ack, BucketHeader, Hello, Ping, Refuse, Welcome, decode, encode

MESSAGES = st.one_of(
    st.builds(Hello, st.text(), st.text(), st.text(), st.integers(0, 9), st.integers(0, 9)),
    st.builds(Welcome, st.lists(st.integers(0, 1 << 40)).map(tuple), st.integers(0, 9)),
    st.builds(Refuse, st.text()),
    st.builds(BucketHeader, st.integers(0, 1 << 40), st.integers(0, 1 << 60), st.binary(max_size=64)),
    st.builds(Ack, st.integers(0, 9), st.booleans(), st.text()),
    st.just(Ping()),
)


@given(MESSAGES)
def test_round_trip(message):
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_a_wire_error(frame):
    with pytest.raises(WireError):
        decode(frame)


@given(MESSAGES, st.data())
def test_a_cut_message_is_a_wire_error(message, data):
    frame = encode(message)
    with pytest.raises(WireError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"kind": "Ack", "protocol": PROTOCOL, "index": 1, "ok": True}, "without message"),
        ({"kind": "Ack", "protocol": PROTOCOL, "index": 1, "ok": 1, "message": ""}, "must be bool"),
        ({"kind": "Ack", "protocol": PROTOCOL, "index": True, "ok": True, "message": ""}, "must be int"),
        ({"kind": "Ping", "protocol": PROTOCOL, "extra": 1}, "unknown fields"),
        ({"kind": "Ping", "protocol": 99}, "this side speaks"),
        ({"kind": "Nope", "protocol": PROTOCOL}, "unknown message kind"),
        ({"kind": ["Ping"], "protocol": PROTOCOL}, "unknown message kind"),
        ({"protocol": PROTOCOL}, "without a kind"),
        ([1, 2], "without a kind"),
        ({"kind": "Welcome", "protocol": PROTOCOL, "buckets": [1, "2"]}, "must be tuple"),
    ],
)
def test_each_way_a_message_can_be_wrong(data, says):
    with pytest.raises(WireError, match=says):
        decode(msgpack.packb(data))
