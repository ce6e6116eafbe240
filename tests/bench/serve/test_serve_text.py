"""Texts have the tokens asked for, under tokenizers of several kinds, and never begin alike by accident."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.serve.workloads import Writer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers trains a small vocabulary")

WORDS = re.compile(r" ?[a-zA-Z]+|[^a-zA-Z]")


def characters(text):
    return list(text)


def pieces(text):
    """Like byte pair encoding: words apart, long ones in pieces of three letters."""
    return [piece for word in WORDS.findall(text) for piece in re.findall(".{1,4}", word)]


def sentence(text):
    """Like SentencePiece: one token more for what stands in front of every text."""
    return ["", *pieces(text)]


def trained():
    """Real byte pair encoding, trained on our licence. Some punctuation in a row is one token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=3000, show_progress=False)
    licence = (Path(__file__).parents[3] / "LICENSE").read_text()
    tokenizer.train_from_iterator([licence, "so ... it ,, is ;. said !! so ... it ,, is ;. said !!"], trainer)
    return lambda text: tokenizer.encode(text).ids


ENCODERS = {"characters": characters, "pieces": pieces, "sentence": sentence, "trained": trained()}
WRITERS = {name: Writer(encode, "salt") for name, encode in ENCODERS.items()}


@given(st.sampled_from(list(WRITERS)), st.integers(2, 700), st.text(max_size=5))
def test_texts_have_the_tokens_asked_for(kind, tokens, name):
    assert len(ENCODERS[kind](WRITERS[kind].text(name, tokens))) == tokens


@pytest.mark.parametrize("kind", ["characters", "pieces", "trained"])
def test_texts_in_a_row_have_the_sum_of_their_tokens(kind):
    row = "".join(WRITERS[kind].text(f"part {number}", 40 + number) for number in range(20))
    assert len(ENCODERS[kind](row)) == sum(40 + number for number in range(20))


def test_the_same_name_is_the_same_text_and_another_salt_is_not():
    assert Writer(pieces, "a").text("x", 300) == Writer(pieces, "a").text("x", 300)
    assert Writer(pieces, "a").text("x", 300)[:40] != Writer(pieces, "b").text("x", 300)[:40]


def test_no_two_texts_begin_alike():
    """16 tokens are the smallest block that vLLM's prefix cache shares."""
    writer = WRITERS["pieces"]
    beginnings = {tuple(pieces(writer.text(f"own {number}", 64))[:16]) for number in range(2000)}
    assert len(beginnings) == 2000
