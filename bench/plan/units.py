"""Speeds, times and counts as people write them. Bits and bytes are decimal: 1 Gbps is 1e9 bits per second."""

from __future__ import annotations

import re

from pdx.errors import ConfigError

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(bps|bit/s|b/s|B/s|Bps)\s*")
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s)\s*")
_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*")


def parse_rate(text: str) -> float:
    """Bytes per second: "400Gbps" (bits) or "50GB/s" (bytes); a lowercase b is a bit, an uppercase B a byte.

    :raises ConfigError: the text is neither, or the rate is zero.
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a speed; write for example 400Gbps (bits) or 50GB/s (bytes)")
    rate = float(match[1]) * _SCALES[match[2].lower()] / (1 if match[3].startswith("B") else 8)
    if rate <= 0:
        raise ConfigError(f"{text!r}: a link without any speed carries nothing; write for example 400Gbps")
    return rate


def parse_time(text: str) -> float:
    """Seconds: "30ms", "1.5s" or "200us".

    :raises ConfigError: the text is not a time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a time; write for example 30ms, 1.5s or 200us")
    return float(match[1]) * _TIMES[match[2]]


def parse_count(text: str) -> int:
    """Tokens: "8000", "8k" (8,000) or "1M".

    :raises ConfigError: the text is not a whole number of at least one.
    """
    match = _COUNT.fullmatch(text)
    count = float(match[1]) * _SCALES[match[2].lower()] if match else 0.0
    if count < 1 or count != int(count):
        raise ConfigError(f"{text!r} is not a number of tokens; write for example 8000 or 8k")
    return int(count)


def show_time(seconds: float) -> str:
    """Format a time in s, ms or µs, with about three significant digits."""
    if seconds == float("inf"):
        return "for ever"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 0.1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.0f} µs"


def show_rate(bytes_per_s: float) -> str:
    """Format a rate in bits and in bytes, because the two are easily confused."""
    return f"{bytes_per_s * 8 / 1e9:,.4g} Gbps ({bytes_per_s / 1e9:,.4g} GB/s)"


def show_bytes(nbytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"
