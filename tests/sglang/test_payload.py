"""What SGLang's unpickler is given: it dies of any name that is not on its list."""

import base64
import pickle
import pickletools

import pytest
import torch

from fp8bridge.sglang import payload


@pytest.mark.parametrize("message", [b"", b"x", bytes(range(256)) * 50])
def test_a_message_arrives_and_names_one_global(message):
    data = base64.b64decode(payload.pack(message))
    names = [argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "SHORT_BINUNICODE"]
    assert set(names) == {"fp8bridge", "torch", "ByteTensor"}
    assert not [o.name for o, _, _ in pickletools.genops(data) if o.name in ("GLOBAL", "INST", "EXT1", "BUILD", "OBJ")]
    assert payload.unpack(pickle.loads(data)) == message


def test_what_a_trainer_does_to_torch_does_not_change_it(monkeypatch):
    """Megatron-Core puts its own function in this place; a tensor pickled by torch would name that."""
    import torch.storage

    plain = payload.pack(b"message")

    def another(data):
        raise AssertionError

    monkeypatch.setattr(torch.storage, "_load_from_bytes", another)
    assert payload.pack(b"message") == plain


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("other", torch.zeros(3, dtype=torch.uint8))],
        [("fp8bridge", torch.zeros(3))],
        [("fp8bridge", torch.zeros(3, dtype=torch.uint8))] * 2,
    ],
)
def test_what_is_not_ours_is_refused(tensors):
    with pytest.raises(ValueError, match="not a message of fp8bridge"):
        payload.unpack(tensors)
