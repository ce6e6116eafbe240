"""What Python objects take: how much memory something keeps, whatever it keeps it in."""

import contextlib
import gc
import tracemalloc


@contextlib.contextmanager
def traced():
    """Yields what tells how many bytes were taken from here on and are still held."""
    gc.collect()
    tracemalloc.start()

    def held():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        yield held
    finally:
        tracemalloc.stop()
