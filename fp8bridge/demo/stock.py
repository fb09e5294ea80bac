"""Stock SGLang servers for the demo, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from ..errors import ConfigError
from ..sglang.agent import LOADER

COMMAND = "FP8BRIDGE_SGLANG"
"""Environment variable: how a server is started, for an SGLang in another environment."""

START_TIMEOUT_S = 300.0


class StockServer:
    """One server with random weights, ended with the context. The model's folder goes with it."""

    def __init__(self, hf_config: dict[str, Any]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="fp8bridge-demo-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(hf_config))
        self._log = folder / "sglang.log"
        words = ["--model-path", str(folder), "--load-format", "dummy", "--skip-tokenizer-init"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--custom-weight-loader", LOADER]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*_command(), *words], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/model_info", timeout=2, trust_env=False).status_code == 200:
                    return self.url
            except httpx.HTTPError:
                time.sleep(0.3)
        raise ConfigError(f"an SGLang server did not start; the end of its log:\n{self._log.read_text()[-2000:]}")

    def __enter__(self) -> StockServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Its ranks are groups of their own and end with it when it is asked to.
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()


def _command() -> list[str]:
    if text := os.environ.get(COMMAND):
        return shlex.split(text)
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            f"SGLang is not installed here; install it, set {COMMAND} to the command that starts its server, or run "
            "`make demo-sglang` in a checkout, which does both"
        )
    return [sys.executable, "-m", "sglang.launch_server"]
