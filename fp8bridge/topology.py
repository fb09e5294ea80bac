"""Short names of how a trainer and its servers are spread over GPUs: `tp8pp4ep8`, `16xtp8`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .errors import ConfigError

_SIZES = ("tp", "pp", "vpp", "ep", "etp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerShape:
    """Sizes of Megatron's groups. dp counts the ranks that share dense weights (context parallel ones too)."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @classmethod
    def parse(cls, text: str) -> TrainerShape:
        """`tp8pp4ep8`, in any order. Left out: etp is tp, dp the least that holds ep x etp, the others 1."""
        found = re.findall(r"([a-z]+)(\d+)", text)
        names = [name for name, _ in found]
        sizes = {name: int(size) for name, size in found}
        if "".join(n + s for n, s in found) != text or not found or set(names) - set(_SIZES) or 0 in sizes.values():
            raise ConfigError(
                f"trainer {text!r} is not written as tp8pp4ep8; sizes: {', '.join(_SIZES)}, each 1 or more"
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"trainer {text!r} names a size twice")
        tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
        etp = sizes.setdefault("etp", tp)
        sizes.setdefault("dp", math.lcm(tp, ep * etp) // tp)
        return cls(**sizes)

    def chunks(self, layers: int) -> list[int]:
        """Layers of each of the pp x vpp chunks; where they do not divide evenly the first ones have one more."""
        count = self.pp * self.vpp
        return [layers // count + (i < layers % count) for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShape:
    count: int
    tp: int = 1

    @property
    def gpus(self) -> int:
        return self.count * self.tp

    @classmethod
    def parse(cls, text: str) -> ServerShape:
        """`16xtp8`: sixteen servers of eight GPUs; `4`: four of one."""
        match = re.fullmatch(r"([1-9]\d*)(?:xtp([1-9]\d*))?", text)
        if match is None:
            raise ConfigError(f"servers {text!r} is not written as 16xtp8 or 16")
        return cls(count=int(match[1]), tp=int(match[2] or 1))
