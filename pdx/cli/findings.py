"""The names of what `pdx doctor` finds. Each is a section of docs/troubleshooting.md, and stays what it is: scripts and
people look for it."""

from __future__ import annotations

from enum import StrEnum


class FindingName(StrEnum):
    """What `pdx doctor` may say of a channel or of the machine, besides that all is well.

    Not everything is a fault: a machine without a GPU is one where some things are not there.
    """

    SHM_UNAVAILABLE = "shm-unavailable"
    CUDA_IPC_UNAVAILABLE = "cuda-ipc-unavailable"
    NIXL_UNAVAILABLE = "nixl-unavailable"
    UCX_UNAVAILABLE = "ucx-unavailable"
    CHANNEL_UNAVAILABLE = "channel-unavailable"  # another package's
    CHANNEL_UNLOADABLE = "channel-unloadable"
    CHANNEL_BROKEN = "channel-broken"
    CHANNEL_HANGS = "channel-hangs"
    CHANNEL_CRASHED = "channel-crashed"

    SHM_SMALL = "shm-small"
    MEMLOCK_SMALL = "memlock-small"
    FILES_FEW = "files-few"
    RDMA_NONE = "rdma-none"
    RDMA_PORT_DOWN = "rdma-port-down"
    RDMA_NO_ACCESS = "rdma-no-access"
    UCX_NO_RDMA = "ucx-no-rdma"

    GPU_NONE = "gpu-none"
    GPU_UNUSABLE = "gpu-unusable"
    GPU_FAILED = "gpu-failed"
    GPU_LOOK_FAILED = "gpu-look-failed"
    GPU_ARENA_LEGACY = "gpu-arena-legacy"
    GPU_NO_PEER_ACCESS = "gpu-no-peer-access"
    GPU_NO_COMPILER = "gpu-no-compiler"
    PAGE_LOCK_SLOW = "page-lock-slow"
    PAGE_LOCK_REFUSED = "page-lock-refused"
