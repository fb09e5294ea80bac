"""AReaL's pause on two ranks: rank 0's failure is every rank's."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from fp8bridge.adapters.areal import BridgeUpdates
from fp8bridge.errors import RankError
from tests.ports import free_port


class Engine(BridgeUpdates):
    """What AReaL's engine has of this, with a rollout engine that is gone."""

    _offload_aware_context = contextlib.nullcontext
    cpu_group = None

    def __init__(self):
        self.rollout_engine = SimpleNamespace(pause_generation=self.pause)

    def pause(self):
        raise OSError("no answer")

    def _check_rollout_engine_connected(self):
        """It is."""


def run(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        Engine().update_weights(SimpleNamespace(type="xccl", use_lora=False, version=1))
    except (OSError, RankError) as err:
        (folder / str(rank)).write_text(f"{type(err).__name__}: {err}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(60)
def test_a_pause_that_fails_on_rank_0_is_an_error_on_both(tmp_path):
    port = free_port()
    mp.start_processes(run, args=(port, tmp_path), nprocs=2, start_method="spawn")
    assert (tmp_path / "0").read_text() == "OSError: no answer"
    assert "trainer rank 0 failed in pause_generation: OSError: no answer" in (tmp_path / "1").read_text()
