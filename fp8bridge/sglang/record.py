"""Where a model's own `load_weights` puts each byte: seen by watching its copies, not by knowing the model.

A rehearsal hands `load_weights` tensors of the right shapes whose content is never read, and keeps every
write to a parameter from happening. What was written where then says which tensors the server would
ignore, which parameters would stay as they are in part, and which copies change a dtype. A model that
reads its parameters while it loads makes something of them (MLA's absorbed weights, say), which copies
alone would leave stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan import Manifest

_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a flat tensor, in elements: offset, shape and strides."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, view: torch.Tensor) -> Region:
        return cls(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset() + self.offset)

    @property
    def is_contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Copy:
    """`source` (wire name) in its region `src`, into `param` in its region `dst`; same shape and dtype."""

    source: str
    src: Region
    param: str
    dst: Region


class Watch(TorchDispatchMode):
    """Sees every use of a parameter, and keeps writes from happening.

    odd: writes that are no plain copy of a tensor that was handed out. read: parameters that something
    was made from.
    """

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []
        self.odd: list[str] = []
        self.written: dict[str, int] = {}
        self.read: set[str] = set()
        self._params = {p.untyped_storage().data_ptr(): (name, p) for name, p in params.items()}
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}

    def source(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is about to be handed out; it starts its storage."""
        self._sources[tensor.untyped_storage().data_ptr()] = (name, tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WRITES and args[0].numel():
            held = self._held(args[0])
            if held is not None:
                self._note(held[0], held[1], args[0], args[1] if func is _WRITES[0] else None)
                return args[0]
        out = func(*args, **(kwargs or {}))
        self.read |= {name for name, param in self._inputs(args) if not _same_memory(out, param)}
        return out

    def _held(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        return self._params.get(tensor.untyped_storage().data_ptr())

    def _inputs(self, args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in pytree.tree_iter(args):
            if isinstance(tensor, torch.Tensor) and (held := self._held(tensor)) is not None:
                yield held

    def _note(self, name: str, param: torch.Tensor, dst: torch.Tensor, src: Any) -> None:
        self.written[name] = self.written.get(name, 0) + dst.numel()
        if not isinstance(src, torch.Tensor):
            return
        found = self._sources.get(src.untyped_storage().data_ptr())
        if found is None:
            self.odd.append(f"{name} gets values that were computed on the way")
        elif src.dtype != dst.dtype:
            self.odd.append(f"{found[0]} is {_dtype(src)} and {name} {_dtype(dst)}")
        elif tuple(src.shape) != tuple(dst.shape):
            self.odd.append(f"{found[0]} {list(src.shape)} is spread over {list(dst.shape)} of {name}")
        else:
            at = Region(int(dst.storage_offset()) - int(param.storage_offset()), tuple(dst.shape), tuple(dst.stride()))
            self.copies.append(Copy(found[0], Region.of(src), name, at))


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """copies: what each tensor's bytes become. problems: why this update would leave wrong weights."""

    copies: list[Copy]
    problems: list[str]
    complete: bool
    """The copies alone are the load: every byte of every tensor is copied once, as it is, and nothing else is
    made of any. On one of several TP ranks, which takes but a part of some: every byte of every parameter comes
    from one such copy."""


def rehearse(model: Any, manifest: Manifest, *, shared: bool = False) -> Rehearsal:
    """Run the model's `load_weights` with nothing written. shared: this is one of several TP ranks."""
    params = parameters(model)
    watch = Watch(params)
    entries = manifest.entries()
    last = ""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for last, entry in entries.items():
            # Never touched, so it costs address space and no memory.
            yield last, watch.source(last, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)))

    problems: list[str] = []
    try:
        with torch.no_grad(), watch:
            model.load_weights(tensors())
    except Exception as err:  # noqa: BLE001 - whatever a model raises, the trainer must learn it
        problems.append(f"load_weights raises at {last}: {type(err).__name__}: {err}")
    beyond = int(getattr(getattr(model, "config", None), "num_hidden_layers", 1 << 30))
    problems += _problems(watch, params, [n for n in entries if _layer(n) < beyond])
    if shared:
        filled = _sizes((copy.param, copy.dst) for copy in watch.copies)
        whole = all(filled.get(n, 0) == watch.written.get(n) == p.numel() for n, p in params.items())
    else:
        taken = _sizes((copy.source, copy.src) for copy in watch.copies)
        whole = all(taken.get(n, 0) == torch.Size(e.shape).numel() for n, e in entries.items())
    return Rehearsal(watch.copies, problems, whole and not (problems or watch.odd or watch.read))


def _sizes(parts: Iterable[tuple[str, Region]]) -> dict[str, int]:
    """Elements in all different regions of each name."""
    found: dict[str, int] = {}
    for name, region in set(parts):
        found[name] = found.get(name, 0) + region.numel
    return found


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.data for name, p in model.named_parameters()}


def _problems(watch: Watch, params: dict[str, torch.Tensor], names: Iterable[str]) -> list[str]:
    used = {copy.source for copy in watch.copies} | {text.split(" ", 1)[0] for text in watch.odd}
    found = [f"{name} is ignored by the server, or changed on its way in" for name in names if name not in used]
    for name, param in params.items():
        written = watch.written.get(name, 0)
        if written < param.numel():
            found.append(f"{name} {list(param.shape)} on the server gets {written} of {param.numel()} values")
    fp8 = ("float8_e4m3fn", "uint8")
    found += [text for text in watch.odd if any(f" {kind} " in text or text.endswith(kind) for kind in fp8)]
    return found


def _same_memory(out: Any, param: torch.Tensor) -> bool:
    """A view: nothing was made of the parameter yet."""
    memory = param.untyped_storage().data_ptr()
    views = [t for t in pytree.tree_iter(out) if isinstance(t, torch.Tensor)]
    return bool(views) and all(t.untyped_storage().data_ptr() == memory for t in views)


def _layer(name: str) -> int:
    parts = name.split(".")
    at = parts.index("layers") + 1 if "layers" in parts else 0
    return int(parts[at]) if at and at < len(parts) and parts[at].isdigit() else -1


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
