"""What production streams take from torch, as far as that shows without a GPU."""

from __future__ import annotations

import torch
from fake_cuda import fake_cuda

from pdx.engine.streams import Streams


def test_the_gpu_is_the_one_of_torchs_number() -> None:
    """Not of torch's UUID, which need not be the driver's where a GPU is partitioned."""
    with fake_cuda(gpus=2):
        assert [Streams(torch.device("cuda", index)).gpu().ordinal for index in (0, 1)] == [0, 1]
