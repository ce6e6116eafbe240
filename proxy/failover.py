"""One leg, given to one engine after the other: as long as the client was sent nothing of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from pdx.errors import LegFailed, NoEngine
from pdx.proxy.exchange import Exchange
from pdx.proxy.health import Reason
from pdx.proxy.metrics import Metrics
from pdx.proxy.roster import Engine
from pdx.telemetry.faults import Faults, printable

T = TypeVar("T")

# No further engine is tried so long after the first one failed. Where none could be reached that counts from the
# beginning: with the connect timeout, a client hears within 5 s in which the proxy ran.
_FAILOVER_S = 2.5
# Engines that fail on one leg, or are full: a request that ends engines does not get them all, and where all are full
# each request is not many.
_MOST_FAILED = 3


class Failover:
    """Both legs of all requests go through `attempt`."""

    def __init__(self, *, metrics: Metrics, faults: Faults, clock: Callable[[], float]) -> None:
        """`clock` tells the seconds in which this process ran."""
        self._metrics = metrics
        self._faults = faults
        self._clock = clock

    async def attempt(
        self,
        exchange: Exchange,
        leg: str,
        choose: Callable[[set[str]], Engine | None],
        ask: Callable[[Engine], Awaitable[T]],
        *,
        final: Collection[Reason] = (Reason.STATUS_4XX,),
    ) -> T:
        """What `ask` returns for the first engine that `choose` names and that does not fail.

        After a failure for a `final` reason no further engine is tried.

        :raises LegFailed: the last one's failure. :raises NoEngine: there is none.
        """
        tried: set[str] = set()
        failure: LegFailed | None = None
        failures = 0
        writes = exchange.reply.writes
        give_up_at = self._clock() + _FAILOVER_S
        while failure is None or (failures < _MOST_FAILED and self._clock() < give_up_at):
            engine = choose(tried)
            if engine is None:
                break
            if failure is not None:
                text = f"transfer {exchange.transfer}: {failure}, trying {engine.name}"
                self._faults.warn(f"trying {failure.url} {failure.reason}", printable(text))
                self._metrics.failovers.labels(leg, failure.reason).inc()
            try:
                return await ask(engine)
            except LegFailed as error:
                if error.reason in final or exchange.reply.writes != writes:
                    raise
                failure = error
                tried.add(engine.url)
                if not error.unsent:
                    if error.reason is not Reason.STATUS_429:
                        exchange.blamed[engine.url] = Reason(error.reason)
                    failures += 1
                    # The first engine had all its time; that is not counted.
                    give_up_at = self._clock() + _FAILOVER_S if failures == 1 else give_up_at
        raise failure or NoEngine("no engine is known")
