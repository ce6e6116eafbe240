"""Spans, counters, clocks."""
