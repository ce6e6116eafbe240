"""How much Python one `Admit` runs: calls are counted, not timed."""

import pytest
from service_stage import attach, keys, serving
from steps import calls_run

from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import Admit

MOST_CALLS = 10  # per chunk that is missing, of 64
MOST_FILES = 18  # of PDX, for one that is missing


@pytest.fixture
def admit(place):
    """Answers an engine's question for these keys; how often each function of PDX was called."""
    with serving(place, lambda: 0.0, arena_bytes=8 << 20) as service:
        scheduler = attach(service, "e", "scheduler", engine="e")
        attach(service, "e", "worker", engine="e")

        def counted(keys):
            ask = Admit(keys, nbytes=GRANULE_BYTES, layers=4, wait_s=1.0, lease_s=30.0, request="r", partial=True)
            with calls_run() as calls:
                answer = service.handle(scheduler, ask)
            assert len(answer.granted) == len(keys)
            return calls

        yield counted


def test_what_is_missing_costs_few_calls_and_passes_few_files(admit):
    admit(keys(range(1)))
    assert len({file for file, _ in admit(keys(range(1, 2)))}) <= MOST_FILES
    assert admit(keys(range(100, 164))).total() <= 64 * MOST_CALLS
