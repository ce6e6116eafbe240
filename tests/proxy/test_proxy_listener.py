"""Which connections are taken, which one makes room, and how long a request's head may take."""

import asyncio
import json
import socket
from unittest import mock

import aiohttp
import pytest
from proxy_harness import BODY, COMPLETIONS, begin, cluster, dial, until, within

from pdx.proxy import server as listener

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(listener, "_LOOK_S", 0.01)


@pytest.fixture
def room(monkeypatch):
    """Says whether there is room for another connection."""
    return lambda is_there: monkeypatch.setattr(listener, "MOST", 1 << 14 if is_there else 0)


async def event(made, name):
    return await made.metric("pdx_proxy_events_total", event=name)


async def test_without_room_an_idle_connection_makes_room(made, caplog, room):
    async with aiohttp.ClientSession() as newcomer:
        assert (await made.get("/health"))[0] == 200  # its connection is older, but was served
        oldest, writer = await dial(made.url)
        _, younger = await dial(made.url)
        assert (await made.post(COMPLETIONS, BODY))[0] == 200
        room(False)
        async with newcomer.post(made.url + COMPLETIONS, json=BODY) as response:
            assert response.status == 200
        assert await within(oldest.read()) == b"", "the one that has been silent for longest"
        assert await event(made, "connections_displaced") == 1
        room(True)
        writer.close()
        younger.close()
        assert (await made.get("/health"))[0] == 200
    assert [record.message for record in caplog.records if "idle connections are closed" in record.message]


async def test_those_who_have_just_come_do_not_make_room_for_each_other(made, room):
    """Strangers who ask once and keep their connection would leave newcomers no time to send a head."""
    served = []
    for _ in range(5):
        reader, writer = await dial(made.url)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"}" in await within(reader.readuntil(b"}"))
        served.append((reader, writer))
    young, writer = await dial(made.url)
    room(False)
    _, other = await dial(made.url)
    assert await within(served[0][0].read()) == b""
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 200 OK" in await within(young.read())
    room(True)
    for each in (other, writer, *(pair[1] for pair in served)):
        each.close()


async def test_a_connection_whose_body_does_not_come_makes_room(room):
    """It costs a stranger nothing to begin a request on each connection that there may be."""
    async with cluster() as made, aiohttp.ClientSession() as newcomer:
        assert (await made.get("/health"))[0] == 200  # its connection is older and idle, but was served
        slow, writer = await begin(made.url, 1000)
        writer.write(b"{")
        await until(lambda: len(made.proxy.drain) == 1)
        room(False)
        async with newcomer.post(made.url + COMPLETIONS, json=BODY) as response:
            assert response.status == 200
        assert await within(slow.read()) == b""
        writer.close()
        await until(lambda: len(made.proxy.drain) == 0)
        room(True)
        assert await event(made, "connections_displaced") == 1
        assert await event(made, "connections_refused") == 0
        assert (await made.get("/health"))[0] == 200


async def test_where_all_are_busy_a_newcomer_is_told_to_come_again(made, room):
    made.prefill.fault = made.decode.fault = "hold"
    busy = asyncio.create_task(made.post(COMPLETIONS, BODY))
    await within(made.prefill.arrived.wait())
    room(False)
    for _ in range(3):
        reader, writer = await dial(made.url)
        head, _, body = (await within(reader.read())).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in head
        assert b"Connection: close" in head
        assert json.loads(body)["error"]["code"] == 503
        writer.close()
    room(True)
    made.release()
    assert (await within(busy))[0] == 200
    assert await event(made, "connections_refused") == 3


async def test_a_head_that_does_not_come_ends_its_connection():
    """aiohttp waits 3,630 s for it."""
    begun = (b"", b"GET /health HT", HEAD)
    async with cluster(served={"head_s": 0.1}) as made:
        strangers = [await dial(made.url) for _ in begun]
        for (_, writer), said in zip(strangers, begun, strict=True):
            writer.write(said)
        for reader, writer in strangers:
            assert await within(reader.read()) == b""
            writer.close()
        assert await event(made, "heads_overdue") == len(begun)


async def test_a_connection_that_was_served_may_rest_but_not_dawdle():
    async with cluster(served={"head_s": 0.2}) as made:
        reader, writer = await dial(made.url)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 OK" in await within(reader.readuntil(b"\r\n"))
            length = 0
            while (line := await within(reader.readline())) != b"\r\n":
                if line.lower().startswith(b"content-length"):
                    length = int(line.split(b":")[1])
            await within(reader.readexactly(length))
            silent, other = await dial(made.url)  # it is closed for its head, and the one that rests is not
            assert await within(silent.read()) == b""
            other.close()
        writer.write(b"GET /hea")
        assert await within(reader.read()) == b""
        writer.close()


async def test_a_request_under_way_outlasts_the_time_for_a_head():
    async with cluster(served={"head_s": 0.2}) as made:
        made.prefill.fault = made.decode.fault = "hold"
        busy = asyncio.create_task(made.post(COMPLETIONS, BODY))
        await within(made.prefill.arrived.wait())
        silent, writer = await dial(made.url)
        assert await within(silent.read()) == b""
        writer.close()
        made.release()
        assert (await within(busy))[0] == 200


async def test_an_accept_that_fails_is_tried_again_later(caplog):
    """asyncio logs a traceback for each, a hundred at a time."""
    accept = socket.socket.accept

    with mock.patch.object(listener, "_REST_S", 0.01):
        async with cluster() as made:
            port, failures = int(made.url.rpartition(":")[2]), [OSError(24, "Too many open files")] * 3

            def failing(self):
                if failures and self.getsockname()[1] == port:
                    raise failures.pop()
                return accept(self)

            with mock.patch.object(socket.socket, "accept", failing):
                assert (await made.post(COMPLETIONS, BODY))[0] == 200
            assert await event(made, "accepts_failed") == 3
            assert await event(made, "internal_errors") == 0
    assert len([record for record in caplog.records if "no connection can be taken now" in record.message]) == 1
    assert len(caplog.text) < 4000


async def test_an_error_of_the_listener_is_contained(caplog):
    """The selector would call it again at once, and asyncio would log each time."""

    failures = [RuntimeError("of the room")]

    class Engines:
        def __len__(self):
            if failures:
                raise failures.pop()
            return 2

    with mock.patch.object(listener, "_REST_S", 0.01):
        async with cluster(served={"engines": Engines()}) as made:
            assert (await made.post(COMPLETIONS, BODY))[0] == 200
            assert made.proxy.env.counters["internal_errors"] == 1
            assert await event(made, "accepts_failed") == 1, "none is taken for a while"
    assert [record.message for record in caplog.records if "an internal error in taking connections" in record.message]


async def test_what_is_no_request_is_logged_once_in_a_while(made, caplog):
    """aiohttp logs a traceback for each: anybody could fill the disk."""
    malformed = [
        b"GET /health HTTP/1.1\r\nNo Header\r\n\r\n",
        HEAD + b"Content-Length: many\r\n\r\n",
        HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
    ]
    for said in 5 * malformed:
        reader, writer = await dial(made.url)
        writer.write(said)
        assert b" 400 Bad Request" in await within(reader.read())  # to the end of the connection
        writer.close()
    assert await event(made, "requests_malformed") == 15
    assert await event(made, "internal_errors") == 0
    assert len([record for record in caplog.records if "a request was not understood" in record.message]) == 1
    assert len(caplog.text) < 2000


async def keep_asking(stream):
    while True:
        ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
        await within(asyncio.get_running_loop().sock_sendall(stream, ask), 60)


async def test_a_client_that_reads_nothing_loses_its_connection():
    """Its request counts as under way, so it would keep its place for ever."""
    with mock.patch.object(listener, "_UNREAD_MS", 300):
        async with cluster() as made:
            host, port = made.url.removeprefix("http://").split(":")
            with socket.socket() as deaf:
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf.setblocking(False)
                await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
                with pytest.raises(ConnectionError):
                    await keep_asking(deaf)
