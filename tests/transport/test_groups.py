"""Update groups of the `nccl` transport, over gloo: made, and left without waiting for anyone.

Run as a script, this file is the other rank, as SGLang joins it.
"""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fp8bridge.transport import nccl

GROUPS = 4


def join(name, port):
    """Receives until the group ends."""
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=120)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=limit))
    group, _ = c10d._new_process_group_helper(
        2, 1, [], c10d.Backend("gloo"), store, group_name=name, timeout=limit, backend_options=None
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    memory, count = torch.zeros(1000, dtype=torch.uint8), 0
    try:
        while True:
            group.broadcast([memory], nccl.from_rank_0()).wait()
            count += int(memory[0])
    except RuntimeError:
        print("left", count, flush=True)


def test_a_rank_that_waits_in_a_group_is_freed_when_the_trainer_leaves_it_and_nothing_is_kept():
    ports = [nccl.free_port("127.0.0.1") for _ in range(GROUPS)]
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.test_groups", *map(str, ports)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        files = []
        for i, port in enumerate(ports):
            name = f"group-{i}"
            group = nccl.make_group("127.0.0.1", port, 2, name, "gloo", timeout_s=60, bucket_timeout_s=5)
            group.broadcast([torch.ones(1000, dtype=torch.uint8)], nccl.from_rank_0()).wait()
            start = time.monotonic()
            nccl.abandon(group, "gloo")
            del group
            assert other.stdout.readline() == "left 1\n"
            assert time.monotonic() - start < 30, "it was freed, not timed out"
            files.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        assert files[-1][0] <= files[0][0] + 1, files
        assert files[-1][1] <= files[0][1] + 1, files
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


if __name__ == "__main__":
    for number, each in enumerate(sys.argv[1:]):
        join(f"group-{number}", int(each))
