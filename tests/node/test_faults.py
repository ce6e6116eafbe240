"""What goes wrong is contained, counted, and logged in bounded measure."""

import logging
from collections import Counter

import pytest

from pdx.errors import ProtocolError
from pdx.telemetry.faults import QUIET_S, Faults, printable


@pytest.fixture
def counters():
    return Counter()


@pytest.fixture
def faults(counters, clock):
    return Faults(counters, clock)


def test_an_exception_ends_its_block_and_is_logged_once_with_its_trace(faults, counters, caplog):
    for _ in range(3):
        with faults.contain("a tick") as failures:
            raise KeyError("x")
        assert failures
    with faults.contain("a tick") as failures:
        raise ValueError("another class")
    with faults.contain("a tick") as failures:
        pass
    assert not failures
    assert counters == {"internal_errors": 4}
    assert [record.exc_info[0] for record in caplog.records] == [KeyError, ValueError]
    assert "a tick" in caplog.records[0].getMessage()


def test_what_the_caller_expects_and_what_ends_the_process_pass(faults, counters):
    with pytest.raises(ProtocolError), faults.contain("a message", passing=(ProtocolError,)):
        raise ProtocolError("garbage")
    with pytest.raises(KeyboardInterrupt), faults.contain("a message"):
        raise KeyboardInterrupt
    assert not counters


def test_bad_messages_are_logged_once_a_minute_and_sender(faults, counters, clock, caplog):
    for _ in range(1000):
        faults.dropped("one", ProtocolError("garbage"))
    faults.dropped("another", ProtocolError("garbage"))
    assert counters["messages_dropped"] == 1001
    assert len(caplog.records) == 2
    clock.now += QUIET_S
    faults.dropped("one", ProtocolError("garbage"))
    assert "999 more" in caplog.records[-1].getMessage()


def test_ever_new_senders_fill_neither_the_log_nor_the_memory(faults, clock, caplog):
    for number in range(1100):
        faults.dropped(str(number), ProtocolError("garbage"))
    assert len(caplog.records) == 1024
    clock.now += QUIET_S
    for number in range(1100, 2200):
        faults.dropped(str(number), ProtocolError("garbage"))
    assert len(caplog.records) == 2048, "those of a minute ago are forgotten"


def test_what_a_sender_wrote_is_one_short_line_of_the_log(faults, caplog):
    caplog.set_level(logging.WARNING)
    faults.dropped("x\n2026 ERROR forged", ProtocolError("y\n\x1b[31mforged" + "z" * 3_000_000))
    (record,) = caplog.records
    assert len(record.getMessage()) < 1000
    assert record.getMessage().isprintable()
    assert "\\n\\x1b[31mforged" in record.getMessage()


def test_what_is_escaped_does_not_become_longer_than_what_is_not():
    for letter in ("x", "\x1b", "\U000e0001"):
        text = printable(letter * 1000)
        assert len(text) <= 301
        assert text.isprintable()
    assert printable("\x1b" * 1000, 8) == "\\x1b\\x1b…"
