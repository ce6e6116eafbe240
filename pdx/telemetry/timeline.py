"""The moments of one transfer, by name, and the durations computed from them. No clock and no I/O here.

All times are CLOCK_MONOTONIC nanoseconds of one host, so moments of different processes are comparable; the proxy
converts those of other hosts (see `pdx.proxy.timelines` for the error).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Event(StrEnum):
    """Moments in the order in which they happen; the comment says which process records each."""

    RECEIVED = "received"  # proxy: the client's request is parsed
    PREFILL_SENT = "prefill_sent"  # proxy: the prefill leg starts
    ADMITTED = "admitted"  # prefill scheduler: slots granted; tokens = tokens reused from the store
    NEAR = "near"  # a node of the transfer: prefill will end soon
    PREFILL_END = "prefill_end"  # prefill worker: last step's forward done; nbytes = gathered by then
    ACROSS = "across"  # prefill's node, at prefill end: nbytes = what the decode's node had acknowledged by then
    SEALED = "sealed"  # prefill worker: everything gathered and sealed; nbytes = gathered in all
    PUSHED = "pushed"  # prefill's node: the decode's node has acknowledged everything; nbytes = sent in all
    LANDED = "landed"  # decode's node: everything of the transfer is sealed there; nbytes = received in all
    PREFILL_ANSWERED = "prefill_answered"  # proxy: the prefill leg has answered
    DECODE_SENT = "decode_sent"  # proxy: the decode leg starts
    FIRST_TOKEN = "first_token"  # proxy: the first token is on its way to the client
    FOUND = "found"  # decode scheduler: the store's answer; tokens = tokens to be loaded
    LOAD_START = "load_start"  # decode worker: scattering starts
    LOAD_END = "load_end"  # decode worker: scattering is done; nbytes = scattered
    RUNNABLE = "runnable"  # decode scheduler: the request may run
    DECODE_FIRST = "decode_first"  # proxy: first token from the decode leg
    DONE = "done"  # proxy: the last byte is on its way to the client


class Moment(msgspec.Struct, frozen=True):
    """One event of one transfer."""

    event: str
    at_ns: int
    engine: str = ""
    nbytes: int = 0
    tokens: int = 0


class Breakdown(msgspec.Struct, frozen=True):
    """Where one request's time went; None if a moment was not recorded."""

    prefill_ms: float | None
    handoff_ms: float | None  # prefill end -> the decode engine may run
    load_ms: float | None
    first_decode_ms: float | None  # may run -> first token of the decode leg
    push_ms: float | None  # prefill end -> everything is on the decode's node, 0 if it was before; None: no wire
    push_lead_ms: float | None  # the reverse: how long before prefill's end everything was there
    moved_bytes: int  # gathered by the prefill engine
    pushed_bytes: int  # sent from node to node
    hidden_share: float | None  # bytes that were where decode finds them when prefill ended / all bytes to get there
    reused_tokens: int


def breakdown(moments: list[Moment]) -> Breakdown:
    """Sum up a timeline. With several shards, the last one to record an event decides, and bytes add up."""
    last: dict[str, Moment] = {}
    nbytes: dict[str, int] = {}
    for moment in moments:
        seen = last.get(moment.event)
        nbytes[moment.event] = nbytes.get(moment.event, 0) + moment.nbytes
        if seen is None or moment.at_ns > seen.at_ns:
            last[moment.event] = moment

    def span_ms(start: Event, end: Event) -> float | None:
        if start not in last or end not in last:
            return None
        return (last[end].at_ns - last[start].at_ns) / 1e6

    arrived = Event.LANDED if Event.LANDED in last else Event.PUSHED
    left_ms = span_ms(Event.PREFILL_END, arrived)
    return Breakdown(
        prefill_ms=span_ms(Event.PREFILL_SENT, Event.PREFILL_END),
        handoff_ms=span_ms(Event.PREFILL_END, Event.RUNNABLE),
        load_ms=span_ms(Event.LOAD_START, Event.LOAD_END),
        first_decode_ms=span_ms(Event.RUNNABLE, Event.DECODE_FIRST),
        push_ms=None if left_ms is None else max(0.0, left_ms),
        push_lead_ms=None if left_ms is None else max(0.0, -left_ms),
        moved_bytes=nbytes.get(Event.SEALED, 0),
        pushed_bytes=nbytes.get(Event.PUSHED if Event.PUSHED in last else Event.LANDED, 0),
        hidden_share=_hidden_share(nbytes),
        reused_tokens=last[Event.ADMITTED].tokens if Event.ADMITTED in last else 0,
    )


def phases(moments: list[Moment], now_ns: int) -> list[float]:
    """The milliseconds that a request was queued, prefilled, handed over and decoded, as far as it has come; its
    present phase lasts until now. Phases follow each other as the client sees it: copies run beside prefill, and a
    decode leg may wait meanwhile.

    For an engine that reports no admission, prefill begins when it was asked, once prefill is over. One that serves
    alone prefills until its first byte.
    """
    last: dict[str, int] = {}
    for moment in moments:
        last[moment.event] = max(moment.at_ns, last.get(moment.event, 0))

    def seen(*events: Event) -> int | None:
        return next((last[event] for event in events if event in last), None)

    prefilled = seen(Event.PREFILL_END, Event.PREFILL_ANSWERED, Event.RUNNABLE, Event.DECODE_FIRST)
    is_taken = prefilled is not None or Event.PREFILL_SENT not in last
    begun = seen(Event.ADMITTED, *((Event.PREFILL_SENT, Event.DECODE_SENT) if is_taken else ()))
    ends = (begun, prefilled, seen(Event.RUNNABLE, Event.DECODE_FIRST), seen(Event.DONE))
    until, spent = seen(Event.RECEIVED) or now_ns, list[float]()
    for number, end in enumerate(ends):
        is_last = all(later is None for later in ends[number:])
        reached = now_ns if is_last else max(until, end or until)
        spent.append(round(max(0, reached - until) / 1e6, 1))
        until = reached
        if is_last:
            break
    return spent


def _hidden_share(nbytes: dict[str, int]) -> float | None:
    """The share of pushed bytes, or without a push of gathered ones; None if there are none."""
    done, total = (Event.ACROSS, Event.PUSHED) if Event.PUSHED in nbytes else (Event.PREFILL_END, Event.SEALED)
    return nbytes.get(done, 0) / nbytes[total] if nbytes.get(total) else None
