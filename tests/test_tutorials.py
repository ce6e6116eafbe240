"""The tutorials are walked through: their programs run and print what the pages say, and what a page shows of a program
is in that program under docs/examples."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from node_harness import MIB
from tutorials import PAGES, ROOT, blocks, commands

import pdx
from pdx.bench.harness import tiny_llama
from pdx.cli.main import main
from pdx.cli.ports import free_ports
from pdx.cli.serve import engine_command
from pdx.errors import PdxError
from pdx.telemetry.timeline import Breakdown
from pdx.testing.channel_conformance import ChannelConformance
from pdx.testing.waiting import wait_until
from pdx.transports import registry

EXAMPLES = ROOT / "docs" / "examples"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


# ---- every page -----------------------------------------------------------------------------


def plain(code: str) -> list[str]:
    """Lines without their common indentation and without remarks for linters."""
    return [re.sub(r" *# noqa.*", "", line).rstrip() for line in textwrap.dedent(code).splitlines()]


def is_piece(code: str, program: Path) -> bool:
    """Whether these lines stand in the program, one behind the other, with whatever indentation."""
    wanted, lines = plain(code), program.read_text().splitlines()
    count = len(wanted)
    return any(plain("\n".join(lines[at : at + count])) == wanted for at in range(len(lines) - count + 1))


def test_code_on_a_page_is_a_piece_of_a_program_that_runs():
    programs = sorted(EXAMPLES.rglob("*.py"))
    known = [path.read_text() for path in EXAMPLES.rglob("*.toml")]
    for page in PAGES:
        for code in blocks(page, "python"):
            assert any(is_piece(code, program) for program in programs), f"{page}: {code}"
        for code in blocks(page, "toml"):
            assert any(code in text for text in known) or "nodes" in tomllib.loads(code), f"{page}: {code}"
        for code in blocks(page, "json"):
            json.loads(code)


# ---- two instances (engines are started by tests/end_to_end and by the demo) -----------------------


@needs_vllm
def test_the_connector_is_configured_as_pdx_serve_does_it():
    by_vllm, by_pdx = (commands("two-instances", f"{program} serve")[:2] for program in ("vllm", "pdx"))
    assert len(by_vllm) == 2
    for shown, served in zip(by_vllm, by_pdx, strict=True):
        role, model, flags = served[2], served[3], served[4:]
        written = engine_command(model, flags, role=role, node="", arena="8GiB", proxy="")
        ours, theirs = (json.loads(line[line.index("--kv-transfer-config") + 1]) for line in (written, shown))
        here, there = (each.pop("kv_connector_extra_config") for each in (ours, theirs))
        assert ours == theirs
        assert {name: here[name] for name in there} == there
        assert there["url"].endswith(f":{shown[shown.index('--port') + 1]}")


@needs_vllm
def test_flags_for_vllm_are_known_to_it():
    """By vLLM's sources, because asking it takes half a minute."""
    home = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    sources = [home / "engine" / "arg_utils.py", *(home / "entrypoints").rglob("cli_args.py")]
    known = "".join(path.read_text() for path in sources)
    serve = main.get_command(click.Context(main), "serve")
    ours = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for line in (line for page in PAGES for program in ("vllm", "pdx") for line in commands(page, f"{program} serve")):
        for flag in {word for word in line if word.startswith("--")} - ours:
            assert f'"{flag}"' in known or f"    {flag[2:].replace('-', '_')}: " in known, flag


def test_what_it_shows_of_a_request_is_what_the_proxy_tells():
    shown = [json.loads(code) for code in blocks("two-instances", "json")]
    (told,) = [one for one in shown if "handoff_ms" in one]
    assert list(told) == [field.name for field in msgspec.structs.fields(Breakdown)]


def test_the_model_for_cpus_is_made_by_what_the_page_says():
    ((_, _, code),) = commands("two-instances", "python -c")
    compile(code, "two-instances.md", "exec")
    assert callable(tiny_llama.make_model)
    assert "from pdx.bench.harness.tiny_llama import make_model" in code


# ---- Python API -------------------------------------------------------------------------------


@contextlib.contextmanager
def running(*lines: list[str]) -> Iterator[None]:
    """`pdx` commands in processes of their own, ended afterwards."""
    started = []
    try:
        started += [
            subprocess.Popen([sys.executable, "-P", "-m", "pdx.cli.main", *line[1:]])  # pytest keeps what it says
            for line in lines
        ]
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)


def answers(address: str) -> bool:
    try:
        pdx.connect(address, timeout_s=1.0).close()
    except PdxError:
        return False
    return True


def run_example(line: list[str], environ: dict[str, str] | None = None) -> str:
    """What the program of this command line prints."""
    done = subprocess.run(
        [sys.executable, *line[1:]],
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@needs_torch
@pytest.mark.timeout(180)
def test_the_python_api_page(place, monkeypatch):
    """Its roster, its two nodes and its program, in a folder and at ports of our own."""
    (roster,) = blocks("python-api", "toml")
    nodes, programs = commands("python-api", "pdx node --name"), commands("python-api", "python docs/examples")
    everything = json.dumps([roster, nodes, programs]).replace("/tmp/pdx-two", str(place))
    for port, free in zip(("7700", "7701"), free_ports(2), strict=True):
        everything = everything.replace(f":{port}", f":{free}")
    roster, nodes, (program,) = json.loads(everything)
    monkeypatch.chdir(place)
    (place / "roster.toml").write_text(roster)
    (place / "roster.toml").chmod(0o600)
    with running(*([*node, "--proxy", ""] for node in nodes)):
        for address in program[2:]:
            wait_until(lambda address=address: answers(address), timeout_s=30.0, what=f"the node at {address} answers")
        printed = run_example(program).splitlines()
    (shown,) = blocks("python-api", "text")
    assert printed[:-1] == shown.splitlines()[:-1]
    channel = re.compile(r"by \w+:")
    assert channel.sub("", printed[-1]) == channel.sub("", shown.splitlines()[-1])


# ---- an engine --------------------------------------------------------------------------------


@pytest.mark.long
@needs_torch
@pytest.mark.timeout(180)
def test_the_engine_page(start_node):
    node = start_node(arena_bytes=64 * MIB)
    (program,) = commands("add-an-engine", "python docs/examples")
    assert run_example(program, {"PDX_NODE": node.address}) == blocks("add-an-engine", "text")[0]

    def is_left() -> bool:
        status = node.status()
        return (len(status.attached), status.leases) == (1, 0)  # one: who asks

    wait_until(is_left, timeout_s=30.0, what="the program holds nothing any more")
    assert set(node.status().chunks) == {"sealed"}


# ---- a channel --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def carrier(tmp_path_factory) -> Iterator[Path]:
    """The page's package, as `pip install` would leave it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "carrier.py").write_text((EXAMPLES / "carrier" / "carrier.py").read_text())
    project = tomllib.loads((EXAMPLES / "carrier" / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = "\n".join(f"{name} = {where}" for name, where in project["entry-points"]["pdx.channels"].items())
    (info / "entry_points.txt").write_text(f"[pdx.channels]\n{entries}\n")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("carrier", None)


@pytest.fixture(scope="class")
def found(request, carrier) -> None:
    """The suite's region is the one that is found by its name."""
    request.cls.region = registry.find("carrier")


@pytest.mark.long
@pytest.mark.usefixtures("found")
class TestCarrier(ChannelConformance):
    pass


def test_doctor_tries_the_channel_of_the_page(carrier, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(carrier), *filter(None, sys.path)]))
    for look in ("_ucx_transports", "_gpus"):  # processes of their own, which take seconds
        monkeypatch.setattr(f"pdx.cli.doctor.{look}", lambda timeout_s: [])
    (line,) = commands("add-a-channel", "pdx doctor")
    result = CliRunner().invoke(main, [*line[1:], "--json"])
    assert result.exit_code == 0, result.output
    (channel,) = json.loads(result.stdout)["channels"]
    assert channel["trial"]["state"] == "ok"
    assert channel["trial"]["provider"] == "carrier:CarrierRegion"


def test_the_suite_of_the_page_is_the_one_that_ran():
    (code,) = [code for code in blocks("add-a-channel", "python") if "ChannelConformance" in code]
    assert is_piece(code, EXAMPLES / "carrier" / "test_carrier.py")
