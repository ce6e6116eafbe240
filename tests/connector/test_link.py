"""An engine's link to its node: what is counted while there is none, and what happens in the middle of attaching."""

from __future__ import annotations

import os
from typing import Any

import pytest
from node_harness import wait_until

from pdx.config import ConnectorConfig
from pdx.connection import Connection
from pdx.messages import VERSION, Hello
from pdx.vllm.link import NodeLink


def test_what_is_counted_while_the_link_tells_what_was_counted_is_told_too(
    address: str, start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Connection):
        def count(self, reason: str) -> None:
            super().count(reason)
            if reason == "before":
                link.count("meanwhile")  # as the engine's thread may at any time

    monkeypatch.setattr("pdx.vllm.link.Connection", Interrupted)
    hello = Hello(VERSION, os.getpid(), "worker", engine="e")
    link = NodeLink(ConnectorConfig(node=address, start_node=False), hello, starter=False)
    try:
        link.count("before")
        node = start_node()
        assert link.wait_attached(10)
        wait_until(
            lambda: [node.status().counters.get(f"degraded_{each}") for each in ("before", "meanwhile")] == [1, 1],
            what="both are told",
        )
    finally:
        link.close()


def test_a_descriptor_that_is_another_file_by_now_says_nothing_about_the_node(
    address: str, start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread asks whether the node lives while another one closes the connection."""
    start_node()
    connection = Connection(address, Hello(VERSION, os.getpid(), "client"))
    pidfd = -1

    class Late:
        def register(self, fd: int, events: int) -> None:
            nonlocal pidfd
            pidfd, connection._pidfd = connection._pidfd, -1  # noqa: SLF001

        def poll(self, timeout: int) -> list[int]:
            return []

    assert connection.attach(10)
    assert connection.is_alive
    with monkeypatch.context() as patched:
        patched.setattr("pdx.connection.select.poll", Late)
        assert not connection.is_alive
    connection._pidfd = pidfd  # noqa: SLF001
    connection.close()
