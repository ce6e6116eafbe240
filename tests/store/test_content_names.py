"""Chunks by their own tokens: what is found covers the prompt without a gap, token by token, and costs little."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from traced import traced

from pdx.store import content_names
from pdx.store.content_names import ContentNames
from pdx.wire.moved import Piece, PromptTokens

SCOPE, OTHER = b"s" * 16, b"o" * 16
CHUNK = 4


def ids(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


class Bed:
    """Names, and what they were told of."""

    def __init__(self, chunk: int = CHUNK, max_bytes: int = 1 << 30) -> None:
        self.names = Counting(max_bytes)
        self.chunk = chunk
        self.prompts: dict[bytes, tuple[list[int], int]] = {}  # by key: the prompt, and where the chunk begins in it

    def keys(self, prompt: Sequence[int], scope: bytes = SCOPE) -> list[bytes]:
        """As an engine makes them: of all tokens up to the chunk's end."""
        ends = range(self.chunk, len(prompt) + 1, self.chunk)
        return [random.Random(str((scope, list(prompt[:end])))).randbytes(16) for end in ends]

    def tell(self, prompt: Sequence[int], scope: bytes = SCOPE, first: int = 0, *, is_moved: bool = False) -> None:
        keys = self.keys(prompt, scope)
        for number, key in enumerate(keys):
            self.prompts[key] = list(prompt), number * self.chunk
        before = keys[first - 1] if first else b""
        prompt_tokens = PromptTokens(scope, ids(prompt[first * self.chunk :]), self.chunk, first * self.chunk, is_moved)
        self.names.register(prompt_tokens, keys[first:], before)

    def find(self, prompt: Sequence[int], scope: bytes = SCOPE) -> list[Piece]:
        """What is found of it, which is right."""
        pieces = self.names.find(scope, ids(prompt), self.chunk)
        at = 0
        for piece in pieces:
            told, start = self.prompts[piece.key]
            assert piece.first >= 0
            assert 1 <= piece.count <= self.chunk - piece.first
            first = start + piece.first
            assert told[first : first + piece.count] == list(prompt[at : at + piece.count])
            assert piece.shift == at - first
            at += piece.count
        assert at <= len(prompt)
        return pieces

    def spans(self, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """(tokens, shift) of each run of what is found."""
        runs: list[tuple[int, int]] = []
        for piece in self.find(prompt):
            if runs and runs[-1][1] == piece.shift:
                runs[-1] = runs[-1][0] + piece.count, piece.shift
            else:
                runs.append((piece.count, piece.shift))
        return runs


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_a_conversation_that_lost_tokens_is_found_behind_its_beginning(bed: Bed) -> None:
    history = list(range(100, 140))
    bed.tell(history)
    for lost in range(1, 30):
        cut = [*history[:6], *history[6 + lost :]]
        rest = len(cut) - 6
        assert bed.spans([*cut, 7, 8, 9]) == [(6, 0), (rest, -lost)]


def test_without_its_beginning_nothing_is_found(bed: Bed) -> None:
    bed.tell(range(100, 140))
    assert bed.find(range(104, 140)) == []
    assert bed.find([1, *range(101, 140)]) == []
    assert bed.spans([100, *range(108, 140)]) == [(1, 0), (32, -7)]


def test_documents_in_another_order_are_found(bed: Bed) -> None:
    system, first, second = list(range(10, 18)), list(range(100, 112)), list(range(200, 220))
    bed.tell([*system, *first, *second])
    assert bed.spans([*system, *second, *first]) == [(8, 0), (20, -12), (12, 20)]


def test_what_lies_between_two_runs_has_to_be_known(bed: Bed) -> None:
    history = list(range(100, 140))
    bed.tell(history)
    assert bed.spans([*history[:8], 1, *history[20:]]) == [(8, 0)]


def test_of_several_runs_the_longest_is_taken(bed: Bed) -> None:
    for seed, length in ((1, 8), (2, 24), (3, 12)):
        bed.tell([*range(10, 14), *[seed] * 4, *range(50, 50 + length)])
    assert bed.spans([*range(10, 14), *range(50, 74)]) == [(4, 0), (24, -4)]


def test_chunks_that_were_computed_are_preferred(bed: Bed) -> None:
    bed.tell([*range(10, 14), *[1] * 4, *range(50, 66)])
    bed.tell([*range(10, 14), *[2] * 4, *range(50, 66)], is_moved=True)
    found = bed.find([*range(10, 14), *range(50, 66)])
    assert [bed.prompts[piece.key][0][4] for piece in found[1:]] == [1] * 4


def test_scopes_never_meet(bed: Bed) -> None:
    bed.tell(range(100, 140), OTHER)
    assert bed.find([*range(100, 104), *range(110, 140)]) == []
    bed.tell(range(100, 104))
    assert bed.spans([*range(100, 104), *range(110, 140)]) == [(4, 0)]


def test_what_comes_late_follows_what_was_before(bed: Bed) -> None:
    history = list(range(100, 140))
    bed.tell(history[:20])
    bed.tell(history, first=5)
    assert bed.spans([*history[:4], *history[10:]]) == [(4, 0), (30, -6)]


def test_what_is_forgotten_is_not_found_and_leaves_nothing(bed: Bed) -> None:
    history = list(range(100, 140))
    bed.tell(history)
    bed.names.forget(bed.keys(history)[5:6])
    assert bed.spans([*history[:4], *history[12:]]) == [(4, 0), (8, -8)]
    bed.names.forget(bed.keys(history))
    assert bed.find(history) == []
    assert bed.names.nbytes == 0


def test_what_comes_and_goes_leaves_nothing() -> None:
    names = ContentNames(1 << 30)
    keys = [[number.to_bytes(16, "big"), number.to_bytes(16, "little")] for number in range(1, 2001)]
    prompt_tokens = [PromptTokens(SCOPE, ids(range(number, number + 8)), CHUNK) for number in range(1, 2001)]
    with traced() as held:
        for one, of_one in zip(prompt_tokens, keys, strict=True):
            names.register(one, of_one, b"")
            names.forget(of_one)
        assert held() < 20_000


def test_those_that_nobody_asks_for_go_first_and_the_bytes_are_what_they_are_said_to_be() -> None:
    bed = Bed(256, max_bytes=2 << 20)
    prompts = [[number, *range(number * 1000, number * 1000 + 1023)] for number in range(1, 400)]
    bed.tell(prompts[0])
    with traced() as held:
        for prompt in prompts[1:]:
            prompt_tokens = PromptTokens(SCOPE, ids(prompt), 256)
            bed.names.register(prompt_tokens, bed.keys(prompt), b"")
            bed.names.find(SCOPE, ids(prompts[0]), 256)
        assert 0.7 * bed.names.nbytes < held() < 1.2 * bed.names.nbytes
    assert bed.names.nbytes <= 2 << 20
    assert sum(piece.count for piece in bed.find(prompts[0])) == 1024
    assert bed.names.find(SCOPE, ids(prompts[1]), 256) == []


def test_any_prompts_of_any_words_are_found_rightly() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        bed = Bed(rng.choice([1, 2, 4, 7]))
        words = rng.choice([2, 5, 1000])
        prompts = [[rng.randrange(words) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
        for prompt in prompts:
            bed.tell(prompt)
        for _ in range(30):
            parts = rng.choices(prompts, k=3)
            mixed = [token for part in parts for token in part[rng.randrange(len(part)) :]]
            found = bed.find([*rng.choice(prompts)[: rng.randrange(1, 9)], *mixed])
            assert not found or found[0].shift == 0


class Counting(ContentNames):
    """Counts how often chunks were looked up, and the tokens that were compared for that."""

    looks = compared = 0

    def alike(self, *args: Any) -> tuple[list[bytes], int]:
        found, compared = super().alike(*args)
        self.looks += 1
        self.compared += compared
        return found, compared


def looks_of(bed: Bed, prompt: Sequence[int]) -> int:
    """How often a chunk was looked up for a prompt."""
    before = bed.names.looks
    bed.names.find(SCOPE, ids(prompt), bed.chunk)
    return bed.names.looks - before


def test_a_question_costs_a_chunk_of_looks_and_one_for_each_chunk() -> None:
    bed = Bed(256)
    rng = random.Random(1)
    history = [rng.randrange(50_000) for _ in range(128 * 1024)]
    keys = [number.to_bytes(16, "big") for number in range(512)]
    bed.names.register(PromptTokens(SCOPE, ids(history), 256), keys, b"")
    assert looks_of(bed, [*history[:256], *history[1001:]]) <= 256 + 2 * 512
    found = bed.names.find(SCOPE, ids([*history[:256], *history[1001:]]), 256)
    assert sum(piece.count for piece in found) == 128 * 1024 - 745


def test_no_prompt_costs_more_than_the_limit() -> None:
    bed = Bed(16)
    bed.names.register(
        PromptTokens(SCOPE, ids([7] * 16 * 4096), 16), [at.to_bytes(16, "big") for at in range(4096)], b""
    )
    for prompt in ([7] * 100_000, [*[7] * 16, *range(100_000)], [7, 8] * 50_000):
        assert looks_of(bed, prompt) <= content_names.MAX_LOOKS


def test_large_chunks_that_are_much_alike_count_by_their_tokens() -> None:
    size = 1 << 16
    bed = Bed(size)
    bed.names.register(PromptTokens(SCOPE, ids([7] * size * 6), size), [at.to_bytes(16, "big") for at in range(6)], b"")
    text = ids([*[7] * (size + 3), 8, *[7] * size * 6])
    bed.names.find(SCOPE, text, size)
    assert (
        bed.names.compared <= (content_names.MAX_LOOKS + 1) * content_names.LOOK_TOKENS
    )  # 25 times that took a second
