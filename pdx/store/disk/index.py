"""Which files a disk tier can find, in the order in which they should go, what they take of its cap, and what they do
not say yet: that they were used, and what is pinned. No I/O, no threads here."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.eviction import WANTED, EvictionOrder
from pdx.store.policies import by_name
from pdx.store.policies.policy import IN, Evictable
from pdx.store.tier import Held
from pdx.telemetry.env import Env

MAX_USES = 1 << 16  # files that are to say that they were used
MAX_OVERDUE = 1024  # chunks that go at one time, though there is room
MAX_SPARED = 32  # files that are passed over for one store, because requests find their chunks in memory
FULL_S = 60.0  # so long new files take the place of old ones after the disk was full before the cap was reached


class Untold(NamedTuple):
    """What a thread is to write: which files were used, how often chunks are pinned now, and how many are."""

    used: Sequence[ChunkFile]
    pins: Mapping[bytes, int]
    num_pinned: int


class FileEntry(Evictable, eq=False, gc=False):
    """A file that can be found. Its `room_bytes` are those that it had at first, by which its policy knows it."""

    file: ChunkFile
    other: FileEntry | None = None  # of another shard of the chunk


class FileIndex:
    """Owned by the control loop. Each call costs what it names, and what `EvictionOrder` takes for that.

    What may be on the disk never exceeds the cap. Files count, files that are being written, and files until they are
    removed; also what can be neither found nor removed.
    """

    def __init__(
        self,
        limit_bytes: int,
        env: Env,
        wanted: Mapping[bytes, Mapping[int, int]] = MappingProxyType({}),
        policy: str = "lru",
    ) -> None:
        """`wanted`: see `EvictionOrder`. `policy`: see `pdx.store.policies.by_name`."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # of the cap …
        self.leaving = 0  # … of these, files that are to be removed in place of no other
        self.coming = 0  # files that are being written
        # What cannot be found, nor removed, until it is replaced: which file, and whether it is unfinished.
        self.stuck: set[tuple[ChunkFile, bool]] = set()
        self._clock = env.clock
        self._oldest: FileEntry | None = None  # the file that was added as that, if the order is still the same
        self._age_s = 0.0  # for so long the file has not been used that is being added
        self._reached = limit_bytes  # bytes of files when the disk was full, until …
        self._reached_until = 0.0
        make = by_name.find(policy, lambda: self._clock() - self._age_s, option="--disk-policy")
        # Pinned files are not in it: no search looks at them.
        self._order: EvictionOrder[FileEntry] = EvictionOrder(partial(make, limit_bytes), wanted, None, env)
        self._overdue: deque[FileEntry] = deque()
        self._files: dict[bytes, FileEntry] = {}  # by key, of each the first; so that most take no list
        self.pins: Counter[bytes] = Counter()  # keys that stay, and how often they were pinned
        self.pinned_bytes = 0  # of the cap, of these
        self.nbytes = 0  # of the cap, of all files that can be found
        self.num_files = 0  # each shard counted
        self._untold_uses: dict[ChunkFile, None] = {}  # files that were used, and are to say so …
        self._untold_pins: dict[bytes, int] = {}  # … and how often chunks are pinned
        self._is_telling = False  # one thread at a time: where writes do not return, loads do not wait

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def of(self, key: bytes) -> Sequence[ChunkFile]:
        """The files of a chunk, one for each shard that is there."""
        return [entry.file for entry in self._entries(key)]

    def _entries(self, key: bytes) -> Iterator[FileEntry]:
        entry = self._files.get(key)
        while entry is not None:
            yield entry
            entry = entry.other

    def file(self, key: bytes, shard: int) -> ChunkFile | None:
        """That of this shard."""
        entry = self._files.get(key)
        while entry is not None and entry.shard != shard:
            entry = entry.other
        return entry.file if entry is not None else None

    def held(self, key: bytes, shards: int) -> Held | None:
        """What there is of a chunk, if all shards are there and alike."""
        entry = self._files.get(key)
        if entry is None:
            return None
        files = self.of(key) if entry.other is not None else [entry.file]
        if len(files) != shards:
            return None
        sizes = {(file.nbytes, file.layers) for file in files}
        if len(sizes) != 1 or {file.shard for file in files} != set(range(shards)):
            return None
        return Held(*sizes.pop())

    def keys(self) -> list[bytes]:
        """Of all chunks, in no order: a walk through a million by their order would stop the control loop."""
        return list(self._files)

    def some(self) -> Iterator[ChunkFile]:
        """Files, those that came last first."""
        return (entry.file for entry in reversed(self._files.values()))

    def pin(self, key: bytes, change: int) -> None:
        """Count so many pins more, or fewer, of a chunk that is there; it never has fewer than none."""
        was = self.pins[key]
        if was + change > 0:
            self.pins[key] = was + change
        else:
            del self.pins[key]
        self.pinned_bytes += _bytes(self.of(key)) * ((key in self.pins) - (was > 0))
        self._oldest = None
        for entry in self._entries(key):
            if key in self.pins:
                self._order.hold(entry)
            else:
                self._order.insert(entry)
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

    def use(self, keys: Sequence[bytes]) -> None:
        """A request has found these chunks."""
        self._each(keys, self._order.access)

    def refresh(self, keys: Sequence[bytes]) -> None:
        """What the queue wants of these has changed, or a copy of them is over."""
        self._each(keys, self._order.refresh)

    def _each(self, keys: Sequence[bytes], call: Callable[[FileEntry], None]) -> None:
        self._oldest = None
        for key in reversed(keys):  # the end of the prompt becomes the older one
            for entry in self._entries(key):
                call(entry)

    def oldest(
        self, nbytes: int, count: int, is_used: Callable[[bytes], bool], instead: bytes | None = None
    ) -> tuple[list[ChunkFile], list[ChunkFile]]:
        """So many bytes of files, and so many files at the least, that should go first; and files that would have been
        among them, but for requests that find their chunks in memory (`is_used`): these count as used now. `instead`:
        the chunk that is to have their place: there may be too few that it may take."""
        self._oldest = None  # a policy may move on what it is asked for
        gone: dict[bytes, None] = {}
        spared: dict[bytes, None] = {}
        files: list[ChunkFile] = []
        for entry in self._order.victims(instead) if nbytes > 0 or count > 0 else ():
            if entry.key in gone or entry.key in spared:  # another shard of it
                continue
            if len(spared) < MAX_SPARED and is_used(entry.key):
                spared[entry.key] = None
                continue
            gone[entry.key] = None
            of_key = self.of(entry.key)
            files += of_key
            nbytes, count = nbytes - _bytes(of_key), count - len(of_key)
            if nbytes <= 0 and count <= 0:
                break
        used: list[ChunkFile] = []
        for key in spared:
            of_key = self.of(key)
            if nbytes > 0 or count > 0:  # there are no others
                files += of_key
                nbytes, count = nbytes - _bytes(of_key), count - len(of_key)
            else:
                used += of_key
                self.use([key])
        return files, used

    def overdue(self) -> list[ChunkFile]:
        """Files that should go though there is room, with all shards of their chunks; or some of them. Each is
        told of once."""
        now = self._clock()
        self._overdue += self._order.overdue()
        keys: dict[bytes, None] = {}
        while self._overdue and len(keys) < MAX_OVERDUE:
            entry = self._overdue.popleft()
            if entry.standing == IN and entry.keep.expires_at <= now:  # else it was pinned, or used, meanwhile
                keys[entry.key] = None
        return [file for key in keys for file in self.of(key)]

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

    def add(self, file: ChunkFile, before: bytes | None = None, *, is_passed: bool = False) -> None:
        """There is this file now. `before`: the chunk that leads up to it, and should stay longer. `is_passed`: see
        `Evictable`; after a restart of the node nobody knows."""
        entry = self._new(file)
        entry.is_passed = is_passed
        if file.key not in self.pins:
            self._order.insert(entry, self._files.get(before) if before is not None else None)

    def add_oldest(self, file: ChunkFile, age_s: float = 0.0) -> None:
        """There is this file, which counts as not used for longest: for so long, if that is known."""
        entry = self._new(file)
        if file.key not in self.pins:
            self._age_s = age_s
            if self._oldest is None or self._oldest.standing != IN:
                self._oldest = next(self._order.victims(), None)
            self._order.insert(entry, self._oldest)
            self._age_s = 0.0
            if entry.level != WANTED:
                self._oldest = entry

    def _new(self, file: ChunkFile) -> FileEntry:
        key, charge = file.key, file.charge
        entry = FileEntry(file, self._files.get(key), key=key, shard=file.shard, room_bytes=charge)
        self._files[key] = entry
        self.pinned_bytes += charge * (key in self.pins)
        self.num_files += 1
        self.nbytes += charge
        self.used_bytes += charge
        return entry

    def replace(self, old: ChunkFile, new: ChunkFile) -> None:
        """The same chunk of the same shard is in another file from now on."""
        for entry in self._entries(old.key):
            if entry.file == old:
                entry.file = new
        self.nbytes += new.charge - old.charge
        self.used_bytes += new.charge - old.charge
        self.pinned_bytes += (new.charge - old.charge) * (old.key in self.pins)

    def remove(self, files: Sequence[ChunkFile]) -> None:
        """These cannot be found any more: all files of their chunks. They count until they are removed."""
        for key in {file.key: None for file in files}:
            if key in self.pins:
                self.pin(key, -self.pins[key])
            for entry in self._entries(key):
                self._order.remove(entry)
            self._files.pop(key, None)
        self.num_files -= len(files)
        self.nbytes -= _bytes(files)


def _bytes(files: Iterable[ChunkFile]) -> int:
    return sum(file.charge for file in files)
