"""What is around the tests of `cuda_ipc` and their peers: a fake driver. By itself, so that peers start quickly."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fake_cuda import FakeCuda, fake_cuda

LAG_S = 0.0002  # streams lag a little only: the suite copies a lot


def one_gpu() -> AbstractContextManager[FakeCuda]:
    return fake_cuda(lag_s=LAG_S)


def two_gpus() -> AbstractContextManager[FakeCuda]:
    return fake_cuda(gpus=2, lag_s=LAG_S)


def strangers() -> AbstractContextManager[FakeCuda]:
    """Two GPUs that cannot reach each other."""
    return fake_cuda(gpus=2, peer_access=False, lag_s=LAG_S)
