"""A `pdx proxy` in a process of its own, that may open few files; and strangers who connect to it."""

import asyncio
import os
import resource
import socket
import ssl
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from engine_standin import StandIn
from proxy_harness import DEADLINE_S, until, within

from pdx.cli.ports import free_ports


class ProxyProcess:
    """What a test talks to; `client` is honest and has connected already."""

    def __init__(self, process, folder, port, control, client, engine):
        self.process, self.port, self.control, self.client, self.engine = process, port, control, client, engine
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"

    @property
    def log(self):
        return self._log.read_text()

    @property
    def pid(self):
        return self.process.pid

    def num_files(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def dial(self, port=None):
        """A connection that says nothing; nobody waits for it to stand."""
        stream = socket.socket()
        stream.setblocking(False)
        stream.connect_ex(("127.0.0.1", port or self.port))
        return stream

    async def ask(self, client=None, path="/v1/completions"):
        """The status of an honest request."""
        body = {"prompt": "beta", "temperature": 0, "max_tokens": 4}
        async with (client or self.client).post(self.url + path, json=body) as response:
            await within(response.read())
            return response.status


async def started(log, options, **more):
    """`pdx proxy` in a process of its own."""
    with log.open("wb") as out:
        command = [sys.executable, "-P", "-m", "pdx.cli.main", "proxy", *options]
        return await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, **more)


@asynccontextmanager
async def proxy_process(folder, *options, limit=0, control=None, headers=None, ca=None):
    """A proxy with one engine for both roles. `headers`: of its client's requests.
    `ca`: it speaks TLS."""
    engine = StandIn("e")
    await engine.start()
    (port,) = free_ports(1)
    control = control or f"ipc://{folder}/control/p.sock"
    options = ["--port", str(port), "--control", control, "--prefill", engine.url, "--decode", engine.url, *options]

    def limited():
        if limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit if isinstance(limit, tuple) else (limit, limit))

    folder = Path(folder)
    process = await started(folder / "log", options, preexec_fn=limited)
    tls = ssl.create_default_context(cafile=ca) if ca else True
    connector = aiohttp.TCPConnector(force_close=False, ssl=tls)
    timeout = aiohttp.ClientTimeout(total=6 * DEADLINE_S)
    client = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
    made = ProxyProcess(process, folder, port, control, client, engine)
    made.url = made.url.replace("http", "https") if ca else made.url
    try:
        await until(lambda: "listening on" in made.log or process.returncode is not None, 6 * DEADLINE_S)
        assert process.returncode is None, made.log
        assert await made.ask() == 200
        yield made
    finally:
        await client.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
        await engine.stop()
