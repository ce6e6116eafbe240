"""Keeps the index of chunks right: asks nodes for their changes, notices what is missing, and asks again."""

from __future__ import annotations

import secrets
from collections.abc import Container, Sequence

import msgspec

from pdx.memory.keys import KEY_BYTES
from pdx.proxy.chunk_index import ChunkIndex
from pdx.proxy.control import Control
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.wire.base import MAX_RUN_KEYS
from pdx.wire.proxy import Changes, Follow

ACKNOWLEDGE = 4  # frames at a time


class _Stream(msgspec.Struct):
    """What a node tells."""

    number: int
    asked_epoch: int  # of the report that made us ask
    epoch: int = 0
    seq: int = 0
    telling: int = 0
    frame: int = 0
    acknowledged: int = 0
    is_whole: bool = False
    seen_at: float = 0.0


class Following:
    """One thread, the event loop's. Who asks for chunks asks `index`."""

    def __init__(self, index: ChunkIndex, control: Control, env: Env, *, timeout_s: float) -> None:
        """`control` asks nodes; where one cannot be asked now, its next report has it asked again."""
        self.index = index
        self._control = control
        self._timeout_s = timeout_s
        self._clock = env.clock
        self._faults = env.faults
        self._counters = env.counters
        self._streams: dict[str, _Stream] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all that is in the nodes that report is known, as far as it has reached this process."""
        return self.index.is_complete and all(stream.is_whole for stream in self._streams.values())

    def lookup(self, keys: Sequence[bytes]) -> tuple[dict[str, dict[str, int]], bool]:
        """See `ChunkIndex.lookup`; and whether that is everything (`is_complete`)."""
        return self.index.lookup(keys), self.is_complete

    def heard(self, node: str, epoch: int) -> None:
        stream = self._streams.get(node)
        if stream is None:
            stream = self._streams[node] = _Stream(_draw(), epoch)
        elif stream.asked_epoch != epoch:
            self._ask_again(stream)
            stream.asked_epoch = epoch
        stream.seen_at = self._clock()
        self._ask(node, stream)

    def took(self, node: str, changes: Changes) -> None:
        stream = self._streams.get(node)
        if stream is None or changes.stream != stream.number or changes.epoch != stream.asked_epoch:
            return  # of a stream, or a life, that is over
        is_same = changes.telling == stream.telling or not stream.frame
        if is_same and changes.frame <= stream.frame:
            return
        if not is_same or changes.frame != stream.frame + 1:
            self._counters["chunk_changes_missed"] += 1
            self._ask_again(stream)
            self._ask(node, stream)
            return
        num_keys = sum(len(run.keys) for run in changes.runs) // KEY_BYTES
        if num_keys > MAX_RUN_KEYS:
            self._refuse(node, stream, f"it tells {num_keys} keys in one frame, which has {MAX_RUN_KEYS}")
            return
        stream.frame, stream.telling = changes.frame, changes.telling
        if changes.first:
            self.index.drop(node)
            stream.is_whole = False
            if not self.index.may_begin(node):
                self._refuse(node, stream, "it begins anew faster than what it told before is forgotten")
                return
        before = self.index.is_complete
        for run in changes.runs:
            (self.index.add if run.is_stored else self.index.remove)(node, run.tier, run.keys)
        if before and not self.index.is_complete:
            self._faults.warn(
                "chunk index",
                f"the index of chunks is full: those of node {printable(node)} are known in part; see "
                "--chunk-index-limit; what is left out counts as chunk_index_full",
            )
        stream.epoch, stream.seq = changes.epoch, changes.seq
        stream.is_whole = stream.is_whole or changes.whole
        self._counters["chunk_changes"] += 1
        if stream.frame - stream.acknowledged >= ACKNOWLEDGE:
            self._ask(node, stream)

    def look(self, members: Container[str] | None) -> None:
        """Forget nodes that are silent, or no `members` any more; to be called a few times a second. What was left
        out of others for lack of room is asked for with their next reports, when there is some."""
        oldest = self._clock() - self._timeout_s
        for node, stream in list(self._streams.items()):
            if stream.seen_at < oldest or not (members is None or node in members):
                del self._streams[node]
                self.index.drop(node)
        self.index.sweep()
        for node in self.index.lacking:
            if (stream := self._streams[node]).is_whole:  # else it is telling, or is going to
                stream.is_whole = False
                self._ask_again(stream)

    def _refuse(self, node: str, stream: _Stream, why: str) -> None:
        """What it tells is not taken in; with its next report it is asked anew, for everything."""
        self._counters["chunk_changes_missed"] += 1
        self._faults.warn(f"chunk index {node}", printable(f"the index of chunks lacks those of node {node!r}: {why}"))
        stream.is_whole = False
        self._ask_again(stream)

    def _ask_again(self, stream: _Stream) -> None:
        stream.number, stream.frame, stream.acknowledged = _draw(), 0, 0

    def _ask(self, node: str, stream: _Stream) -> None:
        """From what is known on; where that is not all of it, from the beginning: the node may have forgotten how much
        of that it has told."""
        stream.acknowledged = stream.frame
        epoch, seq = (stream.epoch, stream.seq) if stream.is_whole else (0, 0)
        self._control.follow(node, Follow(stream.number, epoch, seq, stream.frame))


def _draw() -> int:
    return secrets.randbits(62) + 1
