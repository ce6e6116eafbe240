"""A process's messages to its node that wait for room to be sent, or that must not be lost. No I/O.

The node keeps slots and leases for a process until the process gives them back. A message that does so is kept until
the node has answered it, and sent again if it was lost. It may arrive twice: the node passes over or refuses slots that
have another owner by then and leases that have ended.
"""

from __future__ import annotations

from typing import NamedTuple

from pdx.wire.messages import Abort, Ask, Cancel, Fill, Release

MAX_KEPT = 65_536  # bounds Cancels; slots and leases are bounded by what was granted, questions by their deadlines
MAX_MERGED = 8_192  # slots in one message
MAX_TIMES = 4  # how often a message is sent; a node that answers only later ones will never answer it


class Owed(NamedTuple):
    """One message. `asked`: the number by which a caller collects its answer, 0 if none does."""

    body: Ask
    asked: int = 0
    times: int = 0  # how often it was sent


def gives_back(body: Ask) -> bool:
    """Whether the node keeps something until it gets this message. A Fill that does not seal may get lost: the seal may
    name its slices again."""
    return isinstance(body, Abort | Release | Cancel) or (isinstance(body, Fill) and body.seal)


class Outbox:
    """Messages by the ascending numbers under which they are sent. Not thread-safe."""

    def __init__(self) -> None:
        self._unsent: dict[int, Owed] = {}
        self._sent: dict[int, Owed] = {}  # not answered yet; only those that give something back

    def __len__(self) -> int:
        return len(self._unsent) + len(self._sent)

    def add(self, number: int, body: Ask, *, is_asked: bool) -> bool:
        """Append a message, or merge an Abort's slots into a waiting Abort. False: there are too many messages."""
        if isinstance(body, Cancel) and len(self) >= MAX_KEPT:
            return False
        if not isinstance(body, Abort) or is_asked:
            self._unsent[number] = Owed(body, number if is_asked else 0)
        elif (last := self._last_abort()) and _may_merge(last, body):
            last.slots.extend(body.slots)
        else:
            self._unsent[number] = Owed(Abort(list(body.slots), body.unused))  # a copy of the list, which may grow
        return True

    def _last_abort(self) -> Abort | None:
        if not self._unsent:
            return None
        last = self._unsent[next(reversed(self._unsent))]
        return last.body if isinstance(last.body, Abort) and not last.asked and not last.times else None

    @property
    def next(self) -> tuple[int, Ask] | None:
        """The first unsent message, with its number."""
        number = next(iter(self._unsent), None)
        return None if number is None else (number, self._unsent[number].body)

    def sent(self, number: int) -> None:
        """Note that the first unsent message was sent."""
        body, asked, times = self._unsent.pop(number)
        if gives_back(body):
            self._sent[number] = Owed(body, asked, times + 1)

    def forget(self, number: int) -> None:
        """Drop an unsent message whose answer no caller will collect, unless it gives something back."""
        owed = self._unsent.get(number)
        if owed is not None and not gives_back(owed.body):
            del self._unsent[number]

    def answered(self, number: int) -> Owed | None:
        """Take out and return the message that was sent under this number."""
        return self._sent.pop(number, None)

    def lost(self, number: int) -> list[Owed]:
        """Take out and return the messages that were lost: the node answers in order and has answered `number`, so all
        earlier ones that are still kept were."""
        lost = []
        for earlier in self._sent:
            if earlier > number:
                break
            lost.append(earlier)
        return [self._sent.pop(earlier) for earlier in lost]

    def again(self, number: int, owed: Owed) -> bool:
        """Send a lost message again, under a new number. False: it was sent too often."""
        if owed.times >= MAX_TIMES:
            return False
        self._unsent[number] = owed
        return True


def _may_merge(last: Abort, body: Abort) -> bool:
    return last.unused == body.unused and len(last.slots) + len(body.slots) <= MAX_MERGED
