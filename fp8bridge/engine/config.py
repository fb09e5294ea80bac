"""FP8 training in one frozen config: what multiplies in FP8, what is kept in FP8, what the optimizer keeps.

Pure data: no torch. A field that the chosen recipe would ignore is refused, so a config says what happens.
`fp8bridge.engine.megatron.apply_to_megatron` sets Megatron-Core's three configs from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fp8bridge.errors import ConfigError

RECIPES = ("blockwise", "tensorwise", "delayed", "mxfp8")
STATE_DTYPES = ("float32", "bfloat16", "float16", "fp8")
ATTENTION_RECIPES = ("delayed", "tensorwise", "mxfp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8EngineConfig:
    """FP8 training with Megatron-Core and Transformer Engine. BF16 training is the absence of one.

    Raises ConfigError, naming the field and what to set, for values that exclude each other or that the
    recipe would ignore.
    """

    mode: Literal["e4m3", "hybrid"] = "e4m3"
    """`e4m3` for everything, or `hybrid`: E5M2 for the gradients of outputs. Weights are E4M3 in both."""

    recipe: Literal["blockwise", "tensorwise", "delayed", "mxfp8"] = "blockwise"
    """How scales are chosen: 128x128 weight blocks, one scale a tensor (of this step, or of earlier ones),
    or 1x32 blocks (Blackwell). Only `blockwise` parameters pass to block-FP8 servers as they are."""

    fp8_params: bool = False
    """Keep the weights of linear layers in FP8, and gather them over data-parallel ranks in FP8."""

    block_scales: Literal["power_of_two", "float32"] = "power_of_two"
    """Scales of `blockwise`. `float32` only on Hopper, and `set_environment` must run before Transformer
    Engine is imported."""

    margin: int = 0
    """`delayed`: scales leave room for 2^margin."""

    amax_history_len: int = 1
    """`delayed`: steps whose largest magnitudes are remembered."""

    amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """`delayed`: what of the history is used."""

    wgrad: bool = True
    """Weight gradients multiplied in FP8; `delayed` alone can turn it off, and not with every Transformer Engine."""

    dot_product_attention: bool = False
    """Attention in FP8; not with `blockwise`."""

    multi_head_attention: bool = False
    """`delayed`: no BF16 between attention and the linear layers around it; needs dot_product_attention."""

    tp_only_amax_reduction: bool = False
    """Largest magnitudes agreed on over tensor- (and context-) parallel ranks only. For what reduces them:
    `delayed`, or FP8 attention."""

    bf16_layers_at_start: int = 0
    """Transformer layers kept in BF16 at the start of the model; not with `delayed`."""

    bf16_layers_at_end: int = 0
    """The same at its end."""

    router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Of a mixture-of-experts router's scores. None: the model's own."""

    pad_routed_tokens: bool = False
    """Route a few tokens more, so that every expert gets a multiple of the alignment."""

    token_multiple: int | None = None
    """Pad token counts to a multiple of this too; what FP8 needs comes on top (`align_tokens`)."""

    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Gradients as they are accumulated and reduced."""

    master_dtype: Literal["float32", "float16"] = "float32"
    """The optimizer's copy of the weights. `float16` is scaled per tensor, through the precision-aware optimizer."""

    exp_avg_dtype: Literal["float32", "bfloat16", "float16", "fp8"] = "float32"
    """Adam's first moment."""

    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16", "fp8"] = "float32"
    """Adam's second moment."""

    def __post_init__(self) -> None:
        _check_values(self)
        _check_recipe(self)
        if self.master_dtype == "float16" and self.fp8_params and self.recipe != "delayed":
            raise ConfigError(
                f"master_dtype 'float16' with fp8_params and recipe {self.recipe!r}: Megatron-Core keeps the masters "
                "of such parameters itself, in fp32; set master_dtype='float32', or fp8_params=False"
            )

    @property
    def precision_aware(self) -> bool:
        """Whether optimizer states need Megatron's precision-aware optimizer."""
        return (self.master_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("float32",) * 3

    def as_dict(self) -> dict[str, Any]:
        """`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FP8EngineConfig:
        """From plain values; `preset` in it names what the other keys change. ConfigError names unknown keys."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"an FP8 engine config is a mapping of fields, not {type(data).__name__}")
        known = [f.name for f in fields(cls)]
        given = dict(data)
        preset = given.pop("preset", None)
        base = PRESETS[_known_preset(preset)]().as_dict() if preset is not None else {}
        unknown = [f"{key!r}{_suggest(str(key), [*known, 'preset'])}" for key in given if key not in known]
        if unknown:
            raise ConfigError(f"unknown field {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**base | given)

    @classmethod
    def from_yaml(cls, path: str | Path) -> FP8EngineConfig:
        """From a YAML file: the fields, alone or below the key `fp8_engine`."""
        import yaml

        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as err:
            raise ConfigError(f"cannot read {path} ({err.strerror}); give a YAML file of FP8 engine fields") from err
        except (yaml.YAMLError, UnicodeDecodeError) as err:
            raise ConfigError(f"{path} is not YAML: {err}") from err
        if isinstance(data, Mapping) and "fp8_engine" in data:
            data = data["fp8_engine"]
        try:
            return cls.from_dict({} if data is None else data)
        except ConfigError as err:
            raise ConfigError(f"{path}: {err}") from err

    @classmethod
    def preset(cls, name: str) -> FP8EngineConfig:
        """A preset by name; ConfigError lists the names."""
        return PRESETS[_known_preset(name)]()

    @classmethod
    def hopper_blockwise(cls) -> FP8EngineConfig:
        """Weights kept in 128x128 blocks, which block-FP8 servers take byte for byte."""
        return cls(recipe="blockwise", fp8_params=True)

    @classmethod
    def blackwell_mxfp8(cls) -> FP8EngineConfig:
        """Weights kept in 1x32 blocks with power-of-two scales, Blackwell's own format."""
        return cls(recipe="mxfp8", fp8_params=True)

    @classmethod
    def fp8lm_o1(cls) -> FP8EngineConfig:
        """FP8 compute; weights and optimizer as in BF16 training."""
        return cls(recipe="blockwise")

    @classmethod
    def fp8lm_o2(cls) -> FP8EngineConfig:
        """Also optimizer states: first moment FP8, second FP16, scaled FP16 masters."""
        return cls(recipe="blockwise", master_dtype="float16", exp_avg_dtype="fp8", exp_avg_sq_dtype="float16")

    @classmethod
    def fp8lm_o3(cls) -> FP8EngineConfig:
        """Also FP8 parameters and their gather; masters are fp32 again, which Megatron-Core requires for these."""
        return cls(recipe="blockwise", fp8_params=True, exp_avg_dtype="fp8", exp_avg_sq_dtype="float16")


PRESETS: dict[str, Callable[[], FP8EngineConfig]] = {
    "hopper_blockwise": FP8EngineConfig.hopper_blockwise,
    "blackwell_mxfp8": FP8EngineConfig.blackwell_mxfp8,
    "fp8lm_o1": FP8EngineConfig.fp8lm_o1,
    "fp8lm_o2": FP8EngineConfig.fp8lm_o2,
    "fp8lm_o3": FP8EngineConfig.fp8lm_o3,
}

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": ("e4m3", "hybrid"),
    "recipe": RECIPES,
    "block_scales": ("power_of_two", "float32"),
    "amax_compute_algo": ("most_recent", "max"),
    "router_dtype": ("fp32", "fp64", None),
    "grad_dtype": ("float32", "bfloat16"),
    "master_dtype": ("float32", "float16"),
    "exp_avg_dtype": STATE_DTYPES,
    "exp_avg_sq_dtype": STATE_DTYPES,
}
_LEAST = {"margin": 0, "amax_history_len": 1, "bf16_layers_at_start": 0, "bf16_layers_at_end": 0, "token_multiple": 1}
_ONLY_DELAYED = ("margin", "amax_history_len", "amax_compute_algo", "wgrad", "multi_head_attention")
"""Fields that Megatron-Core hands to the `delayed` recipe and drops for the others."""


def _check_values(config: FP8EngineConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in _CHOICES:
            known = _CHOICES[field.name]
            if value not in known:
                words = ", ".join(map(repr, known))
                raise ConfigError(f"{field.name} must be one of {words}; got {value!r}{_suggest(str(value), known)}")
        elif field.name in _LEAST:
            least = _LEAST[field.name]
            optional = value is None and field.default is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{field.name} must be a whole number of at least {least}; got {value!r}")
        elif not isinstance(value, bool):
            raise ConfigError(f"{field.name} must be true or false; got {value!r}")


def _check_recipe(config: FP8EngineConfig) -> None:
    """Refuse what the recipe would ignore."""
    recipe = config.recipe
    defaults = {f.name: f.default for f in fields(config)}
    if recipe != "delayed":
        for name in _ONLY_DELAYED:
            _refuse_unless_default(config, name, defaults[name], "belongs to recipe 'delayed'")
    if recipe not in ATTENTION_RECIPES:
        why = "Transformer Engine has no FP8 attention for it, and Megatron-Core would drop the flag"
        _refuse_unless_default(config, "dot_product_attention", False, why)
    if recipe != "blockwise":
        _refuse_unless_default(config, "block_scales", "power_of_two", "belongs to recipe 'blockwise'")
    if recipe == "delayed":
        why = "its state runs through all layers, so none may be left out"
        for name in ("bf16_layers_at_start", "bf16_layers_at_end"):
            _refuse_unless_default(config, name, 0, why)
    if config.multi_head_attention and not config.dot_product_attention:
        raise ConfigError("multi_head_attention needs FP8 attention: set dot_product_attention=True too")
    if config.tp_only_amax_reduction and recipe != "delayed" and not config.dot_product_attention:
        raise ConfigError(
            f"tp_only_amax_reduction: recipe {recipe!r} without FP8 attention reduces nothing over that group and "
            "would ignore it; set tp_only_amax_reduction=False"
        )


def _refuse_unless_default(config: FP8EngineConfig, name: str, default: Any, why: str) -> None:
    value = getattr(config, name)
    if value != default:
        raise ConfigError(f"{name}={value!r} with recipe {config.recipe!r}: {why}; set {name}={default!r}")


def _known_preset(name: Any) -> str:
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}{_suggest(str(name), PRESETS)}; known: {', '.join(PRESETS)}")
    return str(name)


def _suggest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, [k for k in known if isinstance(k, str)], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
