"""The course of one request: prefill leg, decode leg, client, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from pdx.errors import ClientGone, Exhausted, LegFailed, NoEngine, ProtocolError
from pdx.proxy import answer, body, headers, request_log, router
from pdx.proxy.control import Control
from pdx.proxy.engines import Engine, Engines
from pdx.proxy.exchange import Drain, Exchange
from pdx.proxy.health import ANSWERED, FULL, UNSENT, Reason
from pdx.proxy.leg import Asked, Legs, failed
from pdx.proxy.locating import Locating
from pdx.proxy.metrics import Metrics, Outcome
from pdx.proxy.plan import ONE_TOKEN, Body, Mode, forward_limit, obstacle, prompt_bytes
from pdx.proxy.router import Pair
from pdx.proxy.timelines import Fallback, Timelines
from pdx.telemetry.faults import Faults, printable
from pdx.telemetry.timeline import Event
from pdx.wire.messages import Cancel
from pdx.wire.proxy import Arriving, Prefilled

T = TypeVar("T")

# No further engine is tried this long after the first failure. If none could be reached, it counts from the
# beginning: with the connect timeout, a client hears within 5 s of this proxy's running time.
_FAILOVER_S = 2.5
# How many engines that fail on one leg, or are full, a request may try: one that kills engines must not reach all of
# them, and if all are full, each request must not become many.
_MOST_FAILED = 3
_RETRY_AFTER_S = 1
# A prefill leg that outlasts its decode leg by more than this is late. Before, its answer may be here already, unread
# by a busy loop: ending the leg would close its connection for nothing.
UNREAD_S = 0.02
# For a longer prompt, the decode leg is sent when a node reports that prefill is about to end: while it waits, vLLM
# runs empty steps, for which the workers of a multi-process engine (on a CPU, of any engine) poll without a pause.
LONG_BYTES = 2048
USAGE_S = 5.0  # a chat's usage waits this long for prefill; the decode engine computes the prompt then


def new_transfer(tag: str) -> str:
    """A new transfer id that nobody can guess. `tag`: identifies this proxy, so that nodes know whose it is."""
    return tag + secrets.token_urlsafe(24)


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """Serves exchanges. All its state is in the parts it is made of."""

    engines: Engines
    timelines: Timelines
    locating: Locating
    legs: Legs
    control: Control
    metrics: Metrics
    drain: Drain
    faults: Faults

    async def serve(self, exchange: Exchange) -> None:
        """Answer the client. If the client disconnects, both legs are cancelled at once: unwinding closes their
        connections.

        :raises asyncio.CancelledError: the client disconnected, or the proxy is shutting down.
        """
        outcome = Outcome.INTERNAL
        self.timelines.begin(exchange.timeline)
        try:
            outcome = await self._outcome(exchange)
            exchange.mark(Event.DONE)
        except (ClientGone, asyncio.CancelledError) as error:
            gone = Outcome.STOPPED if self.drain.is_over else Outcome.CLIENT_GONE
            outcome = exchange.outcome if exchange.answered else gone
            if not exchange.answered:
                self._cancel(exchange, outcome)
            if outcome is Outcome.CLIENT_GONE or isinstance(error, ClientGone):
                exchange.reply.abort()
            if isinstance(error, asyncio.CancelledError):
                raise
        except Exception:
            self._cancel(exchange, outcome)
            raise
        finally:
            self.timelines.end(exchange.timeline, outcome, time.monotonic_ns())
            self.locating.over(exchange)
            self.metrics.requests.labels(exchange.route, exchange.mode, outcome).inc()
            request_log.served(exchange)

    async def _outcome(self, exchange: Exchange) -> Outcome:
        try:
            await self._run(exchange)
        except NoEngine:
            self._cancel(exchange, "no_decoder")
            text = "no engine is available to serve this request"
            await exchange.reply.fail(503, text, retry_after_s=_RETRY_AFTER_S)
            return Outcome.UNAVAILABLE
        except Exhausted as error:
            self._warn(error.lack, f"transfer {exchange.transfer} failed: {error}")
            self.metrics.exhausted.labels(error.lack).inc()
            self._cancel(exchange, "exhausted")
            text = "the proxy has too many connections; come back later"
            await exchange.reply.fail(503, text, retry_after_s=_RETRY_AFTER_S)
            return Outcome.UNAVAILABLE
        except LegFailed as failure:
            if not exchange.answered or exchange.outcome is Outcome.BROKEN:
                self._warn(f"failed {failure.url} {failure.reason}", f"transfer {exchange.transfer} failed: {failure}")
                self.engines.health.pardon([url for url, reason in exchange.blamed.items() if reason in ANSWERED])
                self._cancel(exchange, "decode_failed")
            if not exchange.answered:
                return await self._report(exchange, failure)
        if exchange.outcome is not Outcome.OK:
            self._cancel(exchange, "decode_refused")
        return exchange.outcome

    async def _report(self, exchange: Exchange, failure: LegFailed) -> Outcome:
        said = failure.answer
        is_for_client = failure.reason not in (Reason.REDIRECT, Reason.UNAUTHORIZED)
        if said is not None and is_for_client and not exchange.reply.started:
            exchange.reply.pass_on(said.headers)
            exchange.reply.whole(said.status, said.body, content_type=said.content_type)
            return Outcome.ENGINE_ERROR if said.status >= 500 else Outcome.CLIENT_ERROR
        if not failure.unsent:
            await exchange.reply.fail(502, f"the decode engine failed ({failure.reason})")
            return Outcome.BROKEN
        serving = router.serving(self.engines.all(), self.engines.health, exchange.model)
        after_s = self.engines.health.next_probe_s([engine.url for engine in serving])
        text = f"no engine that could serve this request can be reached ({failure.reason}); come back later"
        await exchange.reply.fail(503, text, retry_after_s=after_s)
        return Outcome.UNAVAILABLE

    async def _run(self, exchange: Exchange) -> None:
        await self.locating.locate(exchange)
        if exchange.mode is Mode.ALONE:
            return await self._alone(exchange)
        candidates = self._candidates(exchange)
        pair = exchange.planned = router.pair(candidates)
        if pair is None:
            return await self._fall_back(exchange, self._why_no_pair(candidates))
        if pair.decoder.detached:
            return await self._fall_back(exchange, "detached")
        if self.locating.has_all(exchange, pair.decoder):
            exchange.set_mode(Mode.ALONE, "cached")
            return await self._alone(exchange)
        self.locating.chosen(exchange, pair.prefiller)
        if exchange.hints.session:
            arriving = Arriving(exchange.hints.session, exchange.hints.salt)
            self.control.tell(arriving, {pair.prefiller.node, pair.decoder.node} - {""})
        self._note_unplaced(pair)
        with self.engines.health.plan(pair.decoder.url) as exchange.booking:
            return await self._split(exchange, pair)

    async def _split(self, exchange: Exchange, pair: Pair) -> None:
        """Serve with both legs: the decode engine reads the prompt and waits for its KV while that is computed. The
        decode leg starts after the prefill leg if no node could tell the decode engine how prefill ended, and if nodes
        would regard the transfer as complete after the first of several prompts."""
        self._heed_obstacle(exchange, pair)
        is_early = bool(pair.decoder.node) and exchange.prompts == 1
        prefill = asyncio.ensure_future(self._prefill_beside(exchange, pair, is_early=is_early))

        def leg() -> Body:
            if not prefill.done():
                return body.arriving(exchange.body, transfer=exchange.transfer, is_early=True)
            found = prefill.result()
            return self._arriving(exchange, found) if isinstance(found, answer.PrefillAnswer) else exchange.body

        async def counts() -> Mapping[str, int]:
            give_up_at = self.engines.health.clock() + USAGE_S
            while not prefill.done() and self.engines.health.clock() < give_up_at:
                await asyncio.wait([prefill], timeout=USAGE_S / 4)
            if not prefill.done():
                text = f"transfer {exchange.transfer}: {pair.prefiller.name} answers later than the decode engine"
                self._warn(f"prefill late {pair.prefiller.url}", f"{text}, which has computed the prompt itself")
                return {}
            found = prefill.result()
            return found.usage.cache_counts if isinstance(found, answer.PrefillAnswer) else {}

        def early(engine: Engine) -> answer.PrefillAnswer | None:
            return self._early(exchange, prefill.result(), engine)

        try:
            with self.engines.health.plan(pair.prefiller.url):  # until the leg begins; that one starts first
                await asyncio.sleep(0)
            if not is_early:
                await asyncio.wait([prefill])
            elif prompt_bytes(exchange.route, exchange.body) > LONG_BYTES:
                await self._until_near(exchange, prefill)
            if exchange.mode is Mode.FORWARD:
                await self._forward(exchange, leg, answer.Forwarded(exchange.route, counts, prefill, early), prefill)
            else:
                await self._decode(exchange, leg, answer.AsItIs(exchange.route, counts), after=prefill)
            if not prefill.done():
                await asyncio.wait([prefill], timeout=UNREAD_S)
            if not prefill.done() and exchange.outcome is Outcome.OK:
                self._cancel(exchange, "prefill_late")
        finally:
            prefill.cancel()
            await asyncio.wait([prefill])
        self._note_refusal(exchange, None if prefill.cancelled() else prefill.result())

    @staticmethod
    async def _until_near(exchange: Exchange, prefill: asyncio.Future[Any]) -> None:
        near = asyncio.ensure_future(exchange.timeline.near.wait())
        try:
            await asyncio.wait([prefill, near], return_when=asyncio.FIRST_COMPLETED)
        finally:
            near.cancel()

    async def _prefill_beside(
        self, exchange: Exchange, pair: Pair, *, is_early: bool
    ) -> answer.PrefillAnswer | Exception:
        """Run the prefill leg. If it fails in any way, the decode engine computes everything."""
        try:
            prefill = await self._prefill(exchange, pair, is_early=is_early)
        except Exception as failure:  # noqa: BLE001 - the root of a task, which another one waits for
            reason = self._prefill_failed(exchange, failure)
            self._note_fallback(exchange, reason)
            self._cancel(exchange, reason)
            if not exchange.reply.writes:
                exchange.set_mode(Mode.ALONE, reason)
            return failure
        if exchange.expecting:
            self.control.tell(Prefilled(exchange.transfer), exchange.expecting)
        return prefill

    def _prefill_failed(self, exchange: Exchange, failure: Exception) -> str:
        """Why another engine, or a single one, has to serve. A refusal is not reported yet: the other engine may refuse
        as well."""
        text = f"transfer {exchange.transfer}: prefill failed, one engine serves alone: {failure}"
        match failure:
            case LegFailed():
                if failure.reason != Reason.STATUS_4XX:
                    self._warn(f"prefill {failure.url} {failure.reason}", text)
                return f"prefill_{failure.reason}"
            case Exhausted():
                self._warn(failure.lack, text)
                return "prefill_exhausted"
        self.faults.unexpected("a prefill leg", failure)
        return "prefill_internal"

    def _note_refusal(self, exchange: Exchange, failure: object) -> None:
        """A request that both engines refuse is the client's fault and not worth a report; this one was answered."""
        if isinstance(failure, LegFailed) and failure.reason is Reason.STATUS_4XX and exchange.outcome is Outcome.OK:
            self._warn(f"refused {failure.url}", f"transfer {exchange.transfer}: refused by {failure.engine} only")

    async def _prefill(self, exchange: Exchange, pair: Pair, *, is_early: bool) -> answer.PrefillAnswer:
        """`is_early`: the decode leg already knows this transfer. Once an engine may have begun it, no other one is
        asked."""

        def choose(tried: set[str]) -> Engine | None:
            return router.prefiller(self._candidates(exchange), planned=pair, tried=tried)

        async def ask(engine: Engine, sent: Mapping[str, str]) -> answer.PrefillAnswer:
            exchange.planned = Pair(engine, pair.decoder)
            if exchange.told and exchange.blamed and not is_early:
                # The transfer the previous engine announced is void, and nodes do not accept that id again.
                self._cancel(exchange, "prefill_failed_over")
                self.timelines.rename(exchange.timeline, new_transfer(self.control.tag))
                exchange.set_mode(exchange.mode, exchange.timeline.why)
            return await self._ask_prefill(exchange, exchange.planned, headers.to_prefill(sent))

        final = frozenset(Reason) - UNSENT - FULL if is_early else {Reason.STATUS_4XX}
        return await self._attempt(exchange, "prefill", choose, ask, final=final)

    def _heed_obstacle(self, exchange: Exchange, pair: Pair) -> None:
        if exchange.mode is Mode.FORWARD:
            why = obstacle(exchange.body, prefill=pair.prefiller.facts, decode=pair.decoder.facts)
            if why:
                self._stop_forwarding(exchange, why)

    async def _ask_prefill(self, exchange: Exchange, pair: Pair, sent: Mapping[str, str]) -> answer.PrefillAnswer:
        engine = pair.prefiller
        self._heed_obstacle(exchange, pair)
        leg = body.prefill_body(
            exchange.route, exchange.body, mode=exchange.mode, transfer=exchange.transfer, decode_node=pair.wire
        )
        leg = self.locating.told(exchange, leg, engine, decodes=False)
        exchange.mark(Event.PREFILL_SENT, engine)
        exchange.told |= {pair.prefiller.node, pair.decoder.node}
        work = self.locating.work(exchange, engine, decodes=False)
        async with self.legs.post(engine, Asked(exchange.route, body.encode(leg)), headers=sent, work=work) as found:
            raw = await found.read()
            if found.status >= 400:
                self._note_status(exchange, engine, found.status)
                raise failed(Reason.STATUS_4XX, engine, str(found.status))
            try:
                prefill = answer.decode_prefill(raw, exchange.route, exchange.prompts)
            except ProtocolError as error:
                raise failed(Reason.MALFORMED, engine, str(error)) from error
        exchange.timeline.prompt_tokens = prefill.usage.prompt_tokens
        exchange.timeline.cached_tokens = prefill.usage.cached_tokens
        exchange.mark(Event.PREFILL_ANSWERED, engine)
        return prefill

    def _early(self, exchange: Exchange, found: object, engine: Engine) -> answer.PrefillAnswer | None:
        """The prefill leg's result, if its token may be sent to the client before `engine` samples its own."""
        if exchange.mode is not Mode.FORWARD or not isinstance(found, answer.PrefillAnswer):
            return None
        # Look the engine up again: since it was asked, its node may have reported a change, or vanished.
        facts = next((each.facts for each in self.engines.all() if each.url == engine.url), None)
        assert exchange.planned is not None
        prefiller = exchange.planned.prefiller
        why = obstacle(
            exchange.body,
            prefill=prefiller.facts,
            decode=facts if facts == engine.facts else None,
            prompt_tokens=found.usage.prompt_tokens,
        )
        if not answer.is_forwardable(found):
            why = "first_token"
        if why:
            self._stop_forwarding(exchange, why)
            return None
        exchange.token(prefiller, streams=True)
        return found

    async def _forward(
        self, exchange: Exchange, leg: Callable[[], Body], shape: answer.Forwarded, prefill: asyncio.Future[Any]
    ) -> None:
        def fits(engine: Engine) -> bool:
            return shape.sent is None or engine.facts == shape.sent.before.facts

        try:
            await self._decode(exchange, leg, shape, fits=fits, after=prefill)
        except answer.FirstTokenDiffers as differs:
            self._note_fallback(exchange, "first_token_differs")
            engine = differs.sent.before
            text = f"transfer {exchange.transfer}: {engine.name} would begin with another token than the client has"
            self._warn(f"differs {engine.url}", f"{text}, and is asked to go on after that one")
            limit = forward_limit(exchange.body, engine.facts)
            continued = body.continuation_body(exchange.body, *differs.sent.ids, limit=limit)
            shape.continues = True
            await self._decode(exchange, lambda: continued, shape, fits=fits)

    def _stop_forwarding(self, exchange: Exchange, why: str) -> None:
        self._note_fallback(exchange, why)
        exchange.set_mode(Mode.SAMPLED, why)

    def _arriving(self, exchange: Exchange, prefill: answer.PrefillAnswer) -> Body:
        usage = prefill.usage
        return body.arriving(
            exchange.body,
            transfer=exchange.transfer,
            prompt_tokens=usage.prompt_tokens if exchange.prompts == 1 else None,  # it is the sum over all prompts
            cached_tokens=usage.cached_tokens,
        )

    async def _alone(self, exchange: Exchange) -> None:
        shape = answer.AsItIs(exchange.route) if exchange.whole is None else answer.Bytes()
        await self._decode(exchange, lambda: exchange.body, shape)

    async def _fall_back(self, exchange: Exchange, reason: str) -> None:
        self._note_fallback(exchange, reason)
        self._cancel(exchange, reason)
        exchange.set_mode(Mode.ALONE, reason)
        await self._alone(exchange)

    async def _decode(
        self,
        exchange: Exchange,
        leg: Callable[[], Body],
        shape: answer.AsItIs | answer.Bytes,
        *,
        fits: Callable[[Engine], bool] = lambda _: True,
        after: asyncio.Future[Any] | None = None,
    ) -> None:
        """Send the leg to the planned decoder, or to another one that `fits`.

        `after`: the prefill leg, while it is in flight. Before it ends, only engines are asked whose node can be told
        its outcome.
        """
        if exchange.booking is not None:
            exchange.booking.end()

        def choose(tried: set[str]) -> Engine | None:
            able = [each for each in self._candidates(exchange) if fits(each.engine)]
            alone = exchange.timeline.why == ONE_TOKEN
            return router.decoder(able, planned=exchange.planned, tried=tried, only_prefill=alone)

        async def ask(engine: Engine, sent: Mapping[str, str]) -> None:
            if after is not None and not engine.node:
                await asyncio.wait([after])
            exchange.mark(Event.DECODE_SENT, engine)
            if exchange.told and not engine.detached:
                exchange.told.add(engine.node)
                exchange.expecting |= {engine.node} if after is not None and not after.done() else set()
            asked = exchange.whole
            if asked is None:
                leg_body = self.locating.told(exchange, leg(), engine, decodes=True)
                asked = Asked(exchange.route, body.encode(leg_body))
            work = self.locating.work(exchange, engine, decodes=True)
            async with self.legs.post(
                engine, asked, headers=sent, is_whole=not exchange.streams, after=after, work=work
            ) as found:
                self._note_status(exchange, engine, found.status)
                await shape.take(exchange, found)

        # The engine may have computed a whole answer all that time: do not ask for that twice.
        final = (Reason.STATUS_4XX,) if exchange.streams else (Reason.STATUS_4XX, Reason.TIMEOUT)
        await self._attempt(exchange, "decode", choose, ask, final=final)

    async def _attempt(
        self,
        exchange: Exchange,
        leg: str,
        choose: Callable[[set[str]], Engine | None],
        ask: Callable[[Engine, Mapping[str, str]], Awaitable[T]],
        *,
        final: Collection[Reason] = (Reason.STATUS_4XX,),
    ) -> T:
        """The result of `ask` for the first engine named by `choose` that does not fail.

        After a failure for a `final` reason no further engine is tried.

        :raises LegFailed: the last failure. :raises NoEngine: there is no engine to try.
        """
        tried: set[str] = set()
        failure: LegFailed | None = None
        failures = 0
        writes = exchange.reply.writes
        give_up_at = self.engines.health.clock() + _FAILOVER_S
        while failure is None or (failures < _MOST_FAILED and self.engines.health.clock() < give_up_at):
            engine = choose(tried)
            if engine is None:
                break
            if failure is not None:
                text = f"transfer {exchange.transfer}: {failure}, trying {engine.name}"
                self._warn(f"trying {failure.url} {failure.reason}", text)
                self.metrics.failovers.labels(leg, failure.reason).inc()
            try:
                with exchange.leg(leg, engine) as sent:
                    return await ask(engine, sent)
            except LegFailed as error:
                if error.reason in final or exchange.reply.writes != writes:
                    raise
                failure = error
                tried.add(engine.url)
                if not error.unsent:
                    if error.reason is not Reason.STATUS_429:
                        exchange.blamed[engine.url] = Reason(error.reason)
                    failures += 1
                    # The first engine used its full time; that does not count.
                    give_up_at = self.engines.health.clock() + _FAILOVER_S if failures == 1 else give_up_at
        raise failure or NoEngine("no engine is known")

    def _note_status(self, exchange: Exchange, engine: Engine, status: int) -> None:
        if status == HTTPStatus.NOT_FOUND and exchange.whole is None:  # otherwise the engine may lack the route
            self.engines.health.lacks(engine.url, exchange.model)

    def _why_no_pair(self, candidates: Sequence[router.Candidate]) -> str:
        apart = router.pair(candidates, shares_kv=False)
        if apart is None:
            self._warn("no pair", "no engine can prefill beside a decoder: a request is served by one engine alone")
            return "no_prefiller"
        first, last = apart.prefiller, apart.decoder
        text = f"a request is served by one engine alone: {self.engines.why_apart(first, last)}"
        self._warn(f"apart {first.url} {last.url}", text)
        return "layouts"

    def _note_unplaced(self, pair: Pair) -> None:
        """Report engines that no node has reported, whose chunks are pushed to nobody: fine with one node, slow with
        two."""
        unplaced = [engine.name for engine in (pair.prefiller, pair.decoder) if not engine.node]
        if unplaced:
            self.metrics.unplaced.inc()
            text = f"no node has reported {' and '.join(unplaced)} (yet): its transfers stay on one node"
            self._warn("unplaced", text)

    def _note_fallback(self, exchange: Exchange, why: str) -> None:
        self.metrics.fallbacks.labels(why).inc()
        self.timelines.fallbacks.appendleft(Fallback(exchange.transfer, why, time.monotonic_ns()))

    def _warn(self, about: str, text: str) -> None:
        """Log once a minute per `about`."""
        self.faults.warn(about, printable(text, 1000))

    def _candidates(self, exchange: Exchange) -> list[router.Candidate]:
        able = router.serving(self.engines.all(), self.engines.health, exchange.model)
        if exchange.only:
            able = [each for each in self.engines.all() if each.url == exchange.only] or able
        cost = partial(self.locating.cost, prompt=exchange.prompt)
        return router.candidates(able, self.engines.health, cost, is_alone=exchange.mode is Mode.ALONE)

    def _cancel(self, exchange: Exchange, reason: str) -> None:
        if exchange.told:
            self.metrics.cancels.labels(reason).inc()
            self.control.tell(Cancel(exchange.transfer), exchange.told)
            exchange.told = set()
