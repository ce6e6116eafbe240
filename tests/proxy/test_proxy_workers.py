"""Several processes of one proxy at one port: real ones, with a stand-in for the engine."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest
from node_harness import has_ended
from proxy_harness import Node, stream, until, within
from workers_stage import PATIENT_S, workers

from pdx.proxy.workers import AGAIN_S, HUNG_S
from pdx.security.address import worker_address


async def test_all_of_them_take_requests_and_the_load_is_that_of_all(tmp_path):
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    async with workers(tmp_path, "--max-header", "128K", "--cache-token-file", str(token)) as them:
        assert "a token is needed" in await them.told(1, "/cache")
        large = {"Authorization": f"Bearer {'t' * 100_000}"}
        async with them.made.client.get(f"{them.made.url}/health", headers=large) as response:
            assert response.status == 200
        for _ in range(40):
            assert await them.ask() == 200
        served = await them.served()
        assert sum(served) == 41, "all, and that of who waited for the port"
        assert sum(each > 0 for each in served) > 1
        with contextlib.closing(Node(f"ipc://{tmp_path}/control/p.sock.1", "alpha")) as node:
            beat = asyncio.create_task(node.keep_reporting())
            await node.peers()
            seen = set()
            while len(seen) < 2:  # a node that is no real one reports to one of them alone
                seen.add((await them.fresh())[1]["nodes"])
            beat.cancel()
        under_way = await them.held(12)
        assert {(await them.fresh("/load"))[1]["server_load"] for _ in range(12)} == {12}
        them.made.engine.released.set()
        assert await within(asyncio.gather(*under_way)) == [200] * 12
        await them.loaded(0)


async def test_one_that_dies_is_started_again_and_nobody_else_notices(tmp_path):
    async with workers(tmp_path) as them:
        under_way = await them.held(12)
        them.made.engine.fault = None
        (victim, *others) = them.pids
        os.kill(victim, signal.SIGKILL)
        await until(lambda: has_ended(victim))
        assert await them.ask() == 200  # by whoever is there, also where another one has come already
        while them.num_starts < them.count + 1:
            assert await them.ask() == 200
        them.made.engine.released.set()
        answers = await within(asyncio.gather(*under_way, return_exceptions=True))
        assert {each for each in answers if not isinstance(each, aiohttp.ClientError)} <= {200}
        assert len([each for each in answers if each == 200]) > 0, "those of the others go on"
        assert set(others) < set(them.pids)
        assert len(them.pids) == them.count
        assert re.search(r"worker \d \(process \d+\) is started again: it ended with status -9", them.made.log)
        await them.loaded(0)
        for _ in range(20):
            assert await them.ask() == 200


async def test_requests_under_way_at_all_of_them_finish_at_a_signal(tmp_path):
    """Also where a terminal, or whoever ends a whole group, signals each of them, too."""
    async with workers(tmp_path, "--drain", "600") as them:
        under_way = await them.held(12)
        pids = them.pids
        for number, to in ((signal.SIGINT, pids), (signal.SIGTERM, [*pids, them.made.pid])):
            for pid in to:
                os.kill(pid, number)
        await until(lambda: them.made.log.count("stopping:") == them.count, PATIENT_S)
        assert await them.ask() == 503
        them.made.engine.released.set()
        assert await within(asyncio.gather(*under_way)) == [200] * 12
        assert await within(them.made.process.wait(), PATIENT_S) == 0
        assert all(map(has_ended, pids))


async def test_a_second_signal_ends_them_at_once(tmp_path):
    async with workers(tmp_path, "--drain", "600") as them:
        begun = [asyncio.Event() for _ in range(6)]
        them.made.engine.fault = "hang_mid"
        streams = []
        for each in begun:
            streams.append(asyncio.create_task(stream(them.made, each)))
            await within(each.wait())
        them.made.process.send_signal(signal.SIGTERM)
        await until(lambda: them.made.log.count("stopping:") == them.count, PATIENT_S)
        them.made.process.send_signal(signal.SIGTERM)
        for each in streams:
            assert json.loads((await within(each))[-1])["error"]["code"] == 503
        assert await within(them.made.process.wait(), PATIENT_S) == 0


async def test_they_end_with_the_process_that_started_them(tmp_path):
    """Whoever is to serve there again does not wait until the last of their requests is over."""
    async with workers(tmp_path, "--drain", "600") as them:
        pids = them.pids
        them.made.engine.fault = "hang_mid"
        begun = asyncio.Event()
        under_way = asyncio.create_task(stream(them.made, begun))
        await within(begun.wait())
        them.made.process.kill()
        await until(lambda: all(map(has_ended, pids)), PATIENT_S)
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", them.made.port))  # though connections of theirs may be remembered
            taken.listen()
        await within(asyncio.gather(under_way, return_exceptions=True))


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_one_that_hangs_is_started_again(tmp_path):
    """The kernel gives it connections as before, which nobody would ever answer."""
    async with workers(tmp_path, count=2) as them:
        hung = them.pids[0]
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: them.num_starts == 3, HUNG_S + PATIENT_S)
        assert f"(process {hung}) hangs: it is killed" in them.made.log
        for _ in range(10):
            assert await them.ask() == 200


async def test_one_that_is_signalled_alone_comes_again_also_where_the_one_that_started_it_was_stopped(tmp_path):
    """As by Ctrl-Z, a freezer or a debugger: once it took that for a signal to end."""
    async with workers(tmp_path, count=2) as them:
        os.kill(them.pids[0], signal.SIGTERM)
        await until(lambda: them.num_starts == 3, PATIENT_S)
        assert "is started again: it ended with status 0" in them.made.log
        them.made.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.2 * AGAIN_S)  # what it waits for at most ends meanwhile
        them.made.process.send_signal(signal.SIGCONT)
        os.kill(them.pids[0], signal.SIGKILL)
        await until(lambda: them.num_starts == 4, PATIENT_S)
        assert them.made.log.count("stopping") == 1, "the one that was signalled"


def start(folder, port, *options):
    """`pdx proxy` until it ends: its status, and what it says."""
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "proxy", "--port", str(port), "--workers", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S, check=False)
    return done.returncode, done.stderr


async def test_a_port_or_a_control_address_that_is_taken_is_said_once(tmp_path):
    async with workers(tmp_path, count=2) as them:
        port, control = them.made.port, f"ipc://{tmp_path}/control/p.sock"
        for at, where, why in (
            (port, f"ipc://{tmp_path}/other/p.sock", f"Error: '127.0.0.1:{port}' cannot be had: "),
            (0, f"{control}.1", "Error: another proxy listens on"),
        ):
            status, said = await asyncio.to_thread(start, tmp_path, at, "--control", where)
            assert (status, said.count("Error: ")) == (1, 1)
            assert why in said
        assert await them.ask() == 200


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("ipc:///run/p.sock", "ipc:///run/p.sock.2"),
        ("tcp://[::1]:7600", "tcp://[::1]:7602"),
        ("127.0.0.1:9000", "127.0.0.1:9002"),
        ("/run/admin", "/run/admin.2"),
        ("", ""),
    ],
)
def test_where_a_worker_is(address, wanted):
    assert (worker_address(address, 0), worker_address(address, 2)) == (address, wanted)
