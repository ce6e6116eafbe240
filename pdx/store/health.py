"""What a disk or a store does just now: whether anything may be loaded from it, or stored there. No I/O here.

Calls that fail are not repeated at once. A store is in doubt when it does not answer, when nothing can be read, or when
it is not there: then nothing is found and nothing stored, and now and then one call, which keeps no request waiting,
finds out whether it works again.
"""

from __future__ import annotations

from pdx.telemetry.env import Env

MAX_ERRORS = 3  # calls that may fail one after the other before there is a pause
PAUSE_S = 10.0
SILENT, FAILING, GONE = "does not answer", "paused: reads failed", "not there"


class Health:
    """Owned by the control loop."""

    def __init__(self, env: Env) -> None:
        self._clock = env.clock
        self.doubt = ""  # in words, for whoever asks for the status
        self.probes = 0  # that were made since the doubt began
        self._is_probing = False
        self._probe_at = 0.0
        self._errors = 0  # since the last call that ended well
        self._reads_from = 0.0  # nothing is found before
        self._num_read = 0
        # by key and shard of a file that could not be read: how many had been read before, and when it is found again
        self._unread: dict[bytes, dict[int, tuple[int, float]]] = {}
        self._write_errors = 0  # since the last chunk that was written
        self._writes_from = 0.0  # nothing is stored before
        self._is_read_only = False
        self._is_ours = True

    @property
    def text(self) -> str:
        """What is wrong, in words; empty: nothing."""
        if self.doubt:
            return self.doubt
        if self._is_read_only:
            return "read-only"
        return "paused: writes failed" if self._clock() < self._writes_from else ""

    # ---- reading ----------------------------------------------------------------------------

    @property
    def takes_loads(self) -> bool:
        """Whether something may be loaded now."""
        return not self.doubt and self._clock() >= self._reads_from

    def hides(self, key: bytes) -> bool:
        """Whether a file of this chunk could not be read a moment ago: who waits for it would have it loaded at once
        again."""
        return any(self._clock() < until for _, until in self._unread.get(key, {}).values())

    def why_not(self, key: bytes) -> str:
        """Why a file of this chunk is not loaded now; empty: it may be."""
        if self.doubt:
            return self.doubt
        if not self.takes_loads:
            return "is not read for some seconds, because a load failed"
        return "could not read its file a moment ago" if self.hides(key) else ""

    def read(self, key: bytes, shard: int) -> None:
        """A file was read."""
        self._num_read += 1
        of_key = self._unread.get(key, {})
        of_key.pop(shard, None)
        if not of_key:
            self._unread.pop(key, None)
        self._errors = 0
        self.doubt = ""

    def not_read(self, key: bytes, shard: int) -> bool:
        """A file could not be read; whether that is the file's own fault: twice, and others were read in between."""
        of_key = self._unread.setdefault(key, {})
        num_read, _ = of_key.get(shard, (self._num_read, 0.0))
        if num_read < self._num_read:
            return True
        of_key[shard] = (num_read, self._clock() + PAUSE_S)
        self._errors += 1
        if self._errors >= MAX_ERRORS:
            self.doubts(FAILING)
        return False

    def works(self) -> None:
        """A call has ended well."""
        self._errors = 0

    def failed(self) -> bool:
        """A call has failed, and the store is to blame; whether that was one too many."""
        self._errors += 1
        return self._errors >= MAX_ERRORS and not self.doubt

    def pause_reads(self) -> None:
        """What failed has nothing to do with the disk, and may be over in some seconds."""
        self._reads_from = self._clock() + PAUSE_S

    def forget(self, key: bytes) -> None:
        """There is no file of this chunk any more."""
        self._unread.pop(key, None)

    # ---- writing ----------------------------------------------------------------------------

    @property
    def takes_stores(self) -> bool:
        """Whether something may be stored now."""
        return self._is_ours and not self.doubt and self._clock() >= self._writes_from

    def wrote(self) -> None:
        """A file was written."""
        self._write_errors = 0
        self._is_read_only = False

    def not_written(self, *, is_read_only: bool) -> None:
        """A file could not be written, for a reason that holds for others, too."""
        self._write_errors += 1
        self._is_read_only = is_read_only
        if self._write_errors >= MAX_ERRORS:
            self.pause_writes()

    def pause_writes(self) -> None:
        """What failed says nothing of reads, and may be over in some seconds."""
        self._writes_from = self._clock() + PAUSE_S

    def begins_read_only(self, *, is_ours: bool) -> None:
        """Nothing can be written there, as was found when the node started. `is_ours`: no other node has the folder,
        so that something may be stored once that is possible."""
        self._is_read_only, self._is_ours = True, is_ours
        self._write_errors = MAX_ERRORS
        self.pause_writes()

    # ---- doubt ------------------------------------------------------------------------------

    def doubts(self, why: str) -> None:
        """Nothing of the disk may be waited for until a probe has succeeded."""
        if not self.doubt:
            self.probes = 0
        self.doubt = why
        self._probe_at = self._clock() + PAUSE_S

    def answers(self) -> None:
        """A call has come back that had taken too long."""
        if self.doubt == SILENT:
            self.doubt = ""

    def begins_probe(self) -> bool:
        """Whether a file is to be read now to see if that works; `probed` is to be called then."""
        if not self.doubt or self._is_probing or self._clock() < self._probe_at:
            return False
        self.probes += 1
        self._is_probing = True
        return True

    def probed(self, *, works: bool) -> None:
        """A probe is over."""
        self._is_probing = False
        if works:
            self._errors = 0
            self.doubt = ""
        elif self.doubt:
            self.doubts(self.doubt)
