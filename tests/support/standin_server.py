"""Stand-ins for vLLM's server, on a thread: one stream for each completion, counters, a cache to be emptied; and for
the systems that benches compare."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pdx.bench.systems.system import CannotRun


class StandInServer(ThreadingHTTPServer):
    """`complete` says what a request gets; `found` and `num_done` are what its metrics tell."""

    daemon_threads = False
    request_queue_size = 64  # a burst's connections come at once

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.found = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.num_done = self.num_resets = 0
        self.lock = threading.Lock()
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def complete(self, body, request_id):
        """The choices of each event, the number of tokens, and headers; an error's status and text; or None: no answer
        as long as this server is there."""
        raise NotImplementedError

    def reset(self):
        """Status and body of the answer."""
        self.num_resets += 1
        return 200, b'{"success":true}'

    def page(self):
        """Its metrics; None: it has none."""
        done = self.num_done
        lines = [
            f'vllm:request_queue_time_seconds_sum{{engine="0"}} {0.001 * done}',
            f'vllm:request_prefill_time_seconds_sum{{engine="0"}} {0.010 * done}',
            f'vllm:request_prefill_time_seconds_count{{engine="0"}} {done}',
            *(
                f'vllm:prompt_tokens_by_source_total{{engine="0",source="{source}"}} {count}'
                for source, count in self.found.items()
            ),
        ]
        return "\n".join(lines)

    def models(self):
        return []

    def close(self):
        self.is_over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # for a client that connects and says nothing, as one that was interrupted may

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            self._send(json.dumps({"data": self.server.models()}).encode(), {"Content-Type": "application/json"})
        elif (page := self.server.page()) is not None:
            self._send(page.encode())
        else:
            self._send(b"", status=404)

    def do_POST(self):
        if self.path == "/reset_prefix_cache":
            status, said = self.server.reset()
            self._send(said, status=status)
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.server.complete(body, self.headers["X-Request-Id"])
        if answer is None:
            self.server.is_over.wait()
        elif isinstance(answer[0], int):
            self._send(answer[1], status=answer[0])
        else:
            choices, count, headers = answer
            usage = {"prompt_tokens": len(asked_text(body)), "completion_tokens": count}
            events = [*({"choices": [each]} for each in choices), {"choices": [], "usage": usage}]
            stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            self._send(stream + b"data: [DONE]\n\n", headers)

    def _send(self, body, headers=None, status=200):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def asked_text(body):
    """All that a request says; one character, or one id, is one token."""
    return body["prompt"] if "prompt" in body else "".join(message["content"] for message in body["messages"])


class StandInSystem:
    """A system by name, as `pdx.bench.systems.names` has them. `fails`: which requests, by number, are refused."""

    polls_idle = is_pdx = False

    def __init__(self, name, *, engines=1, cannot="", is_wrong=False, fails=lambda _: False):
        self.name, self.title, self.engines = name, f"{name}, which is not there", engines
        self.cannot, self.is_wrong, self.fails = cannot, is_wrong, fails
        self.journal, self.started = [], []

    def run(self, trace):
        """What runs of it."""
        raise NotImplementedError

    def why_not(self):
        return ""

    def versions(self):
        return {"stand-in": "1"}

    def commands(self, bed):
        return [f"serve {self.name}"]

    def start(self, bed, *, trace=None):
        if self.cannot:
            raise CannotRun(self.cannot)
        self.started.append(self.run(trace))
        return self.started[-1]
