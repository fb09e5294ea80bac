"""A transformers causal LM whose weights all live in one `StagedWeights`, by wire name."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, UnsupportedModelError
from ..layout import ServerLayout
from ..staging import StagedWeights
from .layers import serve_from
from .weights import Wanted, from_checkpoint, random_weights, read_safetensors

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache

_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""model_type -> prefix of the classes in `transformers.models.<model_type>`."""


class ServedModel:
    """weights: everything it computes from, replaced by commits. Not thread-safe."""

    def __init__(self, hf_config: dict[str, Any], tensors: dict[str, torch.Tensor], module: torch.nn.Module) -> None:
        self.hf_config = hf_config
        self.weights = StagedWeights(tensors, ServerLayout.from_hf_config(hf_config))
        self.vocab_size = int(hf_config["vocab_size"])
        self.context_len = int(hf_config.get("max_position_embeddings", 2048))
        self.eos_token_ids = _eos_token_ids(hf_config)
        self._module = module
        # transformers 5.24 renamed `past_key_values` to `cache`.
        renamed = "cache" in inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if renamed else "past_key_values"
        serve_from(module, self.weights, tied=_tied(hf_config))

    def new_cache(self) -> DynamicCache:
        from transformers.cache_utils import DynamicCache

        return DynamicCache()

    def logits(self, tokens: list[int], cache: DynamicCache, *, keep: int) -> torch.Tensor:
        """fp32 logits [keep, vocab] of the last `keep` of `tokens`, which follow what is in `cache`."""
        ids = torch.tensor([tokens])
        output = self._module(input_ids=ids, use_cache=True, logits_to_keep=keep, **{self._cache_argument: cache})
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def build_model(
    hf_config: dict[str, Any],
    *,
    seed: int = 0,
    weights: str | Path | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> ServedModel:
    """The model of a Hugging Face config, with the given weights or random ones from `seed`.

    weights: folder of safetensors. tensors: by Hugging Face name, high precision (then quantized as
    the config says) or FP8 codes with their `_scale_inv`; they are taken over, not copied.
    Raises UnsupportedModelError, LayoutError, or ConfigError naming the tensors that do not fit.
    """
    if weights is not None and tensors is not None:
        raise ConfigError("give weights (a folder) or tensors, not both")
    module = _skeleton(hf_config)
    tied = _tied(hf_config)
    wanted = [Wanted(n, tuple(p.shape)) for n, p in module.named_parameters(remove_duplicate=False) if n not in tied]
    layout = ServerLayout.from_hf_config(hf_config)
    if weights is not None:
        tensors = read_safetensors(Path(weights))
    if tensors is None:
        stored = random_weights(wanted, layout, seed=seed, std=float(hf_config.get("initializer_range", 0.02)))
    else:
        stored = from_checkpoint({n: t for n, t in tensors.items() if n not in tied}, wanted, layout)
    return ServedModel(hf_config, stored, module)


def _skeleton(hf_config: dict[str, Any]) -> torch.nn.Module:
    """The module tree with parameters on the meta device (no memory) and real rope buffers."""
    model_type = hf_config.get("model_type")
    if model_type not in _CLASSES:
        raise UnsupportedModelError(
            f"model_type {model_type!r}; the rollout server knows {', '.join(sorted(_CLASSES))}"
        )
    package, prefix = f"transformers.models.{model_type}", _CLASSES[model_type]
    config_class = getattr(importlib.import_module(f"{package}.configuration_{model_type}"), f"{prefix}Config")
    modeling = importlib.import_module(f"{package}.modeling_{model_type}")
    plain = {k: v for k, v in hf_config.items() if k not in ("quantization_config", "torch_dtype", "dtype")}
    config = config_class(**plain, attn_implementation="sdpa")
    config.dtype = torch.float32
    with torch.device("meta"):
        module: torch.nn.Module = getattr(modeling, f"{prefix}ForCausalLM")(config)
    # Rope tables are buffers outside the checkpoint, so nothing would ever fill them.
    module.model.rotary_emb = getattr(modeling, f"{prefix}RotaryEmbedding")(config)  # type: ignore[union-attr]
    return module.eval()


def _tied(hf_config: dict[str, Any]) -> dict[str, str]:
    tied = bool(hf_config.get("tie_word_embeddings", False))
    return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}


def _eos_token_ids(hf_config: dict[str, Any]) -> frozenset[int]:
    eos = hf_config.get("eos_token_id")
    return frozenset([eos] if isinstance(eos, int) else eos or ())
