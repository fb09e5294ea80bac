"""A rollout server in a process of its own: for tests, the demo, and loops without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..errors import ServerTimeoutError, ServerUnreachableError
from .config import ServeConfig, read_hf_config
from .listen import listen, url_of

START_TIMEOUT_S = 120.0
_POLL_S = 0.1
_LOG_TAIL_NBYTES = 4000
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RunningServer:
    """url: where it listens. process: the operating system's. Closing it, or leaving `with`, ends it."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log_file: IO[bytes]) -> None:
        self.url = url
        self.process = process
        self._log_file = log_file

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Wait until it answers; its URL. Raises with the end of its log if it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.process.poll() is not None:
                raise ServerUnreachableError(
                    f"the rollout server ended with status {self.process.returncode} at its start:\n{self.log_tail()}",
                    server=self.url,
                )
            # The socket listens from the start, so a request waits until the model is there.
            try:
                with _WITHOUT_PROXY.open(f"{self.url}/health", timeout=1.0):
                    return self.url
            except OSError:
                time.sleep(_POLL_S)
            if time.monotonic() > deadline:
                raise ServerTimeoutError(
                    f"the rollout server was not ready in {timeout_s:g} s:\n{self.log_tail()}", server=self.url
                )

    def log_tail(self) -> str:
        """The last lines that it wrote to stdout and stderr."""
        size = self._log_file.seek(0, os.SEEK_END)
        self._log_file.seek(max(0, size - _LOG_TAIL_NBYTES))
        return self._log_file.read().decode(errors="replace")

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()

    def close(self, timeout_s: float = 10.0) -> None:
        """Ask it to end, then make it. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._log_file.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def launch(
    hf_config: dict[str, Any] | str | Path | ServeConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    wait: bool = True,
    timeout_s: float = START_TIMEOUT_S,
    **options: Any,
) -> RunningServer:
    """Start a server and, unless `wait` is off, wait until it is ready.

    hf_config: a Hugging Face config (dict, file or folder), or a whole ServeConfig. options: fields of
    ServeConfig (`seed`, `weights`, `api_key`, ...). port 0 takes a free one; `url` tells which. The
    server ends when this process does.
    """
    if isinstance(hf_config, ServeConfig):
        config = replace(hf_config, **options)
    else:
        config = ServeConfig(hf_config=read_hf_config(hf_config), **options)
    log_file = tempfile.TemporaryFile()  # noqa: SIM115 - RunningServer closes it
    with listen(host, port) as listening:
        url = url_of(listening)
        process = subprocess.Popen(
            [sys.executable, "-m", "fp8bridge.rollout", "--inherit", str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            pass_fds=[listening.fileno()],
        )
    assert process.stdin is not None, "asked for a pipe"
    # The configuration has keys in it, which the process table would show. The pipe then stays open:
    # its end tells the server that we are gone.
    process.stdin.write(json.dumps(asdict(config)).encode() + b"\n")
    process.stdin.flush()
    server = RunningServer(url, process, log_file)
    if wait:
        try:
            server.wait_ready(timeout_s)
        except BaseException:
            server.close(timeout_s=1.0)
            raise
    return server
