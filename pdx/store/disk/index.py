"""The index of a disk tier: its files in order of eviction, the account of its cap, and uses and pins that are not on
the disk yet. No I/O, no threads here."""

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

MAX_USES = 1 << 16  # files whose use is not on the disk yet
MAX_OVERDUE = 1024  # expired chunks removed per call
MAX_SPARED = 32  # chunks spared per store, because requests find them in memory
FULL_S = 60.0  # how long new files must replace old ones after the disk was full below the cap


class Unsaved(NamedTuple):
    """What a thread writes to the disk: used files, changed pin counts, and the number of pinned chunks."""

    used: Sequence[ChunkFile]
    pins: Mapping[bytes, int]
    num_pinned: int


class FileEntry(Evictable, eq=False, gc=False):
    """A file that can be found. `room_bytes` stays as it was at first, because its policy relies on that."""

    file: ChunkFile
    other: FileEntry | None = None  # the next shard of the chunk, in a linked list


class FileIndex:
    """The files of one disk. Owned by the control loop. A call's cost is linear in its keys, times `EvictionOrder`'s.

    The bytes that may be on the disk never exceed the cap. Files count from the start of writing until they are
    removed; so do files that can be neither found nor removed.
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
        self.leaving = 0  # … of which are being removed without a file in their place
        self.coming = 0  # files being written
        # Files that can be neither found nor removed until they are replaced, and whether each is unfinished.
        self.stuck: set[tuple[ChunkFile, bool]] = set()
        self._clock = env.clock
        self._oldest: FileEntry | None = None  # the file last added as the oldest, if the order is unchanged since
        self._age_s = 0.0  # time since the last use of the file being added
        self._reached = limit_bytes  # bytes in use when the disk was full; valid until …
        self._reached_until = 0.0
        make = by_name.find(policy, lambda: self._clock() - self._age_s, option="--disk-policy")
        # Without pinned files, so that no search meets them.
        self._order: EvictionOrder[FileEntry] = EvictionOrder(partial(make, limit_bytes), wanted, None, env)
        self._overdue: deque[FileEntry] = deque()
        self._files: dict[bytes, FileEntry] = {}  # key -> its first entry, which saves most keys a list
        self.pins: Counter[bytes] = Counter()  # pinned keys, and how often they are pinned
        self.pinned_bytes = 0  # of the cap, in pinned files
        self.nbytes = 0  # of the cap, in files that can be found
        self.num_files = 0  # each shard counts
        self._unsaved_uses: dict[ChunkFile, None] = {}  # used files to be written to the disk …
        self._unsaved_pins: dict[bytes, int] = {}  # … and changed pin counts
        self._is_saving = False  # one thread at a time, so that hanging writes do not delay loads

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def of(self, key: bytes) -> Sequence[ChunkFile]:
        """The files of a chunk, one per shard that is there."""
        return [entry.file for entry in self._entries(key)]

    def _entries(self, key: bytes) -> Iterator[FileEntry]:
        entry = self._files.get(key)
        while entry is not None:
            yield entry
            entry = entry.other

    def file(self, key: bytes, shard: int) -> ChunkFile | None:
        entry = self._files.get(key)
        while entry is not None and entry.shard != shard:
            entry = entry.other
        return entry.file if entry is not None else None

    def held(self, key: bytes, shards: int) -> Held | None:
        """The size of a chunk, if all its shards are there and alike."""
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
        """All keys, in no order: walking a million in order of eviction would stall the control loop."""
        return list(self._files)

    def some(self) -> Iterator[ChunkFile]:
        """Files, the last added first."""
        return (entry.file for entry in reversed(self._files.values()))

    def pin(self, key: bytes, change: int) -> None:
        """Change the number of pins of a chunk that is there, to no less than 0."""
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
        self._unsaved_pins[key] = self.pins[key]

    # ---- the cap ----------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the disk was recently full below the cap, because others use it, too."""
        return self._clock() < self._reached_until

    def full(self) -> None:
        """The disk is full: for a while, do not use more of it than now."""
        self._reached, self._reached_until = self.used_bytes, self._clock() + FULL_S

    def shortfall(self, nbytes: int) -> int:
        """Bytes that must be evicted to make room for `nbytes`; none if not positive."""
        return self.used_bytes + nbytes - (self._reached if self._clock() < self._reached_until else self.limit_bytes)

    @property
    def excess(self) -> int:
        """Bytes above the cap once everything being removed is gone."""
        return self.used_bytes - self.leaving - self.limit_bytes

    def add_stuck(self, file: ChunkFile, *, is_unfinished: bool = False) -> None:
        """Count a file that is not in the index and could not be removed."""
        self.used_bytes += file.charge * ((file, is_unfinished) not in self.stuck)
        self.stuck.add((file, is_unfinished))

    def drop_stuck(self, file: ChunkFile, unfinished: ChunkFile) -> None:
        """A file of that name was written, through an unfinished one: neither is stuck any more."""
        gone = {(file, False), (unfinished, True)} & self.stuck
        self.used_bytes -= file.charge * len(gone)
        self.stuck -= gone

    # ---- use --------------------------------------------------------------------------------

    def use(self, keys: Sequence[bytes]) -> None:
        """A request has hit these chunks."""
        self._each(keys, self._order.access)

    def refresh(self, keys: Sequence[bytes]) -> None:
        """What the queue wants of these chunks has changed, or a copy of them is over."""
        self._each(keys, self._order.refresh)

    def _each(self, keys: Sequence[bytes], call: Callable[[FileEntry], None]) -> None:
        self._oldest = None
        for key in reversed(keys):  # the end of the prompt counts as older
            for entry in self._entries(key):
                call(entry)

    def oldest(
        self, nbytes: int, count: int, is_used: Callable[[bytes], bool], instead: bytes | None = None
    ) -> tuple[list[ChunkFile], list[ChunkFile]]:
        """Files of at least `nbytes` and at least `count` in number that should be evicted first; and files spared
        because requests find their chunks in memory (`is_used`), which count as used now. `instead`: the chunk that
        takes their place; for it there may be too few."""
        self._oldest = None  # drawing victims may change a policy's order
        gone: dict[bytes, None] = {}
        spared: dict[bytes, None] = {}
        files: list[ChunkFile] = []
        for entry in self._order.victims(instead) if nbytes > 0 or count > 0 else ():
            if entry.key in gone or entry.key in spared:  # another shard of a chunk seen already
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
            if nbytes > 0 or count > 0:  # there are not enough others
                files += of_key
                nbytes, count = nbytes - _bytes(of_key), count - len(of_key)
            else:
                used += of_key
                self.use([key])
        return files, used

    def overdue(self) -> list[ChunkFile]:
        """Files that have expired, with all shards of their chunks, up to `MAX_OVERDUE` chunks. Each is returned
        once."""
        now = self._clock()
        self._overdue += self._order.overdue()
        keys: dict[bytes, None] = {}
        while self._overdue and len(keys) < MAX_OVERDUE:
            entry = self._overdue.popleft()
            if entry.standing == IN and entry.keep.expires_at <= now:  # else pinned or used meanwhile
                keys[entry.key] = None
        return [file for key in keys for file in self.of(key)]

    # ---- uses and pins to be written --------------------------------------------------------

    def note(self, file: ChunkFile) -> None:
        """Record a use of the file now, to be written to the disk."""
        self._unsaved_uses[file] = None
        if len(self._unsaved_uses) > MAX_USES:
            del self._unsaved_uses[next(iter(self._unsaved_uses))]

    def take_unsaved(self, *, always: bool = False) -> Unsaved | None:
        """Take what a thread is to write; None if there is nothing, or a thread is writing and not `always`."""
        if not (self._unsaved_uses or self._unsaved_pins) or (self._is_saving and not always):
            return None
        self._is_saving = True
        unsaved = Unsaved(list(self._unsaved_uses), self._unsaved_pins, len(self.pins))
        self._unsaved_uses.clear()
        self._unsaved_pins = {}
        return unsaved

    def saved(self, unsaved: Unsaved, *, is_done: bool) -> None:
        """The thread is done; if it failed, the pins are written with the next ones."""
        self._is_saving = False
        if not is_done:
            self._unsaved_pins = {**unsaved.pins, **self._unsaved_pins}

    # ---- files ------------------------------------------------------------------------------

    def add(self, file: ChunkFile, before: bytes | None = None, *, is_passed: bool = False) -> None:
        """Add a new file. `before`: the key of its predecessor, which should stay longer. `is_passed`: see `Evictable`;
        it is lost when the node restarts."""
        entry = self._new(file)
        entry.is_passed = is_passed
        if file.key not in self.pins:
            self._order.insert(entry, self._files.get(before) if before is not None else None)

    def add_oldest(self, file: ChunkFile, age_s: float = 0.0) -> None:
        """Add a file as the least recently used one. `age_s`: the time since its last use, if that is known."""
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
        """The same chunk and shard is in another file from now on."""
        for entry in self._entries(old.key):
            if entry.file == old:
                entry.file = new
        self.nbytes += new.charge - old.charge
        self.used_bytes += new.charge - old.charge
        self.pinned_bytes += (new.charge - old.charge) * (old.key in self.pins)

    def remove(self, files: Sequence[ChunkFile]) -> None:
        """Make files unfindable, which must be all files of their chunks. They count until they are removed."""
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
