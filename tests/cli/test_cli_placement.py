"""Which cores or GPUs engines get."""

from __future__ import annotations

import pytest

from pdx.cli.placement import gpus, place

BIND = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.mark.parametrize(
    ("engines", "cores", "expected"),
    [
        (2, [0, 1, 2, 3], ["0,1", "2,3"]),
        (3, [0, 1], ["0", "1", "0"]),
        (1, [0, 1], ["0,1"]),
    ],
)
def test_cores_are_shared_out(engines, cores, expected):
    assert [each[BIND] for each in place(engines, cores, [], {})] == expected


def test_each_engine_gets_a_gpu_until_they_run_out():
    homes = place(3, [0, 1], ["4", "6"], {}, sees_others=True)
    assert homes == [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("4,6", "6,4", "4,6")]
    assert place(3, [0, 1], ["4", "6"], {}) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("4", "6", "4")]


def test_what_the_user_has_chosen_stays(monkeypatch):
    assert place(2, [0, 1], [], {BIND: "7"}) == [{}, {}]
    for chosen, found in (("2,3", ["2", "3"]), ("", []), ("-1", []), ("0,-1,1", ["0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert gpus() == found
