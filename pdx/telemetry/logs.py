"""How a process logs: lines for people, or one JSON object a line for what collects logs."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import msgspec

FORMATS = ("text", "json")
VARIABLE = "PDX_LOG_FORMAT"  # processes that this one starts log likewise


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up(level: str = "info") -> None:
    """Log to standard error from now on, in the environment's format. Once in a process."""
    handler = logging.StreamHandler()
    is_json = os.environ.get(VARIABLE) == "json"
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_JsonLines() if is_json else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def event(log: logging.Logger, what: str, **fields: object) -> None:
    """A line that is its fields, each with its name; those that are not known (None) are left out."""
    if log.isEnabledFor(logging.INFO):
        known = {name: value for name, value in fields.items() if value is not None}
        words = " ".join(f"{name}={value}" for name, value in known.items())
        log.info("%s: %s", what, words, extra={"fields": {"event": what, **known}})
