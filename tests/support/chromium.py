"""A headless Chromium, as Debian has it, driven by its own protocol over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
    "--hide-scrollbars",
)


class Tab:
    """One page; `complaints` has what its console said of errors and warnings, and exceptions."""

    def __init__(self, socket):
        self._socket, self._numbers, self._waiting = socket, itertools.count(1), {}
        self.complaints, self._loaded = [], asyncio.Event()
        self.reader = asyncio.create_task(self._read())

    async def _read(self):
        async for message in self._socket:
            said = message.json()
            method, about = said.get("method", ""), said.get("params", {})
            if (waiting := self._waiting.pop(said.get("id"), None)) is not None:
                waiting.set_result(said)
            elif method == "Page.loadEventFired":
                self._loaded.set()
            elif method == "Runtime.exceptionThrown":
                self.complaints.append(str(about["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(about["args"]))
            elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(about["entry"]))
            elif method == "Page.javascriptDialogOpening":
                self.complaints.append(f"a dialog: {about['message']}")
                await self._socket.send_json(
                    {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
                )

    async def do(self, method, **params):
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, 60)
        assert "error" not in said, said
        return said["result"]

    async def open(self, url):
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.do(f"{domain}.enable")
        self._loaded.clear()
        await self.do("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), 60)

    async def value(self, expression):
        """Of a JavaScript expression, a promise's when it is there."""
        said = await self.do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression):
        async with asyncio.timeout(60):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def looks(self, *, width, height=900, is_dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[scheme])
        await self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def picture(self, *, whole=True):
        """A PNG."""
        told = await self.do("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(told["data"])


@asynccontextmanager
async def tab(folder: Path):
    """`folder`: an empty one for the browser's own files."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *_FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
        start_new_session=True,
    )
    try:
        file = folder / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not (file.exists() and len(told := file.read_text().split()) == 2):
                assert process.returncode is None, "Chromium has ended"
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{told[0]}/json/list") as answer:
                [page] = [each for each in await answer.json() if each["type"] == "page"]
            async with client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                made = Tab(socket)
                try:
                    yield made
                finally:
                    made.reader.cancel()
                    await asyncio.gather(made.reader, return_exceptions=True)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
