"""The limits of one leg: of connecting, and of silence."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from proxy_harness import COMPLETIONS, cluster, until, within

from pdx.errors import ClientGone, LegFailed
from pdx.proxy.config import ProxyConfig
from pdx.proxy.engines import Engine
from pdx.proxy.health import EngineState, Health
from pdx.proxy.leg import Asked, Legs
from pdx.telemetry.env import Env

ESTABLISHED, KEEPALIVE = "01", "02"  # a connection's state, and its timer, in /proc/net/tcp

ENGINE = Engine(url="http://e", name="e", prefills=True, decodes=True, named=True)


def health_by(clock):
    return Health(Env(clock), silence_s=120.0)


def legs_of(session, health):
    made = Legs(health, ProxyConfig())
    made.session = session
    return made


class StoppedWhileConnecting:
    """A client session whose process stands still for longer than a connection may take, `times` in a row."""

    def __init__(self, times, passes):
        self.times = times
        self.passes = passes
        self.asked = 0

    async def request(self, *asked, **how):
        self.asked += 1
        self.passes()
        if self.asked <= self.times:
            raise aiohttp.ConnectionTimeoutError
        return Mock(status=200, headers={})


@pytest.mark.parametrize(("ran_s", "times", "asked"), [(0.5, 1, 2), (0.5, 3, 4), (0.5, 4, 4), (2.0, 1, 1)])
def test_a_connection_may_take_its_time_of_this_process(ran_s, times, asked):
    """Here each attempt ends by a timer, of whose time the process ran for `ran_s`; 2 s of that are too long."""
    now = 0.0

    def passes():
        nonlocal now
        now += ran_s

    session = StoppedWhileConnecting(times, passes)
    legs = legs_of(session, health_by(lambda: now))

    async def main():
        async with legs.post(ENGINE, Asked("/v1/completions", b""), headers={}) as answer:
            return answer.status

    if times * ran_s < 2.0:
        assert asyncio.run(main()) == 200
    else:
        with pytest.raises(LegFailed, match="connect_timeout"):
            asyncio.run(main())
    assert session.asked == asked


class Silence:
    """A client session with one answer, a stream, whose bytes come when the test says so."""

    def __init__(self, status=200):
        self.status = status
        self.bytes = asyncio.Queue()

    async def request(self, *asked, **how):
        content = Mock(readany=self.bytes.get)
        return Mock(status=self.status, headers={"Content-Type": "text/event-stream"}, content=content)


class Alone:
    """A leg of its own task, and a clock that only the test moves."""

    def __init__(self, *, is_whole=False):
        self.now = 0.0
        self.is_whole = is_whole
        self.session = Silence()
        health = health_by(lambda: self.now)
        self.record = health.of(ENGINE.url)
        self.legs = legs_of(self.session, health)
        self.read = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.task = asyncio.create_task(self._take())

    async def _take(self):
        async with self.legs.post(ENGINE, Asked(COMPLETIONS, b""), headers={}, is_whole=self.is_whole) as answer:
            while await answer.read_some():
                self.read += 1
                await self.may_read.wait()

    async def after(self, seconds, data=None):
        if data is not None:
            self.session.bytes.put_nowait(data)
            read = self.read
            await until(lambda: self.read > read)
        self.now += seconds
        self.legs.end_silent()
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_stream_may_last_as_long_as_bytes_come():
    alone = Alone()
    await alone.after(599)
    for _ in range(50):
        await alone.after(119, b"x")
    assert not alone.task.done()
    alone.session.bytes.put_nowait(b"")
    await alone.task
    assert alone.record.failures == 0


BEGUN = b'event: response.created\ndata: {"sequence_number":0}\n\nevent: response.in_progress\ndata: {}\n\n'


SAID = [b": keep-alive\n\n", BEGUN, BEGUN.replace(b"\n", b"\r\n"), b":\n\n" + BEGUN]


@pytest.mark.parametrize("said", [*SAID, b'data: {"error": {"code": 503}}\n\ndata: [DONE]\n\n'])
async def test_what_a_server_says_by_itself_comes_from_no_model(said):
    """vLLM's sends it while its engine computes, or hangs: that would never have ended, nor have been noticed."""
    alone = Alone()
    for _ in range(6):
        assert not alone.task.done()
        await alone.after(100, said)
    assert alone.record.heard_at < 0
    with pytest.raises(LegFailed, match="nothing for 600 s"):
        await within(alone.task)


@pytest.mark.parametrize("beside", [b": keep-alive\n\n", BEGUN])
async def test_what_comes_beside_that_comes_from_the_model(beside):
    alone = Alone()
    await alone.after(119, beside + b"data: {}\n\n")
    assert alone.record.heard_at == 0
    alone.session.bytes.put_nowait(b"")
    await alone.task


@pytest.mark.parametrize(
    ("data", "limit", "is_whole"), [(None, 600, False), (b"x", 120, False), (None, 3600, True), (b"x", 120, True)]
)
async def test_an_engine_that_is_silent_for_too_long_is_suspect(data, limit, is_whole):
    alone = Alone(is_whole=is_whole)
    await alone.after(0)
    await alone.after(limit - 1, data)
    assert not alone.task.done()
    await alone.after(1)
    with pytest.raises(LegFailed, match=f"timeout: nothing for {limit} s"):
        await within(alone.task)
    assert alone.record.state is EngineState.SUSPECT


@pytest.mark.parametrize(("is_whole", "others"), [(True, False), (True, True), (False, False)])
async def test_silence_over_a_whole_answer_has_the_engine_probed(is_whole, others):
    """Not one from which others hear, nor where the limit of a first byte finds out."""
    alone = Alone(is_whole=is_whole)
    record = alone.record
    await alone.after(0)
    await alone.after(599)
    assert not record.unproven
    record.heard_at = alone.now if others else record.heard_at
    if is_whole:
        await alone.after(1)
        assert record.unproven == (not others)
        assert record.state is EngineState.NEW
    record.unproven = False  # the probe saw a token
    await alone.after(0 if is_whole else 0.5)
    assert not record.unproven, "once for each leg"
    assert not alone.task.done()
    alone.session.bytes.put_nowait(b"")
    await alone.task


async def test_the_kernel_asks_whether_a_silent_engines_host_is_there():
    """A host that lost its power says nothing, and an answer that is not streamed may be silent for an hour."""
    async with cluster(prefills=0) as made:
        made.decode.fault = "hold"
        asked = asyncio.create_task(made.post(COMPLETIONS, {"prompt": "beta", "max_tokens": 4}))
        await within(made.decode.arrived.wait())
        port = f":{int(made.decode.url.rpartition(':')[2]):04X}"

        def timers():
            rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            return {row[5].partition(":")[0] for row in rows if row[2].endswith(port) and row[3] == ESTABLISHED}

        await until(lambda: timers() == {KEEPALIVE})
        made.decode.released.set()
        assert (await within(asked))[0] == 200


@pytest.mark.parametrize(("data", "limit"), [(b"x", 120), (b": keep-alive\n\n", 600)])
async def test_a_client_that_takes_nothing_is_not_the_engines_fault(data, limit):
    alone = Alone()
    alone.may_read.clear()
    await alone.after(limit + 1, data)
    with pytest.raises(ClientGone, match=f"{limit} s"):
        await within(alone.task)
    assert not alone.record.avoided


async def test_a_small_answer_has_one_limit_for_all_of_it():
    """An engine whose `GET /health` sends a byte now and then would be probed for ever."""
    now = 0.0
    session = Silence()
    legs = legs_of(session, health_by(lambda: now))
    asked = asyncio.create_task(legs.ask(ENGINE, "/health", headers={}, timeout_s=5.0))
    for _ in range(5):
        assert not asked.done()
        session.bytes.put_nowait(b"x")
        await until(session.bytes.empty)
        now += 1.0
        legs.end_silent()
    with pytest.raises(LegFailed, match="timeout"):
        await within(asked)


@pytest.mark.parametrize("how", ["asked", "refused", "read"])
async def test_what_comes_in_one_piece_is_not_read_without_end(how):
    session = Silence(status=500 if how == "refused" else 200)
    now = 0.0
    health = health_by(lambda: now)
    legs = legs_of(session, health)
    piece = b"x" * (1 << 20 if how != "read" else 1 << 24)
    for _ in range(64):
        session.bytes.put_nowait(piece)

    async def posted():
        async with legs.post(ENGINE, Asked(COMPLETIONS, b""), headers={}) as answer:
            await answer.read()

    with pytest.raises(LegFailed, match="malformed"):
        await within(legs.ask(ENGINE, "/health", headers={}, timeout_s=5.0) if how == "asked" else posted())
    assert session.bytes.qsize() > 40
    now = 1e9
    legs.end_silent()  # of a leg that is over there is nothing to end
    assert health.of(ENGINE.url).in_flight == 0
