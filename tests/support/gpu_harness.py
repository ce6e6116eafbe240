"""Nodes whose arena is on a GPU of the fake CUDA driver, and processes that use it: all of them real processes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from fake_cuda import fake_cuda
from node_harness import NodeProcess, Puppet, arenas_of
from peers_harness import Cluster

from pdx.config import NodeConfig, socket_path
from pdx.cuda.gpu import Gpu

GRANULE = 2 << 20  # of device memory
_PUPPET = Path(__file__).with_name("gpu_puppet.py")


def on_fake(*command: str, flags: tuple[str, ...] = ()) -> list[str]:
    """The command line of a process of ours that has the fake driver; `flags`: see `fake_cuda`."""
    return [sys.executable, "-P", "-m", "fake_cuda", *flags, *command]


def uuid(ordinal: int = 0) -> str:
    """Of a fake GPU; the same in every process."""
    with fake_cuda(gpus=ordinal + 1):
        return Gpu.find(str(ordinal)).uuid


class GpuNode(NodeProcess):
    """A node with the fake driver."""

    def __init__(self, config: NodeConfig, *flags: str) -> None:
        super().__init__(config, ["-m", "fake_cuda", *flags, "-m", "pdx.node"])

    @property
    def handover(self) -> Path:
        """The socket where it hands over its memory."""
        return Path(f"{socket_path(self.address)}.gpu")

    def close(self) -> None:
        """End it. What it left behind if it was killed goes, too: the next node of its address would do that."""
        super().close()
        if self.process.returncode == -signal.SIGKILL:
            path = socket_path(self.address)
            for left in (path, Path(f"{path}.peers"), self.handover, *arenas_of(self.address)):
                left.unlink(missing_ok=True)


class GpuCluster(Cluster):
    """Nodes that know each other; `gpus` says which are on which GPU of the fake driver, the others on none."""

    def __init__(self, place: Path, names: str, gpus: dict[str, str], **settings: Any) -> None:
        self._gpus = gpus
        super().__init__(place, names, **settings)

    def node(self, name: str, config: NodeConfig) -> NodeProcess:
        """Also those in host memory have the driver, as on a host with GPUs."""
        config = msgspec.structs.replace(config, gpu=self._gpus.get(name, ""))
        return GpuNode(config, "--gpus", "2")


class GpuPuppet(Puppet):
    """A client process with the fake driver (see gpu_puppet.py). Errors come back as [their name, their text]."""

    def __init__(self, address: str, **settings: Any) -> None:
        super().__init__(address, _PUPPET, json.dumps(settings))
