"""Answers /health, writes its arguments and its child's id to the log, attaches to its node as an engine does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from pdx.client.connection import Connection
from pdx.wire.messages import VERSION, Hello


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def said(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


if __name__ == "__main__":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    facts = {"argv": sys.argv[1:], "child": child.pid, "bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND")}
    os.write(1, json.dumps(facts).encode() + b"\n")
    settings = json.loads(said("--kv-transfer-config"))["kv_connector_extra_config"]
    role, url = settings["role"], settings["url"]
    attached = Connection(settings["node"], Hello(VERSION, os.getpid(), "scheduler", engine=url, role=role, url=url))
    assert attached.attach(30.0)
    HTTPServer(("127.0.0.1", int(said("--port"))), Handler).serve_forever()
