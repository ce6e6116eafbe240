"""Answers /health; writes its arguments and its child's id to the log; ends with 3 when asked for /die.

Attaches to its node as an engine does; with --late once it is asked for /attach. With --loads FIFO it loads its model
until somebody opens that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from pdx.client.connection import Connection
from pdx.wire.messages import VERSION, Hello

ATTACHED = []


def attach() -> None:
    """As the scheduler of the engine that the connector's settings describe."""
    settings = json.loads(sys.argv[sys.argv.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    hello = Hello(
        VERSION, os.getpid(), "scheduler", engine=settings["role"], role=settings["role"], url=settings["url"]
    )
    ATTACHED.append(Connection(settings["node"], hello))
    assert ATTACHED[-1].attach(30.0)


class Handler(BaseHTTPRequestHandler):
    """Two paths."""

    def do_GET(self) -> None:
        if self.path == "/die":
            os.write(1, b"out of luck\n")
            os._exit(3)
        if self.path == "/attach":
            attach()
        self.send_response(200)
        self.end_headers()


if __name__ == "__main__":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    facts = {"argv": sys.argv[1:], "child": child.pid, "bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND")}
    os.write(1, json.dumps(facts).encode() + b"\n")
    if "--broken" in sys.argv:
        raise SystemExit("cannot load the model")
    if "--loads" in sys.argv:
        open(sys.argv[sys.argv.index("--loads") + 1]).close()
    if "--late" not in sys.argv:
        attach()
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
