"""Where the Hugging Face tensors of a Megatron-Core model lie on the ranks. Arithmetic only, no torch.

Stack a parameter's slices of all tensor-parallel (TP) ranks and you get its HF tensors, each cut into
`parts` and interleaved: parts is 1 for most, the number of query groups for the fused qkv
([q_0; k_0; v_0; q_1; ...]), and the TP size for gate/up (rank r stores [gate_r; up_r]). A rank's slice
of that stack gives its rectangles; so ranks that hold a part of a query group (fewer groups than
ranks) and vocabulary padding (rows past the end of the stack) need no case of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8bridge.errors import ConfigError
from fp8bridge.types import Shard, TensorMeta

from .megatron_families import family_of
from .megatron_names import HF_LAYER, MEGATRON_LAYER, MEGATRON_MTP, Family, ModelDims, Rule, Target, dims_of


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of one pipeline chunk: both names it may have there, its rule and HF tensors, or the
    halves of them, as (name, shape of the part, first row of the part)."""

    te_name: str
    local_name: str
    rule: Rule
    tensors: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.te_name, self.local_name))

    def metas(self, dtype: str) -> list[TensorMeta]:
        """The HF tensors, of a model in `dtype`; some keep a dtype of their own."""
        shapes = {target: shape for target, shape, _ in self.tensors}
        for name, (rows, *rest), begin in self.tensors:
            shapes[name] = (begin + rows, *rest)
        return [TensorMeta(name, shape, self.rule.dtype or dtype) for name, shape in shapes.items()]

    def local_shapes(self, tp: int, vocab_multiple: int = 128) -> list[tuple[int, ...]]:
        """The shapes the parameter may have on each of `tp` ranks, Transformer Engine's first; ConfigError if it
        cannot be cut so."""
        split, first = self.rule.split, self.tensors[0][1]
        shape = [sum(s[0] for _, s, _ in self.tensors), *first[1:]]
        if split.padded:
            shape[0] = -(-shape[0] // (vocab_multiple * tp)) * vocab_multiple * tp
        cut = split.axis
        sizes = ([] if cut is None else [shape[cut]]) + ([first[0]] if split.parts == "tp" else [])
        whole = [tuple(shape)] if split.whole else []
        if any(size % tp for size in sizes):
            if whole:
                return whole
            raise ConfigError(
                f"{self.te_name} of shape {tuple(shape)} cannot be cut into {tp} equal slices; "
                "choose a tensor-parallel size that divides the model",
                tensor=self.tensors[0][0],
            )
        if cut is not None:
            shape[cut] //= tp
        return [*whole, tuple(shape)]

    def shards(
        self, dims: ModelDims, *, param: str, rank: int, tp_rank: int, tp: int, shape: Sequence[int]
    ) -> Iterator[Shard]:
        """The rectangles in the slice of TP rank `tp_rank`, whose live shape is `shape`."""
        rows, cols = shape[0], math.prod(shape[1:])
        axis = self.rule.split.axis
        whole = self.rule.split.whole and rows == sum(size for _, (size, *_), _ in self.tensors)
        begin = tp_rank * rows if axis == 0 and not whole else 0
        dst_col = tp_rank * cols if axis == 1 else 0
        parts = {"one": 1, "groups": dims.groups, "tp": tp}[self.rule.split.parts]
        at = 0
        for part in range(parts):
            for name, (tensor_rows, *_), tensor_begin in self.tensors:
                size = tensor_rows // parts
                low, high = max(at, begin), min(at + size, begin + rows)
                if low < high:
                    yield Shard(
                        name, rank, param, high - low, cols,
                        src_row=low - begin, dst_row=tensor_begin + part * size + low - at, dst_col=dst_col,
                    )  # fmt: skip
                at += size


def slots_of(
    family: Family,
    dims: ModelDims,
    layers: Iterable[tuple[int, int]],
    *,
    first: bool,
    last: bool,
    experts: range = range(0),
    mtp: bool = False,
) -> list[Slot]:
    """Every parameter of a pipeline chunk. `layers` are pairs (id in the chunk, id in the model); `experts`
    the model's numbers of this rank's; `mtp`: the chunk also has the layers that predict further tokens."""
    placed = [(rule, "", "") for rule in (family.first if first else ())]
    for local, layer in layers:
        rules = _layer_rules(family, dims, layer)
        placed += [(rule, MEGATRON_LAYER.format(local), HF_LAYER.format(layer)) for rule in rules]
    for k in range(dims.mtp_layers if mtp else 0):
        layer, prefix = dims.layers + k, MEGATRON_MTP.format(k)
        placed += [(rule, prefix, HF_LAYER.format(layer)) for rule in family.mtp]
        inner = _layer_rules(family, dims, layer)
        placed += [(rule, f"{prefix}mtp_model_layer.", HF_LAYER.format(layer)) for rule in inner]
    placed += [(rule, "", "") for rule in (family.last if last else ())]
    wanted = [place for place in placed if not place[0].when or getattr(dims, place[0].when)]
    return [slot for place in wanted for slot in _slots(*place, dims, experts)]


def _layer_rules(family: Family, dims: ModelDims, layer: int) -> tuple[Rule, ...]:
    return family.layer + (family.moe if layer in dims.sparse else family.dense)


def _slots(rule: Rule, prefix: str, hf_prefix: str, dims: ModelDims, experts: range) -> Iterator[Slot]:
    """One slot, or one for each expert on the rank."""
    for local, number in enumerate(experts if rule.expert else (0,)):
        te_name, local_name = rule.param.format(local), (rule.local or rule.param).format(local)
        tensors = tuple((hf_prefix + t.name.format(number), *_part(t, dims)) for t in rule.targets)
        yield Slot(prefix + te_name, prefix + local_name, rule, tensors)


def _part(target: Target, dims: ModelDims) -> tuple[tuple[int, ...], int]:
    """Shape of the part of the tensor that the target means, and its first row."""
    rows, *rest = (getattr(dims, d) for d in target.shape)
    if target.half is None:
        return (rows, *rest), 0
    return (rows // 2, *rest), target.half * (rows // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's place in the groups that cut a model: tensor, expert tensor and expert parallel."""

    tp_rank: int = 0
    tp: int = 1
    etp_rank: int = 0
    etp: int = 1
    ep_rank: int = 0
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "etp", "ep"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, name)
            if not 0 <= rank < size:
                raise ConfigError(f"{name}_rank is {rank}; it must be 0 to {name} - 1, and {name} is {size}")

    def cut(self, expert: bool) -> tuple[int, int]:
        """(rank, size) of the group that cuts a parameter."""
        return (self.etp_rank, self.etp) if expert else (self.tp_rank, self.tp)

    def experts(self, count: int) -> range:
        """The model's numbers of this rank's experts, of `count`."""
        if count % self.ep:
            raise ConfigError(f"{count} experts cannot be split evenly over ep {self.ep}")
        each = count // self.ep
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)


def places(*, tp: int, dp: int = 1, ep: int = 1, etp: int | None = None) -> list[Place]:
    """The tp x dp ranks of a pipeline stage, in Megatron's default order (tp-cp-ep-dp): those that share
    dense weights are cut again, for the experts, into etp (default: tp), then ep."""
    etp = tp if etp is None else etp
    for name, value in {"tp": tp, "dp": dp, "ep": ep, "etp": etp}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    if tp * dp % (etp * ep):
        raise ConfigError(
            f"the {tp * dp} ranks of a stage (tp {tp} x dp {dp}) cannot be split into etp {etp} x ep {ep}"
        )
    return [
        Place(tp_rank=i % tp, tp=tp, etp_rank=i % etp, etp=etp, ep_rank=i // etp % ep, ep=ep) for i in range(tp * dp)
    ]


def megatron_shards(
    hf_config: Mapping[str, Any],
    *,
    tp: int,
    pp: int = 1,
    vpp: int = 1,
    dp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    layers: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    vocab_multiple: int = 128,
    spec: str = "te",
    mtp: bool = False,
) -> tuple[list[TensorMeta], list[Shard]]:
    """What all ranks of a trainer would describe, with no trainer at hand.

    dp: ranks that share dense weights (context parallel ones too); ep x etp of a stage's tp x dp ranks
    share the experts. Ranks are numbered in Megatron's default order (tp-cp-ep-dp-pp). layers: how many
    each of the pp x vpp chunks has, in the model's order (default: evenly many). The vocabulary is padded
    to a multiple of `vocab_multiple` * tp. `spec` ("te" or "local") picks the parameter names; `mtp`: the
    trainer has the config's multi-token prediction layers. ConfigError says which size does not divide.
    """
    family = family_of(hf_config)
    dims = dims_of(hf_config, family)
    if tp < 1 or dims.heads % tp:
        raise ConfigError(f"{dims.heads} attention heads cannot be split over tp {tp}")
    stage_places = places(tp=tp, dp=dp, ep=ep, etp=etp)
    begins = _chunk_begins(dims.layers, pp, vpp, layers)

    metas: dict[str, TensorMeta] = {}
    shards: list[Shard] = []
    for stage, chunk in ((s, c) for s in range(pp) for c in range(vpp)):
        at = chunk * pp + stage
        numbers = list(enumerate(range(begins[at], begins[at + 1])))
        first, last = at == 0, at == pp * vpp - 1
        for i, place in enumerate(stage_places):
            experts = place.experts(dims.experts)
            for slot in slots_of(family, dims, numbers, first=first, last=last, experts=experts, mtp=mtp and last):
                metas |= {meta.name: meta for meta in slot.metas(dtype)}
                tp_rank, size = place.cut(slot.rule.expert)
                param = f"{chunk}:{slot.te_name if spec == 'te' else slot.local_name}"
                shape = slot.local_shapes(size, vocab_multiple)[0 if spec == "te" else -1]
                rank = i + len(stage_places) * stage
                shards += slot.shards(dims, param=param, rank=rank, tp_rank=tp_rank, tp=size, shape=shape)
    return list(metas.values()), shards


def _chunk_begins(count: int, pp: int, vpp: int, layers: Sequence[int] | None) -> list[int]:
    """First layer of each of the pp x vpp chunks, and the end."""
    for name, value in {"pp": pp, "vpp": vpp}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    chunks = pp * vpp
    if layers is None:
        if count % chunks:
            raise ConfigError(
                f"{count} layers cannot be split evenly over pp {pp} x vpp {vpp}; say how many each chunk has (layers)"
            )
        layers = [count // chunks] * chunks
    if len(layers) != chunks or sum(layers) != count or min(layers) < 0:
        raise ConfigError(
            f"layers is {list(layers)}; it needs {chunks} numbers (pp {pp} x vpp {vpp}) that add up to {count}"
        )
    return list(itertools.accumulate(layers, initial=0))
