"""`--help` of all commands: what somebody reads first."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner
from command_tree import commands

import pdx
from pdx.cli.main import main

NODES = ("up", "serve", "node")


def options(path: tuple[str, ...]) -> set[str]:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), name)
    return {name for each in command.params for name in each.opts}


def shown(*path: str, flag: str = "--help") -> str:
    result = CliRunner().invoke(main, [*path, flag], terminal_width=100)
    assert result.exit_code == 0, result.output
    return result.output


def entries(text: str) -> list[str]:
    """The help of each option on one line."""
    return [" ".join(each.split()) for each in re.split(r"\n(?=  -)|\n\n", text) if each.lstrip().startswith("-")]


def sections(text: str) -> dict[str, int]:
    """How many options each heading has."""
    return {part.partition(":\n")[0]: len(entries(part)) for part in text.split("\n\n") if ":\n" in part}


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_help(path):
    text = shown(*path)
    assert shown(*path, flag="-h") == text
    assert [each for each in entries(text) if each.count("[default:") > 1] == []
    assert re.findall(r"\S*[<>]=?x\S*", text) == []
    assert max(sections(text).values()) <= 16, "more are listed under headings"


@pytest.mark.parametrize("name", NODES)
def test_a_nodes_options_are_under_headings(name):
    text = shown(name)
    for heading in ("Options:", "Memory:", "Disks:", "Remote store:", "Metrics and events:"):
        assert f"\n{heading}\n" in text
    assert sections(text)["Disks"] == 5
    assert max(sections(text).values()) <= 14


def test_a_node_is_named_alike_in_all_commands():
    named = {path[0] for path in commands() if "--node" in options(path)}
    assert named == {"up", "serve", "node", "why", "blend", "cache", "doctor"}
    assert [path for path in commands() if "--address" in options(path)] == []


def test_the_version_is_that_of_the_command():
    assert pdx.__version__ in CliRunner().invoke(main, ["--version"]).output
