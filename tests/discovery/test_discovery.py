"""Asking a cluster, apart from any: its thread and its end."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from pdx.discovery import discovery as discovery_module
from pdx.discovery.discovery import Discovery, Found


class _Failing:
    """Two tasks, as for etcd: when the one is ended it takes the session from the other, which says that it failed."""

    def __init__(self):
        self.is_asked = threading.Event()

    async def follow(self, own, changed):
        session = asyncio.Event()

        async def stays():
            self.is_asked.set()
            await session.wait()
            raise OSError("the session is closed")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stays())
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                session.set()
                await asyncio.sleep(0)
                raise

    def found(self):
        return Found()

    async def leave(self):
        pass


def test_it_ends_also_where_what_it_has_begun_fails_meanwhile(monkeypatch):
    monkeypatch.setattr(discovery_module, "CLOSE_S", 30.0)
    source = _Failing()
    asking = Discovery(source, Counter())
    asking.start()
    assert source.is_asked.wait(60)
    asking.close()
    assert "pdx-discovery" not in [thread.name for thread in threading.enumerate()]
