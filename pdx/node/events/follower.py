"""Tells the proxy of changes by chunk, over the line that carries its reports.

The proxy acknowledges frames (`pdx.wire.messages.Follow`). Only a few are in flight, so that heartbeats find room on
the line, and a proxy that does not read costs no more than these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from pdx.node.events.log import Change, EventLog
from pdx.wire.base import MAX_RUN_KEYS, MAX_RUNS
from pdx.wire.proxy import Changes, Follow, Run

MAX_REPEATS = 3
WINDOW = 8  # frames without an acknowledgment


class Follower:
    """The stream of changes to one proxy. Owned by the control loop; nothing blocks."""

    def __init__(self, events: EventLog, epoch: int) -> None:
        self._events = events
        self._epoch = epoch
        self._stream = 0  # none
        self._telling = 0
        self._frame = self._come = 0
        self._repeats = 0  # how often the proxy has acknowledged the same frame, though more were sent
        self._seq = 0  # number of the last batch in frames
        self._feed: Iterator[list[Change]] | None = None  # the chunks that were there when the stream began
        self._is_first = False
        self._frames: deque[tuple[int, Sequence[Run]]] = deque()  # to send, with the number of their last batch

    def asked(self, ask: Follow) -> None:
        """The proxy begins a stream, or acknowledges frames."""
        if ask.stream == self._stream:
            self._repeats = self._repeats + 1 if ask.frame == self._come < self._frame else 0
            self._come = max(self._come, min(ask.frame, self._frame))
            if self._repeats < MAX_REPEATS:
                return
            # Frames were lost: begin anew under another number.
        self._repeats = 0
        self._stream, self._frame, self._come = ask.stream, 0, 0
        self._telling += 1
        self._frames.clear()
        self._feed, self._is_first = None, False
        is_on = self._events.since(ask.seq) is not None and ask.epoch == self._epoch
        self._events.follow(self)
        if is_on:
            self._seq = ask.seq
        else:
            self._begin()

    def gone(self) -> None:
        self._stream = 0
        self._feed = None
        self._frames.clear()
        self._events.leave(self)

    def _begin(self) -> None:
        self._frames.clear()
        self._seq, self._feed, self._is_first = self._events.seq, self._events.snapshot(), True

    @property
    def is_behind(self) -> bool:
        return self._stream > 0 and bool(self._frames or self._feed is not None or self._seq != self._events.seq)

    def turn(self, send: Callable[[Changes], bool]) -> None:
        """After each turn of the control loop: send frames while the proxy keeps up. `send` is False if it cannot."""
        while self.is_behind and self._frame - self._come < WINDOW:
            if not self._frames and not self._fill():
                return
            seq, runs = self._frames[0]
            is_whole = self._feed is None and len(self._frames) == 1
            frame = Changes(
                self._stream,
                self._telling,
                self._frame + 1,
                self._epoch,
                seq,
                list(runs),
                first=self._is_first,
                whole=is_whole,
            )
            if not send(frame):
                return
            self._frames.popleft()
            self._frame += 1
            self._is_first = False

    def _fill(self) -> bool:
        """Make frames of new changes, and of a piece of the feed; False: there is nothing to tell."""
        batches = self._events.since(self._seq)
        if batches is None:  # the proxy was too slow
            self._begin()
            batches = []
        is_news = bool(batches) or self._feed is not None
        for batch in batches:
            parts = list(_packed(batch.changes))
            self._frames.extend((batch.seq if part is parts[-1] else self._seq, part) for part in parts)
            self._seq = batch.seq
        if self._feed is not None:
            piece = next(self._feed, None)
            if piece is None:
                self._feed = None
            self._frames.extend((self._seq, part) for part in _packed(piece or []))
            if not self._frames:
                self._frames.append((self._seq, ()))
        return is_news


def _packed(changes: Iterable[Change]) -> Iterator[list[Run]]:
    """Group changes into lists of runs that each fit into one message."""
    runs: list[Run] = []
    room = MAX_RUN_KEYS
    for change in changes:
        at = 0
        while at < len(change.keys):
            if not room or len(runs) == MAX_RUNS:
                yield runs
                runs, room = [], MAX_RUN_KEYS
            keys = change.keys[at : at + room]
            runs.append(Run(change.tier[:256], change.is_stored, b"".join(keys)))
            at, room = at + len(keys), room - len(keys)
    if runs:
        yield runs
