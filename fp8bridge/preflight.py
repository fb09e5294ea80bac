"""What trainer and servers must agree on before a plan is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ServerMismatchError
from .layout import ServerLayout
from .protocols import ServerInfo

_IDENTITY = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "tie_word_embeddings"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "q_lora_rank", "kv_lora_rank"),
)
"""Fields of a Hugging Face config that shapes hang on: all that can be compared with a server that does not
tell its tensors."""


def resolve_layout(
    infos: Mapping[str, ServerInfo], hf_config: dict[str, Any], *, expected: ServerLayout | None
) -> ServerLayout:
    """The layout all servers share; the trainer's own config decides where none of them tells.

    Raises ServerMismatchError naming the server and each difference: another model, two servers of
    different layouts, a server that is not quantized as the trainer's config (or `expected`) says.
    """
    asked = expected
    if asked is None and hf_config.get("quantization_config"):
        asked = ServerLayout.from_hf_config(hf_config)
    who = "the trainer's config"
    for name, info in infos.items():
        _check_model(name, info, hf_config)
        if info.layout is None:
            continue
        if asked is None:
            asked, who = info.layout, name
        elif found := asked.differences(info.layout):
            raise ServerMismatchError(
                f"{name} serves {info.layout.describe()}, {who} says {asked.describe()} ({'; '.join(found)}); "
                "start the server from a checkpoint of the same quantization_config",
                server=name,
            )
    return asked or ServerLayout.from_hf_config(hf_config)


def _check_model(name: str, info: ServerInfo, hf_config: dict[str, Any]) -> None:
    if info.model is None:
        return
    found = [
        f"{key}: server {info.model[key]!r}, trainer {hf_config[key]!r}"
        for key in _IDENTITY
        if key in info.model and key in hf_config and info.model[key] != hf_config[key]
    ]
    if found:
        raise ServerMismatchError(f"{name} serves another model ({'; '.join(found)})", server=name)
