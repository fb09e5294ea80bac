"""A Megatron-Core GPT model, sharded over the trainer's ranks, as a weight source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8bridge.errors import ConfigError, UnsupportedModelError
from fp8bridge.types import Shard, TensorMeta

from . import transformer_engine as te
from .hf_config import load_hf_config
from .megatron_families import family_of
from .megatron_layout import Place, Slot, slots_of
from .megatron_names import OUTPUT_LAYER, WORD_EMBEDDINGS, dims_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class MegatronSource:
    """The live parameters of this rank's model chunks. A `WeightSource`; made on every rank.

    model_chunks: what Megatron's `get_model` returns: one GPTModel or a list of them, one per virtual
        pipeline stage, bare or wrapped (DistributedDataParallel, Float16Module).
    hf_config: the model's Hugging Face config: a dict, a config.json or its folder.
    rank: by default torch.distributed's.
    place: this rank's place in the groups that cut the model; by default that of the model's own
        `pg_collection` (which is `parallel_state`'s unless the model was built with other groups).

    The source keeps references to the parameters (and the routers' expert biases, which are buffers),
    never copies. A parameter's key is "{chunk}:{name in the unwrapped chunk}".
    """

    def __init__(
        self,
        model_chunks: nn.Module | Sequence[nn.Module],
        hf_config: Mapping[str, Any] | str | Path,
        *,
        rank: int | None = None,
        place: Place | None = None,
    ) -> None:
        self.hf_config = load_hf_config(hf_config)
        self._family = family_of(self.hf_config)
        self._dims = dims_of(self.hf_config, self._family)
        self._wrapped = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        self._chunks = [_unwrap(chunk) for chunk in self._wrapped]
        self._rank = _world_rank() if rank is None else rank
        self._place = _place_of(self._chunks) if place is None else place
        self._params: dict[str, torch.Tensor] = {
            f"{index}:{name}": tensor
            for index, chunk in enumerate(self._chunks)
            for name, tensor in (*chunk.named_parameters(), *_weights_in_buffers(chunk))
        }
        self._fp8: set[str] = set()
        self._kept: dict[str, torch.dtype] = {}
        self.rule: str | None = None
        self.requantized: dict[str, str] = {}

    def describe(self) -> tuple[list[TensorMeta], list[Shard]]:
        """Names, shapes and places of what this rank holds. Not collective; moves no data.

        UnsupportedModelError lists every parameter without a rule; ConfigError says where the model
        and `hf_config` differ.
        """
        self._fp8, self.requantized = set(), {}
        matched = self._match()
        self._check_shapes(matched)
        self._kept = {key: getattr(torch, slot.rule.dtype) for key, slot in matched.items() if slot.rule.dtype}
        self.rule = self._trained_rule()
        metas: dict[str, TensorMeta] = {}
        shards: list[Shard] = []
        for key, slot in matched.items():
            param = self._params[key]
            mine = self._shards(key, slot, self._place.cut(slot.rule.expert)[0])
            for meta in slot.metas(str(param.dtype).removeprefix("torch.")):
                held = [s for s in mine if s.tensor == meta.name]
                new_metas, new_shards = self._as_held(key, slot, meta, held)
                metas |= {m.name: m for m in new_metas}
                shards += new_shards
        return list(metas.values()), shards

    def _shards(self, key: str, slot: Slot, tp_rank: int) -> list[Shard]:
        shape, (_, tp) = self._params[key].shape, self._place.cut(slot.rule.expert)
        return list(slot.shards(self._dims, param=key, rank=self._rank, tp_rank=tp_rank, tp=tp, shape=shape))

    def _as_held(
        self, key: str, slot: Slot, meta: TensorMeta, shards: list[Shard]
    ) -> tuple[list[TensorMeta], list[Shard]]:
        """A plain tensor as it is; an FP8 one as codes and scales, or dequantized where blocks are cut."""
        if key not in self._fp8:
            return [meta], shards
        tp = self._place.cut(slot.rule.expert)[1]
        everywhere = [s for r in range(tp) for s in self._shards(key, slot, r) if s.tensor == meta.name]
        why_not = te.why_not_as_is(meta, everywhere)
        if why_not:
            self.requantized[meta.name] = why_not
            return te.dequantized(meta, shards)
        return te.pass_through(meta, shards)

    def _trained_rule(self) -> str | None:
        rules = {te.rule_of(self._params[key]) for key in self._fp8}
        if len(rules) > 1:
            raise UnsupportedModelError(
                f"rank {self._rank}: some FP8 parameters have power-of-two scales and others have not; use one recipe"
            )
        return rules.pop() if rules else None

    def before_read(self) -> None:
        """Finish the parameter all-gathers that the distributed optimizer left to the next forward.

        Called once per update, on every rank: it is collective over the data-parallel group.
        Without `overlap_param_gather` the optimizer's step has already done them.
        """
        chunk: Any
        for chunk in self._wrapped:
            overlapped = getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False)
            if overlapped:
                chunk.start_param_sync(force_sync=True)

    def read(self, param: str) -> torch.Tensor:
        """The live parameter as a detached matrix view; it shares memory with the model, but for an expert
        bias that is not yet in its float32 (Megatron puts it there in the first forward)."""
        key, mark, what = param.partition("#")
        if mark:
            return te.read(self._params[key], mark + what)
        tensor = self._params[param].detach()
        if param in self._kept:
            tensor = tensor.to(self._kept[param])
        return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor

    def live(self, params: Sequence[str]) -> list[torch.Tensor | None]:
        return [self._live(key) for key in params]

    def _live(self, key: str) -> torch.Tensor | None:
        if key not in self._params:
            param, mark, what = key.partition("#")
            return te.live(self._params[param], mark + what)
        tensor = self._params[key]
        return None if self._kept.get(key, tensor.dtype) != tensor.dtype else tensor

    def _slots(self, index: int, chunk: Any) -> Iterator[Slot]:
        # layer_number counts through the whole model, from 1, whatever the pipeline split.
        layers = [(i, layer.layer_number - 1) for i, layer in enumerate(chunk.decoder.layers)]
        beyond = [layer for _, layer in layers if layer >= self._dims.layers]
        short = chunk.post_process and layers and layers[-1][1] < self._dims.layers - 1
        if beyond or short:
            raise ConfigError(
                f"rank {self._rank}: chunk {index} of the model holds layers {[g for _, g in layers]}"
                f"{' and the last stage' if short else ''}, but hf_config has "
                f"num_hidden_layers {self._dims.layers}; {_OTHER_MODEL}"
            )
        yield from slots_of(
            self._family,
            self._dims,
            layers,
            first=chunk.pre_process,
            last=chunk.post_process,
            experts=self._place.experts(self._dims.experts),
            mtp=_has_mtp(chunk),
        )

    def _match(self) -> dict[str, Slot]:
        """Parameter key -> slot, in the model's order. Every parameter and every slot is used."""
        slots = {
            f"{index}:{name}": slot
            for index, chunk in enumerate(self._chunks)
            for slot in self._slots(index, chunk)
            for name in slot.names
        }
        known = {key: slots[key] for key in self._params if key in slots}
        unknown = [key for key in self._params if key not in slots and not self._is_copy(key)]
        if unknown:
            raise UnsupportedModelError(
                f"rank {self._rank}: the {self._family.model_type} table has no rule under this hf_config "
                f"for: {', '.join(unknown)}. Give the config the trainer was built from (attention_bias, "
                "tie_word_embeddings, num_nextn_predict_layers and the like decide which parameters exist), or add "
                f"the rules to the Family in fp8bridge/adapters/megatron_families.py{_hint(unknown)}"
            )
        used = set(map(id, known.values()))
        missing = {slot.te_name: None for slot in slots.values() if id(slot) not in used}
        if missing:
            raise ConfigError(
                f"rank {self._rank}: hf_config asks for parameters that the model does not have: "
                f"{', '.join(missing)}; {_OTHER_MODEL}"
            )
        for key in known:
            self._check_class(key)
        return known

    def _is_copy(self, key: str) -> bool:
        """The last stage's copy of the embeddings, for a tied head or for multi-token prediction: the first
        stage sends them."""
        index, _, name = key.partition(":")
        if name == WORD_EMBEDDINGS:
            return _has_mtp(self._chunks[int(index)])
        return self._dims.tied and name == OUTPUT_LAYER and getattr(self._params[key], "shared_embedding", False)

    def _check_class(self, key: str) -> None:
        try:
            if te.is_fp8(self._params[key]):
                te.check(self._params[key])
                self._fp8.add(key)
        except UnsupportedModelError as err:
            raise UnsupportedModelError(f"rank {self._rank}: {key} cannot be read: {err.message}", tensor=key) from err

    def _check_shapes(self, matched: dict[str, Slot]) -> None:
        for key, slot in matched.items():
            live = tuple(self._params[key].shape)
            tp_rank, tp = self._place.cut(slot.rule.expert)
            wanted = slot.local_shapes(tp)
            if slot.rule.split.padded and live[0] * tp >= self._dims.vocab:
                # The trainer chooses the padding; it only has to reach the vocabulary's end.
                wanted = [(live[0], *want[1:]) for want in wanted]
            if live not in wanted:
                raise ConfigError(
                    f"rank {self._rank}: {key} has shape {live}, but hf_config asks for "
                    f"{' or '.join(map(str, wanted))} at {'expert ' if slot.rule.expert else ''}tensor-parallel rank "
                    f"{tp_rank} of {tp}; {_OTHER_MODEL}",
                    tensor=slot.tensors[0][0],
                )


_OTHER_MODEL = "hf_config is probably another model's: give the config the trainer was built from"


def _unwrap(chunk: nn.Module) -> Any:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    inner: Any = chunk
    while not hasattr(inner, "decoder") and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    lacking = [name for name in ("decoder", "pre_process", "post_process") if not hasattr(inner, name)]
    if lacking:
        raise ConfigError(
            f"a model chunk is a {type(inner).__name__} without {', '.join(lacking)}; "
            "give the GPTModel chunks that Megatron's get_model returns"
        )
    return inner


def _world_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


_OTHER_FORMS = {
    ".experts.weight1": "legacy GroupedMLP keeps experts transposed in one tensor: build with SequentialMLP or "
    "TEGroupedMLP",
    ".linear_qkv_down_proj.weight": "build the model with mla_down_proj_fusion=False",
    ".linear_q_proj.layer_norm_weight": "the Hugging Face model has no norm of an uncompressed query",
}


def _hint(unknown: Sequence[str]) -> str:
    found = [text for end, text in _OTHER_FORMS.items() if any(key.endswith(end) for key in unknown)]
    return "".join(f" ({text})" for text in found)


def _has_mtp(chunk: Any) -> bool:
    return bool(getattr(chunk, "mtp_process", False))


def _weights_in_buffers(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that the forward pass multiplies or adds: the routers' expert biases."""
    return ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))


def _place_of(chunks: Sequence[Any]) -> Place:
    groups = getattr(chunks[0], "pg_collection", None) if chunks else None
    if groups is None:
        # Before ProcessGroupCollection (megatron-core 0.14) there was only the global state.
        return _place_in_parallel_state()

    def rank_and_size(name: str) -> tuple[int, int]:
        group = getattr(groups, name, None)
        return (0, 1) if group is None else (group.rank(), group.size())

    tp_rank, tp = rank_and_size("tp")
    # Models without experts may be built without the experts' groups.
    etp_rank, etp = rank_and_size("expt_tp") if getattr(groups, "expt_tp", None) is not None else (tp_rank, tp)
    ep_rank, ep = rank_and_size("ep")
    return Place(tp_rank=tp_rank, tp=tp, etp_rank=etp_rank, etp=etp, ep_rank=ep_rank, ep=ep)


def _place_in_parallel_state() -> Place:
    from megatron.core import parallel_state as ps

    return Place(
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp=ps.get_tensor_model_parallel_world_size(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        ep=ps.get_expert_model_parallel_world_size(),
    )
