"""Systems for the reuse bench without engines: HTTP servers on threads, which cache prefixes and count like vLLM."""

import zlib
from collections import OrderedDict

from standin_server import StandInServer, StandInSystem

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


class Server(StandInServer):
    """One engine of a system that runs."""

    daemon_threads = True

    def __init__(self, system, kept):
        self.system, self.kept, self.own = system, kept, Cache(system.room)
        self.num_asked = 0
        super().__init__()

    def reset(self):
        self.own.blocks.clear()
        return super().reset()

    def complete(self, body, request_id):
        system, prompt = self.system, body["prompt"]
        with self.lock:
            self.num_asked += 1
            number = self.num_asked
        system.journal.append((system.name, self.url, prompt))
        if system.fails(number):
            return 500, b"out of order"
        ids = answer(prompt, body["max_tokens"])
        if system.is_wrong:
            ids = [token + 1 for token in ids]
        with self.lock:
            local = self.own.find(prompt) if system.room else 0
            external = self.kept.find(prompt, local) if self.kept else 0
            self.found["local_cache_hit"] += local
            self.found["external_kv_transfer"] += external
            self.found["local_compute"] += len(prompt) - local - external
            for cache in filter(None, (self.own, self.kept)):
                cache.add(prompt + ids)
            self.num_done += 1
        return [{"text": "x", "token_ids": [token]} for token in ids], len(ids), {}


class Running:
    """A started system."""

    def __init__(self, system):
        kept = Cache() if system.keeps else None
        self.engines = [Server(system, kept) for _ in range(system.engines)]
        self.prefill_url, self.url = self.engines[0].url, self.engines[-1].url

    def died(self):
        return ""

    def close(self):
        for engine in self.engines:
            engine.close()


class StandIn(StandInSystem):
    """`room`: blocks of its engine's own cache. `keeps`: whether something beside it keeps all blocks."""

    def __init__(self, name, *, room=0, keeps=False, **how):
        super().__init__(name, **how)
        self.room, self.keeps = room, keeps

    def run(self, trace):
        return Running(self)
