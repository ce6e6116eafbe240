"""Which files a disk tier can find, in the order in which their chunks were used, what they take of its cap, and what
they do not say yet: that they were used, and what is pinned. No I/O, no threads here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.order import LeavingOrder
from pdx.store.tier import Held
from pdx.telemetry.env import Env

MAX_USES = 1 << 16  # files that are to say that they were used
MAX_SPARED = 32  # files that are passed over for one store, because requests find their chunks in memory
FULL_S = 60.0  # so long new files take the place of old ones after the disk was full before the cap was reached


class Untold(NamedTuple):
    """What a thread is to write: which files were used, how often chunks are pinned now, and how many are."""

    used: Sequence[ChunkFile]
    pins: Mapping[bytes, int]
    num_pinned: int


class FileIndex:
    """Owned by the control loop. Each call costs what it names.

    What may be on the disk never exceeds the cap. Files count, files that are being written, and files until they are
    removed; also what can be neither found nor removed.
    """

    def __init__(
        self, limit_bytes: int, env: Env, wants: Callable[[bytes], Mapping[int, int] | None] = lambda key: None
    ) -> None:
        """`wants`: see `LeavingOrder`."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # of the cap …
        self.leaving = 0  # … of these, files that are to be removed in place of no other
        self.coming = 0  # files that are being written
        # What cannot be found, nor removed, until it is replaced: which file, and whether it is unfinished.
        self.stuck: set[tuple[ChunkFile, bool]] = set()
        self._clock = env.clock
        self._reached = limit_bytes  # bytes of files when the disk was full, until …
        self._reached_until = 0.0
        self._files: LeavingOrder[tuple[ChunkFile, ...]] = LeavingOrder(wants)  # by key …
        self._pinned: dict[bytes, tuple[ChunkFile, ...]] = {}  # … and those that stay, which no search looks at
        self.pins: Counter[bytes] = Counter()  # keys that stay, and how often they were pinned
        self.pinned_bytes = 0  # of the cap, of these
        self.nbytes = 0  # of the cap, of all files that can be found
        self.num_files = 0  # each shard counted
        self._untold_uses: dict[ChunkFile, None] = {}  # files that were used, and are to say so …
        self._untold_pins: dict[bytes, int] = {}  # … and how often chunks are pinned
        self._is_telling = False  # one thread at a time: where writes do not return, loads do not wait

    def __contains__(self, key: bytes) -> bool:
        return key in self._files or key in self._pinned

    def of(self, key: bytes) -> Sequence[ChunkFile]:
        """The files of a chunk, one for each shard that is there."""
        return self._files.get(key) or self._pinned.get(key, ())

    def file(self, key: bytes, shard: int) -> ChunkFile | None:
        """That of this shard."""
        for file in self._files.get(key) or self._pinned.get(key, ()):
            if file.shard == shard:
                return file
        return None

    def held(self, key: bytes, shards: int) -> Held | None:
        """What there is of a chunk, if all shards are there and alike."""
        files = self._files.get(key) or self._pinned.get(key)
        if not files:
            return None
        sizes = {(file.nbytes, file.layers) for file in files}
        if len(sizes) != 1 or len(files) != shards or {file.shard for file in files} != set(range(shards)):
            return None
        return Held(*sizes.pop())

    def keys(self) -> list[bytes]:
        """Of all chunks, in no order: a walk through a million by their order would stop the control loop."""
        return [*self._files.keys(), *self._pinned]

    def last_used(self) -> Iterator[ChunkFile]:
        """All files, those that would go last first, and then those with pins."""
        for files in itertools.chain(self._files.last(), self._pinned.values()):
            yield from files

    def pin(self, key: bytes, change: int) -> None:
        """Count so many pins more, or fewer, of a chunk that is there; it never has fewer than none."""
        was = self.pins[key]
        if was + change > 0:
            self.pins[key] = was + change
        else:
            del self.pins[key]
        self.pinned_bytes += _bytes(self.of(key)) * ((key in self.pins) - (was > 0))
        if key in self.pins and (files := self._files.pop(key)) is not None:
            self._pinned[key] = files
        elif key not in self.pins and key in self._pinned:
            self._files.set(key, self._pinned.pop(key))  # it counts as used now
        self._untold_pins[key] = self.pins[key]

    # ---- the cap ----------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the disk was found to be full, because others use it, too."""
        return self._clock() < self._reached_until

    def full(self) -> None:
        """It has no room for more than there is, for a while."""
        self._reached, self._reached_until = self.used_bytes, self._clock() + FULL_S

    def lack(self, nbytes: int) -> int:
        """Bytes that must go so that these have room; none where it is not positive."""
        return self.used_bytes + nbytes - (self._reached if self._clock() < self._reached_until else self.limit_bytes)

    @property
    def excess(self) -> int:
        """Bytes above the cap when all that leaves is gone."""
        return self.used_bytes - self.leaving - self.limit_bytes

    def stick(self, file: ChunkFile, *, is_unfinished: bool = False) -> None:
        """This is there, is not found, and could not be removed."""
        self.used_bytes += file.charge * ((file, is_unfinished) not in self.stuck)
        self.stuck.add((file, is_unfinished))

    def unstick(self, file: ChunkFile, unfinished: ChunkFile) -> None:
        """A file of that name was written, by way of an unfinished one: neither is stuck any more."""
        gone = {(file, False), (unfinished, True)} & self.stuck
        self.used_bytes -= file.charge * len(gone)
        self.stuck -= gone

    # ---- use --------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """These chunks are used now."""
        for key in reversed(keys):  # the end of the prompt becomes the older one
            self._files.touch(key)

    def refresh(self, keys: Iterable[bytes]) -> None:
        """What the queue wants of these has changed."""
        self._files.refresh(keys)

    def oldest(
        self, nbytes: int, count: int, is_used: Callable[[bytes], bool], instead: bytes | None = None
    ) -> tuple[list[ChunkFile], list[ChunkFile]]:
        """So many bytes of files, and so many files at the least, that should go first; and files that would have been
        among them, but for requests that find their chunks in memory (`is_used`): these count as used now. `instead`:
        the chunk that is to have their place: there may be too few that it may take."""
        files: list[ChunkFile] = []
        spared: list[tuple[bytes, tuple[ChunkFile, ...]]] = []
        for key, of_key in self._files.leaving(instead) if nbytes > 0 or count > 0 else ():
            if len(spared) < MAX_SPARED and is_used(key):
                spared.append((key, of_key))
                continue
            files += of_key
            nbytes, count = nbytes - _bytes(of_key), count - len(of_key)
            if nbytes <= 0 and count <= 0:
                break
        used: list[ChunkFile] = []
        for key, of_key in spared:
            if nbytes > 0 or count > 0:  # there are no others
                files += of_key
                nbytes, count = nbytes - _bytes(of_key), count - len(of_key)
            else:
                used += of_key
                self._files.touch(key)
        return files, used

    # ---- what files are to say --------------------------------------------------------------

    def note(self, file: ChunkFile) -> None:
        """It was used now, which it is to say."""
        self._untold_uses[file] = None
        if len(self._untold_uses) > MAX_USES:
            del self._untold_uses[next(iter(self._untold_uses))]

    def tell(self, *, always: bool = False) -> Untold | None:
        """What a thread is to write, where none writes, or `always`."""
        if not (self._untold_uses or self._untold_pins) or (self._is_telling and not always):
            return None
        self._is_telling = True
        untold = Untold(list(self._untold_uses), self._untold_pins, len(self.pins))
        self._untold_uses.clear()
        self._untold_pins = {}
        return untold

    def told(self, untold: Untold, *, is_done: bool) -> None:
        """It is written; or, where that failed, what is pinned is written with the next."""
        self._is_telling = False
        if not is_done:
            self._untold_pins = {**untold.pins, **self._untold_pins}

    # ---- what is there ----------------------------------------------------------------------

    def add(self, file: ChunkFile) -> None:
        """There is this file; it counts as not used for longest."""
        key, charge = file.key, file.charge
        if key in self.pins:
            self._pinned[key] = *self._pinned.get(key, ()), file
            self.pinned_bytes += charge
        else:
            self._files.set(key, (*(self._files.get(key) or ()), file), is_oldest=True)
        self.num_files += 1
        self.nbytes += charge
        self.used_bytes += charge

    def replace(self, old: ChunkFile, new: ChunkFile) -> None:
        """The same chunk of the same shard is in another file from now on."""
        is_pinned = old.key in self._pinned
        of_key = tuple(new if file == old else file for file in self.of(old.key))
        if is_pinned:
            self._pinned[old.key] = of_key
        else:
            self._files.set(old.key, of_key)
        self.nbytes += new.charge - old.charge
        self.used_bytes += new.charge - old.charge
        self.pinned_bytes += (new.charge - old.charge) * is_pinned

    def remove(self, files: Sequence[ChunkFile]) -> None:
        """These cannot be found any more: all files of their chunks. They count until they are removed."""
        for file in files:
            if file.key in self.pins:
                self.pin(file.key, -self.pins[file.key])
            self._files.pop(file.key)
            self._pinned.pop(file.key, None)
        self.num_files -= len(files)
        self.nbytes -= _bytes(files)


def _bytes(files: Iterable[ChunkFile]) -> int:
    return sum(file.charge for file in files)
