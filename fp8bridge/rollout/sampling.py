"""Sampling parameters (SGLang's names and refusals) and the choice of one token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

GREEDY_BELOW = 1e-6
"""SGLang treats a lower temperature as greedy."""

DEFAULT_MAX_NEW_TOKENS = 128

_NOT_CARRIED: dict[str, Any] = {
    "stop": None,
    "stop_regex": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "beam_width": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "custom_params": None,
    "watermark": None,
}
"""SGLang's parameters that would change the tokens and are not here -> the value that changes nothing."""

_NO_EFFECT = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`max_new_tokens` None: SGLang's 128, or what the context length leaves."""

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1


def read_sampling(data: Mapping[str, Any]) -> Sampling:
    """Raises ValueError, in SGLang's words where it has any. None means the default, as there."""
    values = {name: value for name, value in data.items() if value is not None and name not in _NO_EFFECT}
    for name, neutral in _NOT_CARRIED.items():
        if name in values and (value := values.pop(name)) != neutral and value not in ("", [], {}):
            raise ValueError(f"sampling parameter {name}={value!r} is not carried by this server; leave it out")
    if unknown := sorted(set(values) - set(Sampling.__dataclass_fields__)):
        raise ValueError(f"unknown sampling parameters: {', '.join(unknown)}")
    _check_types(values)
    values["stop_token_ids"] = frozenset(values.get("stop_token_ids", ()))
    sampling = Sampling(**values)
    _check_ranges(sampling)
    return sampling


def _check_types(values: dict[str, Any]) -> None:
    kinds: dict[str, tuple[type, ...]] = {
        "max_new_tokens": (int,),
        "top_k": (int,),
        "sampling_seed": (int,),
        "ignore_eos": (bool,),
        "stop_token_ids": (list,),
    }
    for name, value in values.items():
        allowed = kinds.get(name, (int, float))
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ValueError(f"{name} must be {' or '.join(k.__name__ for k in allowed)}, got {value!r}.")
    if not all(type(t) is int for t in values.get("stop_token_ids", ())):
        raise ValueError(f"stop_token_ids must be token ids, got {values['stop_token_ids']!r}.")


def _check_ranges(s: Sampling) -> None:
    if not math.isfinite(s.temperature) or s.temperature < 0.0:
        raise ValueError(f"temperature must be a non-negative finite number, got {s.temperature}.")
    if not 0.0 < s.top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {s.top_p}.")
    if not 0.0 <= s.min_p <= 1.0:
        raise ValueError(f"min_p must be in [0, 1], got {s.min_p}.")
    if s.top_k < 1 and s.top_k != -1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {s.top_k}.")
    if s.max_new_tokens is not None and s.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {s.max_new_tokens}.")


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """One token and its logprob.

    As in SGLang the logprob is that of the tempered distribution, before top-k, top-p and min-p.
    """
    if sampling.greedy:
        logprobs = torch.log_softmax(logits, dim=-1)
        token = int(logprobs.argmax())
    else:
        logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
        token = _draw(logprobs.exp(), sampling, generator)
    return token, float(logprobs[token])


def _draw(probs: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    probs, order = probs.sort(descending=True, stable=True)
    if sampling.top_k > 0:
        probs[sampling.top_k :] = 0.0
    # A token stays if the mass before it is below top_p: the first always does.
    probs[probs.cumsum(0) - probs > sampling.top_p] = 0.0
    probs[probs < probs[0] * sampling.min_p] = 0.0
    return int(order[torch.multinomial(probs, 1, generator=generator)])
