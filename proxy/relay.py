"""One request's way: prefill leg, decode leg, client, and what is done where one of them fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdx.errors import ClientGone, LegFailed, NoEngine, ProtocolError
from pdx.proxy import answer, body, router
from pdx.proxy.control import Control
from pdx.proxy.decode import AsItIs, Continuation
from pdx.proxy.exchange import Exchange, Outcome
from pdx.proxy.leg import Legs, Reason, failed
from pdx.proxy.metrics import Metrics
from pdx.proxy.plan import Body, Mode, continues, forward_limit, obstacle
from pdx.proxy.roster import Engine, Roster
from pdx.proxy.router import Pair
from pdx.timeline import Event

log = logging.getLogger(__name__)

# No further engine is tried after; with the connect timeout, a client hears within 5 s in which the proxy ran.
_FAILOVER_S = 2.5


class Relay:
    """Serves exchanges. What it changes are the parts it is made of; itself it only remembers one warning."""

    def __init__(
        self,
        *,
        roster: Roster,
        legs: Legs,
        control: Control,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._legs = legs
        self._control = control
        self._metrics = metrics
        self._clock = clock
        self._warned_no_pair = False
        self._warned_unplaced = False

    async def serve(self, exchange: Exchange) -> None:
        """Answer the client. Its going away cancels both legs at once: their connections close as this unwinds.

        :raises asyncio.CancelledError: the client went away, or the proxy is closing.
        """
        outcome = Outcome.INTERNAL
        try:
            outcome = await self._outcome(exchange)
            exchange.mark(Event.DONE)
        except (ClientGone, asyncio.CancelledError) as error:
            outcome = Outcome.CLIENT_GONE
            self._cancel(exchange, "client_gone")
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            exchange.timeline.outcome = outcome
            self._metrics.requests.labels(exchange.route, exchange.mode, outcome).inc()

    async def _outcome(self, exchange: Exchange) -> Outcome:
        try:
            await self._run(exchange)
        except NoEngine:
            await exchange.reply.fail(503, "no engine is available to serve this request")
            return Outcome.UNAVAILABLE
        except LegFailed as failure:
            log.warning("transfer %s failed: %s", exchange.transfer, failure)
            self._cancel(exchange, "decode_failed")
            status = 503 if failure.unsent else 502
            await exchange.reply.fail(status, f"the decode engine failed ({failure.reason})")
            return Outcome.UNAVAILABLE if failure.unsent else Outcome.BROKEN
        if exchange.outcome is not Outcome.OK:
            self._cancel(exchange, "decode_refused")
        return exchange.outcome

    async def _run(self, exchange: Exchange) -> None:
        if exchange.mode is Mode.ALONE:
            return await self._alone(exchange)
        pair = self._pair()
        if pair is None:
            return await self._fall_back(exchange, "no_prefiller")
        exchange.planned = pair
        if exchange.mode is Mode.FORWARD:
            why = obstacle(exchange.body, prefill=pair.prefiller.facts, decode=pair.decoder.facts)
            if why:
                self._stop_forwarding(exchange, why)
        with self._legs.book(pair.decoder) as exchange.booking:
            return await self._split(exchange, pair)

    async def _split(self, exchange: Exchange, pair: Pair) -> None:
        try:
            prefill, raw = await self._prefill(exchange, pair)
        except LegFailed as failure:
            self._blame(failure)
            refused = failure.reason is Reason.STATUS_4XX
            if not refused:
                log.warning("transfer %s: prefill failed, one engine serves alone: %s", exchange.transfer, failure)
            await self._fall_back(exchange, f"prefill_{failure.reason}")
            if refused and exchange.outcome is Outcome.OK:  # refused by both, it is the client's fault and no news
                log.warning("transfer %s: refused by %s only", exchange.transfer, failure.engine)
            return None
        if exchange.mode is Mode.FORWARD:
            return await self._forward(exchange, pair, prefill, raw)
        return await self._sample(exchange, prefill)

    async def _prefill(self, exchange: Exchange, pair: Pair) -> tuple[answer.PrefillAnswer, bytes]:
        engine = pair.prefiller
        leg = body.prefill_body(
            exchange.route, exchange.body, mode=exchange.mode, transfer=exchange.transfer, decode_node=pair.wire
        )
        exchange.mark(Event.PREFILL_SENT, engine)
        exchange.told = {pair.prefiller.node, pair.decoder.node}
        async with self._legs.post(engine, exchange.route, payload=body.encode(leg), headers=exchange.headers) as found:
            raw = await found.read()
        if found.status != 200:
            raise failed(Reason.STATUS_5XX if found.status >= 500 else Reason.STATUS_4XX, engine, str(found.status))
        try:
            prefill = answer.decode_prefill(raw)
        except ProtocolError as error:
            raise failed(Reason.MALFORMED, engine, str(error)) from error
        exchange.timeline.prompt_tokens = prefill.usage.prompt_tokens
        exchange.mark(Event.PREFILL_ANSWERED, engine)
        return prefill, raw

    async def _forward(self, exchange: Exchange, pair: Pair, prefill: answer.PrefillAnswer, raw: bytes) -> None:
        engine = pair.prefiller
        limit = forward_limit(exchange.body, pair.decoder.facts)

        def fits(decoder: Engine) -> bool:
            return continues(decoder.facts, prompt_tokens=prefill.usage.prompt_tokens, limit=limit)

        if answer.is_final(prefill, limit):
            return await self._finish_early(exchange, engine, prefill, raw)
        first = answer.first_token(prefill)
        if first is None or not fits(pair.decoder):
            # Nothing is with the client yet, and the KV is on its way all the same.
            self._stop_forwarding(exchange, "first_token" if first is None else "near_ceiling")
            return await self._sample(exchange, prefill)
        if exchange.streams:
            exchange.first_token(engine, streams=True)
            await exchange.reply.write(answer.first_event(prefill, finish=False, options=exchange.stream_options))
        leg = body.continuation_body(
            exchange.body,
            prompt=first.prompt,
            tokens=first.prompt_tokens,
            first=first.token,
            limit=limit,
            transfer=exchange.transfer,
        )
        try:
            await self._decode(exchange, leg, Continuation(prefill, first), fits=fits)
        except (LegFailed, NoEngine) as failure:
            refused = isinstance(failure, LegFailed) and failure.reason is Reason.STATUS_4XX
            unsent = isinstance(failure, NoEngine) or failure.unsent
            if exchange.reply.started or not (refused or unsent):
                raise
            log.warning("transfer %s: no continuation: %s", exchange.transfer, failure)
            if refused:
                return await self._fall_back(exchange, "decode_status_4xx")
            self._stop_forwarding(exchange, "no_continuation")  # there may be engines fit for the whole answer
            return await self._sample(exchange, prefill)

    async def _finish_early(
        self, exchange: Exchange, engine: Engine, prefill: answer.PrefillAnswer, raw: bytes
    ) -> None:
        self._cancel(exchange, "finished_early")  # no decode leg will ever fetch it
        exchange.first_token(engine, streams=exchange.streams)
        if not exchange.streams:
            exchange.reply.whole(200, answer.final_answer(raw))
            return
        options = exchange.stream_options
        first = answer.first_event(prefill, finish=True, options=options)
        await exchange.reply.write(first + answer.final_events(prefill, options=options))
        await exchange.reply.end()

    def _stop_forwarding(self, exchange: Exchange, why: str) -> None:
        self._metrics.fallbacks.labels(why).inc()
        exchange.set_mode(Mode.SAMPLED, why)

    async def _sample(self, exchange: Exchange, prefill: answer.PrefillAnswer) -> None:
        usage = prefill.usage
        leg = body.sampled_body(
            exchange.body,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            transfer=exchange.transfer,
        )
        await self._decode(exchange, leg, AsItIs())

    async def _alone(self, exchange: Exchange) -> None:
        await self._decode(exchange, exchange.body, AsItIs())

    async def _fall_back(self, exchange: Exchange, reason: str) -> None:
        self._metrics.fallbacks.labels(reason).inc()
        self._cancel(exchange, reason)
        exchange.set_mode(Mode.ALONE, reason)
        await self._alone(exchange)

    async def _decode(
        self,
        exchange: Exchange,
        leg: Body,
        shape: AsItIs | Continuation,
        *,
        fits: Callable[[Engine], bool] = lambda _: True,
    ) -> None:
        """Give the leg to the planned decoder; to another one that `fits` if it cannot be reached."""
        if exchange.booking is not None:
            exchange.booking.end()
        tried: set[str] = set()
        failure: LegFailed | None = None
        give_up_at = self._clock() + _FAILOVER_S
        while failure is None or self._clock() < give_up_at:
            able = [each for each in self._candidates() if fits(each.engine)]
            engine = router.decoder(able, planned=exchange.planned, tried=tried)
            if engine is None:
                break
            if failure is not None:
                log.warning("transfer %s: %s, trying %s", exchange.transfer, failure, engine.name)
                self._metrics.failovers.labels(failure.reason).inc()
            exchange.mark(Event.DECODE_SENT, engine)
            if exchange.told:
                exchange.told.add(engine.node)
            payload = body.encode(self._located(exchange, leg, engine))
            try:
                async with self._legs.post(engine, exchange.route, payload=payload, headers=exchange.headers) as found:
                    return await shape.take(exchange, found)
            except LegFailed as error:
                self._blame(error)
                if not error.unsent:
                    raise
                failure = error
                tried.add(engine.url)
        raise failure or NoEngine("no engine is known")

    def _located(self, exchange: Exchange, leg: Body, engine: Engine) -> Body:
        """The leg for this engine. What lacks on its node, the node of the prefill engine may have."""
        prefill_node = exchange.planned.prefiller.node if exchange.planned is not None else ""
        if exchange.mode is Mode.ALONE or not prefill_node or prefill_node == engine.node:
            return leg
        return body.located(leg, prefill_node)

    def _pair(self) -> Pair | None:
        """The engines of the two legs; None: a second leg would gain nothing."""
        pair = router.pair(self._candidates())
        if pair is None and not self._warned_no_pair:
            log.warning("no engine can prefill beside a decoder; every request is served by one engine alone")
        self._warned_no_pair = pair is None
        if pair is not None:
            self._note_unplaced(pair)
        return pair

    def _note_unplaced(self, pair: Pair) -> None:
        """Where no node has reported an engine, chunks are pushed to nobody: fine with one node, slow with two."""
        unplaced = [engine.name for engine in (pair.prefiller, pair.decoder) if not engine.node]
        if unplaced:
            self._metrics.unplaced.inc()
        if unplaced and not self._warned_unplaced:
            log.warning("no node has reported %s (yet): its transfers stay on one node", " and ".join(unplaced))
        self._warned_unplaced = bool(unplaced)

    def _candidates(self) -> list[router.Candidate]:
        return [
            router.Candidate(
                engine=engine,
                in_flight=self._legs.load(engine.url),
                last_used=self._legs.last_used(engine.url),
                suspect=self._roster.is_suspect(engine.url),
            )
            for engine in self._roster.engines()
        ]

    def _blame(self, failure: LegFailed) -> None:
        if failure.unsent:
            self._roster.suspect(failure.url)

    def _cancel(self, exchange: Exchange, reason: str) -> None:
        if exchange.told:
            self._metrics.cancels.labels(reason).inc()
            self._control.cancel(exchange.transfer, exchange.told)
            exchange.told = set()
