"""What a process has to tell its node: what waits for room to be sent, and what must not be lost. No I/O.

The node keeps something for its process until it hears that this gives it back. Such a message is kept until it was
answered, and told again if it was lost. It may be told twice: a slot that is another's by then and a lease that has
ended are passed over or refused.
"""

from __future__ import annotations

from typing import NamedTuple

from pdx.wire.messages import Abort, Ask, Cancel, Fill, Release

MAX_KEPT = 65_536  # slots and leases are bounded by what was granted, questions by their deadlines, but not a Cancel
MAX_MERGED = 8_192  # slots in one message
MAX_TIMES = 4  # that a message is sent; a node that answers later ones never answers this one


class Owed(NamedTuple):
    """One message. `asked`: the number under which a caller collects its answer, 0 if none does."""

    body: Ask
    asked: int = 0
    times: int = 0  # that it was sent


def gives_back(body: Ask) -> bool:
    """Whether the node keeps something until it hears this. A Fill that does not seal is not missed: the seal may name
    its slices again."""
    return isinstance(body, Abort | Release | Cancel) or (isinstance(body, Fill) and body.seal)


class Outbox:
    """Messages by the numbers they are sent under, which ascend. Not thread-safe."""

    def __init__(self) -> None:
        self._unsent: dict[int, Owed] = {}
        self._sent: dict[int, Owed] = {}  # of those that give something back: not answered yet

    def __len__(self) -> int:
        return len(self._unsent) + len(self._sent)

    def add(self, number: int, body: Ask, *, is_asked: bool) -> bool:
        """One more, behind all others; slots that are to be aborted join those that wait. False: there are too many."""
        if isinstance(body, Cancel) and len(self) >= MAX_KEPT:
            return False
        if not isinstance(body, Abort) or is_asked:
            self._unsent[number] = Owed(body, number if is_asked else 0)
        elif (last := self._last_abort()) and _may_merge(last, body):
            last.slots.extend(body.slots)
        else:
            self._unsent[number] = Owed(Abort(list(body.slots), body.unused))  # with a list of its own, which may grow
        return True

    def _last_abort(self) -> Abort | None:
        if not self._unsent:
            return None
        last = self._unsent[next(reversed(self._unsent))]
        return last.body if isinstance(last.body, Abort) and not last.asked and not last.times else None

    @property
    def next(self) -> tuple[int, Ask] | None:
        """The first that was not sent, with its number."""
        number = next(iter(self._unsent), None)
        return None if number is None else (number, self._unsent[number].body)

    def sent(self, number: int) -> None:
        """The first was."""
        body, asked, times = self._unsent.pop(number)
        if gives_back(body):
            self._sent[number] = Owed(body, asked, times + 1)

    def forget(self, number: int) -> None:
        """Nobody will collect the answer to this one; what gives something back is told all the same."""
        owed = self._unsent.get(number)
        if owed is not None and not gives_back(owed.body):
            del self._unsent[number]

    def answered(self, number: int) -> Owed | None:
        """What was sent under this number is not kept any more."""
        return self._sent.pop(number, None)

    def lost(self, number: int) -> list[Owed]:
        """The node has answered what was sent under `number`, and answers these in order. So the earlier ones that are
        still kept were lost: they are taken out."""
        lost = []
        for earlier in self._sent:
            if earlier > number:
                break
            lost.append(earlier)
        return [self._sent.pop(earlier) for earlier in lost]

    def again(self, number: int, owed: Owed) -> bool:
        """It was lost and is to be sent under another number. False: it was sent too often."""
        if owed.times >= MAX_TIMES:
            return False
        self._unsent[number] = owed
        return True


def _may_merge(last: Abort, body: Abort) -> bool:
    return last.unused == body.unused and len(last.slots) + len(body.slots) <= MAX_MERGED
