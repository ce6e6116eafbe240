"""Generated conversations with the statistics that CachedAttention's authors give of ShareGPT's.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention", ATC 2024:
73 % of the conversations have more than one turn, 5.75 turns are the mean; 47 % have more than 2,048 tokens, 30 % more
than 4,096. Turns beyond the first are geometric; a turn's tokens are log-normal, times a log-normal factor of their
session; the two widths and the median are chosen so that both shares come out. Sessions come at random (Poisson), and
their next turn an exponential time after the answer's; ShareGPT has no times, so both are assumptions.
"""

from __future__ import annotations

import math
import random
from array import array

import msgspec

from pdx.bench.sim.requests import Request, Trace

MULTI_SHARE = 0.73
MEAN_TURNS = 5.75
MEDIAN_TURN = 405.0  # tokens of question and answer together, in the middle session
TURN_WIDTH = 0.7  # sigma of the logarithm, within a session …
SESSION_WIDTH = 1.1  # … and from session to session
ANSWER_SHARE = 0.78  # of a turn's tokens
MOST_TURN = 16_384  # tokens


class Conversations(msgspec.Struct, frozen=True, kw_only=True):
    """What is generated."""

    sessions: int = 9000
    rate: float = 1.0  # sessions per second
    think_s: float = 60.0  # mean time from one turn to the next
    window: int = 2048  # tokens of the model's context
    keep_share: float = 0.5  # of the window is left of the history when it would not fit
    moves: bool = False  # whether what blocks hold is known, so that they are found behind a cut (`Request.content`)
    block_tokens: int = 64
    seed: int = 1


class Turn(msgspec.Struct, frozen=True):
    """Of one session: tokens of the question and of the answer, and when the question comes."""

    session: int
    at_s: float
    question: int
    answer: int


def turns(asked: Conversations) -> list[Turn]:
    """All turns, in the order in which they come. The same for the same seed, on every machine."""
    drawn = random.Random(asked.seed)
    more = MEAN_TURNS - (1 - MULTI_SHARE) - 2 * MULTI_SHARE  # turns behind the second, in the mean of all sessions
    stays = more / MULTI_SHARE / (1 + more / MULTI_SHARE)
    found: list[Turn] = []
    started_at = 0.0
    for session in range(asked.sessions):
        started_at += drawn.expovariate(asked.rate)
        count = 1
        if drawn.random() < MULTI_SHARE:
            count = 2
            while drawn.random() < stays:
                count += 1
        factor = MEDIAN_TURN * math.exp(drawn.gauss(0, SESSION_WIDTH))
        at_s = started_at
        for _ in range(count):
            tokens = max(8, min(MOST_TURN, round(factor * math.exp(drawn.gauss(0, TURN_WIDTH)))))
            answer = max(1, round(tokens * ANSWER_SHARE))
            found.append(Turn(session, at_s, tokens - answer, answer))
            at_s += drawn.expovariate(1 / asked.think_s)
    return sorted(found, key=lambda turn: (turn.at_s, turn.session))


def generate(asked: Conversations) -> Trace:
    """A trace of them. A prompt is what the window has of the session's history, and the question.

    History is cut at blocks, which are named by their place in the session and by where it was cut: keys are chained.
    With `moves` the session's first block stands in place of the first that is left: without it nothing is found.
    """
    size, window = asked.block_tokens, asked.window
    histories: dict[int, tuple[int, int]] = {}  # session -> where its history begins and ends
    numbers: dict[int, int] = {}  # of what blocks hold, by session and place there
    requests: list[Request] = []
    for turn in turns(asked):
        answer = min(turn.answer, window // 2)
        question = min(turn.question, window - answer)
        start, end = histories.get(turn.session, (0, 0))
        if end - start + question + answer > window:
            left = min(int(window * asked.keep_share), window - question - answer)
            start = max(start, -(-(end - left) // size) * size)
        tokens, whole = end - start + question, (end + question) // size
        places = [*range(start // size, (end + question + answer) // size)]
        if asked.moves and 0 < start <= end - size:
            places[0] = 0
        end += question + answer
        names = [_name(turn.session, start if at else 0, at) for at in places]
        split = whole - start // size
        keys = names[:split]
        if (start + tokens) % size:  # its last block is not whole, and nobody else finds it
            keys = [*keys, _name(turn.session, 1 + len(requests), -1)]
        ids = array("I", [numbers.setdefault(turn.session << 32 | at, len(numbers)) for at in places if asked.moves])
        requests.append(Request(turn.at_s, tokens, answer, keys, names[split:], str(turn.session), ids.tobytes()))
        histories[turn.session] = start, end
    return Trace(f"sessions-{asked.seed}", size, requests, asked.sessions, window)


def _name(session: int, cut: int, at: int) -> bytes:
    return b"".join(number.to_bytes(4, "big", signed=True) for number in (session, cut, at)) + b"pdx "
