"""Speeds, times and counts: bits are not bytes, and what is none of them is named."""

import pytest

from pdx.bench.plan.units import parse_count, parse_rate, parse_time
from pdx.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [
        ("400Gbps", 50e9),
        ("50GB/s", 50e9),
        ("100Mbit/s", 12.5e6),
        ("8bps", 1),
        ("0.5 gB/s", 5e8),
    ],
)
def test_rates(text, bytes_s):
    assert parse_rate(text) == bytes_s


@pytest.mark.parametrize("text", ["400", "400G", "-1Gbps", "0Gbps", "", "400 Gib/s"])
def test_what_is_no_rate_is_named(text):
    with pytest.raises(ConfigError, match="400Gbps") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


def test_times_and_counts():
    assert [parse_time(text) for text in ("30ms", "1.5s", "200us", "200 µs")] == pytest.approx([0.03, 1.5, 2e-4, 2e-4])
    assert [parse_count(text) for text in ("8000", "8k", "1.5K", "1M")] == [8000, 8000, 1500, 10**6]
