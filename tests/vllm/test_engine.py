"""The part in vLLM's worker, without vLLM: what it takes, and that an update without buckets is none."""

from types import SimpleNamespace

import pytest
import torch

from fp8bridge.errors import ServerMismatchError
from fp8bridge.vllm.engine import BridgeEngine


def engine(workers):
    parallel = SimpleNamespace(world_size_across_dp=workers)
    return BridgeEngine(None, SimpleNamespace(parallel_config=parallel), torch.device("cpu"), None)


def test_several_workers_are_refused():
    with pytest.raises(ServerMismatchError, match="a vLLM server of one worker, not of 2"):
        engine(2)


def test_a_session_in_which_nothing_was_pulled_loads_nothing():
    made = engine(1)  # with a model, loading it would import vLLM
    made.start_weight_update()
    made.update_weights({"phase": "drop"})
    made.finish_weight_update()
