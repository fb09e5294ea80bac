"""Ray: trainer ranks are actors, and the driver syncs them as one bridge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fp8bridge import BridgeConfig, SyncReport, WeightSource
from fp8bridge.errors import BridgeError, ConfigError, RankError

from .feed import bridge_config
from .frameworks import warn_if_untested

if TYPE_CHECKING:
    from fp8bridge import Bridge

_BRIDGE = "_fp8bridge"
"""The attribute of a trainer actor that holds its rank's bridge."""


class RayBridge:
    """A `Bridge` whose ranks are Ray actors. Made and called on the driver, which moves no weights.

    actors: one handle per trainer rank, in rank order; each must have set torch.distributed up, unless it is
    alone. make_source: called in every actor with the actor's instance; its weight source. servers: URLs,
    contacted from actor 0. settings: fields of BridgeConfig.

    Raises what `fp8bridge.connect` raises, and RankError if an actor dies.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        make_source: Callable[[Any], WeightSource],
        servers: Sequence[str],
        **settings: Any,
    ) -> None:
        warn_if_untested("Ray")
        if not actors:
            raise ConfigError("actors must have one handle per trainer rank, got none")
        config = bridge_config(settings)
        self._actors = list(actors)
        self._call(_connect, make_source, list(servers), config)

    def update_weights(self, *, version: int) -> SyncReport:
        """See `Bridge.update_weights`; no actor may be training meanwhile."""
        report: SyncReport = self._call(_update, version)[0]
        return report

    def verify(self) -> dict[str, int]:
        """See `Bridge.verify`."""
        counts: dict[str, int] = self._call(_verify)[0]
        return counts

    def admit(self, server: str) -> None:
        """See `Bridge.admit`."""
        self._call(_admit, server)

    def preview(self) -> str:
        """The plan, in words."""
        text: str = self._call(_preview)[0]
        return text

    def close(self) -> None:
        """Close every actor's bridge; the actors live on. Idempotent."""
        self._call(_close)

    def __enter__(self) -> RayBridge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RankError:
            if error is None:
                raise

    def _call(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`work(actor instance, *arguments)` in every actor at once; the answers by rank.

        The first error to arrive is raised at once: an actor that died may leave the others waiting for it
        until `collective_timeout_s`.
        """
        import ray

        refs = [actor.__ray_call__.remote(work, *arguments) for actor in self._actors]
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending)
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as err:
                raise (err.cause if isinstance(err.cause, BridgeError) else err) from None
            except ray.exceptions.RayActorError as err:
                rank = refs.index(done[0])
                raise RankError(f"trainer rank {rank} is gone: {err}; start it again and connect anew") from err
        answers: list[Any] = ray.get(refs)
        return answers


def _connect(actor: Any, make_source: Callable[[Any], WeightSource], servers: list[str], config: BridgeConfig) -> None:
    from fp8bridge import connect

    setattr(actor, _BRIDGE, connect(make_source(actor), servers, config))


def _bridge(actor: Any) -> Bridge:
    bridge: Bridge | None = getattr(actor, _BRIDGE, None)
    if bridge is None:
        raise ConfigError("this actor has no bridge; it was closed, or the actor was started again: connect anew")
    return bridge


def _update(actor: Any, version: int) -> SyncReport:
    return _bridge(actor).update_weights(version=version)


def _verify(actor: Any) -> dict[str, int]:
    return _bridge(actor).verify()


def _admit(actor: Any, server: str) -> None:
    _bridge(actor).admit(server)


def _preview(actor: Any) -> str:
    return _bridge(actor).plan.preview()


def _close(actor: Any) -> None:
    if getattr(actor, _BRIDGE, None) is not None:
        _bridge(actor).close()
        setattr(actor, _BRIDGE, None)
