"""Two nodes behind a proxy whose verbs need a token; see `cache_bed`."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache_bed import NODES, bed, prompt

from pdx.cli.ports import free_ports
from pdx.client.controller import Controller
from pdx.errors import PdxError
from pdx.testing.waiting import wait_until

TOKEN = secrets.token_hex(16)


@contextlib.contextmanager
def proxy(control: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `pdx proxy` in a process of its own."""
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "proxy", "--port", str(port), "--control", control, *options]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def proxied_bed(place: Path) -> Iterator[Any]:
    """`url` and `token_file` are the proxy's."""
    control = f"ipc://{place}/control/p.sock"
    (place / "control").mkdir(mode=0o700)
    (port,) = free_ports(1)
    (place / "token").write_text(TOKEN)
    (place / "token").chmod(0o600)
    with bed(place, proxy=control) as two:
        made: Any = two
        admin = f"127.0.0.1:{port}"
        with proxy(control, "--admin", admin, "--cache-token-file", str(place / "token")):
            made.url, made.token_file = f"http://{admin}", str(place / "token")
            with Controller(proxy=made.url, token=TOKEN) as cache:
                wait_until(lambda: _knows(cache), timeout_s=60.0, what="the proxy knows both nodes and their engines")
            yield made


def _knows(cache: Controller) -> bool:
    with contextlib.suppress(PdxError):
        return cache.instances == list(NODES) and bool(cache.find(prompt()).tiers)
    return False
