"""Emptying an engine's prefix cache: asked once, asked again while blocks are in use, and what a refusal says."""

import pytest
from standin_server import StandInServer

from pdx.bench.systems.engine_metrics import CacheNotReset, reset


class Engine(StandInServer):
    """Gives these (status, body), the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        super().__init__()

    def reset(self):
        super().reset()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


DONE, BUSY = (200, b'{"success":true}'), (200, b'{"success":false}')


def test_the_cache_is_emptied_and_the_connectors_is_not():
    with Engine(DONE) as engine:
        reset(engine.url)
    assert engine.num_resets == 1  # reset_external is off by default


def test_it_is_asked_again_while_blocks_are_in_use():
    pauses = []
    with Engine(BUSY, BUSY, DONE) as engine:
        reset(engine.url, sleep=pauses.append)
    assert (engine.num_resets, len(pauses)) == (3, 2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, b"Not Found"), "VLLM_SERVER_DEV_MODE=1"),
        ((500, b"the engine is dead"), "HTTP 500: the engine is dead"),
        ((200, b"[]"), "as vLLM does"),
        ((200, b"hello"), "as vLLM does"),
    ],
)
def test_a_refusal_says_what_to_do(answer, words):
    with Engine(answer) as engine, pytest.raises(CacheNotReset, match=words) as told:
        reset(engine.url)
    assert engine.url in str(told.value)
    assert engine.num_resets == 1
