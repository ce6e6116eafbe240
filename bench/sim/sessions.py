"""Generates conversations with the statistics that CachedAttention's authors report for ShareGPT.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention", ATC 2024:
73 % of the conversations have more than one turn, and the mean is 5.75 turns; 47 % have more than 2,048 tokens, 30 %
more than 4,096. In the 73 %, the number of turns beyond the first is geometric. A turn's tokens are log-normal, times a
log-normal factor of its session; the two widths and the median are chosen to match the shares of long conversations.
Sessions arrive as a Poisson process, and times between turns are exponential: assumptions, as ShareGPT has no times.
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
    """What to generate."""

    sessions: int = 9000
    rate: float = 1.0  # sessions per second
    think_s: float = 60.0  # mean time from one turn's arrival to the next
    window: int = 2048  # tokens of the model's context
    keep_share: float = 0.5  # of the window: what a history is cut to when it does not fit
    moves: bool = False  # whether the content of blocks is known, and so they are found after a cut (`Request.content`)
    block_tokens: int = 64
    seed: int = 1


class Turn(msgspec.Struct, frozen=True):
    """One turn of a session: tokens of the question and the answer, and when the question arrives."""

    session: int
    at_s: float
    question: int
    answer: int


def turns(settings: Conversations) -> list[Turn]:
    """All turns in order of arrival. The same seed gives the same turns on every machine."""
    drawn = random.Random(settings.seed)
    more = MEAN_TURNS - (1 - MULTI_SHARE) - 2 * MULTI_SHARE  # turns beyond the second, mean over all sessions
    stays = more / MULTI_SHARE / (1 + more / MULTI_SHARE)
    found: list[Turn] = []
    started_at = 0.0
    for session in range(settings.sessions):
        started_at += drawn.expovariate(settings.rate)
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
            at_s += drawn.expovariate(1 / settings.think_s)
    return sorted(found, key=lambda turn: (turn.at_s, turn.session))


def generate(settings: Conversations) -> Trace:
    """Generate a trace. A prompt is the session's history, as far as the window has room for it, and the question.

    History is cut at block boundaries; where the question fills the window, up to a block of it goes, too. Keys are
    chained, so a block's name has its place in the session and the cut. With `moves`, the session's first block
    replaces the first block after the cut: a node finds nothing without it.
    """
    size, window = settings.block_tokens, settings.window
    histories: dict[int, tuple[int, int]] = {}  # session -> start and end of its history
    numbers: dict[int, int] = {}  # session and place in it -> number of the block's content
    requests: list[Request] = []
    for turn in turns(settings):
        answer = min(turn.answer, window // 2)
        question = min(turn.question, window - answer)
        start, end = histories.get(turn.session, (0, 0))
        if end - start + question + answer > window:
            left = min(int(window * settings.keep_share), window - question - answer)
            start = max(start, -(-(end - left) // size) * size)
        tokens, whole = end - start + question, (end + question) // size
        places = [*range(start // size, (end + question + answer) // size)]
        if settings.moves and 0 < start <= end - size:
            places[0] = 0
        end += question + answer
        names = [_name(turn.session, start if at else 0, at) for at in places]
        split = whole - start // size
        keys = names[:split]
        if (start + tokens) % size:  # the last block is not whole: no other request finds it
            keys = [*keys, _name(turn.session, 1 + len(requests), -1)]
        ids = array("I", [numbers.setdefault(turn.session << 32 | at, len(numbers)) for at in places if settings.moves])
        requests.append(Request(turn.at_s, tokens, answer, keys, names[split:], str(turn.session), ids.tobytes()))
        histories[turn.session] = start, end
    return Trace(f"sessions-{settings.seed}", size, requests, settings.sessions, window)


def _name(session: int, cut: int, at: int) -> bytes:
    return b"".join(number.to_bytes(4, "big", signed=True) for number in (session, cut, at)) + b"pdx "
