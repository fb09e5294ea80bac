"""The leaf layers of a served model. They own no weights.

Each looks its tensors up by wire name, in `StagedWeights.tensors`, every time it runs: a commit
replaces that dict as a whole, and nothing here can hold on to an old version. All arithmetic is
fp32, whatever the storage, so that logprobs compare with a trainer's at 1e-4.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ..errors import UnsupportedModelError
from ..kernels import dequantize
from ..staging import StagedWeights


class _Served(nn.Module):
    def __init__(self, weights: StagedWeights, weight_name: str, bias_name: str | None = None) -> None:
        super().__init__()
        self._weights = weights
        self._weight_name = weight_name
        self._bias_name = bias_name

    def _fp32(self, name: str) -> torch.Tensor:
        return self._weights.tensors[name].float()

    def _bias(self) -> torch.Tensor | None:
        return None if self._bias_name is None else self._fp32(self._bias_name)

    def extra_repr(self) -> str:
        return self._weight_name


class Linear(_Served):
    """An unquantized linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._fp32(self._weight_name), self._bias())


class BlockFP8Linear(_Served):
    """A linear layer held as FP8 codes and block scales, and nothing else.

    The weight is dequantized anew for each call. Slow and honest: there is no second copy that a
    weight update could leave stale. Activations are not quantized (a GPU server does that too).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self._weights.tensors[self._weight_name]
        scale_inv = self._weights.tensors[f"{self._weight_name}_scale_inv"]
        block = self._weights.layout.block
        assert block is not None, "built only for quantized layouts"
        return functional.linear(x, dequantize(codes, scale_inv, block, torch.float32), self._bias())


class Embedding(_Served):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self._weights.tensors[self._weight_name]).float()


class RMSNorm(_Served):
    def __init__(self, weights: StagedWeights, weight_name: str, eps: float) -> None:
        super().__init__(weights, weight_name)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._fp32(self._weight_name), self._eps)


def serve_from(model: nn.Module, weights: StagedWeights, *, tied: dict[str, str]) -> None:
    """Replace every module of `model` that owns parameters by one that reads `weights`.

    tied: weight name -> the name under which it is stored. Raises UnsupportedModelError for a module
    of an unknown kind.
    """
    for name, module in list(model.named_modules()):
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        weight_name = tied.get(f"{name}.weight", f"{name}.weight")
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _replacement(module, name, weight_name, weights))


def _replacement(module: nn.Module, name: str, weight_name: str, weights: StagedWeights) -> nn.Module:
    if isinstance(module, nn.Linear):
        bias_name = f"{name}.bias" if module.bias is not None else None
        quantized = f"{weight_name}_scale_inv" in weights.tensors
        return (BlockFP8Linear if quantized else Linear)(weights, weight_name, bias_name)
    if isinstance(module, nn.Embedding):
        return Embedding(weights, weight_name)
    if type(module).__name__.endswith("RMSNorm"):
        return RMSNorm(weights, weight_name, float(module.variance_epsilon))  # type: ignore[arg-type]
    raise UnsupportedModelError(f"{name} is a {type(module).__name__}; the rollout server has no such layer")
