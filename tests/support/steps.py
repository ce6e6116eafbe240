"""How much Python this thread runs meanwhile, so that costs are counted and not timed."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pdx

PDX = str(Path(pdx.__file__).parent)


@contextlib.contextmanager
def _traced(trace: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def lines_run() -> Iterator[list[int]]:
    """The numbers of all lines, one by one."""
    lines: list[int] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        lines.extend([frame.f_lineno] if event == "line" else [])
        return trace

    with _traced(trace):
        yield lines


@contextlib.contextmanager
def calls_run() -> Iterator[Counter[tuple[str, str]]]:
    """How often each function of PDX is called, by file and name."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PDX):
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def opcodes_run() -> Iterator[Counter[tuple[str, str]]]:
    """How many steps of Python are done in PDX, by function: also those of one that looks at each of many."""
    steps: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PDX):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps[frame.f_code.co_filename, frame.f_code.co_qualname] += event == "opcode"
        return note

    with _traced(note):
        yield steps
