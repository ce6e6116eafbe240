"""Faults in the loop of a node or a proxy: contained where they happen, counted, and logged at a bounded rate."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

from pdx.errors import ProtocolError

_LOG = logging.getLogger("pdx")

QUIET_S = 60.0  # how long, after a warning was logged, further ones about the same are only counted
_MAX_SENDERS = 1024
_MAX_TEXT = 300


class Faults:
    """Counts and logs faults. For the loop's thread only.

    There are two kinds: invalid messages (`messages_dropped`) and unexpected exceptions (`internal_errors`), which are
    defects of PDX or of a library.
    """

    def __init__(
        self, counters: Counter[str], clock: Callable[[], float] = time.monotonic, *, log: logging.Logger = _LOG
    ) -> None:
        """`log`: the logger of the part whose faults these are."""
        self._counters = counters
        self._log = log
        self.clock = clock
        self._known: set[tuple[str, type[Exception]]] = set()
        self._quiet: dict[str, tuple[float, int]] = {}  # until when, and how many were suppressed

    @contextlib.contextmanager
    def contain(self, part: str, *, passing: tuple[type[Exception], ...] = ()) -> Iterator[list[Exception]]:
        """A `with` block that contains all exceptions but those in `passing`, which the caller expects.

        `part` names the work; there are only a few names. Yields a list that gets the exception: if there is one, the
        caller ends the connection, session or job to which the work belonged.
        """
        failures: list[Exception] = []
        try:
            yield failures
        except passing:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted and logged
            failures.append(error)
            self.unexpected(part, error)

    def unexpected(self, part: str, error: Exception) -> None:
        """Count an unexpected exception; the first of its class in this part is logged with its traceback."""
        self._counters["internal_errors"] += 1
        kind = (part, type(error))
        if kind not in self._known:
            self._known.add(kind)
            self._log.error(
                "an internal error in %s; further ones are counted as internal_errors", part, exc_info=error
            )

    def dropped(self, sender: str, error: ProtocolError) -> None:
        """Count an invalid message; the first of a sender in a minute is logged.

        The text of `error` may quote the message, so it is truncated, and its control characters are escaped.
        """
        self._counters["messages_dropped"] += 1
        self.warn(sender, f"dropped a message of {printable(sender)}: {printable(str(error))}")

    def warn(self, about: str, text: str) -> None:
        """Log a warning, at most one a minute about the same thing; it says how many were suppressed."""
        now = self.clock()
        until, unsaid = self._quiet.get(about, (now, 0))
        if now < until:
            self._quiet[about] = (until, unsaid + 1)
            return
        if len(self._quiet) >= _MAX_SENDERS:
            self._quiet = {name: quiet for name, quiet in self._quiet.items() if now < quiet[0]}
            if len(self._quiet) >= _MAX_SENDERS:
                return
        self._quiet[about] = (now + QUIET_S, 0)
        more = f" ({unsaid} more since the last one that was logged)" if unsaid else ""
        self._log.warning("%s%s", text, more)


def counted(log: logging.Logger, counters: Counter[str], reason: str, text: str, *args: object) -> None:
    """Count something that failed or was refused; only the first per reason is logged, as many may follow.

    `text` with `args` is the warning.
    """
    counters[reason] += 1
    if counters[reason] == 1:
        log.warning("%s (further ones are counted as %s)", text % args, reason)


def printable(text: str, most: int = _MAX_TEXT) -> str:
    """`text` on one line, unprintable characters escaped, cut to `most` characters (with escapes) plus an ellipsis."""
    if len(text) <= most and text.isprintable():
        return text
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]}…"
