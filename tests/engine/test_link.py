"""An engine's link to its node: what is counted while there is none, and what happens in the middle of attaching."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import zmq
from toy_engine import Engines

from pdx.client.connection import Connection
from pdx.config import ConnectorConfig, socket_path
from pdx.engine.link import NodeLink
from pdx.memory.arena import Arena
from pdx.testing.waiting import wait_until
from pdx.wire.messages import VERSION, Hello
from pdx.wire.proxy import decode_to_proxy


def test_what_is_counted_while_the_link_tells_what_was_counted_is_told_too(
    address: str, start_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Connection):
        def count(self, reason: str, *args: Any, **settings: Any) -> None:
            super().count(reason, *args, **settings)
            if reason == "before":
                link.count("meanwhile")  # as the engine's thread may at any time

    monkeypatch.setattr("pdx.engine.link.Connection", Interrupted)
    hello = Hello(VERSION, os.getpid(), "worker", engine="e")
    link = NodeLink(ConnectorConfig(node=address, start_node=False), hello, starter=False)
    try:
        link.count("before")
        node = start_here()
        assert link.wait_attached(10)
        wait_until(
            lambda: [node.status().counters.get(f"degraded_{each}") for each in ("before", "meanwhile")] == [1, 1],
            what="both are told",
        )
    finally:
        link.close()


def test_an_engine_that_its_node_refuses_starts_no_other(
    address: str, start_here: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another one would end at once, every ten seconds."""

    class Patient(Connection):
        def attach(self, timeout_s: float) -> bool:
            return super().attach(30.0)

    monkeypatch.setattr("pdx.engine.link.Connection", Patient)
    start_here()
    hello = Hello(VERSION, os.getpid(), "scheduler", engine="e")
    with contextlib.ExitStack() as undo:
        for is_second in (False, True):
            link = NodeLink(ConnectorConfig(node=address), hello, starter=is_second)
            undo.callback(link.close)
            assert is_second or link.wait_attached(30)
        wait_until(lambda: "give each engine of this host an engine_id of its own" in caplog.text, what="it is refused")
    assert not Path(f"{socket_path(address)}.log").exists()


def test_an_engine_that_cannot_start_a_node_is_attached_to_one_that_comes_later(
    address: str, start_here: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log = Path(f"{socket_path(address)}.log")
    log.mkdir()  # or a full table of files, or a folder that others may enter
    link = NodeLink(ConnectorConfig(node=address), Hello(VERSION, os.getpid(), "scheduler", engine="e"), starter=True)
    try:
        wait_until(lambda: str(log) in caplog.text, what="none can be started")
        start_here()
        assert link.wait_attached(30)
    finally:
        link.close()
        log.rmdir()


def test_a_descriptor_that_is_another_file_by_now_says_nothing_about_the_node(
    address: str, start_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread asks whether the node lives while another one closes the connection."""
    start_here()
    connection = Connection(address, Hello(VERSION, os.getpid(), "client"))

    class Late:
        def register(self, fd: int, events: int) -> None:
            patched.undo()
            connection.close()

        def poll(self, timeout: int) -> list[int]:
            return []

    assert connection.attach(10)
    assert connection.is_alive
    with monkeypatch.context() as patched:
        patched.setattr("pdx.client.connection.select.poll", Late)
        assert not connection.is_alive


def test_the_fingerprint_that_keys_are_made_with_is_told_at_once_and_to_each_node(
    place: Path, address: str, start_node: Any
) -> None:
    """Between two heartbeats of a node that reports nothing else, and to one that is started later."""
    context = zmq.Context()
    proxy = context.socket(zmq.ROUTER)
    proxy.bind(f"ipc://{place}/proxy.sock")

    def keyed() -> bytes | None:
        engines = decode_to_proxy(proxy.recv_multipart()[1]).engines if proxy.poll(30_000) else []
        return engines[0].layout if engines else None

    hello = Hello(VERSION, os.getpid(), "scheduler", engine="e", layout=b"l" * 16)
    link = NodeLink(ConnectorConfig(node=address, start_node=False), hello, starter=False)
    try:
        node = start_node(proxy=f"ipc://{place}/proxy.sock", report_s=60.0)
        wait_until(lambda: keyed() == b"l" * 16, what="the layout's")
        link.key_by(b"k" * 16)
        wait_until(lambda: keyed() == b"k" * 16, what="the new one")
        node.kill()
        start_node(proxy=f"ipc://{place}/proxy.sock", report_s=60.0)
        wait_until(lambda: keyed() == b"k" * 16, what="the new one, at the next node")
    finally:
        link.close()
        context.destroy(linger=0)
        (place / "proxy.sock").unlink()


def test_the_arena_is_mapped_page_by_page_where_its_bytes_are_copied_alone(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of all pages of a large arena take memory and time, and the scheduler half copies nothing."""
    mapped: list[Arena] = []
    monkeypatch.setattr(Arena, "populate_in_background", lambda arena: mapped.append(arena))
    engine = engines(shards=2)
    assert {id(each) for each in mapped} == {id(worker.link.connection.arena) for worker in engine.workers}
