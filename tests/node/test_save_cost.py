"""How much Python one saved chunk runs, with a disk below: calls are counted, not timed."""

import time

from service_stage import attach, keys, serving
from steps import calls_run

from pdx.memory.arena import GRANULE_BYTES
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Fill

CHUNKS = 64
MOST_CALLS = 45  # per chunk: its fill, and the turn in which the disk is given it


def test_a_saved_chunk_costs_few_calls(place):
    with serving(place, time.monotonic, disks=[f"{place}/disk"], disk_limit_bytes=1 << 26) as service:
        service.open_tiers()
        disk, deliver = service.tiers.below[0][0], service.env.mailbox.deliver
        wait_until(lambda: deliver() or disk.is_counted, what="the disk is counted")
        session = attach(service, "x")
        slots = service.handle(session, Admit(keys(range(CHUNKS)), nbytes=GRANULE_BYTES)).granted_slots
        with calls_run() as calls:
            service.handle(session, Fill(slots, 0, 1, True))
            service.turn()
        wait_until(lambda: deliver() or service.turn() or disk.tally.stores == CHUNKS, what="all is stored")
        assert calls.total() <= CHUNKS * MOST_CALLS
