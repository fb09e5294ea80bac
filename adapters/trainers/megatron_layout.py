"""Where the Hugging Face tensors of a Megatron-Core model lie on the ranks. Arithmetic only, no torch.

Stack a parameter's slices of all tensor-parallel (TP) ranks and you get its HF tensors, each cut into
`parts` and interleaved: parts is 1 for most, the number of query groups for the fused qkv
([q_0; k_0; v_0; q_1; ...]), and the TP size for gate/up (rank r stores [gate_r; up_r]). A rank's slice
of that stack gives its rectangles; so ranks that hold a part of a query group (fewer groups than
ranks) and vocabulary padding (rows past the end of the stack) need no case of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8bridge.errors import ConfigError
from fp8bridge.types import Shard, TensorMeta

from .megatron_names import HF_LAYER, MEGATRON_LAYER, Family, ModelDims, Rule, dims_of, family_of


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of one pipeline chunk: both names it may have there, its rule and HF tensors."""

    te_name: str
    local_name: str
    rule: Rule
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.te_name, self.local_name))

    def metas(self, dtype: str) -> list[TensorMeta]:
        return [TensorMeta(name, shape, dtype) for name, shape in self.tensors]

    def local_shape(self, tp: int, vocab_multiple: int = 128) -> tuple[int, ...]:
        """The shape of the parameter on each of `tp` ranks; ConfigError if it cannot be cut so."""
        split, first = self.rule.split, self.tensors[0][1]
        shape = [sum(s[0] for _, s in self.tensors), *first[1:]]
        if split.padded:
            shape[0] = -(-shape[0] // (vocab_multiple * tp)) * vocab_multiple * tp
        cut = split.axis
        sizes = ([] if cut is None else [shape[cut]]) + ([first[0]] if split.parts == "tp" else [])
        if any(size % tp for size in sizes):
            raise ConfigError(
                f"{self.te_name} of shape {tuple(shape)} cannot be cut into {tp} equal slices; "
                "choose a tensor-parallel size that divides the model",
                tensor=self.tensors[0][0],
            )
        if cut is not None:
            shape[cut] //= tp
        return tuple(shape)

    def shards(
        self, dims: ModelDims, *, param: str, rank: int, tp_rank: int, tp: int, shape: Sequence[int]
    ) -> Iterator[Shard]:
        """The rectangles in the slice of TP rank `tp_rank`, whose live shape is `shape`."""
        rows, cols = shape[0], math.prod(shape[1:])
        axis = self.rule.split.axis
        begin = tp_rank * rows if axis == 0 else 0
        dst_col = tp_rank * cols if axis == 1 else 0
        parts = {"one": 1, "groups": dims.groups, "tp": tp}[self.rule.split.parts]
        at = 0
        for part in range(parts):
            for name, (tensor_rows, *_) in self.tensors:
                size = tensor_rows // parts
                low, high = max(at, begin), min(at + size, begin + rows)
                if low < high:
                    yield Shard(
                        name, rank, param, high - low, cols,
                        src_row=low - begin, dst_row=part * size + low - at, dst_col=dst_col,
                    )  # fmt: skip
                at += size


def slots_of(
    family: Family, dims: ModelDims, layers: Iterable[tuple[int, int]], *, first: bool, last: bool
) -> list[Slot]:
    """Every parameter of a pipeline chunk. `layers` are pairs (id in the chunk, id in the model)."""

    def slot(rule: Rule, prefix: str, hf_prefix: str) -> Slot:
        tensors = tuple((hf_prefix + t.name, tuple(getattr(dims, d) for d in t.shape)) for t in rule.targets)
        return Slot(prefix + rule.param, prefix + (rule.local or rule.param), rule, tensors)

    placed = [(rule, "", "") for rule in (family.first if first else ())]
    for local, layer in layers:
        placed += [(rule, MEGATRON_LAYER.format(local), HF_LAYER.format(layer)) for rule in family.layer]
    placed += [(rule, "", "") for rule in (family.last if last else ())]
    return [slot(*place) for place in placed if not place[0].when or getattr(dims, place[0].when)]


def megatron_shards(
    hf_config: Mapping[str, Any],
    *,
    tp: int,
    pp: int = 1,
    vpp: int = 1,
    dp: int = 1,
    dtype: str = "bfloat16",
    vocab_multiple: int = 128,
    spec: str = "te",
) -> tuple[list[TensorMeta], list[Shard]]:
    """What all ranks of a TP x PP x VPP x DP trainer would describe, with no trainer at hand.

    Ranks are numbered in Megatron's default order (tp-cp-ep-dp-pp), layers are split evenly, and the
    vocabulary is padded to a multiple of `vocab_multiple` * tp. `spec` ("te" or "local") picks the
    parameter names. ConfigError says which size does not divide.
    """
    family = family_of(hf_config)
    dims = dims_of(hf_config, family)
    for name, value in {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    if dims.layers % (pp * vpp):
        raise ConfigError(f"{dims.layers} layers cannot be split evenly over pp {pp} x vpp {vpp}")
    per_chunk = dims.layers // (pp * vpp)

    metas: dict[str, TensorMeta] = {}
    shards: list[Shard] = []
    for stage, chunk in ((s, c) for s in range(pp) for c in range(vpp)):
        begin = (chunk * pp + stage) * per_chunk
        layers = [(i, begin + i) for i in range(per_chunk)]
        first, last = stage == chunk == 0, (stage, chunk) == (pp - 1, vpp - 1)
        for slot in slots_of(family, dims, layers, first=first, last=last):
            metas |= {meta.name: meta for meta in slot.metas(dtype)}
            shape = slot.local_shape(tp, vocab_multiple)
            param = f"{chunk}:{slot.te_name if spec == 'te' else slot.local_name}"
            for replica, tp_rank in ((d, t) for d in range(dp) for t in range(tp)):
                rank = tp_rank + tp * (replica + dp * stage)
                shards += slot.shards(dims, param=param, rank=rank, tp_rank=tp_rank, tp=tp, shape=shape)
    return list(metas.values()), shards
