"""The disk tier: chunks in files, found again by the next node that uses the same folder.

The control loop owns the index, with the order of eviction, and the account of bytes. Threads read, write and remove
the files (`pdx.store.disk.folder`).

    <root>/<two hex digits>/<key>-<shard>-<slices>-<bytes>[-<bytes when encoded>].chunk

A file is begun only when the cap has room for its chunk, not encoded; if needed, in place of the files to evict first
(`pdx.store.eviction`), which the same thread removes before. An encoded file takes less in the end. Nothing is stored
until all files of an earlier node are counted.

A deleted or damaged chunk is never found again, even if its file cannot be removed, because a client's name may stand
for other bytes later.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from pdx.config import private_folder
from pdx.errors import ArenaFull, ConfigError, TierError
from pdx.memory.keys import is_named
from pdx.security.socket_lock import owned
from pdx.store.codecs.codec import NONE
from pdx.store.copy import Copy
from pdx.store.disk import chunk_file, folder, pins
from pdx.store.disk import files as disk_files
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.files import DiskFiles
from pdx.store.disk.folder import Folder, Useless
from pdx.store.health import SILENT
from pdx.store.store_tier import Work
from pdx.store.tier import Grant, Held, TierHost
from pdx.telemetry.faults import printable
from pdx.wire.status import COUNTING, TierStatus

log = logging.getLogger("pdx.node")

MIB = 1 << 20
COUNTED, NOT_READABLE = "counted", "not readable"  # see `_scan`
JOIN_S = 10.0
SILENT_JOIN_S = 1.0  # … if the disk does not answer
_BATCH = 256  # files per message to the control loop


class DiskTier(DiskFiles):
    """See `StoreTier`."""

    can_pin = True

    def __init__(
        self,
        host: TierHost,
        root: Path,
        limit_bytes: int,
        *,
        reserve_bytes: int = 0,
        codec: str = NONE,
        name: str = "disk",
        policy: str = "lru",
    ) -> None:
        """`reserve_bytes` of the file system stay free, whatever the cap. `policy`: the eviction policy, see
        `pdx.store.policies.by_name`.

        :raises ConfigError: the folder cannot be this node's alone.
        """
        private_folder(root)
        env = host.env
        self.name = name
        self.siblings: Sequence[DiskTier] = ()  # the other disks of the node: a chunk may lie on one of them, too
        self._scan = COUNTING  # then COUNTED, or NOT_READABLE; SILENT while the scan does not progress
        self._heard_at = env.clock()  # the scan's last progress; set by any thread
        self._evicted: set[bytes] = set()  # keys deleted during the scan
        # Last use of an earlier node's chunks with clients' names, until all disks are counted.
        self.named_at: dict[bytes, int] = {}
        self._lock = contextlib.ExitStack()
        lock = self._lock.enter_context(owned(root / "tier", partial(self._taken, root), may_be_read_only=True))
        limit_bytes = folder.attainable(root, limit_bytes, reserve_bytes, env.counters)
        super().__init__(host, Folder(root, host, reserve_bytes), limit_bytes, codec, policy)
        if not lock.is_written:
            self._health.begins_read_only(is_ours=lock.is_held)
            self._warn(TierError(f"{root} is read-only: chunks are loaded from there, and none stored", "read_only"))
        try:
            self._index.pins.update(pins.read(root))
        except TierError as error:
            self._warn(error)
        if not self._folder.is_direct:
            self._count("not_direct")
            log.warning("%s is read and written through the page cache: no direct I/O there", root)
        self._scanner = threading.Thread(target=self._list, name="pdx-disk-scan", daemon=True)
        self._scanner.start()

    @staticmethod
    def _taken(root: Path, owner: str) -> ConfigError:
        what = f"{root} is the disk tier of another node (process {owner})"
        return ConfigError(f"{what}; two nodes cannot share one: name another folder with --disk, or end that node")

    def status(self) -> TierStatus:
        self._look()
        state = self._health.text or ("" if self._threads.takes(self._writes) else "writes do not return")
        if not state and not self.is_counted:
            state = COUNTING if self.is_listing else self._scan
        elif not state and self._index.is_full:
            state = "full"
        elif not state:
            state = "ok" if self._folder.is_direct else "by way of the page cache"
        is_up = (self.is_counted or self.is_listing) and self._health.takes_loads
        found = TierStatus(
            self.name, printable(str(self.folder)), self.num_chunks, self.used_bytes, self.limit_bytes, state
        )
        return msgspec.structs.replace(found, is_up=is_up)

    @property
    def is_counted(self) -> bool:
        """Whether the scan is done and the index has all files."""
        return self._scan == COUNTED

    @property
    def is_scanned(self) -> bool:
        """Whether the scan is over, even with an error."""
        return self._scan in (COUNTED, NOT_READABLE)

    @property
    def takes_stores(self) -> bool:
        self._look()
        return self.is_counted and self._health.takes_stores and self._threads.takes(self._writes)

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        self._look()
        found: list[Held] = []
        for key in keys if self._health.takes_loads else ():
            held = self._index.held(key, shards)
            if held is None or self._health.hides(key) or self._may_be_old(key):
                break
            found.append(held)
        return found

    def use(self, keys: Sequence[bytes]) -> None:
        self._index.use(keys)

    def refresh(self, keys: Sequence[bytes]) -> None:
        self._index.refresh(keys)

    def holds(self, key: bytes, shards: int = 0) -> bool:
        return self._index.held(key, shards or len(self._index.of(key))) is not None

    def keys(self) -> list[bytes]:
        return self._index.keys()

    def _may_be_old(self, key: bytes) -> bool:
        """Whether another disk, not counted yet, may have a newer chunk of this name."""
        return key in self.named_at and any(each.is_listing for each in self.siblings)

    @property
    def is_listing(self) -> bool:
        """Whether the scan is in progress. A disk that does not answer meanwhile counts as left out until it does."""
        if self._scan == COUNTING and self._heard_at < self.env.clock() - disk_files.SILENT_S:
            self._scan = SILENT
            text = f"{self.folder} does not answer: which chunks are there is not known until it does"
            self._warn(TierError(text, "silent"))
        return self._scan == COUNTING

    def _list(self) -> None:
        """The scan's thread: tell the control loop all files of an earlier node, then that these were all, or why there
        may be more."""
        root, post = self._folder.root, self.env.mailbox.post
        why: TierError | None = None
        try:
            files = folder.listed(root, self._is_scan_over, self._folder.block_bytes)
            while not self._is_scan_over() and (batch := list(itertools.islice(files, _BATCH))):
                post(partial(self._found, batch))
        except OSError as error:
            why = TierError(f"{root} cannot be listed: {error.strerror}; nothing is stored there", "read_failed")
        except Exception as error:  # the thread's root
            log.exception("the disk tier failed")
            why = TierError(f"{root} is not read: {type(error).__name__}; nothing is stored there", "failed")
        if not self._is_scan_over():
            post(partial(self._scanned, why))

    def _is_scan_over(self) -> bool:
        self._heard_at = self.env.clock()
        return self._threads.is_closing

    def _is_newest(self, key: bytes, time_ns: int) -> bool:
        """Whether an earlier node's chunk with a client's name is newer than other disks' chunks of that name; if so,
        delete those. They can differ if a disk was left out for one run of the node, while clients rewrote chunks."""
        for each in self.siblings:
            if each.named_at.get(key, math.inf if key in each._index else -1) >= time_ns:
                return False  # that one is newer, or was stored by this node
        for each in self.siblings:
            if key in each.named_at:
                each.evict([key])
        self.named_at.setdefault(key, time_ns)
        return True

    def why_not(self, key: bytes) -> str:
        if key in self._index:
            is_old = "has it, and another disk, which may have a newer one, is not counted yet"
            return self._health.why_not(key) or (is_old if self._may_be_old(key) else "")
        if self.is_counted:
            return ""
        return "could not be listed" if self.is_scanned else "has not counted its files yet"

    def admit(self, copy: Copy) -> Grant:
        self._admitted[copy.number] = self._forgotten.moment()
        granted: list[int] = []
        takes_stores, shards = self.takes_stores, copy.shards
        limit_bytes, block_bytes = self._index.limit_bytes, self._folder.block_bytes
        for index, key in enumerate(copy.keys):
            if self._index.held(key, shards) is not None:
                continue
            chunk = copy.chunks[index * shards]
            slot = chunk.slot
            charge = shards * chunk_file.disk_bytes(slot.nbytes, chunk.layers, block_bytes=block_bytes)
            if not takes_stores or charge > limit_bytes:
                why = "too_large" if takes_stores else "paused" if self.is_counted else "not_counted"
                self._leave_out(why, copy.keys[index:])
                break
            granted.append(index)
        return Grant(granted)

    def copy_ended(self, copy: Copy) -> None:
        if self._admitted.pop(copy.number, None) is not None:
            self._index.refresh(copy.keys)

    def evict(self, keys: Sequence[bytes], shards: int = 0) -> int:
        files: list[ChunkFile] = []
        count = 0
        for key in dict.fromkeys(keys):
            if not self.is_scanned:
                self._evicted.add(key)
            self._forgotten.note(key)
            for shard, task in self._busy.get(key, ()):
                task.forgotten.add(key)
                if task.job is not None and (task.part.key, task.part.shard) == (key, shard):
                    task.is_cancelled = True
            files += self._index.of(key)
            count += key in self._index
        self._remove(files, is_forgotten=True)
        return count

    def tick(self) -> None:
        if overdue := self._index.overdue():
            self._count("expired", len(overdue))
            self._remove(overdue, is_forgotten=True)

    def is_pinned(self, key: bytes) -> bool:
        return key in self._index.pins

    def pin(self, keys: Sequence[bytes], *, pinned: bool, share: float) -> None:
        if pinned:
            fresh = [key for key in keys if key not in self._index.pins]
            nbytes = self._index.pinned_bytes + sum(file.charge for key in fresh for file in self._index.of(key))
            most = int(self.limit_bytes * share)
            if fresh and nbytes > most:
                raise ArenaFull(f"{nbytes} bytes would be pinned in {self.name}, where {most} may be (pin_share)")
        for key in keys:
            self._index.pin(key, 1 if pinned else -1)
        self._note()

    def close(self) -> None:
        """See `Tier.close`. Pending removals are done first, as far as the disk answers."""
        self._looked_at = -math.inf
        self._look()
        timeout_s = SILENT_JOIN_S if self._health.doubt == SILENT else JOIN_S
        has_ended = self._threads.close(timeout_s)
        self._scanner.join(timeout_s if has_ended else 0.0)
        has_ended = has_ended and not self._scanner.is_alive()
        if has_ended and (unsaved := self._index.take_unsaved(always=True)) is not None:
            with contextlib.suppress(TierError):  # best effort
                self._folder.write_unsaved(unsaved, Work())
        for job in itertools.chain.from_iterable(self._later.values()):
            self._end(job, TierError("the disk tier is closed", "cancelled"))
        self._later.clear()
        if has_ended:
            self._lock.close()  # else the disk hangs, and the folder stays locked until this process is gone

    def _found(self, batch: Sequence[tuple[int, ChunkFile | Useless]]) -> None:
        """Take a batch of an earlier node's files with the times of their last use, most recent first."""
        self._heard_at, now = self.env.clock(), time.time()
        for time_ns, file in batch:
            if isinstance(file, Useless):
                self._index.used_bytes += file.nbytes
                if file.why.kind in ("unfinished", "foreign"):
                    self._count(file.why.kind)
                else:
                    self._warn(file.why)
                continue
            is_old = is_named(file.key) and not self._is_newest(file.key, time_ns)
            if is_old or self._index.file(file.key, file.shard) is not None:
                self._remove_unfound(file)
            else:
                self._index.add_oldest(file, max(0.0, now - time_ns / 1e9))
                self.note([file.key])
            if file.key in self._evicted:
                self.evict([file.key])
        surplus = self.num_chunks - disk_files.MAX_FILES
        self._index_is_full(surplus)
        files, _ = self._index.oldest(self._index.excess, surplus, self._host.is_used)
        self._remove(files, is_forgotten=False)

    def _scanned(self, error: TierError | None) -> None:
        """The scan is over; after an error nothing is stored, because the cap could not be kept."""
        self._scan = COUNTED if error is None else NOT_READABLE
        self._evicted.clear()
        disks = (self, *self.siblings)
        if all(each.is_scanned for each in disks):
            for each in disks:
                each.named_at.clear()
        if error is not None:
            self._warn(error)
        else:
            self._drop_pins()
            used, limit = self.used_bytes / MIB, self.limit_bytes / MIB
            log.info("disk tier %s: %d chunks, %.0f of %.0f MiB", self.folder, self.num_chunks, used, limit)

    def _drop_pins(self) -> None:
        """Drop an earlier node's pins of chunks that are gone, and those for which a smaller cap has no room."""
        gone = [key for key in self._index.pins if key not in self._index]
        for key in gone:
            self._index.pin(key, -self._index.pins[key])
        too_many: list[bytes] = []
        lack = self._index.excess
        for key in self._index.pins if lack > 0 else ():
            too_many.append(key)
            lack -= sum(file.charge for file in self._index.of(key))
            if lack <= 0:
                break
        for key in too_many:
            self._index.pin(key, -self._index.pins[key])
        if too_many:
            self.env.counters["disk_pins_dropped"] += len(too_many)
            text = "%s: pins of %d chunks are dropped: the cap is smaller than what was pinned"
            log.warning(text, self.folder, len(too_many))
            files, _ = self._index.oldest(self._index.excess, 0, self._host.is_used)
            self._remove(files, is_forgotten=False)
        self._note()
