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

import pytest
import torch
import torch.distributed as dist

from fp8bridge.errors import TransportError
from fp8bridge.transport import nccl

GROUPS = 3


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


@pytest.fixture(params=[False, True], ids=["alone", "with a default group"])
def default_group(request, tmp_path):
    """A trainer that has torch.distributed set up, bound to a device, or has not."""
    if request.param:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        dist.distributed_c10d._world.default_pg.bound_device_id = torch.device("cpu", 0)
    yield request.param
    if request.param:
        assert dist.distributed_c10d._world.default_pg.bound_device_id == torch.device("cpu", 0)
        dist.destroy_process_group()


def test_a_rank_that_waits_in_a_group_is_freed_when_the_trainer_leaves_it_and_nothing_is_kept(default_group):
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.test_groups"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    held = []
    try:
        for number in range(GROUPS):
            store = nccl.open_store("127.0.0.1", 2, timeout_s=60)
            print(f"group-{number}", store.port, file=other.stdin, flush=True)
            group = nccl.make_group(store, 2, f"group-{number}", "gloo", timeout_s=60, bucket_timeout_s=5)
            group.broadcast([torch.ones(1000, dtype=torch.uint8)], nccl.from_rank_0()).wait()
            start = time.monotonic()
            nccl.abandon(group, "gloo")
            del group, store
            assert other.stdout.readline() == "left 1\n"
            assert time.monotonic() - start < 30, "it was freed, not timed out"
            held.append(what_is_held())
        deadline = time.monotonic() + 20
        while held[-1] > held[0]:
            assert time.monotonic() < deadline, held
            time.sleep(0.1)
            held.append(what_is_held())
    finally:
        other.kill()
        other.communicate()


def what_is_held():
    return len(os.listdir("/proc/self/fd")) + threading.active_count()


def test_an_address_of_another_host_is_refused_by_name():
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1.*an address of this host"):
        nccl.open_store("192.0.2.1", 2, timeout_s=2)


if __name__ == "__main__":
    for line in sys.stdin:
        group_name, port_number = line.split()
        join(group_name, int(port_number))
