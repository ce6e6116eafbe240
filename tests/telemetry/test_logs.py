"""Logs: for people, or one JSON object a line, whatever is in it."""

import json
import os
import subprocess
import sys

import click
import pytest

from pdx.cli.main import main
from pdx.telemetry import logs

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
