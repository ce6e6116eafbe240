"""Our own tiers pass the conformance suite: files, Redis (one and a cluster), and S3 by SeaweedFS."""

import contextlib
import os
import threading

import pytest
from remote_bed import made, running

from pdx.store.disk.chunk_file import verify
from pdx.store.disk.tier import DiskTier
from pdx.store.remote.backend import RemoteSettings
from pdx.store.tier_setup import open_remote
from pdx.testing.tier_conformance import TierConformance
from pdx.testing.tier_stage import TierStore

MIB = 1 << 20


class Files(TierStore):
    """A folder."""

    def __init__(self, folder):
        self.root = folder / "tier"

    def open(self, host, codec="none"):
        return DiskTier(host, self.root, 64 * MIB, codec=codec)

    def alter(self, key, shard, change):
        [path] = self.root.glob(f"??/{key.hex()}-{shard}-*.chunk")
        data = change(path.read_bytes())
        path.unlink()
        if data is not None:
            path.write_bytes(data)

    @contextlib.contextmanager
    def silent(self):
        goes_on = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("preadv", "pwritev"):
                real = getattr(os, name)
                patch.setattr(os, name, lambda *args, _real=real: (goes_on.wait(60), _real(*args))[1])
            try:
                yield
            finally:
                goes_on.set()


class TestFiles(TierConformance):
    @pytest.fixture
    def store(self, tmp_path):
        store = Files(tmp_path)
        yield store
        for path in store.root.glob("??/*.chunk"):
            verify(path, is_direct=False)


class Remote(TierStore):
    """A server of its own process. `limit_s`: of its calls."""

    def __init__(self, server, limit_s):
        self.server, self.limit_s = server, limit_s

    def open(self, host, codec="none"):
        settings = RemoteSettings(url=self.server.url, timeout_s=self.limit_s, lookup_s=self.limit_s, codec=codec)
        return open_remote(host, settings)

    def alter(self, key, shard, change):
        name = f"v3/{key.hex()}-{shard}"
        data = change(self.server.raw(name))
        if data is None:
            self.server.remove(name)
        else:
            self.server.put(name, data)

    @contextlib.contextmanager
    def silent(self):
        self.server.stop()
        try:
            yield
        finally:
            self.server.go_on()


@pytest.fixture(scope="class")
def server(request, tmp_path_factory):
    """One for all tests of a class."""
    with pytest.MonkeyPatch.context() as patch:
        if request.cls.kind == "s3":
            server = request.getfixturevalue("s3")
            for name, value in server.env().items():
                patch.setenv(name, value)
            yield server
        else:
            with running(made(request.cls.kind, tmp_path_factory.mktemp("store") / "server"), patch) as server:
                yield server


class OfServer(TierConformance):
    kind: str

    @pytest.fixture
    def store(self, server, request):
        return Remote(server, 1.0 if "does_not_answer" in request.node.name else 30.0)


class TestRedis(OfServer):
    kind = "redis"


class TestS3(OfServer):
    kind = "s3"


@pytest.mark.long
class TestCluster(OfServer):
    kind = "cluster"
