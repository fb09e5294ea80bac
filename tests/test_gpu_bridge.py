"""The whole path with parameters on the GPU: same bits as the naive reference on the CPU."""

import pytest
import torch

import fp8bridge
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.config import RULES
from fp8bridge.errors import NonFiniteError

from .support import FP8_CONFIG, FP8_LAYOUT, ZmqThreadServer, assert_same_bits, expected_wire, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bucket_nbytes", [60_000, 1 << 20])
def test_cuda_parameters_reach_the_server_bit_for_bit(rule, bucket_nbytes):
    model = tiny_model()
    on_gpu = {name: tensor.cuda() for name, tensor in model.items()}
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)
    source = StateDictSource(on_gpu, FP8_CONFIG)
    with fp8bridge.connect(source, [server], rule=rule, bucket_nbytes=bucket_nbytes) as bridge:
        for version in (1, 2, 3):
            on_gpu["model.layers.1.mlp.down_proj.weight"].mul_(1.5)
            bridge.update_weights(version=version)
            bridge.verify()
    model = {name: tensor.cpu() for name, tensor in on_gpu.items()}
    assert_same_bits(server.tensors, expected_wire(model, rule=rule))


def test_nan_on_the_gpu_is_named_and_nothing_is_sent():
    on_gpu = {name: tensor.cuda() for name, tensor in tiny_model().items()}
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)
    with fp8bridge.connect(StateDictSource(on_gpu, FP8_CONFIG), [server]) as bridge:
        on_gpu["model.norm.weight"][7] = float("nan")
        with pytest.raises(NonFiniteError, match="model.norm.weight has 1 NaN"):
            bridge.update_weights(version=1)
    assert server.weight_version == "default"
