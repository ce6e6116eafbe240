"""Real remote stores, each a process of its own, and a remote tier over one with a control loop that the test turns."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from functools import partial

import obstore
import psutil
import pytest
from http_server import answering
from obstore.store import MemoryStore, S3Store

from pdx.store.remote.backend import RemoteSettings, open_backend
from pdx.store.tier_setup import open_remote
from pdx.testing.tier_stage import TierStage
from pdx.testing.tier_stage import content as content
from pdx.testing.tier_stage import key as key
from pdx.testing.waiting import wait_until

obstore.put(MemoryStore(), "warm", b"")  # it has threads and descriptors of its own from the first call on
UP_S = 60.0
HANGS_S = 60.0
KEY_ID, SECRET = "pdx-tests", "not-a-secret-of-anybody"


def program(name):
    """Where it is; beside this Python, too, whose folder is on no PATH where nobody has activated it."""
    return shutil.which(name, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))


def free_port():
    """Below the range that the kernel gives out, and with another port 10,000 above it."""
    while True:
        port = random.randrange(10_000, 22_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        return port


def certificate(folder, name="server", host="127.0.0.1"):
    """A certificate for this host that signs itself: its file, and that of its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run([*command.split(), "-addext", f"subjectAltName=IP:{host}"], check=True, capture_output=True)
    return cert, key


def signed(folder, name="signed", host="127.0.0.1"):
    """A certificate for this host that an authority signs: the files of the authority, of itself and of its key."""
    ca, ca_key, cert, key = (folder / f"{name}-{rest}" for rest in ("ca.pem", "ca.key", "server.pem", "server.key"))
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2"
    own = f"{command} -subj /CN={name} -keyout {ca_key} -out {ca} -addext basicConstraints=critical,CA:TRUE"
    subprocess.run(own.split(), check=True, capture_output=True)
    own = f"{command} -subj /CN={host} -keyout {key} -out {cert} -CA {ca} -CAkey {ca_key}"
    own += f" -addext subjectAltName=IP:{host} -addext basicConstraints=critical,CA:FALSE"
    subprocess.run(own.split(), check=True, capture_output=True)
    return ca, cert, key


class Server:
    """A process that a test starts, kills and starts again at the same port."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self.folder, self.port = folder, free_port()
        self.process = None

    def start(self):
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, cwd=self.folder)
        try:
            wait_until(self.is_up, timeout_s=UP_S, what=f"{self.command()[0]} answers; {self.folder}/log")
        except BaseException:
            self.kill()
            raise
        return self

    def is_up(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # all of its threads

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def env(self):
        """By which a client finds it."""
        return {}


class Kept:
    """What Redis keeps, by its own command line."""

    def put(self, name, data):
        self.cli("-x", "SET", f"pdx:{name}", input=data)

    def remove(self, name):
        self.cli("DEL", f"pdx:{name}")

    def put_list(self, name):
        self.cli("DEL", f"pdx:{name}")
        self.cli("LPUSH", f"pdx:{name}", "x")

    def raw(self, name):
        return self.cli("GET", f"pdx:{name}")


class Redis(Server, Kept):
    """redis-server of Debian; `flags` of its command line."""

    def __init__(self, folder, *flags, tls=None):
        super().__init__(folder)
        self.flags, self.tls = flags, tls
        self.url = f"{'rediss' if tls else 'valkey'}://127.0.0.1:{self.port}"

    def command(self):
        where = ["--port", str(self.port)]
        if self.tls:
            cert, secret = map(str, self.tls)
            where = ["--port", "0", "--tls-port", str(self.port), "--tls-cert-file", cert, "--tls-key-file", secret]
            where += ["--tls-auth-clients", "no", "--tls-cluster", "yes", "--tls-ca-cert-file", cert]
        return [
            "redis-server",
            *where,
            "--bind",
            "127.0.0.1",
            "127.0.0.2",
            "--save",
            "",
            "--appendonly",
            "no",
            *self.flags,
        ]

    def cli(self, *words, **settings):
        how = ["--tls", "--cacert", str(self.tls[0])] if self.tls else []
        command = ["redis-cli", "-p", str(self.port), *how, *words]
        return subprocess.run(command, capture_output=True, check=True, **settings).stdout.removesuffix(b"\n")

    def names(self):
        return sorted(line.decode().removeprefix("pdx:") for line in self.cli("--scan").splitlines())


class Cluster(Kept):
    """Three of them as a cluster of Redis."""

    def __init__(self, folder, tls=None):
        folder.mkdir()
        flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
        self.members = [Redis(folder / str(number), *flags, tls=tls) for number in range(3)]
        self.url = self.members[0].url

    def start(self):
        for member in self.members:
            member.start()
        where = [f"127.0.0.1:{member.port}" for member in self.members]
        self.members[0].cli("--cluster", "create", *where, "--cluster-yes")
        self.wait_until_one()
        return self

    def wait_until_one(self):
        wait_until(
            lambda: all(b"cluster_state:ok" in member.cli("cluster", "info") for member in self.members),
            timeout_s=UP_S,
            what="the cluster is one",
        )

    def kill(self):
        for member in self.members:
            member.kill()

    def cli(self, *words, **settings):
        return self.members[0].cli("-c", *words, **settings)

    def names(self):
        return sorted(name for member in self.members for name in member.names())

    def stop(self):
        for member in self.members:
            member.stop()

    def go_on(self):
        for member in self.members:
            member.go_on()

    def env(self):
        return {}


class SeaweedFs(Server):
    """SeaweedFS, a real object store, with one bucket."""

    url = "s3://chunks/team"

    def command(self):
        rights = {
            "name": "pdx",
            "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [rights]}))
        ports = [f"-{name}.port={port}" for name, port in zip(("master", "volume", "filer"), self.others, strict=True)]
        return [
            program("weed"),
            "server",
            f"-dir={self.folder}",
            "-ip=127.0.0.1",
            *ports,
            "-s3",
            f"-s3.port={self.port}",
            "-s3.port.iceberg=0",  # these two have fixed ports, which two servers of one host would both take
            "-s3.port.lance=0",
            "-master.telemetry=false",
            f"-s3.config={self.folder}/s3.json",
            *(f"-s3.{name}.file={file}" for name, file in zip(("cert", "key"), self.tls, strict=False)),
            "-master.volumeSizeLimitMB=64",
            "-volume.max=16",
        ]

    def __init__(self, folder, tls=()):
        super().__init__(folder)
        self.others, self.tls = [free_port() for _ in range(3)], tls
        self.endpoint = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"

    def start(self):
        super().start()
        wait_until(self._makes_bucket, timeout_s=UP_S, what="the bucket is made")
        return self

    def is_up(self):
        try:
            urllib.request.urlopen(self.endpoint, timeout=1, context=ssl._create_unverified_context())
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def env(self):
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def _store(self):
        own = {name.removeprefix("AWS_").lower(): value for name, value in self.env().items()}
        options = {"allow_http": True, "allow_invalid_certificates": True, "timeout": "20s"}
        return S3Store("chunks", prefix="team", client_options=options, **own)

    def _makes_bucket(self):
        from obstore.exceptions import BaseError

        try:
            self.put("made", b"not empty: a volume is there from now on")
        except BaseError:  # it takes a while until it lets itself be written to
            return False
        return True

    def put(self, name, data):
        obstore.put(self._store(), name, data, use_multipart=False)

    def remove(self, name):
        obstore.delete(self._store(), name)

    def raw(self, name):
        return bytes(obstore.get(self._store(), name).bytes())

    def names(self):
        found = [each["path"] for batch in obstore.list(self._store()) for each in batch]
        return sorted(name.removeprefix("team/") for name in found if not name.endswith("made"))


TRICKLE_S = 0.2


class Relay:
    """Passes TCP connections on to a server at `to`. What comes back trickles while `trickles` is set: a byte each
    `TRICKLE_S`. After `cut_after` bytes of answers, if that is set, `on_cut` is called once and no byte follows."""

    def __init__(self, to):
        self.trickles = threading.Event()
        self.cut_after, self.on_cut = None, None
        self._to, self._over, self._lock = to, threading.Event(), threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                client, _ = self._listener.accept()
                try:
                    pair = client, socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    client.close()
                    continue
                self._pairs.append(pair)
                for source, to in (pair, pair[::-1]):
                    self._threads.append(threading.Thread(target=self._pass, args=(source, to, to is pair[0])))
                    self._threads[-1].start()

    def _pass(self, source, to, is_answer):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer:
                    data = self._cut(data)
                while is_answer and data and self.trickles.is_set() and not self._over.wait(TRICKLE_S):
                    to.sendall(data[:1])
                    data = data[1:]
                to.sendall(data)
        self._hang_up(source, to)

    @staticmethod
    def _hang_up(*sockets):
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _cut(self, data):
        with self._lock:
            if self.cut_after is None:
                return data
            is_now = 0 <= self.cut_after < len(data)
            data = data[: max(self.cut_after, 0)]
            self.cut_after = -1 if is_now else self.cut_after - len(data)
        if is_now:
            self.on_cut()
        return data

    def close(self):
        self._over.set()
        self._hang_up(self._listener)
        self._threads[0].join()
        for pair in self._pairs:
            self._hang_up(*pair)
        for thread in self._threads:
            thread.join()
        for each in itertools.chain([self._listener], *self._pairs):
            each.close()


def made(kind, folder, *flags, **settings):
    name = {"s3": "weed"}.get(kind, "redis-server")
    if not program(name):
        pytest.skip(f"there is no {name} here (.ci/run installs it)")
    return {"redis": Redis, "cluster": Cluster, "s3": SeaweedFs}[kind](folder, *flags, **settings)


class Bed(TierStage):
    """A tier over the store at `url`. What it is to load it has been asked for."""

    def __init__(self, folder, url, *, slot_bytes=32 << 10, slots=16, codec="none", content=content, **settings):
        folder.mkdir(exist_ok=True)
        given = RemoteSettings(**{"url": url, "timeout_s": 30.0, "lookup_s": 30.0, "codec": codec} | settings)
        make = partial(open_remote, settings=given)
        super().__init__(folder, make, slot_bytes=slot_bytes, slots=slots, content=content)

    def start(self, verb, number, shard=0, **settings):
        return (self.start_store if verb == "store" else self.start_load)(number, shard, **settings)

    def store(self, number, shard=0, **settings):
        """The error; or "left out"."""
        copy = self.start_store(number, shard, **settings)
        return "left out" if copy is None else self.end(copy)

    def load(self, number, shard=0, *, at=1, nbytes=None, **settings):
        """The error, or None if the right bytes are in the arena."""
        error = self.end(self.start_load(number, shard, at=at, nbytes=nbytes, **settings))
        if error is None:
            slot = self.slot(at, nbytes)
            assert self.bytes_at(slot) == self.content(number, shard, slot.nbytes)
        return error

    def sought(self, numbers, shards=1):
        """See `TierStage.count`."""
        return self.count(list(numbers), shards)

    def paused(self, kind):
        """Wait until nothing is asked of it, for one fault of this kind."""
        self.until(lambda: self.counters["remote_paused"])
        assert self.counters[f"remote_{kind}"] == 1


@contextlib.contextmanager
def running(server, patch):
    """It runs meanwhile, and its client finds it."""
    try:
        server.start()
        for name, value in server.env().items():
            patch.setenv(name, value)
        yield server
    finally:
        server.kill()


def credentials(folder, **words):
    """The name of a file of them."""
    file = folder / "remote.toml"
    file.touch(mode=0o600)
    file.write_text("".join(f'{name} = "{value}"\n' for name, value in words.items()))
    return str(file)


def connections(server):
    """That this process has to a server."""
    own = psutil.Process().net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.raddr.port == server.port for each in own)


class S3Handler(http.server.BaseHTTPRequestHandler):
    """Of a store that is not real."""

    def say(self, status, text=""):
        with contextlib.suppress(OSError):  # who asked may be gone
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *text):
        pass


@contextlib.contextmanager
def s3_answers(handler, patch):
    """A server that is this store, and that a client finds by the environment."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    with answering(server):
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("AWS_REGION", "x")
        yield server


def opened(url, **settings):
    return open_backend(RemoteSettings(**{"url": url, "timeout_s": 1.0, "lookup_s": 1.0} | settings))
