"""A node that is killed at any moment: what its disk tier has afterwards is whole, and nothing else is left."""

import contextlib
import random
import signal
import subprocess
import sys
from pathlib import Path

import disk_bed
import pytest
from disk_bed import Bed

LIMIT_BYTES = 8 * 40_960  # as in disk_killed.py


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_after_a_kill_at_any_system_call_whatever_is_found_is_whole(tmp_path, seed):
    random_ = random.Random(seed)
    stored = 0
    for life in range(4):
        command = [sys.executable, str(Path(disk_bed.__file__).with_name("disk_killed.py")), str(tmp_path)]
        done = subprocess.run(
            [*command, str(100 * seed + life), str(random_.randrange(1, 150))], capture_output=True, text=True
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        stored += done.stdout.count("stored")
        with contextlib.closing(Bed(tmp_path, limit_bytes=LIMIT_BYTES)) as bed:
            found = [number for number in range(20) if bed.has(number)]
            assert [bed.load(number) for number in found] == [None] * len(found)
            assert bed.files == sorted(bed.file(number) for number in found)
            assert bed.disk_bytes <= bed.tier.used_bytes == len(found) * bed.charge <= LIMIT_BYTES
            assert not any(bed.counters[f"disk_{kind}"] for kind in ("corrupt", "truncated", "missing"))
    assert stored
