"""What clients ask of a service, and when: who shares which text with whom. Pure; texts are written elsewhere.

A text has a name, and the same name means the same text. So what requests share can be read off their names.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pdx.errors import ConfigError

QUESTION_TOKENS = 100  # of a question about a long document, unless told otherwise
SYSTEM_PROMPTS = 8


class Workload(StrEnum):
    """The LMCache paper's four."""

    RANDOM = "random"  # nothing is shared
    LONG_DOCUMENT = "long-document"  # many questions about each of a few long documents, in random order
    CHAT = "chat"  # conversations; each round repeats all that was said before
    SHARED_PROMPT = "shared-prompt"  # many users, each below one of several system prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a workload."""

    workload: Workload
    requests: int
    input_tokens: int  # of a request's prompt; of a conversation's first message
    output_tokens: int
    rate: float = math.inf  # requests per second on average
    seed: int = 0
    shared: int = 0  # documents, or system prompts
    shared_tokens: int = 0  # of each of them; the rest of `input_tokens` is the request's own
    rounds: int = 1  # of a conversation
    message_tokens: int = 0  # of a conversation's later messages
    think_s: float = 0.0  # mean pause between an answer and the next message

    @property
    def sessions(self) -> int:
        """Clients that come on their own: conversations, or single requests."""
        return self.requests // self.rounds

    @property
    def most_tokens(self) -> int:
        """The longest prompt with its answer."""
        return self.input_tokens + self.output_tokens + (self.rounds - 1) * (self.message_tokens + self.output_tokens)


@dataclass(frozen=True, slots=True)
class Passage:
    """A text to be written."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    message: Passage
    think_s: float = 0.0  # pause before it, after the last answer


@dataclass(frozen=True, slots=True)
class Session:
    """One client: its requests follow each other, each after the answer to the one before."""

    index: int
    start_s: float  # when the first request is sent, from the start of its block
    turns: tuple[Turn, ...]
    system: Passage | None = None  # stands before everything


def make_shape(
    workload: Workload,
    *,
    requests: int,
    input_tokens: int,
    output_tokens: int,
    rate: float,
    seed: int,
    shared: int | None = None,
    shared_tokens: int | None = None,
    rounds: int = 5,
    message_tokens: int = 200,
    think_s: float = 1.0,
) -> Shape:
    """A shape without what its workload has no use for. None: a value that suits the workload.

    :raises ConfigError: no such workload can be made.
    """
    if not rate > 0:
        raise ConfigError(f"--rate {rate:g}: requests per second must be above 0, or inf")
    shape = Shape(
        workload=workload,
        requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        rate=rate,
        seed=seed,
    )
    if workload is Workload.CHAT:
        if requests % rounds:
            raise ConfigError(f"--requests {requests} is no multiple of --rounds {rounds}: conversations are whole")
        return replace(shape, rounds=rounds, message_tokens=message_tokens, think_s=think_s)
    if workload is Workload.RANDOM:
        return shape
    few, most = _usual_sharing(shape)
    shape = replace(
        shape,
        shared=few if shared is None else shared,
        shared_tokens=most if shared_tokens is None else shared_tokens,
    )
    if not 0 < shape.shared_tokens < input_tokens:
        raise ConfigError(
            f"--shared-len {shape.shared_tokens} must be above 0 and below --input-len {input_tokens}, whose part it is"
        )
    if not 0 < shape.shared <= requests:
        raise ConfigError(f"--shared {shape.shared}: at least 1 and at most one for each of {requests} requests")
    return shape


def _usual_sharing(shape: Shape) -> tuple[int, int]:
    """How many texts are shared, and their length."""
    if shape.workload is Workload.LONG_DOCUMENT:
        question = max(1, min(QUESTION_TOKENS, shape.input_tokens // 10))
        return max(1, shape.requests // 10), shape.input_tokens - question
    return min(SYSTEM_PROMPTS, shape.requests), shape.input_tokens // 2


def plan(shape: Shape) -> list[Session]:
    """All sessions in the order of their start. The same shape gives the same plan."""
    starts = arrivals(shape.sessions, shape.rate / shape.rounds, random.Random(f"{shape.seed} arrivals"))
    draw = random.Random(f"{shape.seed} content")
    if shape.workload is Workload.CHAT:
        return [Session(index, start, _rounds(shape, index, draw)) for index, start in enumerate(starts)]
    systems = _shared_texts(shape, draw)
    own = shape.input_tokens - shape.shared_tokens
    return [
        Session(index, start, (Turn(Passage(f"own {index}", own)),), systems[index] if systems else None)
        for index, start in enumerate(starts)
    ]


def arrivals(count: int, rate: float, draw: random.Random) -> list[float]:
    """Poisson arrivals in seconds. Like `vllm bench serve`, stretched so that the last one is at `count / rate`."""
    if math.isinf(rate):
        return [0.0] * count
    times: list[float] = []
    for _ in range(count):
        times.append((times[-1] if times else 0.0) + draw.expovariate(1.0))
    stretch = count / rate / times[-1] if times and times[-1] > 0 else 0.0
    return [time * stretch for time in times]


def blocks(sessions: Sequence[Session], count: int) -> list[list[Session]]:
    """Cut into at most `count` blocks of consecutive sessions, each with a clock of its own."""
    count = max(1, min(count, len(sessions)))
    cuts = [len(sessions) * number // count for number in range(count + 1)]
    found = []
    for first, end in zip(cuts, cuts[1:], strict=False):
        zero_s = sessions[first - 1].start_s if first else 0.0
        found.append([replace(one, start_s=one.start_s - zero_s) for one in sessions[first:end]])
    return found


def _shared_texts(shape: Shape, draw: random.Random) -> list[Passage]:
    """For each session the text that it shares; empty where nothing is shared."""
    texts = [Passage(f"shared {number}", shape.shared_tokens) for number in range(shape.shared)]
    if shape.workload is Workload.LONG_DOCUMENT:  # each document as often as any other
        found = [texts[number % len(texts)] for number in range(shape.sessions)]
        draw.shuffle(found)
        return found
    return [draw.choice(texts) for _ in range(shape.sessions)] if texts else []


def _rounds(shape: Shape, session: int, draw: random.Random) -> tuple[Turn, ...]:
    turns = [Turn(Passage(f"own {session} round 0", shape.input_tokens))]
    for number in range(1, shape.rounds):
        pause_s = draw.expovariate(1 / shape.think_s) if shape.think_s > 0 else 0.0
        turns.append(Turn(Passage(f"own {session} round {number}", shape.message_tokens), pause_s))
    return tuple(turns)


_POOL = 1000  # words: seven of them in a row, which is less than one page, hardly come twice
_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_SHORT = [" the", " a", " I", " of"]  # few tokens each, to fill what is left
_SHORTEST = [".", ",", "!", ";"]  # where even those are too long; two of them in a row may be one token
_TRIES = 8

Encode = Callable[[str], Sequence[int]]


class Writer:
    """Writes texts. The same tokenizer, salt and name give the same text, any other name or salt a different one.

    Texts begin with a space and consist of words, so that tokenizers split between two of them: texts written one
    behind the other have as many tokens as they have alone.
    """

    def __init__(self, encode: Encode, salt: str) -> None:
        """`encode` adds no special tokens."""
        self._encode = encode
        self._salt = salt
        draw = random.Random("words")
        words = {" " + "".join(_syllables(draw)) for _ in range(_POOL)}
        self._words = sorted(words)
        # Behind another word: some tokenizers put a token of their own in front of every text.
        alone = len(encode(_SHORT[0]))
        self._cost = {word: len(encode(_SHORT[0] + word)) - alone for word in [*self._words, *_SHORT, *_SHORTEST]}

    def text(self, name: str, tokens: int) -> str:
        """A text of `tokens` tokens; where the tokenizer allows no such text, the nearest one found."""
        best, off = "", tokens
        wanted = tokens
        for _ in range(_TRIES):
            text = self._draw(random.Random(f"{self._salt} {name}"), wanted)
            error = len(self._encode(text)) - tokens
            if abs(error) < off or not best:
                best, off = text, abs(error)
            if error == 0:
                break
            wanted = max(1, wanted - error)
        return best

    def _draw(self, draw: random.Random, tokens: int) -> str:
        """Words whose tokens, counted one by one, are `tokens`."""
        text: list[str] = []
        left = tokens
        while left > 0:
            word = draw.choice(self._words)
            if self._cost[word] > left:
                short = self._at_most(_SHORT, left) or self._at_most(_SHORTEST, left)
                if not short:
                    break
                word = draw.choice(short)
            text.append(word)
            left -= self._cost[word]
        return "".join(text)

    def _at_most(self, words: Sequence[str], tokens: int) -> list[str]:
        return [word for word in words if 0 < self._cost[word] <= tokens]


def _syllables(draw: random.Random) -> list[str]:
    return [draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(draw.randint(1, 4))]
