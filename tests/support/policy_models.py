"""Each eviction policy as its paper has it, with lists and loops: which accesses are hits."""

from collections import OrderedDict

from hypothesis import strategies as st

from pdx.memory.arena import GRANULE_BYTES
from pdx.store.policies.gittins import FOUND, NEW, PRIOR, Ages

ROOM = 10  # chunks
ACCESSES = st.lists(st.integers(0, 30) | st.integers(0, 12), max_size=200)


def lru(accesses):
    cache = OrderedDict()
    for key in accesses:
        yield key in cache
        if key not in cache and len(cache) == ROOM:
            cache.popitem(last=False)
        cache[key] = None
        cache.move_to_end(key)


def fifo(accesses):
    cache = []
    for key in accesses:
        yield key in cache
        if key not in cache:
            cache = [*cache[-ROOM + 1 :], key]


def s3fifo(accesses):
    small, main, ghosts, uses = [], [], [], {}

    def evict():
        while True:
            if len(small) >= ROOM // 10 or not main:
                key = small.pop(0)
                if uses[key] >= 2:
                    main.append(key)
                    uses[key] = 0
                else:
                    del uses[key]
                    ghosts.append(key)
                    del ghosts[: -(ROOM - ROOM // 10)]
                    return
            else:
                key = main.pop(0)
                if not uses[key]:
                    del uses[key]
                    return
                main.append(key)
                uses[key] -= 1

    for key in accesses:
        yield key in uses
        if key in uses:
            uses[key] = min(3, uses[key] + 1)
            continue
        if len(uses) == ROOM:
            evict()
        if key in ghosts:
            ghosts.remove(key)
            main.append(key)
        else:
            small.append(key)
        uses[key] = 0


def gittins(accesses):
    """Every age of every chunk is a number in a list; the worths come of the same arithmetic."""
    nbytes, total = GRANULE_BYTES, ROOM * GRANULE_BYTES
    ages = [Ages(total, PRIOR[NEW]), Ages(total, PRIOR[FOUND])]
    here, ghosts, now, look_at = [], [], 0, int(total / 8)  # of (key, kind, since), the oldest first
    for key in accesses:
        known = next((each for each in here if each[0] == key), None)
        was = known or next((each for each in ghosts if each[0] == key), None)
        yield known is not None
        if known is None and len(here) == ROOM:
            oldest = {kind: next((each for each in here if each[1] == kind), None) for kind in (NEW, FOUND)}
            heads = [each for each in oldest.values() if each is not None]
            victim = min(heads, key=lambda each: ages[each[1]].worths[ages[each[1]].step(now - each[2])])
            here.remove(victim)
            ghosts.append(victim)
            for each in ghosts[: -4 * ROOM]:
                ages[each[1]].ends(each[2], now, nbytes, is_found=False)
                was = None if each is was else was
            del ghosts[: -4 * ROOM]
        if was is not None:
            ages[was[1]].ends(was[2], now, nbytes, is_found=True)
            (here if known else ghosts).remove(was)
        now += nbytes
        here.append((key, NEW if was is None else FOUND, now))
        ages[here[-1][1]].begins(now, nbytes)
        if now >= look_at:
            look_at = now + int(total / 8)
            for each in ages:
                each.look(now)


MODELS = {
    "lru": lru,
    "s3fifo": s3fifo,
    "gittins": gittins,
    "age:1000": fifo,
    "idle:1000": lru,
}
POLICIES = list(MODELS)
