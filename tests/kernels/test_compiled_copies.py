"""What the copy kernel is compiled to for GPUs that are not here, and when."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # a minute of compiling
SCRIPT = Path(__file__).with_name("compile_paged.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What compile_paged.py says; it compiles with an empty cache."""
    folder = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-P", "-W", "error", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {report["arch"] for report in found} == {80, 90, 100}
    return found


def test_data_moves_16_bytes_an_access_and_several_are_in_flight(reports):
    for report in reports:
        assert len(report["kernels"]) == 5  # gathers to this GPU, a peer and the host; scatters from a GPU and the host
        for kernel in report["kernels"]:
            # Loads of data go past L1 (.cg); the others are numbers from the tables, and every store is data.
            loads = {name: num for name, num in kernel["accesses"].items() if name.startswith("ld.global.cg")}
            stores = {name: num for name, num in kernel["accesses"].items() if name.startswith("st.")}
            for accesses in (loads, stores):
                assert all(name.endswith((".v2.b64", ".v4.b32")) for name in accesses), report
                assert sum(accesses.values()) == 4, report
            assert set(kernel["accesses"]) - set(loads) - set(stores) == {"ld.global.b64"}


def test_a_gathered_slice_stays_in_the_cache_of_the_gpu_that_it_lies_on_and_goes_first_elsewhere(reports):
    """One GPU's node: the decoder's scatter reads it there. Scattered pages are always read again."""
    for report in reports:
        stores = []
        for kernel in report["kernels"]:
            hints = {".cs" in name for name in kernel["accesses"] if name.startswith("st.")}
            stores.append((kernel["warps"], kernel["is_gather"], hints))
        here, peer, host = (4, True, {False}), (4, True, {True}), (32, True, {True})
        scatters = [(4, False, {False}), (32, False, {False})]
        assert sorted(stores, key=str) == sorted([here, peer, host, *scatters], key=str), report


def test_nothing_is_compiled_after_the_warm_up_and_a_batch_is_one_launch(reports):
    for report in reports:
        assert report["compiled_late"] == 0, report
        assert report["num_launches"] == 24  # 4 batches, there and back, on this GPU, a peer and the host
