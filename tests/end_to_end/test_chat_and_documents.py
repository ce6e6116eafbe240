"""The tutorial about KV at another position is walked through: its commands, one after the other, on a real model.

What they print is what the page shows, but for numbers and names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import Server
from tutorials import BLOCK, ROOT

from pdx.cli.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(2400)]

PAGE = ROOT / "docs" / "tutorials" / "chat-and-documents.md"
ID = re.compile(r"(?:chatcmpl|cmpl)-[0-9a-f]{16}")
VARYING = re.compile(r"[0-9a-f]{8}[0-9a-f-]*|[0-9][0-9.,]*")


class Walk:
    """A shell in a folder of its own, with a node and a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        (folder / "docs").symlink_to(ROOT / "docs")
        command = folder / "pdx"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m pdx.cli.main "$@"\n')
        command.chmod(0o700)
        self.env = {
            **os.environ,
            "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PDX_NODE": f"ipc://{folder}/node.sock",
            "PDX_PROXY": "",
            "COLUMNS": "150",
        }
        self.ids: dict[str, str] = {}  # of the page's requests, in this walk
        self.server: Server | None = None

    def run(self, line: str) -> str:
        """What this command line prints; nothing where it serves until it is ended."""
        line = ID.sub(lambda match: self.ids[match[0]], line.replace(":8100", f":{self.port}"))
        if "pdx serve" in line:
            line = line.replace("--port 8100", f"--port {self.port}")
            self.server = Server(["bash", "-c", line], self.port, self.folder / "engine.log", self.env)
            self.server.wait_ready()
            return ""
        variable = re.match(r"(\w+)=\$\(", line)
        if variable:
            line += f"; echo ${variable[1]}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        if variable:
            self.env[variable[1]] = done.stdout.strip()
        return done.stdout + done.stderr

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()
        subprocess.run([str(self.folder / "pdx"), "node", "--stop", "--force"], env=self.env, check=False)


@pytest.fixture
def walk(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("w")
    folder.chmod(0o700)
    walk = Walk(folder)
    try:
        yield walk
    finally:
        walk.close()


def essence(line: str) -> str:
    """Without what differs from run to run."""
    return re.sub(r"[\s━]+", " ", VARYING.sub("#", line)).strip()


def test_each_command_prints_what_the_page_shows(walk: Walk) -> None:
    printed: dict[str, str] = {}
    output = ""
    for language, code in BLOCK.findall(PAGE.read_text()):
        if language == "":
            lines = [line for line in code.splitlines() if not line.startswith("make setup")]  # it is set up
            if any("--stop" in line for line in lines):
                assert walk.server is not None
                walk.server.stop()
            output = "".join(walk.run(line) for line in lines)
            printed[code] = output
            print(code, output, sep="\n")  # noqa: T201 - `pytest -rP`: for the page
        elif language == "text":
            found = {essence(line): line for line in output.splitlines()}
            for shown in filter(lambda line: line != "…", code.splitlines()):
                assert essence(shown) in found, f"{shown}\n\nis not in\n\n{output}"
                walk.ids |= dict(zip(ID.findall(shown), ID.findall(found[essence(shown)]), strict=True))

    moved, exact = (text for code, text in printed.items() if "long_chat" in code)
    until_cut = moved[: moved.index("while: ")]
    assert [each[1] for each in turns(until_cut)] == [each[1] for each in turns(exact)][: len(turns(until_cut))]
    at_cut, computed = ({name: count for name, _, count in turns(text)}["while"] for text in (moved, exact))
    assert at_cut < computed / 2, "the rest was found"
    (orders,) = (text for code, text in printed.items() if "three_orders" in code)
    blended = [int(count) for count in re.findall(r"again +(\d+) tokens", orders)]
    whole = [int(count) for count in re.findall(r"exact +(\d+) tokens", orders)]
    assert len(blended) == 6
    assert max(blended) <= 256 + 20 < min(whole), "what fills no chunk, and the question"


def turns(text: str) -> list[tuple[str, str, int]]:
    """Of each turn of a chat: its page, the answer, and how many tokens were computed for it."""
    found = re.findall(r"^(\w+): .*?(\d+) of \d+ tokens computed.*\n +(.*)$", text, re.MULTILINE)
    return [(name, answer, int(count)) for name, count, answer in found]
