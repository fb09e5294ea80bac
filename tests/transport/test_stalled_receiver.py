"""A receiving process that stalls until the sender has given it up, and then wakes: it must live on.

It is somebody's inference server. Run as a script, this file is that process.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from fp8bridge import BridgeConfig
from fp8bridge.errors import ServerTimeoutError, TransportError
from fp8bridge.planner import make_plan
from fp8bridge.protocols import PackedBucket
from fp8bridge.receiver import Receiver
from fp8bridge.staging import StagedWeights, bucket_checksums
from fp8bridge.transport.zmq import ZmqTransport
from tests.support import FP8_LAYOUT, SplitSource, expected_wire, tiny_model

STALL_S = 7.0
"""More than the longest time in which a heartbeat of ours ever cut off a peer (6 s)."""


def model(seed):
    """Large enough that the buckets that follow fill the receiver's queue and the kernel's."""
    return tiny_model(seed=seed, hidden=768, ffn=1024)


MANIFEST = make_plan(
    [SplitSource(model(0), 0, 1).describe()], FP8_LAYOUT, BridgeConfig(bucket_nbytes=600_000)
).manifest


class StallingWeights(StagedWeights):
    """Stops its process at the second bucket."""

    def keep(self, index, payload):
        if index == MANIFEST.buckets[1].index:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().keep(index, payload)


def receive(endpoint):
    weights = StallingWeights(expected_wire(model(4)), FP8_LAYOUT)
    weights.begin(MANIFEST)
    try:
        Receiver(weights, "a").pull([endpoint], "t", MANIFEST.hash, timeout_s=5)
    except TransportError as err:
        print(err)


def test_a_process_that_wakes_after_it_was_given_up_is_told_so_and_lives():
    wire = expected_wire(model(5))
    transport = ZmqTransport("127.0.0.1", bucket_timeout_s=STALL_S)
    endpoint = transport.open({"a": "t"}, MANIFEST, [b.index for b in MANIFEST.buckets])
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.test_stalled_receiver", endpoint],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        transport.connect(timeout_s=60, gone=lambda _: None)
        for bucket in MANIFEST.buckets:
            memory = torch.cat([wire[e.name].contiguous().reshape(-1).view(torch.uint8) for e in bucket.entries])
            transport.send(PackedBucket(bucket, memory, bucket_checksums(bucket, memory)))
        transport.wait(MANIFEST.buckets[1].index)
        assert isinstance(transport.failures["a"], ServerTimeoutError)
        transport.close("over")
        child.send_signal(signal.SIGCONT)
        said, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0, errors
    # Whether the sender's last word still came depends on how full its connection was.
    assert "did not acknowledge bucket" in said or "heard nothing from the trainer" in said


if __name__ == "__main__":
    receive(sys.argv[1])
