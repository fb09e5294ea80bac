"""Runs inside a stock SGLang server, in every TP rank, by its `--custom-weight-loader` hook.

    python -m sglang.launch_server ... --custom-weight-loader fp8bridge.sglang.loader.load

Phases of an update: `rehearse` (is this manifest a full update of this model?), `pull` (rank 0 receives
every bucket over ZMQ into shared memory and checks it; the model is not touched), then `load` (every rank
loads from there) or `drop`. `checksums` reads the weights back as they were sent; where several TP
ranks have a part each, they bring them together in shared memory with `share`, and `put` and `compare` by bucket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgpack
import numpy as np
import torch
import zmq

from ..kernels import BoundUnpack, UnpackItem, UnpackTable
from ..layout import ServerLayout
from ..plan import Bucket, Manifest
from ..receiver import Receiver
from ..staging import StagedWeights, tensor_checksum, unpack
from . import payload
from .agent import Report
from .cuda_ipc import open_export
from .record import Copy, Rehearsal, parameters, rehearse

SHARED = Path("/dev/shm")
_PREFIX = "fp8bridge-"


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry. Never raises: an exception here would end the server."""
    try:
        phase, rank, address, call, data = msgpack.unpackb(payload.unpack(named_tensors))
    except Exception as err:  # noqa: BLE001
        print(f"fp8bridge: a call that cannot be read: {err}")
        return
    try:
        answer = Report(call, rank, True, "", _PHASES[phase](model, rank, data))
    except Exception as err:  # noqa: BLE001
        answer = Report(call, rank, False, f"{type(err).__name__}: {err}", {})
    context = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.connect(address)
        socket.send(answer.encode())
    except (zmq.ZMQError, TypeError) as err:
        print(f"fp8bridge: cannot report to {address}: {err}")
    finally:
        context.destroy(linger=5000)


@dataclass
class _State:
    """What one TP rank remembers between calls."""

    manifest: Manifest | None = None
    rehearsal: Rehearsal | None = None
    folder: Path | None = None
    lock: IO[bytes] | None = None
    copies: dict[int, list[Copy]] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    scatters: dict[int, tuple[BoundUnpack, list[Copy]]] = field(default_factory=dict)
    shared: torch.Tensor | None = None
    """GPU memory of a trainer's, in which its buckets lie."""
    trainer: str = ""
    """Which one's."""


_state = _State()


def _rehearse(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    manifest = Manifest.from_dict(data["manifest"])
    if _state.manifest is None or _state.manifest.hash != manifest.hash:
        _state.rehearsal, _state.manifest = rehearse(model, manifest, shared=data["tp_size"] > 1), manifest
        _state.copies, _state.scatters = {}, {}
    assert _state.rehearsal is not None, "made above"
    return {"problems": _state.rehearsal.problems[:100], "count": len(_state.rehearsal.problems)}


def _pull(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """Rank 0: every bucket into a folder of shared memory. The others have nothing to do."""
    manifest = _expect(data)
    if rank != 0:
        return {}
    _drop(model, rank, {})
    _state.folder, _state.lock = _shared_folder()
    try:
        weights = _AnyWeights(manifest.layout, _device_of(model))
        weights.begin(manifest)
        receiver = Receiver(weights, data["name"], memory=_in_files(_state.folder))
        nbytes = receiver.pull(data["endpoints"], data["session"], manifest.hash, timeout_s=data["timeout_s"])
    except BaseException:
        _drop(model, rank, {})
        raise
    return {"folder": str(_state.folder), "nbytes": nbytes}


def _load(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """Every rank: from shared memory into the live model, a bucket at a time."""
    manifest, folder = _expect(data), Path(data["folder"])
    replay = _can_replay(data)
    device = _device_of(model)
    with torch.no_grad():
        for bucket in manifest.buckets:
            if not bucket.nbytes:
                continue
            memory = torch.from_numpy(np.memmap(folder / str(bucket.index), dtype=np.uint8, mode="r+"))
            _load_bucket(model, bucket, memory.to(device), replay=replay)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {"way": "replay" if replay else "load_weights"}


def _load_shared(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """One bucket, from the trainer's own GPU memory."""
    manifest = _expect(data)
    if data["trainer"] != _state.trainer:
        # Memory stays taken as long as it is mapped here, also that of a trainer that is gone.
        _state.trainer, _state.shared = data["trainer"], None
    if data["export"] is not None:
        _state.shared = open_export(data["export"])
    if _state.shared is None:
        raise RuntimeError("memory that was not exported to this process; the server was restarted: admit it again")
    bucket, replay = manifest.buckets[data["index"]], _can_replay(data)
    with torch.no_grad():
        _load_bucket(model, bucket, _state.shared.narrow(0, data["offset"], bucket.nbytes), replay=replay)
    torch.cuda.synchronize()
    return {"way": "replay" if replay else "load_weights"}


def _can_replay(data: dict[str, Any]) -> bool:
    return bool(data["replay"] and _state.rehearsal is not None and _state.rehearsal.complete)


def _load_bucket(model: Any, bucket: Bucket, memory: torch.Tensor, *, replay: bool) -> None:
    tensors = unpack(bucket, memory)
    if not replay:
        model.load_weights(iter(tensors.items()))
        return
    params = parameters(model)
    bound, rest = _scatter(params, bucket)
    bound.launch(memory)
    for copy in rest:
        copy.dst.view(params[copy.param]).copy_(copy.src.view(tensors[copy.source]))


def _scatter(params: dict[str, torch.Tensor], bucket: Bucket) -> tuple[BoundUnpack, list[Copy]]:
    """One launch for the copies of a bucket, and those that it cannot make: of parts of rows, which a server of
    several TP ranks takes. Kept while the parameters stay where they are."""
    places = tuple(p.data_ptr() for p in params.values())
    if places != _state.places:
        _state.places, _state.scatters = places, {}
    if bucket.index not in _state.scatters:
        offsets = {e.name: e.offset for e in bucket.entries}
        items, targets, rest = [], [], []
        for copy in _copies().get(bucket.index, ()):
            target = copy.dst.view(params[copy.param])
            if not (copy.src.is_contiguous and target.dim() <= 2 and (not target.dim() or target.stride(-1) == 1)):
                rest.append(copy)
                continue
            target = target.reshape(1, -1) if target.dim() < 2 else target
            dtype, at = str(target.dtype).removeprefix("torch."), copy.src.offset * target.element_size()
            rows, cols = target.shape
            items.append(UnpackItem(rows, cols, dtype, offsets[copy.source] + at))
            targets.append(target)
        table = UnpackTable.build(items, device=_device_of_params(params))
        _state.scatters[bucket.index] = (table.bind(targets), rest)
    return _state.scatters[bucket.index]


def _copies() -> dict[int, list[Copy]]:
    """What the rehearsal saw, by bucket; sorted out once."""
    if not _state.copies:
        assert _state.manifest is not None, "rehearsed"
        assert _state.rehearsal is not None, "rehearsed"
        home = {e.name: bucket.index for bucket in _state.manifest.buckets for e in bucket.entries}
        for copy in _state.rehearsal.copies:
            _state.copies.setdefault(home[copy.source], []).append(copy)
    return _state.copies


def _drop(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 removes what it pulled; mappings that other ranks still have stay valid."""
    if rank == 0:
        if _state.folder is not None:
            shutil.rmtree(_state.folder, ignore_errors=True)
        if _state.lock is not None:
            _state.lock.close()
        _state.folder = _state.lock = None
    return {}


def _shared_folder() -> tuple[Path, IO[bytes]]:
    """A new folder, and a lock in it that ends with this process. Folders of processes that died are removed:
    what is in them is memory of this host."""
    for old in SHARED.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(old / "lock", "rb") as theirs:
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    # It gets its name once it is locked, so that nobody takes it for a dead one's.
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=SHARED))
    lock = open(made / "lock", "wb")  # noqa: SIM115 - held as long as the folder
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name.removeprefix("."))), lock


def _checksums(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """uint64 of the bytes of every tensor, put together again from where it was loaded to."""
    manifest, rehearsal = _expect(data), _state.rehearsal
    if rehearsal is None or not rehearsal.complete:
        raise RuntimeError("this rank does not hold every tensor as it was sent: the model changes them")
    params, found = parameters(model), {}
    copies: dict[str, list[Any]] = {}
    for copy in rehearsal.copies:
        copies.setdefault(copy.source, []).append(copy)
    for name, entry in manifest.entries().items():
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=_device_of(model))
        for copy in copies.get(name, ()):
            copy.src.view(whole).copy_(copy.dst.view(params[copy.param]))
        found[name] = tensor_checksum(whole)
    return {"tensors": found}


def _share(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 makes a folder that all TP ranks of the host can see."""
    if rank != 0:
        return {}
    _drop(model, rank, {})
    _state.folder, _state.lock = _shared_folder()
    return {"folder": str(_state.folder)}


def _put(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """Every rank writes what it has of a bucket's tensors where the whole bucket comes together."""
    if rank == 0:
        for old in set(Path(data["folder"]).glob("back-*")) - {_back(data)}:
            old.unlink()
    for _, part, mine in _parts(model, data):
        part.copy_(mine)
    return {}


def _compare(model: Any, rank: int, data: dict[str, Any]) -> dict[str, Any]:
    """After all have put theirs: of what several ranks have, the others must have the same. Rank 0 tells the
    checksums."""
    for copy, part, mine in _parts(model, data):
        if not torch.equal(part.contiguous().view(torch.uint8), mine.contiguous().view(torch.uint8)):
            raise RuntimeError(f"TP ranks hold different bytes of {copy.source}, which each has a copy of")
    if rank != 0:
        return {}
    bucket = _expect(data).buckets[data["index"]]
    tensors = unpack(bucket, _bucket_file(bucket, data))
    return {"tensors": {name: tensor_checksum(tensor) for name, tensor in tensors.items()}}


def _parts(model: Any, data: dict[str, Any]) -> Iterator[tuple[Copy, torch.Tensor, torch.Tensor]]:
    """(a copy of the load, its region of the bucket in shared memory, what this rank holds of it, on the CPU)."""
    bucket, params = _expect(data).buckets[data["index"]], parameters(model)
    if _state.rehearsal is None or not _state.rehearsal.complete:
        raise RuntimeError("this rank does not hold its tensors as they were sent: the model changes them")
    tensors = unpack(bucket, _bucket_file(bucket, data))
    for copy in _copies().get(bucket.index, ()):
        mine = copy.dst.view(params[copy.param]).cpu()
        yield copy, copy.src.view(tensors[copy.source]), mine


def _back(data: dict[str, Any]) -> Path:
    return Path(data["folder"], f"back-{data['index']}")


def _bucket_file(bucket: Bucket, data: dict[str, Any]) -> torch.Tensor:
    """Flat uint8 in shared memory; whoever comes first makes it, of zeros."""
    if not bucket.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    path = _back(data)
    with open(path, "ab") as file:
        os.posix_fallocate(file.fileno(), 0, bucket.nbytes)
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+", shape=(bucket.nbytes,)))


def _device_of(model: Any) -> torch.device:
    return _device_of_params(parameters(model))


def _device_of_params(params: dict[str, torch.Tensor]) -> torch.device:
    return next(iter(params.values())).device


def _expect(data: dict[str, Any]) -> Manifest:
    if _state.manifest is None or _state.manifest.hash != data["manifest_hash"]:
        raise RuntimeError("this plan is not known here; the server was restarted: rehearse it first")
    return _state.manifest


class _AnyWeights(StagedWeights):
    """Takes every tensor of the manifest: the rehearsal has compared it with the model. Checksums are made on
    the model's device, which is far quicker than the one thread that SGLang leaves."""

    def __init__(self, layout: ServerLayout, device: torch.device) -> None:
        super().__init__({}, layout)
        self._device = device

    def _checksums(self, bucket: Bucket, payload: torch.Tensor) -> bytes:
        return super()._checksums(bucket, payload.to(self._device))

    def differences(self, manifest: Manifest) -> list[str]:
        return []


def _in_files(folder: Path) -> Callable[[int, int], np.ndarray[Any, Any]]:
    def memory(index: int, nbytes: int) -> np.ndarray[Any, Any]:
        if not nbytes:
            return np.empty(0, dtype=np.uint8)
        path = folder / str(index)
        with open(path, "wb") as file:
            # Here a full /dev/shm is an error; met while writing to the mapping, it would kill the server.
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return np.memmap(path, dtype=np.uint8, mode="r+", shape=(nbytes,))

    return memory


_PHASES = {
    "rehearse": _rehearse,
    "pull": _pull,
    "load": _load,
    "load_shared": _load_shared,
    "drop": _drop,
    "checksums": _checksums,
    "share": _share,
    "put": _put,
    "compare": _compare,
}
