"""Clocks, counters, logs, timelines of transfers, spans, contained faults, and the host's id."""
