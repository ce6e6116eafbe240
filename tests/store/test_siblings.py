"""Chunks by what leads up to them, against a search through all of them."""

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pdx.memory.keys import KEY_BYTES
from pdx.store.siblings import MAX_BEGINNINGS, Siblings, common

PARENTS = [b"p" * KEY_BYTES, b"q" * KEY_BYTES]


def _names(letters: str) -> bytes:
    return b"".join(letter.encode() * KEY_BYTES for letter in letters)


def _key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


letters = st.text("abc", min_size=1, max_size=5)
chunks = st.lists(st.tuples(st.sampled_from(PARENTS), letters), max_size=30)


@given(chunks, st.sampled_from(PARENTS), letters, st.data())
@settings(max_examples=examples(300), deadline=None)
def test_the_best_one_is_found_as_by_looking_at_all(chunks, parent, prompt, data):
    siblings = Siblings()
    for number, (of, names) in enumerate(chunks):
        siblings.add(of, _names(names), _key(number))
    gone = data.draw(st.sets(st.sampled_from(range(len(chunks))))) if chunks else set()
    for number in gone:
        siblings.discard(_key(number))
    kept = {_key(number): chunk for number, chunk in enumerate(chunks) if number not in gone}
    assert len(siblings) == len(kept)

    most = max((common(_names(names), _names(prompt)) for of, names in kept.values() if of == parent), default=0)
    found = list(siblings.like(parent, _names(prompt)))

    assert (found[0][1] if found else 0) == most
    for key, count in found:
        of, names = kept[key]
        assert of == parent
        assert names[:count] == prompt[:count]


@given(chunks, st.sampled_from(PARENTS), letters)
@settings(max_examples=examples(300), deadline=None)
def test_what_a_chunk_makes_useless_begins_as_it_does(chunks, parent, names):
    siblings = Siblings()
    for number, (of, each) in enumerate(chunks):
        siblings.add(of, _names(each), _key(number))
    siblings.add(parent, _names(names), b"!" * KEY_BYTES)

    found = siblings.beginnings(parent, _names(names), b"!" * KEY_BYTES)

    assert len(found) <= MAX_BEGINNINGS
    for key in found:
        of, each = chunks[int.from_bytes(key, "big")]
        assert of == parent
        assert names.startswith(each)
    same = [number for number, chunk in enumerate(chunks) if chunk == (parent, names)]
    assert len({*found} & {_key(number) for number in same}) == min(len(same), MAX_BEGINNINGS)


def test_a_chunk_of_several_shards_is_there_until_its_last_one_is_not():
    siblings = Siblings()
    for _ in range(2):
        siblings.add(PARENTS[0], _names("ab"), _key(1))
    siblings.discard(_key(1))
    assert list(siblings.like(PARENTS[0], _names("ac"))) == [(_key(1), 1)]
    siblings.discard(_key(1))
    assert not list(siblings.like(PARENTS[0], _names("ac")))
    assert len(siblings) == 0


def test_names_are_compared_block_by_block():
    one, other = _names("ab"), _names("a") + b"b" * (KEY_BYTES - 1) + b"c"
    assert common(one, other) == 1
    assert common(one, one[:-1]) == 1
    assert common(one, b"") == 0
