"""The health of a disk or remote store: whether it may be read or written now. No I/O here.

Failed calls are not retried at once. A store is in doubt when it does not answer, when reads fail, or when it is not
there: then nothing is found or stored, and from time to time a probe, for which no request waits, finds out whether it
works again.
"""

from __future__ import annotations

from pdx.telemetry.env import Env

MAX_ERRORS = 3  # consecutive failures that cause a pause
PAUSE_S = 10.0
SILENT, FAILING, GONE = "does not answer", "paused: reads failed", "not there"


class Health:
    """The health of one disk or store. Owned by the control loop."""

    def __init__(self, env: Env) -> None:
        self._clock = env.clock
        self.doubt = ""  # its reason, in words, for the status; empty: not in doubt
        self.probes = 0  # since the doubt began
        self._is_probing = False
        self._probe_at = 0.0
        self._errors = 0  # since the last successful call
        self._reads_from = 0.0  # no reads before this time
        self._num_read = 0
        # key -> shard of a file that could not be read -> (files read before that, when it may be found again)
        self._unread: dict[bytes, dict[int, tuple[int, float]]] = {}
        self._write_errors = 0  # since the last successful write
        self._writes_from = 0.0  # no writes before this time
        self._is_read_only = False
        self._is_ours = True

    @property
    def text(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if self.doubt:
            return self.doubt
        if self._is_read_only:
            return "read-only"
        return "paused: writes failed" if self._clock() < self._writes_from else ""

    # ---- reading ----------------------------------------------------------------------------

    @property
    def takes_loads(self) -> bool:
        return not self.doubt and self._clock() >= self._reads_from

    def hides(self, key: bytes) -> bool:
        """Whether a file of this chunk could not be read a moment ago: a waiting request would retry it at once."""
        return any(self._clock() < until for _, until in self._unread.get(key, {}).values())

    def why_not(self, key: bytes) -> str:
        """Why a file of this chunk is not loaded now; empty if it may be."""
        if self.doubt:
            return self.doubt
        if not self.takes_loads:
            return "is not read for some seconds, because a load failed"
        return "could not read its file a moment ago" if self.hides(key) else ""

    def read(self, key: bytes, shard: int) -> None:
        self._num_read += 1
        of_key = self._unread.get(key, {})
        of_key.pop(shard, None)
        if not of_key:
            self._unread.pop(key, None)
        self._errors = 0
        self.doubt = ""

    def not_read(self, key: bytes, shard: int) -> bool:
        """A file could not be read; return whether the file is to blame: it failed twice, with other reads between."""
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
        self._errors = 0

    def failed(self) -> bool:
        """A call has failed, and the store is to blame; return whether it should now be in doubt."""
        self._errors += 1
        return self._errors >= MAX_ERRORS and not self.doubt

    def pause_reads(self) -> None:
        """Pause reads after a failure that has nothing to do with the disk and may be over in some seconds."""
        self._reads_from = self._clock() + PAUSE_S

    def forget(self, key: bytes) -> None:
        """Forget read errors of a chunk that has no file any more."""
        self._unread.pop(key, None)

    # ---- writing ----------------------------------------------------------------------------

    @property
    def takes_stores(self) -> bool:
        return self._is_ours and not self.doubt and self._clock() >= self._writes_from

    def wrote(self) -> None:
        self._write_errors = 0
        self._is_read_only = False

    def not_written(self, *, is_read_only: bool) -> None:
        """A file could not be written, for a reason that is not its own."""
        self._write_errors += 1
        self._is_read_only = is_read_only
        if self._write_errors >= MAX_ERRORS:
            self.pause_writes()

    def pause_writes(self) -> None:
        """Pause writes after a failure that does not concern reads and may be over in some seconds."""
        self._writes_from = self._clock() + PAUSE_S

    def begins_read_only(self, *, is_ours: bool) -> None:
        """The node found at its start that nothing can be written. `is_ours`: no other node has the folder, so that
        stores are allowed once they are possible."""
        self._is_read_only, self._is_ours = True, is_ours
        self._write_errors = MAX_ERRORS
        self.pause_writes()

    # ---- doubt ------------------------------------------------------------------------------

    def doubts(self, why: str) -> None:
        """Put the store in doubt: nothing is read or written until a probe succeeds."""
        if not self.doubt:
            self.probes = 0
        self.doubt = why
        self._probe_at = self._clock() + PAUSE_S

    def answers(self) -> None:
        """A call that had taken too long has returned."""
        if self.doubt == SILENT:
            self.doubt = ""

    def begins_probe(self) -> bool:
        """Whether a probe is due; if so, the caller makes it and then calls `probed`."""
        if not self.doubt or self._is_probing or self._clock() < self._probe_at:
            return False
        self.probes += 1
        self._is_probing = True
        return True

    def probed(self, *, works: bool) -> None:
        self._is_probing = False
        if works:
            self._errors = 0
            self.doubt = ""
        elif self.doubt:
            self.doubts(self.doubt)
