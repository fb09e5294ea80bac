"""Real processes over gloo: several trainer ranks, a server in rank 0's process, and real kills."""

import os
import signal
import time
from collections import Counter

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

import fp8bridge
from fp8bridge.errors import BridgeError
from tests.ports import free_port

from .support import FP8_LAYOUT, SplitSource, ZmqThreadServer, assert_same_bits, expected_wire, tiny_model

RANKS = 3


class BadSource(SplitSource):
    """Does `harm` in an update: in the scan for NaN (the second read of a parameter), or in the gather."""

    def __init__(self, *args, harm, stage):
        super().__init__(*args)
        self.harm, self.stage, self.reads = harm, stage, Counter()

    def read(self, param):
        self.reads[param] += 1
        if {2: "check", 3: "gather"}.get(self.reads[param]) == self.stage:
            self.harm()
        return super().read(param)


def fail():
    raise KeyError("a bug in the trainer")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def work(rank, port, harm, stage, queue):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    model = tiny_model()
    old = expected_wire(tiny_model(seed=9))
    source = SplitSource(model, rank, RANKS)
    if harm and rank == 1:
        source = BadSource(model, rank, RANKS, harm=harm, stage=stage)
    server = ZmqThreadServer("a", layout=FP8_LAYOUT, tensors=dict(old))
    outcome = "ok"
    try:
        with fp8bridge.connect(source, [server], bucket_nbytes=60_000, collective_timeout_s=20) as bridge:
            bridge.update_weights(version=1)
            if harm is None:
                assert bridge.verify() == {"a": len(old)}
                assert len(bridge.plan.owners) > 1, "several ranks send"
    except (BridgeError, KeyError) as err:
        outcome = f"{type(err).__name__}: {err}"
    if rank == 0:
        assert_same_bits(server.tensors, expected_wire(model) if outcome == "ok" else old)
        assert not server.paused
        assert server.weight_version == ("1" if outcome == "ok" else "default")
        assert server._token is None, "no session is left open"
    queue.put((rank, outcome))
    queue.close()
    queue.join_thread()
    # A group that is left to the interpreter's end may abort the process while its peers are going.
    dist.destroy_process_group()


def run(harm=None, stage=None):
    context = mp.get_context("spawn")
    queue, port = context.Queue(), free_port()
    processes = [context.Process(target=work, args=(r, port, harm, stage, queue)) for r in range(RANKS)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(90)
    outcomes = {}
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and len(outcomes) < sum(p.exitcode == 0 for p in processes):
        rank, outcome = queue.get(timeout=5)
        outcomes[rank] = outcome
    for p in processes:
        if p.is_alive():
            p.kill()
    return outcomes, [p.exitcode for p in processes]


def test_three_ranks_send_their_shares():
    outcomes, codes = run()
    assert outcomes == {0: "ok", 1: "ok", 2: "ok"}
    assert codes == [0, 0, 0]


@pytest.mark.parametrize("stage", ["check", "gather"])
def test_an_exception_on_one_rank_is_raised_on_all_and_the_server_is_as_before(stage):
    outcomes, _ = run(fail, stage)
    assert outcomes[1].startswith("KeyError"), "its own error"
    for rank in (0, 2):
        assert outcomes[rank].startswith("RankError"), outcomes


@pytest.mark.parametrize("stage", ["check", "gather"])
def test_a_killed_rank_leaves_the_server_serving_its_old_version(stage):
    outcomes, codes = run(die, stage)
    assert codes[1] == -signal.SIGKILL
    assert set(outcomes) == {0, 2}
    assert all(o.startswith("RankError") for o in outcomes.values()), outcomes
