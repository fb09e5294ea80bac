"""Runs inside a vLLM worker, as its weight-transfer backend `fp8bridge`.

vLLM takes a model apart in `start_weight_update` of its own backends. Here nothing touches the model before
`finish_weight_update`: buckets are pulled over ZMQ into host memory and checked first, and an update without
them is none.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import BridgeError, ServerMismatchError
from ..plan import Manifest
from ..receiver import Receiver
from ..sglang.record import rehearse
from ..staging import StagedWeights, describe_differences

_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""Of attention with an FP8 cache: vLLM has values of its own for those that no checkpoint brings."""


class BridgeEngine:
    """What vLLM's worker calls of a `WeightTransferEngine`. An exception's text reaches the trainer."""

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self._model = model
        self._config = vllm_config
        self._device = device
        self._rehearsed = ""
        self._weights: _Pulled | None = None
        size = vllm_config.parallel_config.world_size_across_dp
        if size > 1:
            raise ServerMismatchError(f"the fp8bridge backend takes a vLLM server of one worker, not of {size}")

    def parse_init_info(self, info: dict[str, Any]) -> dict[str, Any]:
        return info

    def init_transfer_engine(self, info: dict[str, Any]) -> None:
        """Nothing: every update says where it comes from."""

    def start_weight_update(self) -> None:
        self._weights = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """`rehearse`, `pull` or `drop`; the phase says what else is in it."""
        phase = update_info["phase"]
        if phase == "drop":
            self._weights = None
            return
        manifest = Manifest.from_dict(update_info["manifest"])
        if self._rehearsed != manifest.hash:
            if problems := rehearse(self._empty_model(), manifest).problems:
                raise ServerMismatchError(describe_differences(problems))
            self._rehearsed = manifest.hash
        if phase == "pull":
            self._weights = self._pull(manifest, update_info)

    def finish_weight_update(self) -> None:
        """Load what was pulled, the whole of it, as vLLM loads a checkpoint. With nothing pulled, nothing."""
        if self._weights is None:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with torch.no_grad():
            initialize_layerwise_reload(self._model)
            self._model.load_weights((name, t.to(self._device)) for name, t in self._weights.staged.items())
            finalize_layerwise_reload(self._model, self._config.model_config)
        self._weights = None

    def reset_weight_update_target(self) -> None:
        """Always the model itself."""

    def drain_pending(self) -> None:
        """Nothing is pending when a call has returned."""

    def shutdown(self) -> None:
        self._weights = None

    def _empty_model(self) -> Any:
        """The model as it was before vLLM packed its weights for the kernels. Its memory is never touched, so it costs
        address space alone."""
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        compilation = self._config.compilation_config
        layers = compilation.static_forward_context
        compilation.static_forward_context = {}  # where the live model's layers are known by name
        try:
            with set_default_torch_dtype(self._config.model_config.dtype), torch.device("cpu"):
                model = initialize_model(vllm_config=self._config)
        finally:
            compilation.static_forward_context = layers
        for module in model.modules():
            for name in _CACHE_SCALES:
                module._parameters.pop(name, None)
        return model

    def _pull(self, manifest: Manifest, told: dict[str, Any]) -> _Pulled:
        weights = _Pulled({}, manifest.layout)
        weights.begin(manifest)
        receiver = Receiver(weights, told["name"])
        receiver.pull(told["endpoints"], told["session"], manifest.hash, timeout_s=told["timeout_s"])
        if weights.missing:
            raise BridgeError(f"buckets {weights.missing[:8]} have not arrived")
        return weights


class _Pulled(StagedWeights):
    """Takes every tensor of the manifest: the rehearsal has compared it with the model."""

    def differences(self, manifest: Manifest) -> list[str]:
        return []

    @property
    def staged(self) -> dict[str, torch.Tensor]:
        return self._staged
