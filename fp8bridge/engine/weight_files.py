"""Safetensors folders as Hugging Face lays them out: read by rectangles, written file by file.

A file is written header first, so that a tensor goes to its place as soon as it is there, and memory
stays at one tensor. `new_folder` makes a folder appear whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fp8bridge.errors import ConfigError
from fp8bridge.layout import SCALE_SUFFIX

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Safetensors' names -> torch's."""

_STORED = {torch_name: name for name, torch_name in DTYPES.items()}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a folder: its file, torch dtype without `torch.`, and shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def matrix(self) -> tuple[int, int]:
        """[n] is n x 1, [d0, d1, ...] is d0 x (d1 * ...)."""
        return (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


class WeightFiles:
    """The tensors of a checkpoint folder. Files are mapped, not read; only rectangles asked for are.

    ConfigError, naming the file, for a folder without safetensors or with a broken one.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        for file, names in self._files().items():
            for name in names if names is not None else self._handle(file).keys():
                self.tensors[name] = self._stored(file, name)

    def _files(self) -> dict[str, list[str] | None]:
        """File -> its tensors' names; None: all of them."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files: dict[str, list[str] | None] = {}
                for name, file in weight_map.items():
                    names = files.setdefault(str(file), [])
                    assert names is not None, "every list was made here"
                    names.append(name)
            except (ValueError, KeyError, TypeError, AttributeError) as err:
                raise ConfigError(f"{index} is not a safetensors index ({err!r}); download it again") from err
            outside = [f for f in files if Path(f).name != f]
            if outside:
                raise ConfigError(f"{index} names files outside its folder: {', '.join(outside)}; do not trust it")
            return files
        if (self.folder / SINGLE).is_file():
            return {SINGLE: None}
        raise ConfigError(f"{self.folder} has neither {INDEX} nor {SINGLE}; give a folder of safetensors")

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            path = self.folder / file
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as err:
                raise ConfigError(f"cannot read {path}: {err}; download it again") from err
        return self._open[file]

    def _stored(self, file: str, name: str) -> Stored:
        from safetensors import SafetensorError

        try:
            part = self._handle(file).get_slice(name)
        except SafetensorError as err:
            raise ConfigError(f"{self.folder / file} has no {name}, which the index says it has: {err}") from err
        dtype = part.get_dtype()
        if dtype not in DTYPES:
            raise ConfigError(f"{name} in {self.folder / file} is {dtype}, which nothing here reads", tensor=name)
        return Stored(file, DTYPES[dtype], tuple(part.get_shape()))

    def scale_of(self, name: str) -> str | None:
        """The name of a tensor's block scales, if it has any."""
        return name + SCALE_SUFFIX if name + SCALE_SUFFIX in self.tensors else None

    def read(
        self, name: str, rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Rows and columns [first, end) of the tensor's matrix view, on the CPU; all by default."""
        stored = self.tensors[name]
        whole = stored.matrix
        (r0, r1), (c0, c1) = rows or (0, whole[0]), cols or (0, whole[1])
        handle = self._handle(stored.file)
        if len(stored.shape) == 2:
            part: torch.Tensor = handle.get_slice(name)[r0:r1, c0:c1]
            return part
        if len(stored.shape) > 0:
            part = handle.get_slice(name)[r0:r1]
            return part.reshape(r1 - r0, -1)[:, c0:c1]
        scalar: torch.Tensor = handle.get_tensor(name)
        return scalar.reshape(1, 1)


class FileWriter:
    """One safetensors file. `tensors`: (name, torch dtype without `torch.`, shape), in the order of their bytes.

    A context manager; on the way out the bytes are on disk (fsync).
    """

    def __init__(self, path: Path, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._at: dict[str, tuple[int, int]] = {}
        end = 0
        for name, dtype, shape in tensors:
            stored = Stored(path.name, dtype, tuple(shape))
            begin, end = end, end + stored.nbytes
            header[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self._at[name] = (begin, end)
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        self.nbytes = end
        self._start = 8 + len(raw)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(raw)) + raw)
        self._file.truncate(self._start + end)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """A whole tensor, on any device."""
        begin, end = self._at[name]
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        assert raw.numel() == end - begin, f"{name}: {raw.numel()} bytes for a place of {end - begin}"
        self._file.seek(self._start + begin)
        data: Any = raw.numpy()
        self._file.write(data)

    def write_all(self, memory: torch.Tensor) -> None:
        """All tensors at once: flat uint8, in the order of the header."""
        assert memory.numel() == self.nbytes, f"{memory.numel()} bytes for a file of {self.nbytes}"
        self._file.seek(self._start)
        data: Any = memory.cpu().numpy()
        self._file.write(data)


def file_name(index: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: Mapping[str, Sequence[str]], nbytes: int) -> None:
    """The index of file -> tensor names; nothing where one file holds all."""
    if list(files) != [SINGLE]:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(folder: Path, hf_config: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")


def copy_other_files(source: Path, target: Path) -> None:
    """Tokenizer and the like: what is neither weights nor config.json."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != CONFIG and not path.name.endswith(_WEIGHTS):
            shutil.copy2(path, target / path.name)


def start_folder(target: Path, *, overwrite: bool) -> Path:
    """A temporary folder beside `target`, for `finish_folder` or `discard_folder`."""
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists already; choose another folder, or pass overwrite")
    if target.exists() and not (target.is_dir() and (target / CONFIG).is_file()):
        raise ConfigError(f"{target} is no model folder (no {CONFIG}) and will not be overwritten; choose another one")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as err:
        raise ConfigError(f"cannot make a folder in {target.parent} ({err.strerror}); choose another one") from err


def finish_folder(temporary: Path, target: Path) -> None:
    """Everything to disk, then the folder to its name. Until then an old `target` is untouched; while both
    renames happen it stands beside, as `.NAME.old`, and is removed last."""
    for path in temporary.iterdir():
        _sync(path)
    temporary.chmod(0o755)
    _sync(temporary)
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard_folder(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
