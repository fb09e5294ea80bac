"""Buckets into a stock SGLang server on the trainer's GPU by checkpoint-engine's protocol, which SGLang speaks
at /update_weights_from_ipc where that package is installed (tested with 0.4.2). No loader of ours is needed there.

One request lasts for the whole update. In it SGLang connects to a socket of ours and is sent, in turn: what
shares our memory with it, where each bucket's tensors lie in it (it answers after loading and a device sync),
twice that we are done (it lets go of the memory, then processes the weights). We hear pickle of no one.

What SGLang does meanwhile is out of our hands: it waits for our next word without a limit. A trainer that is
killed within an update leaves such a server hanging, to be restarted; with our loader it would not.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
import zmq

from ..errors import BridgeError, ServerMismatchError, ServerRefusedError, ServerTimeoutError
from ..plan import Manifest
from ..protocols import PackedBucket
from ..sglang import payload
from ..sglang.agent import LOADER
from ..sglang.cuda_ipc import whole
from ..sglang.server import SglangServer

_TICK_MS = 50
_FAREWELL_S = 10.0


class CheckpointEngineLine:
    """One server. Its methods are called from one thread at a time.

    Raises ServerMismatchError for a server of several TP ranks: each would read from a trainer on its own GPU.
    """

    def __init__(self, server: SglangServer, *, timeout_s: float) -> None:
        if server.tp_size > 1:
            raise ServerMismatchError(
                f"{server.name} has tp_size {server.tp_size}, and without our loader ipc reaches one rank; start it "
                f"with --custom-weight-loader {LOADER}",
                server=server.name,
            )
        server.sessions_wanted = False
        self._server = server
        self._timeout_s = timeout_s
        self._last: int | None = None
        self._talk: _Talk | None = None

    def open(self, manifest: Manifest, buckets: Sequence[int]) -> None:
        self._last = buckets[-1] if buckets else None

    def load(self, packed: PackedBucket) -> None:
        """Returns when the server's device has read the bucket; after the last one, when it has let go of our
        memory and processed its weights."""
        if self._talk is None:
            self._talk = _Talk(self._server, packed.memory, self._timeout_s)
            # Only now: a server that refuses has the old version still.
            self._talk.ask(payload.pack_memory(whole(packed.memory)))
            self._server.disclaim()
        self._talk.ask(payload.pack_places(packed.bucket, int(packed.memory.storage_offset())))
        if packed.bucket.index == self._last:
            self._talk.ask(payload.pack_done())
            self._talk.ask(payload.pack_done())
            self._talk.finish()
            self._talk = None

    def end(self, reason: str) -> None:
        """Where the update ended early: have the server give up its request."""
        if self._talk is not None:
            self._talk.give_up(reason or "the update ended early")
            self._talk = None

    lost = end


class _Talk:
    """One request to the server, and the socket that it talks to us over meanwhile."""

    def __init__(self, server: SglangServer, memory: torch.Tensor, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        # A folder that only this user can enter: whoever connects first is shown our memory.
        self._folder = tempfile.TemporaryDirectory(prefix="fp8bridge-")
        address = f"ipc://{Path(self._folder.name, 'socket')}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.bind(address)
        self._answer: Future[None] = Future()
        # A daemon: no process has to wait for a server that never answers.
        threading.Thread(
            target=self._request, args=({gpu_of(memory): address},), name=f"fp8bridge-{server.name}", daemon=True
        ).start()

    def ask(self, message: bytes) -> None:
        """Say something, and hear that it was done. Raises ServerError with the server's own words."""
        deadline = time.monotonic() + self._timeout_s
        self._until(zmq.POLLOUT, deadline)
        self._socket.send(message)
        self._until(zmq.POLLIN, deadline)
        if words := self._socket.recv().decode(errors="replace").strip():
            raise ServerRefusedError(
                f"{self._server.name} could not load what it was shown: {words.splitlines()[-1]}",
                status=200,
                answer=words,
                server=self._server.name,
            )

    def finish(self) -> None:
        """The server's answer to the request."""
        deadline = time.monotonic() + self._timeout_s
        while not self._answer.done():
            self._in_time(deadline)
            time.sleep(0.001)
        self._close()
        self._answer.result()

    def give_up(self, reason: str) -> None:
        """The server is told, if it still listens, and given a moment to come out of its request."""
        deadline = time.monotonic() + _FAREWELL_S
        try:
            self._until(zmq.POLLOUT, deadline)
            self._socket.send(payload.pack_failure(reason))
            while not self._answer.done():
                self._in_time(deadline)
                time.sleep(0.001)
        except (BridgeError, zmq.ZMQError):
            pass  # what ended the update has been said
        finally:
            self._close()

    def _request(self, sockets: dict[str, str]) -> None:
        try:
            self._answer.set_result(self._server.client.update_from_ipc(sockets, timeout_s=None))
        except ServerRefusedError as err:
            self._answer.set_exception(self._explained(err))
        except BaseException as err:  # noqa: BLE001 - for whoever waits for the answer
            self._answer.set_exception(err)

    def _explained(self, err: ServerRefusedError) -> BridgeError:
        if "checkpoint-engine is not installed" not in err.answer:
            return err
        return ServerMismatchError(
            f"{self._server.name} has neither our loader nor checkpoint-engine, and ipc needs one; start it with "
            f"--custom-weight-loader {LOADER}, or pip install checkpoint-engine where it runs",
            server=self._server.name,
        )

    def _until(self, event: int, deadline: float) -> None:
        while not self._socket.poll(_TICK_MS, event):
            if self._answer.done():
                self._answer.result()
                raise ServerRefusedError(
                    f"{self._server.name} ended the update before it was told everything",
                    status=200,
                    answer="",
                    server=self._server.name,
                )
            self._in_time(deadline)

    def _in_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise ServerTimeoutError(
                f"{self._server.name} did not answer over checkpoint-engine's socket in {self._timeout_s:g} s; does "
                "it run on this host, as this user?",
                server=self._server.name,
            )

    def _close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()
        self._folder.cleanup()


def gpu_of(memory: torch.Tensor) -> str:
    """The GPU's name in checkpoint-engine's protocol."""
    return f"GPU-{torch.cuda.get_device_properties(memory.device).uuid}"
