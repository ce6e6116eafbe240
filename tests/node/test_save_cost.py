"""How much Python one saved chunk runs, with a disk below: calls are counted, not timed."""

import os
import sys
import time
from pathlib import Path

from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.node.service import PROBE_BYTES, Service
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.wire.messages import VERSION, Admit, Fill, Hello

PDX = str(Path(sys.modules[Service.__module__].__file__).parents[1])
CHUNKS = 64
MOST_CALLS = 45  # per chunk: its fill, and the turn in which the disk is given it


def test_a_saved_chunk_costs_few_calls(place):
    config = NodeConfig(
        address=f"ipc://{place}/n.sock", arena_bytes=8 << 20, disks=[f"{place}/disk"], disk_limit_bytes=1 << 26
    )
    with Arena.create(place / "arena", config.arena_bytes + PROBE_BYTES) as arena:
        env = Env(time.monotonic)
        service = Service(config, [arena], 1, env)
        service.peers.turn = list
        service.open_tiers()
        disk = service.tiers.below[0][0]
        wait_until(lambda: env.mailbox.deliver() or disk.is_counted, what="the disk is counted")
        session, _ = service.attach(b"x", Hello(VERSION, os.getpid(), "client", name="x"), os.getpid())
        keys = [number.to_bytes(16, "big") for number in range(CHUNKS)]
        slots = service.handle(session, Admit(keys, nbytes=GRANULE_BYTES)).granted_slots
        calls = 0

        def note(frame, event, _):
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename.startswith(PDX)

        sys.setprofile(note)
        try:
            service.handle(session, Fill(slots, 0, 1, True))
            service.turn()
        finally:
            sys.setprofile(None)
        wait_until(lambda: env.mailbox.deliver() or service.turn() or disk.tally.stores == CHUNKS, what="all is stored")
        assert calls <= CHUNKS * MOST_CALLS
        service.tiers.close()
        service.sessions.close()
        service.peers.close()
