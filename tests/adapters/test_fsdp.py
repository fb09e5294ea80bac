"""DTensors, as FSDP2 leaves them, and exporters: the server holds what the whole tensors quantize to."""

import pytest
import torch
import torch.multiprocessing as mp

from tests.ports import free_port
from tests.support import assert_same_bits, expected_wire

from . import fsdp_world


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("fsdp") / "found.pt"
    port = free_port()
    mp.start_processes(fsdp_world.run, args=(port, str(path)), nprocs=fsdp_world.WORLD, start_method="spawn")
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("how", ["rows", "columns", "export"])
def test_the_server_holds_the_whole_tensors(found, how):
    assert_same_bits(found[how], expected_wire(found["expected"]))


def test_shards_really_travelled(found):
    assert found["gathered"] > 0
