"""Request bodies: SGLang's fields and ours, checked by their annotations, unknown ones ignored."""

from __future__ import annotations

import types
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

B = TypeVar("B")


_LARGEST = 1e15
"""Of numbers that are seconds, probabilities and the like."""


class InvalidBody(Exception):
    """The fields that are wrong, one line each."""

    def __init__(self, problems: list[str]) -> None:
        count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}"
        super().__init__(f"{count}:\n" + "\n".join(f"  {p}" for p in problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    mode: Literal["abort", "retract", "in_place"] = "abort"
    lease_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    rid: str | None = None
    abort_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    selector: Literal["target", "draft", "all"] = "all"
    session: str | None = None
    lease_s: float | None = None
    manifest_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    session: str | None = None
    weight_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortUpdate:
    session: str | None = None
    whosever: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    endpoints: list[str]
    manifest_hash: str
    session: str | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    new_version: str
    abort_all_requests: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    action: str = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetWeight:
    name: str
    truncate_size: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    pass


def read_body(cls: type[B], data: Any) -> B:
    """Raises InvalidBody naming every field that is missing or of another type."""
    if not isinstance(data, dict):
        raise InvalidBody([f"body: Input should be a JSON object, not {type(data).__name__}"])
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name not in data:
            if field.default is MISSING:
                problems.append(f"body.{field.name}: Field required")
        elif _fits(hints[field.name], data[field.name]):
            values[field.name] = data[field.name]
        else:
            problems.append(f"body.{field.name}: Input should be {_words(hints[field.name])}")
    if problems:
        raise InvalidBody(problems)
    return cls(**values)


def _fits(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(part, value) for part in get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(_fits(get_args(hint)[0], v) for v in value)
    if hint is float:
        # JSON has no such bound, and Python's has NaN and Infinity too.
        return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    return type(value) is hint


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(v) for v in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(hint))
    if get_origin(hint) is list:
        return f"a list of {_words(get_args(hint)[0])}"
    return {str: "a string", int: "an integer", float: "a number", bool: "a boolean"}.get(hint, "null")
