"""Log formats: lines for people, or one JSON object per line for log collectors."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

FORMATS = ("text", "json")
VARIABLE = "PDX_LOG_FORMAT"  # inherited by processes that this one starts


class _JsonLines(logging.Formatter):
    def __init__(self, **fields: Any) -> None:
        """`fields`: added to every line."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _formatter(worker: int | None = None) -> logging.Formatter:
    """A formatter in the environment's format."""
    if os.environ.get(VARIABLE) == "json":
        return _JsonLines() if worker is None else _JsonLines(worker=worker)
    who = "" if worker is None else f"worker {worker}: "
    return logging.Formatter(f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s")


def set_up(level: str = "info") -> None:
    """Log to standard error from now on, in the environment's format. Call it once per process."""
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def name_worker(number: int) -> None:
    """Put the number of this process, among those of one command, into every line from now on."""
    for handler in logging.root.handlers:
        handler.setFormatter(_formatter(number))


def _word(value: object) -> str:
    """A field's value, quoted if it could be taken for another field."""
    text = str(value)
    return json.dumps(text) if any(each.isspace() or each in '="' for each in text) else text


def event(log: logging.Logger, what: str, **fields: object) -> None:
    """Log a line of named fields; unknown ones (None) are left out."""
    if log.isEnabledFor(logging.INFO):
        known = {name: value for name, value in fields.items() if value is not None}
        words = " ".join(f"{name}={_word(value)}" for name, value in known.items())
        log.info("%s: %s", what, words, extra={"fields": {"event": what, **known}})
