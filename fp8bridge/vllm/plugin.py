"""vLLM's entry point `vllm.general_plugins`: it finds this where fp8bridge is installed and calls it in each process.

vllm serve MODEL --weight-transfer-config '{"backend": "fp8bridge"}'
"""

from __future__ import annotations

BACKEND = "fp8bridge"


def register() -> None:
    """Make the weight-transfer backend known."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM may call a plugin twice
        WeightTransferEngineFactory.register_engine(BACKEND, "fp8bridge.vllm.engine", "BridgeEngine")
