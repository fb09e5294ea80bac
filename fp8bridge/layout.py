"""What the server holds: which tensors are FP8 blocks, and under which names.

Read from a Hugging Face config's `quantization_config`, the same text SGLang reads, so that both
sides decide by the checkpoint's config and not by a list of names of ours. The only names known
here are those of modules that SGLang never builds as a quantizable linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from .errors import LayoutError
from .types import TensorMeta

Action = Literal["quantize", "pass_through", "copy", "cast"]
"""What becomes of a trainer tensor. pass_through: FP8 codes or their scales, sent as the trainer has them."""

SCALE_SUFFIX = "_scale_inv"

NEVER_QUANTIZED = {
    "embed_tokens": "embedding",
    "lm_head": "output head",
    "head": "output head",
    "gate": "router",
    "router": "router",
    "shared_expert_gate": "router",
    "conv1d": "convolution",
    "eh_proj": "MTP projection",
}
"""Last module component -> what it is. SGLang builds none of these as a block-FP8 linear layer."""

_FUSED_BY_SERVER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_WRAPPERS = ("model", "language_model")


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one tensor, and why (the reason is shown by `Plan.preview`)."""

    action: Action
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """The layout a server expects, parsed and validated.

    block: (rows, columns) of a scale block, or None when the server is not quantized.
    dtype: dtype of everything that is not quantized.
    ignored: module names (any prefix `model.` stripped) that stay unquantized.
    scale_format: "float32", or "ue8m0" when scales must be powers of two.
    """

    block: tuple[int, int] | None
    dtype: str = "bfloat16"
    ignored: tuple[str, ...] = ()
    scale_format: Literal["float32", "ue8m0"] = "float32"

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ServerLayout:
        """Parse a Hugging Face config (`quantization_config`, `torch_dtype` / `dtype`).

        Raises LayoutError for a quantization that is not block FP8, naming the field.
        """
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        quant = config.get("quantization_config")
        if not quant:
            return cls(block=None, dtype=dtype)
        ignored = quant.get("ignored_layers") or quant.get("modules_to_not_convert") or ()
        return cls(
            block=_block(quant),
            dtype=dtype,
            ignored=tuple(sorted({_strip(name) for name in ignored})),
            scale_format=_scale_format(quant),
        )

    def decide(self, meta: TensorMeta, scale: TensorMeta | None = None) -> Decision:
        """The action for one trainer tensor; `scale` is that of its `X_scale_inv`, if the source has one.

        Raises LayoutError if the tensor is FP8 in the trainer and cannot be passed through as it is.
        """
        why_not = self._why_not_quantized(meta)
        if meta.dtype in ("float8_e4m3fn", "uint8") or scale is not None:
            return self._pass_through(meta, scale, why_not)
        if why_not is None:
            return Decision("quantize", f"linear weight, block {self.block[0]}x{self.block[1]}")  # type: ignore[index]
        if meta.dtype == self.dtype:
            return Decision("copy", why_not)
        if meta.name.endswith("e_score_correction_bias"):
            return Decision("copy", f"{why_not}; kept {meta.dtype}")
        return Decision("cast", f"{why_not}; {meta.dtype} -> {self.dtype}")

    def unused_ignores(self, names: Iterable[str]) -> list[str]:
        """Entries of `ignored` that match no tensor: most likely a wrong prefix in the config."""
        modules = [_strip(name.rsplit(".", 1)[0]) for name in names]
        return [e for e in self.ignored if not any(_inside(m, e) for m in modules)]

    def check_siblings(self, names: Iterable[str]) -> None:
        """Raise LayoutError where only some members of a layer the server fuses are ignored."""
        modules = {_strip(name.rsplit(".", 1)[0]) for name in names}
        for module in sorted(modules):
            parent, _, last = module.rpartition(".")
            for group in _FUSED_BY_SERVER:
                if last != group[0]:
                    continue
                members = [f"{parent}.{m}" for m in group if f"{parent}.{m}" in modules]
                skipped = [m for m in members if self._is_ignored(m)]
                if skipped and len(skipped) < len(members):
                    raise LayoutError(
                        f"the server fuses {', '.join(members)} into one layer, but its config ignores only "
                        f"{', '.join(skipped)}; ignore all of them or none"
                    )

    def scale_shape(self, matrix: tuple[int, int]) -> tuple[int, int]:
        """[ceil(rows / block rows), ceil(columns / block columns)] of fp32 scales."""
        if self.block is None:
            raise LayoutError("this server is not quantized; there are no scales")
        return (-(-matrix[0] // self.block[0]), -(-matrix[1] // self.block[1]))

    def differences(self, other: ServerLayout) -> list[str]:
        """`field: mine != theirs` for each field that differs; empty when the layouts agree."""
        mine, theirs = self.as_dict(), other.as_dict()
        return [f"{k}: {mine[k]} != {theirs[k]}" for k in mine if mine[k] != theirs[k]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "block": list(self.block) if self.block else None,
            "dtype": self.dtype,
            "ignored": list(self.ignored),
            "scale_format": self.scale_format,
        }

    def as_hf_config(self) -> dict[str, Any]:
        """The part of a Hugging Face config that `from_hf_config` reads."""
        config: dict[str, Any] = {"torch_dtype": self.dtype}
        if self.block is not None:
            config["quantization_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": list(self.ignored),
                "scale_fmt": self.scale_format,
            }
        return config

    def describe(self) -> str:
        if self.block is None:
            return f"unquantized {self.dtype}"
        return f"FP8 e4m3, {self.block[0]}x{self.block[1]} blocks, {self.scale_format} scales, rest {self.dtype}"

    def _pass_through(self, meta: TensorMeta, scale: TensorMeta | None, why_not: str | None) -> Decision:
        if why_not is not None:
            raise LayoutError(
                f"{meta.name} is FP8 in the trainer, but the server keeps it in {self.dtype} ({why_not}); let the "
                "source give the dequantized weight, or serve a checkpoint that has it in FP8",
                tensor=meta.name,
            )
        expected = self.scale_shape(meta.matrix)
        if meta.dtype != "float8_e4m3fn" or scale is None or (scale.dtype, scale.shape) != ("float32", expected):
            found = "no scale" if scale is None else f"a scale of {scale.dtype} {list(scale.shape)}"
            raise LayoutError(
                f"{meta.name} is {meta.dtype} {list(meta.shape)} in the trainer with {found}; to pass it through the "
                f"server needs float8_e4m3fn codes and a scale of float32 {list(expected)}. A source must give those, "
                "or the high-precision weight",
                tensor=meta.name,
            )
        return Decision("pass_through", "the trainer's own FP8 codes and scales")

    def _is_ignored(self, module: str) -> bool:
        return any(_inside(module, entry) for entry in self.ignored)

    def _why_not_quantized(self, meta: TensorMeta) -> str | None:
        module, _, kind = meta.name.rpartition(".")
        if self.block is None:
            return "server is not quantized"
        if kind != "weight":
            return "not a weight"
        if len(meta.shape) != 2:
            return "not a matrix"
        last = module.rpartition(".")[2]
        if last in NEVER_QUANTIZED:
            return NEVER_QUANTIZED[last]
        if "norm" in last:
            return "norm"
        if self._is_ignored(_strip(module)):
            return "ignored by the server's config"
        return None


def _block(quant: dict[str, Any]) -> tuple[int, int]:
    method = quant.get("quant_method")
    if method != "fp8":
        raise LayoutError(
            f"quantization_config.quant_method is {method!r}; fp8bridge serves 'fp8' with weight_block_size. "
            "Serve a block-FP8 or an unquantized checkpoint"
        )
    block = quant.get("weight_block_size")
    if not block:
        raise LayoutError(
            "quantization_config has no weight_block_size (per-tensor FP8): SGLang drops the loader of such "
            "weights after start and cannot update them; serve a checkpoint with weight_block_size [128, 128]"
        )
    if len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise LayoutError(f"weight_block_size must be two positive integers, got {block!r}")
    scheme = quant.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise LayoutError(f"activation_scheme {scheme!r} with block scales; SGLang takes only 'dynamic'")
    return (block[0], block[1])


def _scale_format(quant: dict[str, Any]) -> Literal["float32", "ue8m0"]:
    fmt = quant.get("scale_fmt") or "float32"
    if fmt in ("float32", "fp32", "float"):
        return "float32"
    if fmt == "ue8m0":
        return "ue8m0"
    raise LayoutError(f"quantization_config.scale_fmt is {fmt!r}; known: 'ue8m0', or absent for fp32 scales")


def _strip(module: str) -> str:
    """Drop leading `model.` and `language_model.`: checkpoints and servers disagree about them."""
    parts = module.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def _inside(module: str, entry: str) -> bool:
    """True if `module` is `entry` or below it, on dotted boundaries (layers.1 is not layers.10)."""
    return module == entry or module.startswith(entry + ".")
