"""What a rehearsal sees of a model's own `load_weights`: small models that load in every way there is."""

import pytest
import torch
from torch import nn

from fp8bridge.kernels import reference
from fp8bridge.plan import Bucket, Entry, Manifest
from fp8bridge.sglang import loader
from fp8bridge.sglang.record import rehearse
from tests.support import FP8_LAYOUT


def manifest(**tensors):
    entries, end = [], 0
    for name, (dtype, shape) in tensors.items():
        nbytes = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        entries.append(Entry(name.replace("__", "."), dtype, shape, end, nbytes))
        end += nbytes
    return Manifest(FP8_LAYOUT, (Bucket(0, 0, end, tuple(entries)),))


class Fused(nn.Module):
    """Two tensors stacked into one parameter, as SGLang does with gate and up; a norm; unknown names are skipped."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.full((6, 4), 7.0, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.Parameter(torch.full((4,), 7.0, dtype=torch.bfloat16), requires_grad=False)
        self.absorbed = None

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "gate":
                self.gate_up.data[: len(tensor)].copy_(tensor)
            elif name == "up":
                self.gate_up.data.narrow(0, 3, len(tensor)).copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)


WHOLE = {"gate": ("bfloat16", (3, 4)), "up": ("bfloat16", (3, 4)), "norm": ("bfloat16", (4,))}


def test_a_full_load_is_complete_and_nothing_was_written():
    model = Fused()
    found = rehearse(model, manifest(**WHOLE))
    assert (found.problems, found.complete) == ([], True)
    assert {(c.source, c.param, c.dst.offset) for c in found.copies} == {
        ("gate", "gate_up", 0),
        ("up", "gate_up", 12),
        ("norm", "norm", 0),
    }
    assert (model.gate_up == 7).all()
    assert (model.norm == 7).all()


def test_replay_is_the_load_bit_for_bit(monkeypatch):
    plan = manifest(**WHOLE)
    tensors = {e.name: torch.randn(e.shape).bfloat16() for e in plan.buckets[0].entries}
    memory = torch.cat([tensors[e.name].reshape(-1).view(torch.uint8) for e in plan.buckets[0].entries])
    loaded, replayed = Fused(), Fused()
    loaded.load_weights(tensors.items())
    monkeypatch.setattr(loader, "_state", loader._State(manifest=plan, rehearsal=rehearse(replayed, plan)))
    for _ in range(2):
        loader._load_bucket(replayed, plan.buckets[0], memory, replay=True)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), replayed.parameters(), strict=True))
    # A parameter that was put elsewhere is found there.
    replayed.norm.data = torch.zeros(4, dtype=torch.bfloat16)
    loader._load_bucket(replayed, plan.buckets[0], memory, replay=True)
    assert torch.equal(replayed.norm, loaded.norm)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gate": None}, "gate_up [6, 4] on the server gets 12 of 24 values"),
        ({"gate": ("bfloat16", (2, 4))}, "gate_up [6, 4] on the server gets 20 of 24 values"),
        ({"other": ("bfloat16", (2, 4))}, "other is ignored by the server"),
        ({"up": ("bfloat16", (9, 4))}, "load_weights raises at up: "),
        ({"norm": ("float8_e4m3fn", (4,))}, "norm is float8_e4m3fn and norm bfloat16"),
    ],
)
def test_what_would_leave_wrong_weights_is_named(change, says):
    tensors = {name: form for name, form in (WHOLE | change).items() if form is not None}
    found = rehearse(Fused(), manifest(**tensors))
    assert [p for p in found.problems if says in p], found.problems
    assert not found.complete


class Derives(Fused):
    """Makes something of its weights when they are loaded, as MLA does of kv_b."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.absorbed = self.gate_up.data[:3].t().contiguous()


class Computes(Fused):
    """Changes a tensor on its way in."""

    def load_weights(self, weights):
        super().load_weights((n, t * 2 if n == "norm" else t) for n, t in weights)


class Casts(Fused):
    def __init__(self):
        super().__init__()
        self.norm.data = self.norm.data.float()


class Halves(Fused):
    """Takes a part of a tensor only, as a rank of a tensor-parallel server does."""

    def load_weights(self, weights):
        super().load_weights((n, t[:, :4]) if n in ("gate", "up") else (n, t) for n, t in weights)


@pytest.mark.parametrize("model", [Derives, Computes, Casts, Halves])
def test_copies_are_not_the_load_where_the_model_does_more_or_less(model):
    wide = {"gate": ("bfloat16", (3, 8)), "up": ("bfloat16", (3, 8))} if model is Halves else {}
    found = rehearse(model(), manifest(**WHOLE | wide))
    assert not found.complete
    if model is not Computes:
        assert found.problems == [], "all of it is a right load, by load_weights"


def test_layers_that_the_target_leaves_to_a_draft_model_are_no_problem():
    class Config:
        num_hidden_layers = 2

    model = Fused()
    model.config = Config()
    mtp = {"model__layers__2__eh_proj__weight": ("bfloat16", (4, 8))}
    assert rehearse(model, manifest(**WHOLE | mtp)).problems == []
    layer = {"model__layers__1__odd__weight": ("bfloat16", (4, 8))}
    assert rehearse(model, manifest(**WHOLE | layer)).problems != []


def test_fp8_codes_and_scales_are_copies_like_any():
    class Fp8(nn.Module):
        def __init__(self):
            super().__init__()
            codes, scales = reference.quantize(torch.randn(256, 128), "sglang")
            self.weight = nn.Parameter(codes, requires_grad=False)
            self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)

        def load_weights(self, weights):
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)

    fits = {"weight": ("float8_e4m3fn", (256, 128)), "weight_scale_inv": ("float32", (2, 1))}
    assert rehearse(Fp8(), manifest(**fits)).complete
    bf16 = rehearse(Fp8(), manifest(**fits | {"weight": ("bfloat16", (256, 128))}))
    assert [p for p in bf16.problems if "weight is bfloat16 and weight float8_e4m3fn" in p]
