"""`--file` of the commands of `pdx cache`, whatever is there."""

import os
import threading

import pytest

from pdx.cli.cache_options import _of_file
from pdx.errors import SelectionError


def test_brackets_without_end_are_a_text(tmp_path):
    file = tmp_path / "prompt"
    file.write_text("[" * 200_000)
    assert _of_file(file, "", "").text == "[" * 200_000


def test_a_fifo_that_nobody_writes_to_is_empty(tmp_path):
    file = tmp_path / "fifo"
    os.mkfifo(file)
    with pytest.raises(SelectionError, match="is empty"):
        _of_file(file, "", "")


def test_what_is_written_to_a_pipe_is_read_to_its_end():
    reads, writes = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writes, b"[1, 2"), os.write(writes, b", 3]"), os.close(writes)))
    writer.start()
    try:
        assert list(_of_file(f"/dev/fd/{reads}", "", "").tokens) == [1, 2, 3]
    finally:
        writer.join()
        os.close(reads)
