"""One log line per served request: how, by which engines, how fast, how much was cached. No text of it."""

from __future__ import annotations

import logging

from pdx.proxy import headers
from pdx.proxy.exchange import Exchange
from pdx.telemetry.faults import printable
from pdx.telemetry.logs import event
from pdx.telemetry.timeline import Event

log = logging.getLogger("pdx.proxy.requests")


def served(exchange: Exchange) -> None:
    """Log a request that has ended, with its timeline's outcome."""
    if not log.isEnabledFor(logging.INFO):
        return
    timeline, seen = exchange.timeline, exchange.seen
    engines = {moment.event: moment.engine for moment in timeline.moments}

    def ms(last: Event) -> float | None:
        return round((seen[last] - exchange.received_ns) / 1e6, 1) if last in seen else None

    model, name = exchange.model, headers.request_id(exchange.headers)
    event(
        log,
        "request",
        request=name if name != exchange.transfer else None,
        transfer=exchange.transfer,
        trace=exchange.trace.name if exchange.trace is not None else None,
        route=str(exchange.route),
        model=printable(model, 128) if model else None,
        outcome=str(timeline.outcome),
        mode=str(exchange.mode),
        why=timeline.why or None,
        prefill=engines.get(Event.PREFILL_SENT),
        decode=engines.get(Event.DECODE_SENT),
        ttft_ms=ms(Event.FIRST_TOKEN) if exchange.streams else None,
        ms=ms(Event.DONE),
        prompt_tokens=timeline.prompt_tokens or None,
        cached_tokens=timeline.cached_tokens,
        pieces=exchange.reply.writes or None,
    )
