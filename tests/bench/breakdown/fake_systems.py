"""Systems for the breakdown without engines: HTTP servers on threads, which answer at once and count like vLLM."""

import time
import zlib

from standin_server import StandInServer, StandInSystem

from pdx.telemetry.timeline import Event, Moment
from pdx.telemetry.trace import Lane, Tracer

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
STEPS = {
    "received": 0,
    "prefill_sent": 1,
    "prefill_answered": 14,
    "decode_sent": 15,
    "decode_first": 40,
    "done": 50,
}


def answer(prompt, tokens):
    """What every right system says."""
    return "".join(LETTERS[(zlib.crc32(str(prompt).encode()) >> shift) % len(LETTERS)] for shift in range(tokens))


class Server(StandInServer):
    """One system that runs. Its system's journal is told of every request."""

    def __init__(self, system, trace):
        self.system = system
        self.arrived_ns = {}
        self._tracer = Tracer(trace, "engine/0") if trace is not None else None
        super().__init__()
        self.prefill_url, self.decode_url = self.url, f"{self.url}/decode" if system.engines == 2 else self.url

    def complete(self, body, request_id):
        system, prompt = self.system, body["prompt"]
        with self.lock:
            self.arrived_ns[request_id] = time.monotonic_ns()
            system.num_asked += 1
            number = system.num_asked
        system.journal.append((system.name, prompt))
        if system.hangs(number):
            return None
        if system.fails(number):
            return 500, b"out of order"
        text = answer(prompt, body["max_tokens"])
        with self.lock:  # before the client can ask for more
            self.num_done += 1
            self.found["local_compute"] += len(prompt)
            if self._tracer is not None and self._tracer.is_on:
                start = self.arrived_ns[request_id]
                self._tracer.span(Lane.GATHER, f"t-{request_id}", 0, 1, start + 3 * MS, start + 4 * MS, 100)
                self._tracer.flush()
        choices = [{"text": letter} for letter in (text.swapcase() if system.is_wrong else text)]
        return choices, len(text), {"x-pdx-transfer-id": f"t-{request_id}"} if system.is_pdx else {}

    def moments(self, request_id):
        at = self.arrived_ns[request_id] / MS
        return {name: at + after for name, after in STEPS.items()} if not self.system.is_pdx else None

    def timeline(self, transfer):
        at = self.arrived_ns[transfer.removeprefix("t-")]
        return [Moment(event, at + after * MS, nbytes=100) for event, after in MOMENTS.items()]

    def died(self):
        return ""

    def close(self):
        super().close()
        if self._tracer is not None:
            self._tracer.close()


class FakeSystem(StandInSystem):
    """`journal` may be shared by several. `hangs` says which requests, by their number, are never answered."""

    def __init__(self, name, journal, *, hangs=lambda _: False, **how):
        super().__init__(name, engines=1 if name == "plain" else 2, **how)
        self.is_pdx = name.startswith("pdx")
        self.journal, self.hangs = journal, hangs
        self.num_asked = 0

    def run(self, trace):
        return Server(self, trace)
