"""A rank's live parameters: whatever moves, changes or breaks between updates, what is seen is what is there now."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bridge import BridgeConfig, parameters
from fp8bridge.errors import NonFiniteError, PlanError
from fp8bridge.kernels import Scan
from fp8bridge.parameters import Parameters
from fp8bridge.planner import make_plan
from fp8bridge.types import Shard, TensorMeta
from tests.support import FP8_LAYOUT

COUNT = 7


class Source:
    """`mixed`: some parameters lie still, one is made anew at each reading."""

    def __init__(self, mixed):
        self.tensors = {f"t{i}": torch.full((3, 4), float(i)).bfloat16() for i in range(COUNT)}
        self.fleeting = {"t2"} if mixed else set()

    def describe(self):
        metas = [TensorMeta(n, tuple(t.shape), "bfloat16") for n, t in self.tensors.items()]
        return metas, [Shard(n, 0, n, 3, 4, 0, 0, 0, 0) for n in self.tensors]

    def read(self, param):
        found = self.tensors[param]
        return found.clone() if param in self.fleeting else found

    def live(self, params):
        return [None if p in self.fleeting else self.tensors[p] for p in params]


class LastingScan(Scan):
    """As on a GPU: made once, used again by address."""

    keeps_alive = False
    made = 0

    def __init__(self, sources):
        super().__init__(sources)
        type(self).made += 1


def of(source):
    plan = make_plan([source.describe()], FP8_LAYOUT, BridgeConfig())
    items = {item.meta.name: item for bucket in plan.items_by_bucket().values() for item in bucket}
    return Parameters(source, [(items[s.tensor], s) for s in source.describe()[1]])


changes = st.lists(
    st.tuples(st.sampled_from(["value", "nan", "inf", "move", "nothing"]), st.integers(0, COUNT - 1)), max_size=12
)


@settings(deadline=None, max_examples=60)
@given(changes, st.integers(1, COUNT + 1), st.booleans(), st.booleans())
def test_what_is_seen_is_what_is_there_now(changes, part, mixed, lasting):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "_PART", part)
        patch.setattr(parameters, "Scan", LastingScan if lasting else Scan)
        source = Source(mixed)
        seen = of(source)
        for what, index in [("nothing", 0), *changes]:
            tensor = source.tensors[f"t{index}"]
            epoch, still = seen.epoch, True
            if what == "move":
                source.tensors[f"t{index}"] = tensor.clone()
                still = f"t{index}" in source.fleeting
            elif what != "nothing":
                tensor[index % 3, index % 4] = {"value": 3.0, "nan": float("nan"), "inf": float("inf")}[what]
            bad = {n for n, t in source.tensors.items() if not torch.isfinite(t).all()}
            seen.refresh()
            assert (seen.epoch == epoch) == (still and epoch > 0)
            if not bad:
                seen.check_values(power_of_two_scales=False)
                continue
            with pytest.raises(NonFiniteError) as caught:
                seen.check_values(power_of_two_scales=False)
            assert caught.value.tensor in bad
            source.tensors[caught.value.tensor].zero_()


def test_a_scan_of_what_lies_still_is_made_once(monkeypatch):
    monkeypatch.setattr(parameters, "_PART", 3)
    monkeypatch.setattr(parameters, "Scan", LastingScan)
    monkeypatch.setattr(LastingScan, "made", 0)
    source = Source(mixed=False)
    seen = of(source)
    for _ in range(3):
        seen.refresh()
        seen.check_values(power_of_two_scales=False)
    assert LastingScan.made == 3, "one for each part of seven parameters"


def test_after_a_parameter_of_another_shape_nothing_is_taken_for_checked():
    source = Source(mixed=False)
    seen = of(source)
    seen.refresh()
    right = source.tensors["t5"]
    source.tensors["t5"] = torch.zeros(2, 4, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(PlanError, match="t5 on rank 0 is now bfloat16"):
            seen.refresh()
    source.tensors["t5"] = right
    right[0, 0] = float("nan")
    seen.refresh()
    with pytest.raises(NonFiniteError, match="t5 has 1 NaN"):
        seen.check_values(power_of_two_scales=False)
