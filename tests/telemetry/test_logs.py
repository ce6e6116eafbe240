"""Logs: for people, or one JSON object a line, whatever is in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pdx.cli.main import main
from pdx.telemetry import logs

ROOT = Path(__file__).resolve().parent.parent.parent
LOGS = """
import logging
from pdx.telemetry import logs
logs.set_up("info")
log = logging.getLogger("pdx.node")
log.debug("nothing")
log.info("%d of\\n%s", 3, {"a": 1})
logs.event(log, "request", mode="alone", ms=1.5, why=None)
logs.name_worker(1)
logs.event(log, "request", model="gpt mode=forward", path="/\\udcff")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a defect")
"""


def logged(form):
    environ = {**os.environ, logs.VARIABLE: form}
    return subprocess.run([sys.executable, "-c", LOGS], env=environ, capture_output=True, text=True, check=True).stderr


def test_json_is_one_object_a_line():
    first, event, odd, defect = map(json.loads, logged("json").splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {"level": "info", "logger": "pdx.node", "message": "3 of\n{'a': 1}"}
    assert (event["event"], event["mode"], event["ms"], "why" in event) == ("request", "alone", 1.5, False)
    assert (odd["model"], odd["path"], odd["worker"]) == ("gpt mode=forward", "/\udcff", 1)
    assert (defect["level"], defect["exception"].splitlines()[-1]) == ("error", "ZeroDivisionError: division by zero")


def test_text_is_for_people():
    told = logged("text")
    assert " INFO pdx.node: request: mode=alone ms=1.5\n" in told
    assert ' INFO worker 1: pdx.node: request: model="gpt mode=forward" path=' in told
    assert " ERROR worker 1: pdx.node: a defect\nTraceback" in told


@pytest.mark.parametrize("words", ["node", "proxy", "up m", "serve both m"])
def test_each_command_that_logs_takes_the_format_and_hands_it_on(words, monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "text")
    name, *rest = words.split()
    command = main.get_command(click.Context(main), name)
    command.make_context(name, [*rest])
    assert os.environ[logs.VARIABLE] == "text"
    command.make_context(name, ["--log-format", "json", *rest])
    assert os.environ[logs.VARIABLE] == "json"
    command.make_context(name, [*rest])
    assert os.environ[logs.VARIABLE] == "json", "as the environment says"


def test_loggers_have_the_name_of_the_part_that_speaks():
    """Of its room, by its own name or that of its module; what stands below a node is its part."""
    named = {}
    for folder in ("pdx", "proxy", "transports"):
        for file in (ROOT / folder).rglob("*.py"):
            if folder == "pdx" and file.relative_to(ROOT).parts[1] in ("bench", "kernels", "proxy", "transports"):
                continue  # through a link
            room = file.relative_to(ROOT).parts[1] if folder == "pdx" else folder
            for name in re.findall(r"^\s*\w+ = logging\.getLogger\((.+?)\)", file.read_text(), re.MULTILINE):
                named.setdefault(room, set()).add(name)
    assert named.pop("telemetry") <= {"__name__", '"pdx"'}, "what it says of faults, it says for any part"
    parts = {"store": "node"}
    allowed = {room: {"__name__", f'"pdx.{parts.get(room, room)}"'} for room in named}
    allowed["vllm"].add('"pdx"')  # of all parts: they go where vLLM's own lines go
    allowed["vllm"].add('"vllm"')
    allowed["proxy"].add('"pdx.proxy.requests"')
    assert {room: names - allowed[room] for room, names in named.items() if names - allowed[room]} == {}
    assert len(named) > 5
