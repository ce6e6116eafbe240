"""What channels need from a machine: shared memory, lockable memory, RDMA devices, UCX transports.

Facts about this host, and how to improve them. Reads files only; it opens no devices and loads no libraries.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from pdx.cli.tables import size

SHM = Path("/dev/shm")
_MOUNTS = Path("/proc/self/mounts")
_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
DEFAULT_ARENA_BYTES = 4 << 30
FEW_FILES = 4096
_CAP_IPC_LOCK = 14
_RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd", "gdaki")


class FindingName(StrEnum):
    """Everything `pdx doctor` may report about a channel or the machine, besides success. Not every finding is a fault.

    Each is a row in docs/troubleshooting.md. The names are stable: scripts and people search for them.
    """

    SHM_UNAVAILABLE = "shm-unavailable"
    CUDA_IPC_UNAVAILABLE = "cuda-ipc-unavailable"
    NIXL_UNAVAILABLE = "nixl-unavailable"
    UCX_UNAVAILABLE = "ucx-unavailable"
    CHANNEL_UNAVAILABLE = "channel-unavailable"  # a channel of another package
    CHANNEL_UNLOADABLE = "channel-unloadable"
    CHANNEL_BROKEN = "channel-broken"
    CHANNEL_HANGS = "channel-hangs"
    CHANNEL_CRASHED = "channel-crashed"

    SHM_SMALL = "shm-small"
    HUGE_PAGES_NONE = "huge-pages-none"
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

    ENGINES_APART = "engines-apart"


class Fact(msgspec.Struct, frozen=True):
    """One fact about the machine; `fix` says how to improve it, if that could matter. Facts that are bad or may
    surprise have a `finding`."""

    name: str
    found: str
    is_ok: bool = True
    fix: str = ""
    finding: FindingName | None = None


def facts(ucx: Sequence[str], environ: Mapping[str, str]) -> list[Fact]:
    """All facts; `ucx` holds UCX's transports as "transport/device"."""
    devices = rdma_devices(Path("/sys/class/infiniband"))
    return [
        shared_memory(),
        huge_pages(),
        memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _may_lock(), has_rdma=bool(devices)),
        files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        rdma(devices, _verbs()),
        ucx_transports(ucx, environ, has_rdma=bool(devices)),
    ]


def shared_memory() -> Fact:
    stats = os.statvfs(SHM)
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    found = f"{size(total)}, {size(free)} of it free"
    if free >= DEFAULT_ARENA_BYTES:
        return Fact("/dev/shm", found)
    fix = f"mount -o remount,size=… {SHM}, docker run --shm-size=…, or a smaller --arena"
    found = f"{found}; the default arena has {size(DEFAULT_ARENA_BYTES)}"
    return Fact("/dev/shm", found, False, fix, FindingName.SHM_SMALL)


def huge_pages(mounts: Path = _MOUNTS, setting: Path = _SHMEM_HUGE_PAGES) -> Fact:
    """Whether the kernel gives arenas in host memory huge pages, which a node requests.

    The mount option `huge` decides. `setting` applies to shared memory without a mount, except that `force` and `deny`
    apply to all (Documentation/admin-guide/mm/transhuge.rst of Linux, "Hugepages in tmpfs/shmem").
    """
    lines = [line.split() for line in _text(mounts).splitlines()]
    options = [found for _, place, _, found, *_ in lines if place == str(SHM)]  # the last mount hides the others
    named = [each.removeprefix("huge=") for each in ",".join(options[-1:]).split(",") if each.startswith("huge=")]
    chosen = named[0] if named else "never"
    over = _text(setting).partition("[")[2].partition("]")[0]
    why = f"shmem_enabled is {over}" if over in ("force", "deny") else f"{SHM} has huge={chosen}"
    if over != "deny" and (over == "force" or chosen != "never"):
        return Fact("huge pages", f"for arenas in host memory ({why})")
    return Fact("huge pages", f"none for arenas in host memory ({why})", finding=FindingName.HUGE_PAGES_NONE)


def _text(path: Path) -> str:
    """Empty: this kernel lacks the file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def memlock(limit: int, may_lock: bool, *, has_rdma: bool) -> Fact:
    """RLIMIT_MEMLOCK in bytes: RDMA devices lock the whole arena in memory."""
    if may_lock or limit == resource.RLIM_INFINITY:
        return Fact("memlock", "unlimited" if limit == resource.RLIM_INFINITY else f"{size(limit)}, not enforced")
    fix = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1)"
    if has_rdma:
        found = f"{size(limit)}, less than the arena that RDMA has to lock"
        return Fact("memlock", found, False, fix, FindingName.MEMLOCK_SMALL)
    return Fact("memlock", f"{size(limit)}; only RDMA would need more")


def files(hard: int) -> Fact:
    """The hard RLIMIT_NOFILE: a node raises its own limit to that."""
    if hard == resource.RLIM_INFINITY or hard >= FEW_FILES:
        return Fact("files", "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,} may be open at a time")
    found = f"{hard:,} may be open at a time; a node needs two per attached process and three per peer"
    fix = "ulimit -Hn 65536 (systemd: LimitNOFILE=65536, docker: --ulimit nofile=65536)"
    return Fact("files", found, False, fix, FindingName.FILES_FEW)


def rdma_devices(folder: Path) -> dict[str, list[str]]:
    """The port states of each RDMA device, such as ACTIVE."""
    if not folder.is_dir():
        return {}
    return {
        device.name: [port.read_text().rpartition(":")[2].strip() for port in sorted(device.glob("ports/*/state"))]
        for device in sorted(folder.iterdir())
    }


def rdma(devices: Mapping[str, Sequence[str]], verbs: Mapping[str, bool]) -> Fact:
    """Whether RDMA is usable; `verbs`: for each device file, whether this process may open it."""
    if not devices:
        return Fact("RDMA", "no device; nixl and ucx reach other hosts over TCP", finding=FindingName.RDMA_NONE)
    found = ", ".join(f"{name} ({', '.join(states) or 'no port'})" for name, states in devices.items())
    if not any("ACTIVE" in states for states in devices.values()):
        fix = "no port is active: check cables, and the subnet manager or `ip link`"
        return Fact("RDMA", found, False, fix, FindingName.RDMA_PORT_DOWN)
    if not any(verbs.values()):
        names = ", ".join(verbs) or "/dev/infiniband/uverbs*"
        fix = "give this user access (docker: --device /dev/infiniband --cap-add IPC_LOCK)"
        return Fact("RDMA", f"{found}, but {names} cannot be opened", False, fix, FindingName.RDMA_NO_ACCESS)
    return Fact("RDMA", found)


def ucx_transports(ucx: Sequence[str], environ: Mapping[str, str], *, has_rdma: bool) -> Fact:
    """The transports UCX will choose from, and the variables that restrict them."""
    chosen = " ".join(f"{name}={environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in environ)
    if not ucx:
        found = f"its Python library is not here {chosen}".rstrip()
        return Fact("UCX", found, finding=FindingName.UCX_UNAVAILABLE)
    found = f"{' '.join(ucx)} {chosen and f'({chosen})'}".rstrip()
    if has_rdma and not any(each.startswith(_RDMA_TRANSPORTS) for each in ucx):
        fix = "there is RDMA, but UCX does not use it: check UCX_TLS and libibverbs"
        return Fact("UCX", found, False, fix, FindingName.UCX_NO_RDMA)
    return Fact("UCX", found)


def _may_lock() -> bool:
    """Whether this process may lock any amount of memory (CAP_IPC_LOCK)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _verbs() -> dict[str, bool]:
    files = sorted(Path("/dev/infiniband").glob("uverbs*"))
    return {str(file): os.access(file, os.R_OK | os.W_OK) for file in files}
