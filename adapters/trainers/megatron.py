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
from .megatron_layout import Slot, slots_of
from .megatron_names import OUTPUT_LAYER, dims_of, family_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class MegatronSource:
    """The live parameters of this rank's model chunks. A `WeightSource`; made on every rank.

    model_chunks: what Megatron's `get_model` returns: one GPTModel or a list of them, one per virtual
        pipeline stage, bare or wrapped (DistributedDataParallel, Float16Module).
    hf_config: the model's Hugging Face config: a dict, a config.json or its folder.
    rank, tp_rank, tp_size: by default torch.distributed's rank and Megatron's `parallel_state`.

    The source keeps references to the parameters, never copies. A parameter's key is
    "{chunk}:{name in the unwrapped chunk}".
    """

    def __init__(
        self,
        model_chunks: nn.Module | Sequence[nn.Module],
        hf_config: Mapping[str, Any] | str | Path,
        *,
        rank: int | None = None,
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> None:
        self.hf_config = load_hf_config(hf_config)
        self._family = family_of(self.hf_config)
        self._dims = dims_of(self.hf_config, self._family)
        self._wrapped = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        self._chunks = [_unwrap(chunk) for chunk in self._wrapped]
        self._rank = _world_rank() if rank is None else rank
        if tp_rank is None or tp_size is None:
            tp_rank, tp_size = _tp_rank_and_size()
        self._tp_rank, self._tp = tp_rank, tp_size
        self._params = {
            f"{index}:{name}": param
            for index, chunk in enumerate(self._chunks)
            for name, param in chunk.named_parameters()
        }
        self._fp8: set[str] = set()
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
        self.rule = self._trained_rule()
        metas: dict[str, TensorMeta] = {}
        shards: list[Shard] = []
        for key, slot in matched.items():
            param = self._params[key]
            mine = self._shards(key, slot, self._tp_rank)
            for meta in slot.metas(str(param.dtype).removeprefix("torch.")):
                held = [s for s in mine if s.tensor == meta.name]
                new_metas, new_shards = self._as_held(key, slot, meta, held)
                metas |= {m.name: m for m in new_metas}
                shards += new_shards
        return list(metas.values()), shards

    def _shards(self, key: str, slot: Slot, tp_rank: int) -> list[Shard]:
        shape = self._params[key].shape
        return list(slot.shards(self._dims, param=key, rank=self._rank, tp_rank=tp_rank, tp=self._tp, shape=shape))

    def _as_held(
        self, key: str, slot: Slot, meta: TensorMeta, shards: list[Shard]
    ) -> tuple[list[TensorMeta], list[Shard]]:
        """A plain tensor as it is; an FP8 one as codes and scales, or dequantized where blocks are cut."""
        if key not in self._fp8:
            return [meta], shards
        everywhere = [s for r in range(self._tp) for s in self._shards(key, slot, r) if s.tensor == meta.name]
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
        """The live parameter as a detached matrix view; it shares memory with the model."""
        key, mark, what = param.partition("#")
        if mark:
            return te.read(self._params[key], mark + what)
        tensor: torch.Tensor = self._params[param].detach()
        return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor

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
        yield from slots_of(self._family, self._dims, layers, first=chunk.pre_process, last=chunk.post_process)

    def _match(self) -> dict[str, Slot]:
        """Parameter key -> slot, in the model's order. Every parameter and every slot is used."""
        slots = {
            f"{index}:{name}": slot
            for index, chunk in enumerate(self._chunks)
            for slot in self._slots(index, chunk)
            for name in slot.names
        }
        known = {key: slots[key] for key in self._params if key in slots}
        unknown = [key for key in self._params if key not in slots and not self._is_tied_copy(key)]
        if unknown:
            raise UnsupportedModelError(
                f"rank {self._rank}: the {self._family.model_type} table has no rule under this hf_config "
                f"for: {', '.join(unknown)}. Give the config the trainer "
                "was built from (attention_bias, mlp_bias and tie_word_embeddings decide which parameters "
                "exist), or add the rules to the Family "
                "in fp8bridge/adapters/megatron_names.py"
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

    def _is_tied_copy(self, key: str) -> bool:
        """The last stage's copy of tied embeddings: the first stage sends them."""
        marked = getattr(self._params[key], "shared_embedding", False)
        return self._dims.tied and key.endswith(f":{OUTPUT_LAYER}") and marked

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
            want = slot.local_shape(self._tp)
            if slot.rule.split.padded:
                # The trainer chooses the padding; it only has to reach the vocabulary's end.
                enough = live[0] * self._tp >= self._dims.vocab
                want = (live[0] if enough else want[0], *want[1:])
            if live != want:
                raise ConfigError(
                    f"rank {self._rank}: {key} has shape {live}, but hf_config asks for {want} at "
                    f"tensor-parallel rank {self._tp_rank} of {self._tp}; {_OTHER_MODEL}",
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


def _tp_rank_and_size() -> tuple[int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
