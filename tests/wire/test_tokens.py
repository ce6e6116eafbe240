"""Keys made of tokens: what is pinned, and what is refused; `tests/connector` holds them against vLLM's own hashes."""

import hashlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import SelectionError
from pdx.memory.keys import chunk_key
from pdx.wire.base import MAX_KEYS
from pdx.wire.tokens import chosen, chunk_keys, number_of
from pdx.wire.verbs import Model

LAYOUT = b"l" * 16
SHAPE = {
    "block_tokens": "2", "chunk_tokens": "4", "num_shards": "2", "hashing": "sha256_cbor", "root": "00" * 32,
    "salt_tag": "cache_salt", "vocabulary": "1000",
}  # fmt: skip


def model(layout=LAYOUT, **changes):
    return Model("engine", "", layout, {name: text for name, text in {**SHAPE, **changes}.items() if text is not None})


def hashed(hexes):
    return hashlib.sha256(bytes.fromhex(hexes)).digest()


def test_a_key_is_made_of_the_bytes_that_rfc_8949_says():
    """By hand: an array of the parent, an array of two numbers, and null or an array of the salt's two texts."""
    salt = "81 82 6a 63616368655f73616c74 62 c3a9"
    first = hashed(f"83 5820 {'00' * 32} 82 01 1903e7 {salt}")
    second = hashed(f"83 5820 {first.hex()} 82 17 1818 f6")
    assert chunk_keys(model(), [1, 999, 23, 24, 5], "é") == [chunk_key(LAYOUT, second)]


def test_a_salt_stands_alone_in_releases_that_have_no_tag_for_it():
    first = hashed(f"83 5820 {'00' * 32} 82 01 02 81 62 c3a9")
    second = hashed(f"83 5820 {first.hex()} 82 03 04 f6")
    assert chunk_keys(model(salt_tag=""), [1, 2, 3, 4], "é") == [chunk_key(LAYOUT, second)]


@given(
    st.binary(min_size=1, max_size=128),
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, (1 << 31) - 1)), min_size=1, max_size=600),
    st.one_of(st.text(min_size=2), st.text(min_size=2, max_size=9).map(lambda text: 300 * text)),
    st.sampled_from(["", "cache_salt"]),
)
def test_a_hash_by_pickle_is_of_the_bytes_that_pickle_writes(root, tokens, salt, tag):
    size = str(len(tokens))
    for text in ("", salt):
        made = chunk_keys(
            model(
                hashing="sha256", root=root.hex(), block_tokens=size, chunk_tokens=size, salt_tag=tag, vocabulary=None
            ),
            tokens,
            text,
        )
        own = text.encode().decode()  # two texts, as engines have them: pickle writes one that it meets again otherwise
        extra = (((tag, own),) if tag else (own,)) if text else None
        written = pickle.dumps((root, tuple(tokens), extra), protocol=pickle.HIGHEST_PROTOCOL)
        assert made == [chunk_key(LAYOUT, hashlib.sha256(written).digest())]


def test_what_pickle_would_write_in_several_frames_is_refused():
    told = model(hashing="sha256", block_tokens="4", vocabulary=None)
    assert chunk_keys(told, [1, 2, 3, 4], "s" * 65_000)
    with pytest.raises(SelectionError, match="too long to be hashed here: name a request"):
        chunk_keys(told, [1, 2, 3, 4], "s" * 65_536)


@pytest.mark.parametrize(
    ("model_", "tokens", "salt"),
    [
        (model(), [1, 2, 3, 5], ""),
        (model(), [1, 2, 3, 4], "salt"),
        (model(b"k" * 16), [1, 2, 3, 4], ""),
        (model(root="01" * 32), [1, 2, 3, 4], ""),
        (model(hashing="sha256"), [1, 2, 3, 4], ""),
        (model(block_tokens="4"), [1, 2, 3, 4], ""),
    ],
)
def test_whatever_differs_makes_another_key(model_, tokens, salt):
    assert chunk_keys(model_, tokens, salt) != chunk_keys(model(), [1, 2, 3, 4])


def test_a_longer_prompt_begins_with_the_keys_of_a_shorter_one():
    keys = chunk_keys(model(), list(range(12)))
    assert keys[:2] == chunk_keys(model(), list(range(11)))
    assert len(set(keys)) == 3


def test_numbers_are_read_from_the_shape():
    assert (number_of(model(), "chunk_tokens"), number_of(model(), "num_shards")) == (4, 2)


@pytest.mark.parametrize(
    ("changes", "tokens", "words"),
    [
        ({}, [1, 2, 3], "3 tokens fill no chunk of engine 'engine': one has 4 tokens"),
        ({}, [], "0 tokens fill no chunk"),
        ({}, [1, 2, 3, 1000], r"token 3 is 1000: engine 'engine' knows 1,000 tokens"),
        ({}, [1, -2, 3, 4], "token 1 is -2"),
        ({"vocabulary": None}, [1, 2, 3, 1 << 31], "no model knows so many"),
        ({"vocabulary": "all"}, [1, 2, 3, 1 << 31], "no model knows so many"),
        ({}, [1, 2, "3", 4], "token 2 is '3': ids of tokens are whole numbers"),
        ({}, [1, 2, True, 4], "token 2 is True"),
        ({}, [1, 2, 3.0, 4], "token 2 is 3.0"),
        ({"root": None}, [1, 2, 3, 4], "in a way that only it knows"),
        ({"root": "xyz"}, [1, 2, 3, 4], "in a way that only it knows"),
        ({"hashing": "xxhash"}, [1, 2, 3, 4], "'xxhash', which is not known here"),
        ({"chunk_tokens": None}, [1, 2, 3, 4], "has not told its chunk_tokens"),
        ({"cache_groups": "2"}, [1, 2, 3, 4], "has 2 cache groups"),
        ({"block_tokens": "many"}, [1, 2, 3, 4], "has not told its block_tokens"),
        ({"block_tokens": "0"}, [1, 2, 3, 4], "has not told its block_tokens"),
    ],
)
def test_tokens_that_name_no_chunk_are_refused(changes, tokens, words):
    with pytest.raises(SelectionError, match=words):
        chunk_keys(model(**changes), tokens)


def test_more_chunks_than_a_message_holds_are_refused():
    whole = [1, 2, 3, 4] * MAX_KEYS
    assert len(chunk_keys(model(), [*whole, 1, 2, 3])) == MAX_KEYS
    with pytest.raises(SelectionError, match="more than 16384 chunks"):
        chunk_keys(model(), [*whole, 1, 2, 3, 4])


def engine(name, url="", layout=LAYOUT, **changes):
    return Model(name, url, layout, {**SHAPE, "model": "0123abcd", **changes})


def test_engines_that_make_keys_alike_are_one_whichever_of_them_is_named():
    one, same, other = engine("eeee1"), engine("f", "http://f"), engine("gggg1", layout=b"k" * 16, model="4567cdef")
    assert chosen([one, same]) == [one, same]
    for name in ("eeee1", "eeee", "f", "http://f", LAYOUT.hex(), LAYOUT.hex()[:4], "0123abcd", "0123"):
        assert chosen([one, same, other], name) == [one, same], name
    assert chosen([one, same, other], "gggg1") == [other]
    for name in ("eee", "llama", "http://"):
        with pytest.raises(
            SelectionError, match=r"is, or has, the model .*; there are engine 'eeee1' \(model '0123abcd'"
        ):
            chosen([one, same, other], name)
    with pytest.raises(SelectionError, match="name chunks differently, so say of which model"):
        chosen([one, other])
    with pytest.raises(SelectionError, match="name chunks differently"):
        chosen([one, engine("eeee2", root="11" * 32)], "eeee")
    with pytest.raises(SelectionError, match="no engine is attached"):
        chosen([])
