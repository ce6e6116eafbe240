"""The documents say what is: links resolve, and commands, modules, settings, messages and tests they name exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest

import pdx
import pdx.wire.messages
import pdx.wire.proxy
import pdx.wire.verbs
from pdx import errors
from pdx.cli.machine import FindingName
from pdx.cli.main import main
from pdx.client import api
from pdx.config import ConnectorConfig, NodeConfig
from pdx.options import table
from pdx.telemetry import names

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
VLLM = (ROOT / "docs" / "vllm.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[`(]) *pdx ([a-z]\w*)([^`#\n]*)", re.MULTILINE)
PASSES_FLAGS_ON = {"serve", "up"}  # to vLLM
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
URL = re.compile(r"https?:[^\s)`>\"']*")
LOCAL_HOSTS = re.compile(r"localhost|\d+\.\d+\.\d+\.\d+")


def anchors(page: Path) -> set[str]:
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_their_anchors_resolve():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
            name, _, anchor = target.partition("#")
            there = page.parent / name if name else page
            if "://" not in target and not (there.exists() and (not anchor or anchor in anchors(there))):
                broken.append((page.name, target))
    assert broken == []


def test_links_to_other_hosts_have_a_sound_form():
    """Whether somebody answers there is not asked: tests run without a network."""
    bad = []
    for page in PAGES:
        for found in URL.findall(page.read_text()):
            url = urlsplit(found.rstrip(".,;:"))
            is_public = url.scheme == "https" and re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", url.hostname or "")
            if not LOCAL_HOSTS.fullmatch(url.hostname or "") and not (is_public and not url.username and not url.port):
                bad.append((page.name, found))
    assert bad == []


def test_every_page_is_linked_from_the_index_or_the_records():
    index = (ROOT / "docs" / "index.md").read_text() + (ROOT / "docs" / "adr" / "0001-record-decisions.md").read_text()
    listed = {*re.findall(r"\]\(([^)#]+\.md)\)", index)}
    names = {Path(name).name for name in listed}
    assert [page.name for page in PAGES if page.name not in names and page.name != "index.md"] == []
    assert "](docs/index.md)" in (ROOT / "README.md").read_text()


def test_commands_and_their_options_exist():
    code = "\n".join(found for page in PAGES for found in CODE.findall(page.read_text()))
    for name, rest in COMMAND.findall(code):
        command = main.get_command(click.Context(main), name)
        assert command is not None, f"pdx {name}"
        words = rest.split()
        while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z]\w*", words[0]):
            name = f"{name} {words[0]}"
            command = command.get_command(click.Context(command), words.pop(0))
            assert command is not None, f"pdx {name}"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        known.add("--help")
        ours = rest.partition(" -- ")[0]  # the others are for vLLM
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", ours):
            assert option in known or name in PASSES_FLAGS_ON, f"pdx {name} {option}"


def test_every_command_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [name for name in main.list_commands(click.Context(main)) if f"pdx {name}" not in readme] == []


def test_every_room_is_in_the_architecture():
    top = ("pdx", "proxy", "kernels", "transports", "bench", "tests")
    inner = [path.parent for path in (ROOT / "pdx").rglob("__init__.py") if ".venv" not in path.parts]
    rooms = {*top, *(str(path.relative_to(ROOT)) for path in inner)}
    rooms -= {"pdx/bench", *(f"pdx/{name}" for name in top)}  # links to the folders at the top
    assert len(rooms) > 15
    assert sorted(name for name in rooms if f"- `{name}`:" not in ARCHITECTURE) == []
    of_bench = {path.parent.name for path in (ROOT / "bench").glob("*/*.py")}
    row = ARCHITECTURE.split("- `bench`:", 1)[1].split("\n- ", 1)[0]
    assert sorted(name for name in of_bench if f"`{name}`" not in row) == []


def test_every_module_says_what_is_in_it():
    folders = ("pdx", "proxy", "kernels", "transports", "bench")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 40
    assert [
        path for path in modules if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ] == []


def test_every_path_and_test_named_exists():
    text = "\n".join(page.read_text() for page in PAGES)
    paths = re.findall(r"`((?:pdx|proxy|kernels|tests|bench|docs)/[\w./-]+)[`:]", text)
    assert [path for path in paths if not (ROOT / path).exists() and not path.startswith("bench/results")] == []
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)", text)
    assert [each for each in named if f"def {each[1]}(" not in (ROOT / each[0]).read_text()] == []


def test_pictures_of_results_are_shown_and_have_a_baseline_that_does_not_poll():
    """As it comes, NIXL polls on the cores that are measured (ADR 23): its prefill is twice as long then."""
    numbers = (ROOT / "docs" / "numbers.md").read_text()
    for picture in sorted((ROOT / "bench" / "results").glob("*.png")):
        assert f"](../bench/results/{picture.name})" in numbers
        result = json.loads(picture.with_suffix(".json").read_text())
        if result["bench"] == "breakdown":
            systems = result["details"]["settings"]["systems"]
            assert "plain" in systems, picture.name
            assert not {"nixl", "nixl-push"} & {*systems}, picture.name


@pytest.mark.parametrize("settings", [table(ConnectorConfig, flags=False), table(NodeConfig)], ids=["engine", "node"])
def test_tables_of_settings_are_made_from_the_settings(settings):
    assert settings in VLLM, f"docs/vllm.md lacks this table:\n{settings}"


@pytest.mark.parametrize("prefix", ["pdx_node_", "pdx_proxy_", "vllm:pdx_"])
def test_tables_of_metrics_are_made_from_their_names(prefix):
    told = names.table(prefix)
    assert told in (ROOT / "docs" / "metrics.md").read_text(), f"docs/metrics.md lacks this table:\n{told}"


def test_what_engines_count_is_documented():
    sources = "\n".join(path.read_text() for room in ("engine", "vllm") for path in (ROOT / "pdx" / room).glob("*.py"))
    counted = set(re.findall(r"\bcount\(\s*\"([a-z_]+)\"", sources))
    assert len(counted) > 20
    assert sorted(counted - {*names.DEGRADED}) == []
    assert sorted(name for name in names.DEGRADED if f"`degraded_{name}`" not in VLLM) == []


def test_every_message_is_in_the_architecture():
    messages = {*pdx.wire.messages.Message.__subclasses__(), *pdx.wire.verbs.VERBS.values()} - {pdx.wire.verbs.Verb}
    kinds = {kind.__name__ for kind in messages if kind.__module__.startswith("pdx.")}
    assert len(kinds) > 15
    assert [name for name in sorted(kinds) if f"`{name}`" not in ARCHITECTURE] == []


def test_every_public_name_of_the_python_api_is_documented():
    text = (ROOT / "docs" / "python-api.md").read_text()
    named = [*pdx.__all__, *(name for name, kind in vars(errors).items() if isinstance(kind, type))]
    for kind in (api.Node, api.WritableChunk, api.ReadableChunk):
        named += [name for name in dir(kind) if not name.startswith("_")]
    assert [name for name in named if not re.search(rf"\b{name}\b", text)] == []


def test_every_finding_of_doctor_has_a_row_in_troubleshooting_and_a_symptom_a_command_that_tells():
    symptoms, findings = TROUBLES.split("\n## What pdx doctor finds\n")
    rows = [line.strip("|").split("|") for line in findings.splitlines() if "| `" in line[:3]]
    assert sorted(name.strip(" `") for name, _, _ in rows) == sorted(FindingName)
    assert [name for name, means, do in rows if not means.strip() or not do.strip()] == []
    sources = "".join((ROOT / "pdx" / "cli" / f"{module}.py").read_text() for module in ("doctor", "machine", "gpus"))
    assert [name for name in FindingName if f"FindingName.{name.name}" not in sources] == []
    sections = symptoms.split("\n### ")[1:]
    assert len(sections) >= 6
    assert [
        section for section in sections if not re.search(r"^```\n[^`]*\b(?:pdx|curl) ", section, re.MULTILINE)
    ] == []


def test_counters_and_messages_that_troubleshooting_quotes_are_those_of_the_program():
    sources = "".join(path.read_text() for folder in ("pdx", "proxy") for path in (ROOT / folder).rglob("*.py"))
    counters = set(re.findall(r"`degraded_(\w+)`", TROUBLES))
    assert len(counters) > 2
    quoted = ("already owns", "no engine that could serve this request can be reached", "between all")
    assert [word for word in (*(f'"{name}"' for name in counters), *quoted) if word not in sources] == []
    assert [word for word in quoted if word not in TROUBLES] == []
