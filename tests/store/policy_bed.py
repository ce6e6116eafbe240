"""A store of chunks of one granule, by numbers."""

from pdx.memory.arena import GRANULE_BYTES
from pdx.store.chunk import Claim

SESSION = 1


def name(number):
    return number.to_bytes(16, "big")


def put(store, numbers, **others):
    claim = Claim(
        **{
            "keys": [name(number) for number in numbers],
            "nbytes": GRANULE_BYTES,
            "layers": 1,
            "owner": SESSION,
            "writers": [SESSION],
            **others,
        }
    )
    granted, slots, _ = store.reserve(claim)
    store.seal(store.fill(slots, 0, 1, SESSION))
    return len(granted)


def there(store, numbers):
    return [number for number in numbers if store.find([name(number)], 1)]


def use(store, number, how):
    """As a request that finds one chunk, or, where it is not there, puts it there; returns whether it was."""
    found = store.find([name(number)], 1)
    if not found:
        put(store, [number])
    elif how == "touch":
        store.touch(found[0])
    elif how == "lease":
        store.release(store.lease(found[0], SESSION, 1.0), SESSION)
    return bool(found)
