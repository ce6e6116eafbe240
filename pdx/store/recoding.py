"""Chunks of a tier that are stored in another form from now on, a few at a time: how far that is. No I/O here."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from pdx.errors import TierError
from pdx.store.codecs.codec import LOSSLESS, NONE, codec_of

AT_ONCE = 4  # chunks: what is stored and loaded meanwhile has threads, too
Pair = tuple[bytes, bytes]  # the key of a chunk, and the one that it has afterwards
OnChunk = Callable[[bytes, TierError | None], None]


def check(pairs: Sequence[Pair], codec: str) -> None:
    """Whether these may be stored so: what loses something has other keys, and what loses nothing has the same.

    :raises CodecError: there is no such codec.
    :raises TierError: the keys are not right for it.
    """
    if codec != NONE:
        codec_of(codec)
    is_lossy = codec not in (NONE, LOSSLESS)
    if any((old == new) is is_lossy for old, new in pairs):
        what = "another key than the exact one" if is_lossy else "the key that it has"
        raise TierError(f"a chunk that is stored by {codec} has {what}", "not_encoded")


class Recoding:
    """Owned by the control loop. `done` and `failed` of `total` chunks are over; `is_over`: all that will be. Threads
    look at `is_cancelled`: they are to end soon, and leave a chunk as it was before, or as it was to be."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        codec: str,
        shards: int,
        begin: Callable[[Pair, Recoding], None],
        on_chunk: OnChunk,
    ) -> None:
        """`begin` has a tier begin one, of which `ended` tells it later, or at once. `on_chunk` is told of each that is
        over, by the key that it had."""
        self.codec = codec
        self.shards = shards
        self.total = len(pairs)
        self.done = 0
        self.failed: Counter[str] = Counter()  # by kind of error
        self.is_cancelled = False
        self._left = deque(pairs)
        self._begin = begin
        self._on_chunk = on_chunk
        self._under_way = 0
        self._is_filling = False

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is under way, nor will be."""
        return not self._left and not self._under_way

    def go_on(self) -> None:
        """Begin what may be begun now."""
        if self._is_filling:
            return
        self._is_filling = True
        while self._left and self._under_way < AT_ONCE:
            self._under_way += 1
            self._begin(self._left.popleft(), self)
        self._is_filling = False

    def ended(self, key: bytes, error: TierError | None) -> None:
        """The chunk that had this key is stored as was asked, or as before."""
        self._under_way -= 1
        self.done += error is None
        if error is not None:
            self.failed[error.kind] += 1
        self._on_chunk(key, error)
        self.go_on()

    def cancel(self) -> None:
        """Begin no more, and end those that were begun soon."""
        self.is_cancelled = True
        left, self._left = self._left, deque()
        for key, _ in left:
            self.failed["cancelled"] += 1
            self._on_chunk(key, TierError("cancelled", "cancelled"))
