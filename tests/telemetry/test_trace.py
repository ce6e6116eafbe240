"""Spans in files: switched while processes run, bounded, by several threads; what no tracer wrote is refused."""

import logging
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from pdx.errors import ConfigError, ProtocolError
from pdx.telemetry import trace
from pdx.telemetry.trace import Lane, Tracer, TraceSpan, read, switch, trace_folder, tracer_for

TRANSFER = "x" * 20


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "spans"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def tracer(folder):
    with Tracer(folder, "engine/0") as made:
        yield made


def record(tracer, start_ns, *, transfer=TRANSFER):
    tracer.span(Lane.WIRE, transfer, 2, 3, start_ns, start_ns + 5, 4096)


def starts(folder):
    return [span.start_ns for span in read(folder)]


def test_a_span_comes_back_as_it_was(tracer, folder):
    tracer.span(Lane.GATHER, TRANSFER, 0, 2, 7, 9, 123)
    assert read(folder) == [], "nothing is written before it is asked for"
    tracer.flush()
    assert read(folder) == [TraceSpan(Lane.GATHER, TRANSFER, 0, 2, 7, 9, 123, "engine/0")]
    assert read(folder)[0].lane == "gather"


def test_spans_of_all_files_come_in_order_of_their_start(tracer, folder):
    with Tracer(folder, "engine/0") as other, Tracer(folder, "node/../a b") as third:
        for at, each in enumerate([tracer, other, third, tracer]):
            record(each, 100 - at)
    tracer.flush()
    assert starts(folder) == [97, 98, 99, 100]
    assert {span.who for span in read(folder)} == {"engine/0", "node/../a b"}
    names = sorted(path.name for path in folder.iterdir())
    pid = os.getpid()
    assert names == [f"engine_0-{pid}-0.spans", f"engine_0-{pid}-1.spans", f"node_.._a_b-{pid}-0.spans", "on"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_it_follows_the_switch_of_a_process_or_a_shell(tracer, folder, monkeypatch):
    assert not tracer.is_on
    for on in (True, False, True):
        switch(folder, on)
        assert tracer.is_on is on
    with Tracer(folder, "late") as late:
        assert late.is_on, "a switch that was set before the process started counts"
    for text, on in (("1\n", True), ("", False), ("1", True), ("0\n", False), ("garbage", False)):
        (folder / "on").write_text(text)  # truncates first, as `echo 1 > on` does
        assert tracer.is_on is on
    (folder / "on").write_text("1")
    with monkeypatch.context() as patch:
        patch.setattr(trace.os, "pread", lambda *_: os.close(-1))  # OSError, as where its file system is gone
        assert not tracer.is_on
    assert tracer.is_on
    tracer.close()
    assert not tracer.is_on


def test_whoever_comes_while_another_thread_writes_has_its_spans_written_by_that_one(tracer, folder, monkeypatch):
    written, go = threading.Event(), threading.Event()
    real = os.write

    def slow(file, data):
        written.set()
        assert go.wait(20)
        return real(file, data)

    monkeypatch.setattr(trace.os, "write", slow)
    record(tracer, 1)
    writer = threading.Thread(target=tracer.flush)
    writer.start()
    assert written.wait(20)
    record(tracer, 2)
    tracer.flush()  # does not wait
    assert starts(folder) == []
    go.set()
    writer.join()
    assert starts(folder) == [1, 2]


def test_a_flush_may_wait_until_there_is_enough(tracer, folder):
    for at in range(3):
        tracer.flush(3)
        assert starts(folder) == []
        record(tracer, at)
    tracer.flush(3)
    assert starts(folder) == [0, 1, 2]


# ---- bounds -----------------------------------------------------------------------------------


def test_memory_is_bounded_and_what_is_dropped_is_counted_with_one_warning(tracer, folder, monkeypatch, caplog):
    monkeypatch.setattr(trace, "MAX_PENDING", 3)
    for at in range(10):
        record(tracer, at)
    assert tracer.num_dropped == 7
    assert [(record.levelno, "3" in record.getMessage()) for record in caplog.records] == [(logging.WARNING, True)]
    tracer.flush()
    record(tracer, 10)
    tracer.flush()
    assert starts(folder) == [0, 1, 2, 10]


def test_a_file_is_bounded(folder, monkeypatch, caplog):
    monkeypatch.setattr(trace, "MAX_FILE_BYTES", 300)
    with Tracer(folder, "e") as tracer:
        for at in range(100):
            record(tracer, at)
            tracer.flush()
        kept = starts(folder)
        assert kept == list(range(len(kept)))
        assert 2 <= len(kept) == 100 - tracer.num_dropped
        assert tracer.path.stat().st_size <= 300
    assert len(caplog.records) == 1


def test_a_full_disk_costs_spans_and_nothing_else(tracer, folder, monkeypatch, caplog):
    record(tracer, 1)
    tracer.flush()
    room = iter([10])
    real = os.write

    def nearly_full(file, data):
        for nbytes in room:
            return real(file, data[:nbytes])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trace.os, "write", nearly_full)
        for at in (2, 3):
            record(tracer, at)
        tracer.flush()
    record(tracer, 4)
    tracer.flush()
    assert starts(folder) == [1], "nothing is written behind half a line"
    assert tracer.num_dropped == 3
    assert ["No space left" in record.getMessage() for record in caplog.records] == [True]


def test_spans_after_the_end_are_lost_and_close_is_idempotent(tracer, folder):
    record(tracer, 1)
    tracer.close()
    tracer.close()
    record(tracer, 2)
    tracer.flush()
    assert starts(folder) == [1]
    assert tracer.num_dropped == 1


# ---- folders and files that are not ours ------------------------------------------------------


@pytest.mark.parametrize("use", [lambda folder: Tracer(folder, "e"), lambda folder: switch(folder, True)])
def test_the_folder_must_be_there_and_private(folder, use):
    with pytest.raises(ConfigError, match="mkdir -m 700"):
        use(folder / "none")
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="0700"):
        use(folder)
    assert list(folder.iterdir()) == []


def test_a_switch_that_is_a_link_is_not_followed(folder, tmp_path):
    (folder / "on").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="spans"):
        Tracer(folder, "e")
    with pytest.raises(ConfigError, match="/on"):
        switch(folder, True)
    assert not (tmp_path / "elsewhere").exists()


def test_the_setting_comes_before_the_environment(folder, monkeypatch):
    monkeypatch.delenv("PDX_TRACE", raising=False)
    assert trace_folder("") is None
    assert tracer_for("", "e") is None
    assert trace_folder(str(folder)) == folder
    monkeypatch.setenv("PDX_TRACE", str(folder))
    assert trace_folder("") == folder
    with pytest.raises(ConfigError, match="/nowhere"):
        trace_folder("/nowhere")
    made = tracer_for("", "e")
    assert made is not None
    made.close()


def line(**changes) -> bytes:
    span = {
        "lane": "wire", "transfer": TRANSFER, "first_layer": 0, "num_layers": 1, "start_ns": 1, "end_ns": 2,
        "nbytes": 3, "who": "e", **changes,
    }  # fmt: skip
    return msgspec.json.encode(list(span.values())) + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        b"garbage\n",
        b"[]\n",
        line(lane="sideways"),
        line(transfer="x" * 600),
        line(start_ns=1 << 70),
        line(more=1),
        b"[" * 4000 + b"\n",
        b"x" * 5000,
    ],
)
def test_what_no_tracer_wrote_is_refused_by_name_and_line(folder, content):
    (folder / "e-1-0.spans").write_bytes(line() + content)
    with pytest.raises(ProtocolError, match=r"e-1-0\.spans:2"):
        read(folder)


def test_a_last_line_that_is_still_being_written_is_left_out(folder):
    (folder / "e-1-0.spans").write_bytes(line() + line()[:-9])
    assert len(read(folder)) == 1


def test_files_too_long_too_many_or_none_are_refused(folder, monkeypatch):
    path = folder / "e-1-0.spans"
    with path.open("wb") as file:
        file.truncate(trace.MAX_FILE_BYTES + 1)
    with pytest.raises(ProtocolError, match=r"e-1-0\.spans"):
        read(folder)
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever
    with pytest.raises(ProtocolError, match="not a file"):
        read(folder)
    monkeypatch.setattr(trace, "MAX_FILES", 0)
    with pytest.raises(ProtocolError, match="1 files"):
        read(folder)
    with pytest.raises(ConfigError, match="no-folder"):
        read(Path(f"{folder}/no-folder"))
