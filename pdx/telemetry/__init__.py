"""Clocks, timelines of transfers, spans, contained faults, which host this is."""
