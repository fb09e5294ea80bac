"""Real Transformer Engine on a real GPU: a Megatron model with FP8 parameters, trained, then passed through."""

import pytest
import torch

import fp8bridge
from fp8bridge.adapters.megatron import MegatronSource
from tests.ports import free_port

from .support import FP8_LAYOUT, ZmqThreadServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # Megatron's and Transformer Engine's own, at import and in use
]
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.fixture(scope="module")
def trainer():
    pytest.importorskip("transformer_engine.pytorch", reason="no Transformer Engine; give its wheels in WHEELS")
    pytest.importorskip("megatron.core", reason="no megatron-core; give its wheel in WHEELS")
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    port = free_port()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    ps.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1234)
    yield Trainer()
    ps.destroy_model_parallel()
    dist.destroy_process_group()


class Trainer:
    """One GPU; FP8 parameters are the primary weights, the distributed optimizer holds fp32 masters."""

    def __init__(self):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=CONFIG["num_hidden_layers"],
            hidden_size=CONFIG["hidden_size"],
            num_attention_heads=CONFIG["num_attention_heads"],
            num_query_groups=CONFIG["num_key_value_heads"],
            kv_channels=CONFIG["head_dim"],
            ffn_hidden_size=CONFIG["intermediate_size"],
            params_dtype=torch.bfloat16,
            bf16=True,
            fp8="e4m3",
            fp8_recipe="blockwise",
            fp8_param=True,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            qk_layernorm=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
        )
        self.model = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True),
            vocab_size=1024,
            max_sequence_length=256,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        ).cuda()
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, fp8_param_gather=True)
        self.ddp = DistributedDataParallel(config, ddp_config, self.model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                fp8_recipe="blockwise",
            ),
            [self.ddp],
        )

    def step(self):
        ids = torch.arange(256, device="cuda").view(2, 128) * 7 % 1000  # always the same: the loss must fall
        positions = torch.arange(128, device="cuda")[None].expand(2, -1)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.ddp(ids, positions, None, labels=ids).float().mean()
        loss.backward()
        self.ddp.finish_grad_sync()
        self.optimizer.step()
        return loss.item()

    def raw(self):
        """HF name -> (codes, scales) cut out of the trainer's own buffers by plain indexing."""
        found = {}
        for i, layer in enumerate(self.model.decoder.layers):
            prefix = f"model.layers.{i}."
            qkv = self._whole(layer.self_attention.linear_qkv.weight)
            fc1 = self._whole(layer.mlp.linear_fc1.weight)
            found[prefix + "self_attn.o_proj.weight"] = self._whole(layer.self_attention.linear_proj.weight)
            found[prefix + "mlp.down_proj.weight"] = self._whole(layer.mlp.linear_fc2.weight)
            for j, name in enumerate(("gate_proj", "up_proj")):
                found[prefix + f"mlp.{name}.weight"] = tuple(t.chunk(2)[j] for t in fc1)
            for name, at in {"q_proj": [0, 1, 4, 5], "k_proj": [2, 6], "v_proj": [3, 7]}.items():
                heads = [t.unflatten(0, (8, -1))[at].flatten(0, 1) for t in qkv]
                found[prefix + f"self_attn.{name}.weight"] = tuple(heads)
        return found

    def _whole(self, weight):
        rows, cols = weight.shape
        grid = (-(-rows // 128), -(-cols // 128))
        return weight._rowwise_data.clone(), weight._rowwise_scale_inv[: grid[0], : grid[1]].clone()


def test_parameters_are_fp8_and_a_step_changes_them(trainer):
    kinds = {
        type(p).__name__ for n, p in trainer.model.named_parameters() if any(x in n for x in LINEAR) and p.dim() == 2
    }
    assert kinds == {"Float8BlockwiseQTensor"}
    before = {n: c.clone() for n, (c, _) in trainer.raw().items()}
    losses = [trainer.step() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(before[n], c) for n, (c, _) in trainer.raw().items())


def test_the_server_holds_the_trainers_own_bytes_after_each_step(trainer):
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)
    source = MegatronSource(trainer.ddp, CONFIG)
    with fp8bridge.connect(source, [server], bucket_nbytes=2 << 20) as bridge:
        assert bridge.plan.rule == "te_pow2"
        assert bridge.plan.summary()["actions"]["pass_through"]["tensors"] == 2 * 7 * 3
        for version in (1, 2):
            trainer.step()
            bridge.update_weights(version=version)
            bridge.verify()
            for name, (codes, scales) in trainer.raw().items():
                assert torch.equal(server.tensors[name].view(torch.uint8), codes.cpu()), name
                assert torch.equal(server.tensors[f"{name}_scale_inv"], scales.cpu()), name
            norm = trainer.model.decoder.final_layernorm.weight.detach().cpu()
            assert torch.equal(server.tensors["model.norm.weight"], norm)
