"""Answers /health; writes its arguments and its child's id to the log; ends with 3 when asked for /die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    """Two paths."""

    def do_GET(self) -> None:
        if self.path == "/die":
            os.write(1, b"out of luck\n")
            os._exit(3)
        self.send_response(200)
        self.end_headers()


if __name__ == "__main__":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    facts = {"argv": sys.argv[1:], "child": child.pid, "bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND")}
    os.write(1, json.dumps(facts).encode() + b"\n")
    if "--broken" in sys.argv:
        raise SystemExit("cannot load the model")
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
