"""`/generate` bodies: one request or a batch, SGLang's fields, refusals in its words where it has any."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from .generation import Generation
from .model import ServedModel
from .sampling import DEFAULT_MAX_NEW_TOKENS, read_sampling

_NOT_CARRIED = (
    "stream",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "lora_path",
    "session_params",
    "custom_logit_processor",
)
"""Fields of SGLang's that ask for something this server does not do; refused rather than ignored."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """generations: one per prompt. is_batch: the answer is a list."""

    generations: list[Generation]
    is_batch: bool


def read_generate(data: Any, model: ServedModel, tokenizer: Tokenizer | None) -> GenerateRequest:
    """Raises ValueError with the words of the 400."""
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    for name in _NOT_CARRIED:
        if data.get(name):
            raise ValueError(f"{name}={data[name]!r} is not carried by this server; leave it out")
    prompts, is_batch = _prompts(data, tokenizer)
    count = len(prompts)
    rids = _rids(data.get("rid"), count, is_batch)
    params = _spread("sampling_params", data.get("sampling_params"), {}, count, is_batch)
    logprobs = _spread("return_logprob", data.get("return_logprob"), False, count, is_batch)
    starts = _spread("logprob_start_len", data.get("logprob_start_len"), -1, count, is_batch)
    rows = zip(prompts, rids, params, logprobs, starts, strict=True)
    return GenerateRequest([_generation(*row, model=model) for row in rows], is_batch)


def _prompts(data: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[list[list[int]], bool]:
    text, ids = data.get("text"), data.get("input_ids")
    if (text is None) == (ids is None):
        raise ValueError("Either text, input_ids or input_embeds should be provided.")
    if text is not None:
        if tokenizer is None:
            raise ValueError(
                "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. Please provide "
                "input_ids or re-initialize the engine with skip_tokenizer_init=False."
            )
        texts = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise ValueError("text must be a string or a list of strings.")
        return [tokenizer.encode(t) for t in texts], isinstance(text, list)
    if not isinstance(ids, list) or not ids:
        raise ValueError("input_ids cannot be empty.")
    is_batch = isinstance(ids[0], list)
    return (ids if is_batch else [ids]), is_batch


def _rids(rid: Any, count: int, is_batch: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(count)] if is_batch else [rid]
    if not is_batch or not isinstance(rid, list) or len(rid) != count or not all(isinstance(r, str) for r in rid):
        raise ValueError("rid should be a string for a single request, or a list as long as the batch.")
    if duplicates := sorted({r for r in rid if rid.count(r) > 1}):
        raise ValueError(f"Duplicate request IDs detected within the request: {duplicates}")
    return rid


def _spread(name: str, value: Any, default: Any, count: int, is_batch: bool) -> list[Any]:
    """A field that is one value for all, or a list with one for each."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if not is_batch or len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts.")
    return [default if v is None else v for v in value]


def _generation(
    prompt: list[int], rid: str, params: Any, return_logprob: Any, start: Any, *, model: ServedModel
) -> Generation:
    _check_prompt(prompt, model)
    if not isinstance(params, dict):
        raise ValueError("sampling_params must be an object.")
    if not isinstance(return_logprob, bool) or type(start) is not int or start < -1:
        raise ValueError("return_logprob must be a boolean and logprob_start_len an integer, -1 or more.")
    if return_logprob and start > len(prompt):
        raise ValueError(
            f"logprob_start_len={start} is higher than the number of input tokens {len(prompt)}. "
            "Please use a smaller logprob_start_len."
        )
    sampling = read_sampling(params)
    asked, room = sampling.max_new_tokens, model.context_len - len(prompt)
    if asked is not None and asked > room:
        raise ValueError(
            "Requested token count exceeds the model's maximum context length of "
            f"{model.context_len} tokens. You requested a total of {asked + len(prompt)} tokens: {len(prompt)} tokens "
            f"from the input messages and {asked} tokens for the completion. Please reduce the number of tokens in "
            "the input messages or the completion to fit within the limit."
        )
    return Generation(
        rid=rid,
        prompt=prompt,
        sampling=sampling,
        max_new_tokens=min(DEFAULT_MAX_NEW_TOKENS, room - 1) if asked is None else asked,
        seed=secrets.randbits(63) if sampling.sampling_seed is None else sampling.sampling_seed,
        return_logprob=return_logprob,
        logprob_start_len=start,
    )


def _check_prompt(prompt: Any, model: ServedModel) -> None:
    if not isinstance(prompt, list) or not all(type(t) is int for t in prompt):
        raise ValueError("input_ids must be a list of token ids, or a list of such lists.")
    if not prompt:
        raise ValueError("input_ids cannot be empty.")
    if outside := [t for t in prompt if not 0 <= t < model.vocab_size]:
        raise ValueError(f"input_ids contains token id {outside[0]}; valid range is [0, {model.vocab_size}).")
    if len(prompt) >= model.context_len:
        raise ValueError(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({model.context_len} tokens)."
        )
