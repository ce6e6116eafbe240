"""`pdx top`: frames on terminals of all sizes, and the command itself."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from unittest import mock

import msgspec
import pytest
from cache_stage import TOKEN
from click.testing import CliRunner
from proxy_harness import until
from rich.console import Console
from status_stage import serving

from pdx.cli.main import main
from pdx.cli.top import _bar, _portions, frame
from pdx.proxy.status import FRESH_S
from pdx.wire.overview import Overview

EMPTY = Overview("1", "unavailable", 0, 0, [], [], [], [], [])


async def overview(nodes, requests, *, hostile=False):
    async with serving(nodes=nodes, requests=requests, hostile=hostile) as stage:
        return msgspec.json.decode((await stage.page.document())[0], type=Overview)


def drawn(told, width=80, **how):
    console = Console(width=width, file=io.StringIO())
    console.print(frame(told, console, **how))
    return console.file.getvalue().splitlines()


async def pdx_top(*arguments):
    return await asyncio.to_thread(CliRunner().invoke, main, ["top", *arguments])


async def test_a_frame_holds_on_a_terminal_of_80():
    lines = drawn(await overview(7, 9))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert lines[0] == "pdx ok  7 nodes, 4 can prefill, 3 can decode, 9 under way, 0 waiting"
    for words in (
        "requests under way: 9",
        "engines: 7",
        "nodes: 7",
        "last fallbacks: 9",
        "node-000: load_late 3 times",
    ):
        assert words in text
    assert any(line.split()[:5] == ["node-001", "memory", "8.6", "GiB", "64.0"] for line in lines)
    assert any(line.split()[:4] == ["llama-0", "prefill", "well", "node-000"] for line in lines)
    assert any("nixl 5 tcp 1" in line for line in lines)
    assert "node-000: disk: paused: the disk is full" in lines
    assert "node-003: node-005 is closed: it was silent for 6 s" in lines


async def test_a_frame_is_as_high_as_its_terminal():
    told = await overview(20, 200)
    for height in (24, 40, 60):
        assert len(drawn(told, lines=height)) <= height
    assert re.search(r"requests under way: \d+ of 200\n", "\n".join(map(str.rstrip, drawn(told, lines=60))))
    assert len(drawn(told)) > 260, "without a height all is there"


async def test_strangers_words_steer_no_terminal_and_break_no_column():
    lines = drawn(await overview(14, 30, hostile=True))
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) <= 80
    assert any("000<img src=x" in line for line in lines)
    for number in (0, 1, 5):
        row = next(line for line in lines if line.startswith(f"{number:03}") and " memory " in line)
        assert "64.0 GiB" in row


def test_where_nothing_is_there_is_a_frame_too():
    lines = drawn(EMPTY)
    assert lines[0].startswith("pdx unavailable  0 nodes")
    assert "requests under way: 0" in [line.strip() for line in lines]
    assert "cannot be asked" in "\n".join(drawn(EMPTY, problem="it cannot be asked"))


@pytest.mark.parametrize(
    ("needs", "room", "shares"),
    [
        ([0, 0, 0, 0], 50, [0, 0, 0, 0]),
        ([100, 100, 100, 100], 40, [10, 10, 10, 10]),
        ([100, 2, 3, 0], 40, [35, 2, 3, 0]),
        ([5, 100, 100, 0], 40, [5, 25, 10, 0]),
        ([100, 100, 100, 100], 0, [1, 1, 1, 1]),
    ],
)
def test_lines_are_shared_and_what_is_left_is_used(needs, room, shares):
    assert _portions(needs, room) == shares


def test_a_bar_has_each_phase_and_is_no_longer_than_its_room():
    assert str(_bar([1.0, 500.0, 1.0, 498.0], 1000.0, 20, is_plain=True)) == ".#########=---------"
    assert str(_bar([500.0], 1000.0, 20, is_plain=False)) == "·" * 10
    assert str(_bar([1.0, 1.0, 1.0, 1.0], 1e9, 3, is_plain=True)) == ".#="
    assert str(_bar([0.0, 0.0], 0.0, 20, is_plain=True)) == ""


async def test_into_a_pipe_it_goes_once_and_plain():
    async with serving(nodes=3, requests=3) as stage:
        url = stage.url
        for arguments in ([url], [url, "--once"], [url.removeprefix("http://")], [f"{url}/"]):
            done = await pdx_top(*arguments)
            assert done.exit_code == 0, done.output
            assert done.output.startswith("pdx ok  3 nodes")
            assert "\x1b" not in done.output


async def test_what_is_wrong_is_one_line(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    async with serving(cache_token_file=str(file)) as stage:
        url = stage.url
        done = await pdx_top(url)
        assert (done.exit_code, done.output) == (1, "Error: a token is needed: Authorization: Bearer TOKEN\n")
        assert (await pdx_top(url, "--token-file", str(file))).exit_code == 0
    done = await pdx_top(url)
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: the proxy at {url} does not answer")
    assert len(done.output.splitlines()) == 1


class Terminal:
    """`pdx top` at a pseudo-terminal."""

    def __init__(self, url, **environment):
        self.ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        termios.tcsetwinsize(theirs, (24, 80))
        self.theirs, self.seen = theirs, b""
        env = {**os.environ, "TERM": "xterm", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdx.cli.main", "top", url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.set_blocking(self.ours, False)

    def read(self):
        with contextlib.suppress(BlockingIOError):
            while True:  # one call gives a part
                self.seen += os.read(self.ours, 1 << 16)

    def shows(self, words):
        self.read()
        assert self.process.poll() is None, self.seen
        return words in self.seen

    async def ended(self):
        def has_ended():
            is_over = self.process.poll() is not None
            self.read()  # behind it: all that it has said
            return is_over

        await until(has_ended, 60)
        return self.process.returncode

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.parametrize("how", ["q", "Ctrl-C"])
async def test_at_a_terminal_it_goes_on_until_it_is_ended_and_leaves_the_terminal_as_it_was(how):
    async with serving(nodes=3, requests=3) as stage:
        terminal = Terminal(stage.url)
        try:
            await until(lambda: terminal.shows(b"requests under way"), 60)
            if how == "q":
                with mock.patch.object(stage.nodes, "members", side_effect=OSError("broken on purpose")):
                    stage.now += FRESH_S
                    await until(lambda: terminal.shows(b"Internal Server Error"), 60)
                terminal.seen = b""
                await until(lambda: terminal.shows(b"requests under way"), 60)
                os.write(terminal.ours, b"xq")
            else:
                terminal.process.send_signal(signal.SIGINT)
            assert await terminal.ended() == 0
            assert termios.tcgetattr(terminal.theirs) == terminal.before
            assert b"\x1b[?1049l" in terminal.seen, "the screen is as it was"
            assert b"Traceback" not in terminal.seen
        finally:
            terminal.close()


async def test_where_there_are_no_such_characters_it_is_drawn_in_ascii():
    async with serving(nodes=3, requests=9) as stage:
        url = stage.url
        done = await asyncio.to_thread(CliRunner(charset="ascii").invoke, main, ["top", url])
    assert (done.exit_code, done.output.isascii()) == (0, True), done.output
    assert ".queue #prefill =handoff -decode" in done.output
