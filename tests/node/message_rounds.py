"""The messages of which `test_message_cost.py` counts the steps: a round of them, which leaves the node as it was."""

from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import Abort, Admit, Cancel, Fill, Release
from pdx.wire.verbs import Status

WRITER_CHUNKS = 200  # of the writer that dies
ASKED_CHUNKS = 64  # in one reservation
CANCELLED_CHUNKS = 8
FILL_CHUNKS = 2_000  # sealed by one message when a store is filled
TAIL_BYTES = 100


class Load:
    """A node with `chunks` sealed chunks, room for `WRITER_CHUNKS` more, and what it is asked; `bed` attaches to it."""

    def __init__(self, bed, chunks):
        self.chunks = chunks
        self.bed = bed
        self._names = 0
        self._client = bed.attach()
        self.seal(chunks)

    @staticmethod
    def arena_bytes(chunks):
        return (chunks + WRITER_CHUNKS) * GRANULE_BYTES

    def round(self):
        """The steps of a round, each with its name; whoever drives it carries each out and sends back the answer.

        Steps of one name belong together. The store holds the same before and after.
        """
        client = self._client
        reserved = yield "reserve 64", lambda: client.ask(Admit(self._keys(ASKED_CHUNKS), GRANULE_BYTES))
        yield "abort 64", lambda: client.ask(Abort(reserved.granted_slots))
        writer = self.bed.attach()
        writer.ask(Admit(self._keys(WRITER_CHUNKS), GRANULE_BYTES))  # from now on the store is full
        reserved = yield "reserve 64, evicting", lambda: client.ask(Admit(self._keys(64), GRANULE_BYTES))
        yield "seal 64", lambda: client.ask(Fill(reserved.granted_slots, layers=1, seal=True))
        yield from self._partial_chunk()
        yield from self._cancel()
        yield "status", lambda: client.ask(Status())
        yield "death of a writer", writer.end
        self.seal(self.chunks - self.sealed())

    def _partial_chunk(self):
        """A chunk and the end of a prompt, from one process to another."""
        client, keys, transfer = self._client, self._keys(2), self._transfer()
        ask = Admit(keys, GRANULE_BYTES, tail_nbytes=TAIL_BYTES, transfer=transfer, part="writes")
        name = "partial chunk: reserve, seal, look up, release"
        reserved = yield name, lambda: client.ask(ask)
        assert len(reserved.granted_slots) == len(keys)
        yield name, lambda: client.ask(Fill(reserved.granted_slots, layers=1, seal=True))
        found = yield name, lambda: client.ask(Admit(keys, lease_s=30.0, transfer=transfer))
        assert found.hits == len(keys)
        yield name, lambda: client.ask(Release(found.lease))

    def _cancel(self):
        client, transfer = self._client, self._transfer()
        reserved = client.ask(Admit(self._keys(CANCELLED_CHUNKS), GRANULE_BYTES, transfer=transfer, part="writes"))
        yield "cancel of 8 chunks", lambda: client.ask(Cancel(transfer))
        client.ask(Abort(reserved.granted_slots))
        yield "cancel of an unknown transfer", lambda: client.ask(Cancel(self._transfer()))

    def sealed(self):
        return self._client.ask(Status()).chunks["sealed"]

    def seal(self, count):
        for first in range(0, count, FILL_CHUNKS):
            keys = self._keys(min(FILL_CHUNKS, count - first))
            reserved = self._client.ask(Admit(keys, GRANULE_BYTES))
            assert len(reserved.granted_slots) == len(keys), f"no room for {len(keys)} chunks"
            self._client.ask(Fill(reserved.granted_slots, layers=1, seal=True))

    def _keys(self, count):
        self._names += count
        return [number.to_bytes(16, "little") for number in range(self._names - count, self._names)]

    def _transfer(self):
        self._names += 1
        return f"transfer-of-the-bench-{self._names}"


def drive(steps, take):
    """Carry out a round: `take` is given each step's name and call, and returns what the call returns."""
    answer = None
    while True:
        try:
            name, call = steps.send(answer)
        except StopIteration:
            return
        answer = take(name, call)
