"""Trainers of two ranks in processes of their own, forked from one that has imported everything already.

Run as a script, this file is that process: it reads a JSON line for each thing to do and answers with one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RANKS = 2
SETTINGS = {
    "bucket_nbytes": 30_000,
    "open_timeout_s": 4,
    "request_timeout_s": 3,
    "bucket_timeout_s": 1.5,
    "collective_timeout_s": 4,
    "keep_last": 1,
    "rule": "sglang",
}
LEASE_S = SETTINGS["request_timeout_s"] + SETTINGS["bucket_timeout_s"]


class Trainers:
    """Starts trainers of `RANKS` ranks and says how each rank ended."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = open(f"{self._folder.name}/log", "w+")  # noqa: SIM115 - closed below
        words = [sys.executable, "-m", "tests.faults.trainers", self._folder.name]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT
        )

    def start(self, urls: list[str], version: int, seed: int, **task: Any) -> list[int]:
        """The process of each rank. task: `at` [rank, first|middle|last, signal, 0 for an exception] at a bucket;
        `nan`: the weights have one; `versions` by rank; `settings` of the bridge; `kind` "sglang" for their model."""
        return self._say({"do": "start", "urls": urls, "version": version, "seed": seed} | task)

    def wait(self, timeout_s: float = 40) -> list[dict[str, Any]]:
        """How each rank ended: `status` as in subprocess, `error` its kind and words, `fenced` its report's."""
        return self._say({"do": "wait", "timeout_s": timeout_s})

    def wait_stopped(self, pid: int, timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-5000:]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def _say(self, task: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self.log()
        return json.loads(answer)


def train(rank: int, task: dict[str, Any], store: str) -> dict[str, Any]:
    import torch.distributed as dist

    import fp8bridge.adapters.state_dict

    if task.get("kind") == "sglang":
        from tests.sglang.rig import BF16
        from tests.sglang.rig import weights as plain_weights

        config = BF16
    else:
        from tests.rollout.rig import QWEN3 as config
        from tests.test_end_to_end import plain_weights

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = plain_weights(task["seed"])
    if task.get("nan"):
        model["model.norm.weight"][3] = float("nan")
    version = task.get("versions", [task["version"]] * RANKS)[rank]
    source = fp8bridge.adapters.state_dict.StateDictSource(model, config)
    with fp8bridge.connect(source, task["urls"], **SETTINGS | task.get("settings", {})) as bridge:
        try:
            report = bridge.update_weights(version=version, on_progress=_strike(rank, task.get("at")))
        except BaseException as err:  # noqa: BLE001 - it is what the test asks for
            if isinstance(err, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            return {"error": type(err).__name__, "message": str(err), "fenced": {}}
        return {"error": None, "message": "", "fenced": report.fenced}


def _strike(rank: int, at: list[Any] | None) -> Any:
    if at is None or at[0] != rank:
        return None
    _, place, number = at

    def strike(done: int, total: int) -> None:
        if done != {"first": 1, "middle": (total + 1) // 2, "last": total}[place]:
            return
        if number == 0:
            raise RuntimeError(f"rank {rank} has had enough")
        os.kill(os.getpid(), number)

    return strike


def fork(rank: int, task: dict[str, Any], folder: str, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        found = train(rank, task, f"{folder}/store-{number}")
        Path(f"{folder}/{os.getpid()}").write_text(json.dumps(found))
        status = 0
    except BaseException:  # noqa: BLE001 - the parent reads it in the log
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def reap(pids: list[int], folder: str, timeout_s: float) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(pids):
        for pid in pids:
            if pid in found or not os.waitpid(pid, os.WNOHANG)[0]:
                continue
            path = Path(f"{folder}/{pid}")
            found[pid] = json.loads(path.read_text()) if path.exists() else {"error": "none said"}
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in found:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    found[pid] = {"error": "hung"}
        time.sleep(0.02)
    return [found[pid] for pid in pids]


def main(folder: str) -> None:
    import torch

    import tests.test_end_to_end

    torch.set_num_threads(1)
    tests.test_end_to_end.plain_weights(1)
    pids: list[int] = []
    for number, line in enumerate(sys.stdin):
        task = json.loads(line)
        if task["do"] == "start":
            pids = [fork(rank, task, folder, number) for rank in range(RANKS)]
            answer: Any = pids
        else:
            answer = reap(pids, folder, task["timeout_s"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
