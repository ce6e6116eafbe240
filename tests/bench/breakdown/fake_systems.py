"""Systems for the breakdown without engines: HTTP servers on threads, which answer at once and count like vLLM."""

import json
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pdx.bench.harness.prompts import QUESTION_TOKENS
from pdx.bench.systems.system import CannotRun
from pdx.telemetry.timeline import Event, Moment
from pdx.telemetry.trace import Lane, Tracer

KEEPS = ("pdx-both", "lmcache")
LETTERS = "abcdefghij"
MS = 1_000_000
# After the request's arrival, in ms.
MOMENTS = {
    Event.RECEIVED: 0,
    Event.PREFILL_SENT: 1,
    Event.ADMITTED: 2,
    Event.PREFILL_END: 12,
    Event.SEALED: 12,
    Event.LOAD_START: 15,
    Event.LOAD_END: 17,
    Event.RUNNABLE: 18,
    Event.DECODE_FIRST: 20,
}


def answer(prompt, tokens):
    """What every right system says."""
    return "".join(LETTERS[(zlib.crc32(str(prompt).encode()) >> shift) % len(LETTERS)] for shift in range(tokens))


def never(number):
    """Of no request."""
    return False


class Server(ThreadingHTTPServer):
    """One system that runs. Its system's journal is told of every request."""

    daemon_threads = False

    def __init__(self, system, trace):
        super().__init__(("127.0.0.1", 0), Handler)
        self.system = system
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.prefill_url, self.decode_url = self.url, f"{self.url}/decode" if system.engines == 2 else self.url
        self.arrived_ns = {}
        self.own, self.kept = set(), set()  # documents in the engine's own cache, and behind its connector
        self.found = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.num_resets = 0
        self.num_done = 0
        self.is_over = threading.Event()
        self._tracer = Tracer(trace, "engine/0") if trace is not None else None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def arrive(self, request_id):
        with self._lock:
            self.arrived_ns[request_id] = time.monotonic_ns()
            self.system.num_asked += 1
            return self.system.num_asked

    def look_up(self, prompt):
        """Where the tokens of a prompt are: all but the last one in the own cache, the document behind a connector."""
        document = str(prompt[:-QUESTION_TOKENS])  # text, or a list of token ids
        local = len(prompt) - 1 if document in self.own else 0
        external = len(prompt) - QUESTION_TOKENS if document in self.kept and not local else 0
        self.found["local_compute"] += len(prompt) - local - external
        self.found["local_cache_hit"] += local
        self.found["external_kv_transfer"] += external
        self.own.add(document)
        if self.system.keeps and not self.system.forgets:
            self.kept.add(document)

    def finish(self, request_id, prompt):
        with self._lock:
            self.num_done += 1
            self.look_up(prompt)
            if self._tracer is not None and self._tracer.is_on:
                start = self.arrived_ns[request_id]
                self._tracer.span(Lane.GATHER, f"t-{request_id}", 0, 1, start + 3 * MS, start + 4 * MS, 100)
                self._tracer.flush()

    def moments(self, request_id):
        at = self.arrived_ns[request_id] / MS
        steps = {
            "received": 0,
            "prefill_sent": 1,
            "prefill_answered": 14,
            "decode_sent": 15,
            "decode_first": 40,
            "done": 50,
        }
        return {name: at + after for name, after in steps.items()} if not self.system.is_pdx else None

    def timeline(self, transfer):
        at = self.arrived_ns[transfer.removeprefix("t-")]
        return [Moment(event, at + after * MS, nbytes=100) for event, after in MOMENTS.items()]

    def died(self):
        return ""

    def close(self):
        self.is_over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
        if self._tracer is not None:
            self._tracer.close()


class Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # for a client that connects and says nothing, as one that was interrupted may

    def log_message(self, *_):
        pass

    def do_GET(self):
        done = self.server.num_done
        lines = [
            f'vllm:request_queue_time_seconds_sum{{engine="0"}} {0.001 * done}',
            f'vllm:request_prefill_time_seconds_sum{{engine="0"}} {0.010 * done}',
            f'vllm:request_prefill_time_seconds_count{{engine="0"}} {done}',
            *(
                f'vllm:prompt_tokens_by_source_total{{engine="0",source="{source}"}} {count}'
                for source, count in self.server.found.items()
            ),
        ]
        self._send(200, "\n".join(lines).encode())

    def do_POST(self):
        if self.path == "/reset_prefix_cache":
            self.reset()
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request_id = self.headers["X-Request-Id"]
        number = self.server.arrive(request_id)
        self.server.system.journal.append((self.server.system.name, body["prompt"]))
        if self.server.system.hangs(number):
            self.server.is_over.wait()
            return
        if self.server.system.fails(number):
            self._send(500, b"out of order")
            return
        text = answer(body["prompt"], body["max_tokens"])
        if self.server.system.is_wrong:
            text = text.swapcase()
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(text)}
        events = [{"choices": [{"text": letter}]} for letter in text] + [{"choices": [], "usage": usage}]
        stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self.server.finish(request_id, body["prompt"])  # before the client can ask for more
        self._send(200, stream, {"x-pdx-transfer-id": f"t-{request_id}"} if self.server.system.is_pdx else {})

    def reset(self):
        if self.server.system.is_closed:
            self._send(404, b"Not Found")
            return
        self.server.num_resets += 1
        self.server.own.clear()
        self._send(200, b'{"success":true}')

    def _send(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class FakeSystem:
    """A system by name, as `pdx.bench.systems.names` has them. `journal` may be shared by several.

    `fails` and `hangs` say which requests, by their number, are refused and which ones are never answered.
    """

    def __init__(self, name, journal, *, fails=never, hangs=never, cannot="", is_wrong=False):
        self.name, self.title = name, f"{name}, which is not there"
        self.keeps = name in KEEPS
        self.is_pair = name != "plain" and not self.keeps
        self.is_pdx = self.is_pair and name.startswith("pdx")
        self.engines = 2 if self.is_pair else 1
        self.forgets = False  # what it keeps
        self.is_closed = False  # to whoever wants its cache reset
        self.journal, self.fails, self.hangs, self.cannot, self.is_wrong = journal, fails, hangs, cannot, is_wrong
        self.num_asked = 0
        self.num_started = 0
        self.polls_idle = False

    def why_not(self):
        return ""

    def versions(self):
        return {"fake": "1"}

    def commands(self, bed):
        return [f"serve {self.name}"]

    def start(self, bed, *, trace=None):
        if self.cannot:
            raise CannotRun(self.cannot)
        self.num_started += 1
        return Server(self, trace)


class FakeFleet:
    """Keeps all systems, or (`holds_all` False) one at a time."""

    def __init__(self, systems, traces, *, holds_all=True):
        self.holds_all = holds_all
        self.num_rests = 0
        self._systems, self._traces, self._running = systems, traces, {}

    @property
    def running(self):
        return list(self._running)

    def get(self, name):
        if name not in self._running:
            if not self.holds_all:
                self.close()
            trace = self._traces / name if self._systems[name].is_pdx else None
            self._running[name] = self._systems[name].start(None, trace=trace)
        return self._running[name]

    def rest(self):
        self.num_rests += 1

    def close(self):
        while self._running:
            self._running.popitem()[1].close()
