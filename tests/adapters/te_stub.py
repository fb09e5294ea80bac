# ruff: noqa: E501
"""The real Python layer of Transformer Engine 2.20 on a CPU, with its CUDA extension stubbed.

Gives the real tensor classes, quantizers and recipes; the one kernel that weights need, the 2-D block
quantizer, is our naive reference (equal to the real kernel bit for bit: tests/kernels on a GPU). The
meta wheel may not be installed in site-packages, where it would break `import megatron.core`; `make test`
puts it into a folder of its own, which `FP8BRIDGE_TE_DIR` names.
"""

import enum
import importlib.metadata
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

from fp8bridge.kernels import reference

TE_DIR = Path(os.environ.get("FP8BRIDGE_TE_DIR") or Path(sys.prefix) / "te")

ENUMS = {
    "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    "CommOverlapType": "RS AG",
    "DType": {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEScalingMode": {
        "NVTE_DELAYED_TENSOR_SCALING": 0,
        "NVTE_MXFP8_1D_SCALING": 1,
        "NVTE_BLOCK_SCALING_1D": 2,
        "NVTE_BLOCK_SCALING_2D": 3,
        "NVTE_NVFP4_1D_SCALING": 4,
        "NVTE_INVALID_SCALING": 100,
    },
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Fused_Attn_Backend": {"NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2, "NVTE_No_Backend": -1},
    "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_QKV_Format": {
        "NVTE_BSHD": 1,
        "NVTE_SBHD": 0,
        "NVTE_THD": 2,
        "NVTE_SBHD_2BSHD": 4,
        "NVTE_BSHD_2SBHD": 3,
        "NVTE_THD_2BSHD": 5,
        "NVTE_THD_2SBHD": 6,
        "NVTE_BHSD": 7,
        "NVTE_QKV_Format_NOT_SET": 8,
    },
    "NVTE_QKV_Layout": "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
}
"""Values of transformer_engine_torch 2.20.2; a string lists the names of 0, 1, 2, ..."""


class _Anything:
    """Any other name of the extension: may be named and compared, raises when called."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"transformer_engine_torch.{self._name} needs CUDA")

    def __hash__(self):
        return hash(self._name)

    def __eq__(self, other):
        return isinstance(other, _Anything) and other._name == self._name

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return (object,)

    def __int__(self):
        return abs(hash(self._name)) % 1000


def quantize(tensor, quantizer, out=None, noop=None):
    """transformer_engine_torch.quantize for 2-D blocks. Padding columns of the scales are NaN: never to be sent."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

    rule = "te_pow2" if quantizer.force_pow_2_scales else "te"
    codes, scale_inv = reference.quantize(tensor.detach().reshape(-1, tensor.shape[-1]), rule)
    codes = codes.view(torch.uint8).reshape(tensor.shape)
    parts = dict.fromkeys(("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"))
    if quantizer.rowwise_usage:
        padded = torch.full(quantizer.get_scale_shape(tensor.shape, False), float("nan"))
        padded[:, : scale_inv.shape[1]] = scale_inv
        parts |= {"rowwise_data": codes, "rowwise_scale_inv": padded}
    if quantizer.columnwise_usage:
        padded = torch.full(quantizer.get_scale_shape(tensor.shape, True), float("nan"))
        padded[:, : scale_inv.shape[0]] = scale_inv.t()
        parts |= {"columnwise_data": codes.t().contiguous(), "columnwise_scale_inv": padded}
    if out is not None:
        for name, value in parts.items():
            held = getattr(out, f"_{name}")
            if held is not None and value is not None:
                held.copy_(value)
        return out
    return Float8BlockwiseQTensor(
        shape=tensor.shape,
        dtype=tensor.dtype,
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        is_2D_scaled=True,
        device=tensor.device,
        requires_grad=False,
        **parts,
    )


def install():
    """Make `import transformer_engine.pytorch` work in this process; before Megatron is imported."""
    sys.path.insert(0, str(TE_DIR))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not look for the compiled library
    stub = types.ModuleType("transformer_engine_torch")
    for name, members in ENUMS.items():
        setattr(
            stub,
            name,
            enum.IntEnum(name, members, start=0) if isinstance(members, str) else enum.IntEnum(name, members),
        )

    def anything(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    stub.__getattr__ = anything
    stub.quantize = quantize
    sys.modules["transformer_engine_torch"] = stub
    spec = importlib.util.find_spec("transformer_engine")
    package = types.ModuleType("transformer_engine")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__, package.__file__ = spec, spec.origin
    package.__version__ = importlib.metadata.version("transformer_engine")
    sys.modules["transformer_engine"] = package
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    package.common = common
    _pretend_a_gpu()


def _pretend_a_gpu():
    """Modules ask for one when they are made; nothing is run on it. After the import, which would use it."""
    import transformer_engine.pytorch.quantization as quantization

    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="none")
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    quantization.check_recipe_support = lambda recipe: None
    quantization.is_fp8_block_scaling_available = lambda *_, **__: (True, "")
