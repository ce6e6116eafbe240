"""How much Python one `Admit` runs: calls are counted, not timed."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.node.service import PROBE_BYTES, Service
from pdx.telemetry.env import Env
from pdx.wire.messages import VERSION, Admit, Hello

PDX = str(Path(sys.modules[Service.__module__].__file__).parents[1])
MOST_CALLS = 10  # per chunk that is missing, of 64
MOST_FILES = 18  # of PDX, for one that is missing


@pytest.fixture
def admit(place):
    """Answers an engine's question for these keys; how often each function of PDX was called."""
    nbytes = 8 << 20
    config = NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=nbytes)
    with Arena.create(place / "arena", nbytes + PROBE_BYTES) as arena:
        service = Service(config, [arena], 1, Env(lambda: 0.0))
        hellos = [Hello(VERSION, os.getpid(), kind, name=kind, engine="e") for kind in ("scheduler", "worker")]
        scheduler, _ = [service.attach(hello.kind.encode(), hello, os.getpid())[0] for hello in hellos]

        def counted(keys):
            ask = Admit(keys, nbytes=GRANULE_BYTES, layers=4, wait_s=1.0, lease_s=30.0, request="r", partial=True)
            calls = Counter()

            def note(frame, event, _):
                if event == "call" and frame.f_code.co_filename.startswith(PDX):
                    calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

            sys.setprofile(note)
            try:
                answer = service.handle(scheduler, ask)
            finally:
                sys.setprofile(None)
            assert len(answer.granted) == len(keys)
            return calls

        yield counted
        service.sessions.close()
        service.peers.close()


def keys(first, count):
    return [number.to_bytes(16, "big") for number in range(first, first + count)]


def test_what_is_missing_costs_few_calls_and_passes_few_files(admit):
    admit(keys(0, 1))
    assert len({file for file, _ in admit(keys(1, 1))}) <= MOST_FILES
    assert admit(keys(100, 64)).total() <= 64 * MOST_CALLS
