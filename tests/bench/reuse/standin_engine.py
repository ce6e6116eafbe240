"""Systems for the reuse bench without engines: HTTP servers on threads, which cache prefixes and count like vLLM."""

import json
import threading
import zlib
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pdx.bench.systems.system import CannotRun

BLOCK = 16


def answer(prompt, tokens):
    """What every right system says: it depends on all of the prompt."""
    digest = zlib.crc32(repr(prompt).encode())
    return [(digest >> number % 24) % 90 for number in range(tokens)]


class Cache:
    """Blocks by all that is before them; `room`: the most of them, the least recently used leave."""

    def __init__(self, room=None):
        self.room, self.blocks = room, OrderedDict()

    def find(self, prompt, start=0):
        """Tokens from `start` on, in whole blocks and without a gap."""
        at = start
        while at + BLOCK < len(prompt) and tuple(prompt[: at + BLOCK]) in self.blocks:
            at += BLOCK
        return at - start

    def add(self, tokens):
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            self.blocks[tuple(tokens[:end])] = None
            self.blocks.move_to_end(tuple(tokens[:end]))
        while self.room is not None and len(self.blocks) > self.room:
            self.blocks.popitem(last=False)


class Server(ThreadingHTTPServer):
    """One engine of a system that runs."""

    daemon_threads = True
    request_queue_size = 64  # a burst's connections come at once

    def __init__(self, system, kept):
        super().__init__(("127.0.0.1", 0), Handler)
        self.system, self.kept = system, kept
        self.own = Cache(system.room)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.found = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.num_done = self.num_asked = self.num_resets = 0
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def take(self, prompt, ids):
        """Count where its tokens were, and keep it."""
        with self.lock:
            local = self.own.find(prompt) if self.system.room else 0
            external = self.kept.find(prompt, local) if self.kept else 0
            self.found["local_cache_hit"] += local
            self.found["external_kv_transfer"] += external
            self.found["local_compute"] += len(prompt) - local - external
            self.own.add(prompt + ids)
            if self.kept:
                self.kept.add(prompt + ids)
            self.num_done += 1

    def end(self):
        self.shutdown()
        self._thread.join()
        self.server_close()


class Running:
    """A started system."""

    def __init__(self, system):
        kept = Cache() if system.keeps else None
        self.engines = [Server(system, kept) for _ in range(system.engines)]
        self.prefill_url, self.url = self.engines[0].url, self.engines[-1].url

    def cpu_s(self):
        return {"engine": self.engines[-1].num_done * 0.5}

    def line_bytes(self):
        return None

    def died(self):
        return ""

    def close(self):
        for engine in self.engines:
            engine.end()


class Handler(BaseHTTPRequestHandler):
    timeout = 10.0

    def log_message(self, *_):
        pass

    def do_GET(self):
        done = self.server.num_done
        lines = [
            f'vllm:request_prefill_time_seconds_count{{engine="0"}} {done}',
            *(
                f'vllm:prompt_tokens_by_source_total{{engine="0",source="{source}"}} {count}'
                for source, count in self.server.found.items()
            ),
        ]
        self._send("\n".join(lines).encode())

    def do_POST(self):
        if self.path == "/reset_prefix_cache":
            self.server.num_resets += 1
            self.server.own.blocks.clear()
            self._send(b'{"success":true}')
            return
        system = self.server.system
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.num_asked += 1
            number = self.server.num_asked
        system.journal.append((system.name, self.server.url, body["prompt"]))
        if system.fails(number):
            self.send_error(500, "out of order")
            return
        ids = answer(body["prompt"], body["max_tokens"])
        if system.is_wrong:
            ids = [token + 1 for token in ids]
        self.server.take(body["prompt"], ids)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        events = [{"choices": [{"text": "x", "token_ids": [token]}]} for token in ids]
        events.append({"choices": [], "usage": usage})
        self._send(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n")

    def _send(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class StandIn:
    """A system by name. `room`: blocks of its engine's own cache. `fails`: which requests, by number, are refused."""

    polls_idle = False
    is_pdx = False
    is_pair = False

    def __init__(self, name, *, room=0, keeps=False, engines=1, cannot="", is_wrong=False, fails=lambda _: False):
        self.name, self.title = name, f"{name}, which is not there"
        self.room, self.keeps, self.engines = room, keeps, engines
        self.cannot, self.is_wrong, self.fails = cannot, is_wrong, fails
        self.journal = []
        self.started = []

    def why_not(self):
        return ""

    def versions(self):
        return {"stand-in": "1"}

    def commands(self, bed):
        return [f"serve {self.name}"]

    def start(self, bed, *, trace=None):
        if self.cannot:
            raise CannotRun(self.cannot)
        self.started.append(Running(self))
        return self.started[-1]
