"""TRL's own AsyncGRPOTrainer with our weight transfer and a real rollout server."""

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: make test-frameworks does")

from fp8bridge import LoopbackServer
from fp8bridge.adapters.trl import BridgeWeightTransfer
from fp8bridge.errors import ConfigError, NonFiniteError

from ..support import FP8_CONFIG, FP8_LAYOUT, assert_same_bits, expected_wire, tiny_model
from .support import run_snippet, save_model

pytestmark = pytest.mark.frameworks

# What TRL needs a GPU for: FlashAttention 3, and the GPU's name for a metric.
ON_THE_CPU = """
import torch
import trl.experimental.async_grpo.async_grpo_trainer as trainer
import trl.experimental.async_grpo.packing as packing

trainer.get_peak_flops_per_device = lambda *_: float("inf")

class Attention:
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size):
        out = torch.empty_like(q)
        for i in range(len(cu_q) - 1):
            (a, b), (c, d) = cu_q[i : i + 2].tolist(), cu_k[i : i + 2].tolist()
            groups = q.shape[1] // k.shape[1]
            keys, values = (x[c:d].repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            one = torch.nn.functional.scaled_dot_product_attention(
                q[a:b].transpose(0, 1), keys, values, attn_mask=seen, scale=softmax_scale
            )
            out[a:b] = one.transpose(0, 1)
        return out

packing._flash_attn = lambda: Attention
"""


def test_the_snippet_trains_and_the_server_follows(server, tmp_path):
    save_model(tmp_path / "model")
    old = server.checksums()
    printed = run_snippet("trl.md", tmp_path, tmp_path / "model", server.server.url, before=ON_THE_CPU,
                          TRL_EXPERIMENTAL_SILENCE="1")  # fmt: skip
    assert printed.splitlines()[-1] == "3 {}", "once before the first step, and after each of two"
    assert server.version() == "3"
    assert all(server.checksums()[name] != old[name] for name in old if name.endswith("proj.weight"))


def test_it_is_trls_protocol():
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    wanted = {name for name in vars(WeightTransferProtocol) if not name.startswith("_")}
    assert wanted == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
    assert wanted <= set(dir(BridgeWeightTransfer))


def sync(transfer, model):
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(model.items()))
    transfer.resume()


def test_every_sync_has_the_trainers_bits_and_the_next_version():
    server, model = LoopbackServer(layout=FP8_LAYOUT), tiny_model()
    transfer = BridgeWeightTransfer([server], FP8_CONFIG, transport="loopback")
    for version in ("1", "2"):
        for tensor in model.values():
            tensor.mul_(1.25)
        sync(transfer, model)
        assert_same_bits(server.tensors, expected_wire(model))
        assert server.weight_version == version
        assert not server.paused
    transfer.destroy()
    transfer.destroy()


def test_an_error_of_the_bridge_reaches_the_trainer_and_the_server_keeps_its_weights():
    server, model = LoopbackServer(layout=FP8_LAYOUT), tiny_model()
    transfer = BridgeWeightTransfer([server], FP8_CONFIG, transport="loopback")
    sync(transfer, model)
    good = {name: tensor.clone() for name, tensor in expected_wire(model).items()}
    model["model.norm.weight"][3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight"):
        sync(transfer, model)
    assert_same_bits(server.tensors, good)
    assert (server.weight_version, server.paused) == ("1", False)
    model["model.norm.weight"] = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is bfloat16 \[3\], was bfloat16 \[192\]"):
        sync(transfer, model)
    with pytest.raises(ConfigError, match="bucket_size: no field of BridgeConfig"):
        BridgeWeightTransfer([server], FP8_CONFIG, bucket_size=1)
