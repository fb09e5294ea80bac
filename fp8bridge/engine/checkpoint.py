"""Checkpoints of a Megatron trainer in Hugging Face's form.

    from fp8bridge.engine.checkpoint import load_checkpoint, save_checkpoint

    loaded = load_checkpoint(model_chunks, "Qwen3-8B-FP8")       # before the optimizer is made
    save_checkpoint(model_chunks, "step-1000", hf_config, to="fp8")

`convert_checkpoint` needs no trainer.
"""

from .conversion import Converted, convert_checkpoint
from .loading import Loaded, load_checkpoint
from .saving import Saved, save_checkpoint

__all__ = ["Converted", "Loaded", "Saved", "convert_checkpoint", "load_checkpoint", "save_checkpoint"]
