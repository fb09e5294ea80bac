"""One request on its way through the engine, and what SGLang's `/generate` says about it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from .sampling import Sampling

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache


@dataclass(slots=True, eq=False)
class Generation:
    """Filled by the engine's thread; read by others only after `done` has its result."""

    rid: str
    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    seed: int
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First prompt token whose logprob is wanted; -1 for none."""

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Weight version of each output token."""
    input_logprobs: list[float | None] | None = None
    """From `logprob_start_len` on; the first is None, as nothing predicts it."""
    retractions: int = 0
    finish: dict[str, Any] | None = None
    cache: DynamicCache | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)
    started_at: float = field(default_factory=time.monotonic)
    done: Future[Generation] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.generator.manual_seed(self.seed)
        # From here on nobody can cancel it from outside; requests end by `abort`.
        self.done.set_running_or_notify_cancel()

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output_ids

    @property
    def first_wanted(self) -> int:
        """Position of the first prompt token with a logprob; the prompt's length if none is wanted."""
        start = self.logprob_start_len
        return start if self.return_logprob and start >= 0 else len(self.prompt)

    def add(self, token: int, logprob: float, version: str, eos: frozenset[int]) -> None:
        """Keep one token and decide whether it is the last."""
        if self.max_new_tokens > 0:
            self.output_ids.append(token)
            self.output_logprobs.append(logprob)
            self.versions.append(version)
        if not self.sampling.ignore_eos and token in (self.sampling.stop_token_ids | eos):
            self.finish = {"type": "stop", "matched": token}
        if len(self.output_ids) >= self.max_new_tokens and self.finish is None:
            self.finish = {"type": "length", "length": self.max_new_tokens}

    def version_spans(self, current: str) -> list[dict[str, Any]]:
        """Runs of output tokens of one weight version, as 0.5.23 reports them."""
        spans: list[dict[str, Any]] = []
        for version, run in groupby(self.versions):
            start = spans[-1]["end"] if spans else 0
            spans.append({"version": version, "start": start, "end": start + len(list(run))})
        return spans or [{"version": current, "start": 0, "end": 0}]

    def meta_info(self, current_version: str) -> dict[str, Any]:
        spans = self.version_spans(current_version)
        meta = {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.output_ids),
            "cached_tokens": 0,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "num_retractions": self.retractions,
            "e2e_latency": time.monotonic() - self.started_at,
        }
        if self.return_logprob:
            wanted = self.prompt[self.first_wanted :]
            values = self.input_logprobs or []
            meta["input_token_logprobs"] = [[v, t, None] for v, t in zip(values, wanted, strict=False)]
            outputs = zip(self.output_logprobs, self.output_ids, strict=True)
            meta["output_token_logprobs"] = [[v, t, None] for v, t in outputs]
            meta["output_token_logprobs_length"] = len(self.output_ids)
        return meta
