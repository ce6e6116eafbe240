"""The writes that are arriving over one group of streams: which parts came, which may still come. No I/O, no locks."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdx.errors import ProtocolError
from pdx.transports.frames import MAX_STREAMS, Body, Head, parts_of, unpack_body

WINDOW = 256  # writes that have begun and are not acknowledged; all that is remembered is bounded by it


@dataclass(eq=False)
class Arrival:
    """One write. `entered`: what `Sessions.enter` said of all its pieces; None if they may not land."""

    number: int
    parts: int
    packed: bytes
    body: Body
    entered: list[int] | None = None
    came: set[int] = field(default_factory=set)
    left: int = 0  # parts that have not wholly arrived


class Arrivals:
    """By number. A writer counts its writes from 0 without gaps and has at most WINDOW of them unacknowledged, so a
    number that was over before, or is far ahead, is none of an honest writer's."""

    def __init__(self) -> None:
        self._floor = 0  # all below are over
        self._over: set[int] = set()  # and these
        self._under_way: dict[int, Arrival] = {}

    def begin(self, head: Head, packed: bytes) -> Arrival:
        """A part begins to arrive; if it is the first one, `Arrival.entered` is to be filled in.

        :raises ProtocolError: it came before, its number is not in the window, or it does not fit the other parts.
        """
        number = head.number
        if not self._floor <= number < self._floor + WINDOW or number in self._over:
            raise ProtocolError(f"write {number} is not one of the {WINDOW} from {self._floor} that may come now")
        arrival = self._under_way.get(number)
        if arrival is None:
            body = unpack_body(packed)
            if head.parts > parts_of(sum(piece.nbytes for piece in body.pieces), MAX_STREAMS):
                raise ProtocolError(f"write {number} is too small for {head.parts} parts")
            arrival = self._under_way[number] = Arrival(number, head.parts, packed, body, left=head.parts)
        elif packed != arrival.packed or head.parts != arrival.parts or head.part in arrival.came:
            raise ProtocolError(f"part {head.part} of write {number} is not one of those that may come now")
        arrival.came.add(head.part)
        return arrival

    def end_part(self, arrival: Arrival) -> bool:
        """A part has wholly arrived, or was dropped. Whether it was the last one of its write."""
        arrival.left -= 1
        if arrival.left:
            return False
        del self._under_way[arrival.number]
        self._over.add(arrival.number)
        while self._floor in self._over:
            self._over.remove(self._floor)
            self._floor += 1
        return True

    def unfinished(self) -> list[Arrival]:
        """Those that are not over."""
        return list(self._under_way.values())
