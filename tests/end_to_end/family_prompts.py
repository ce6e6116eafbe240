"""Prompts for models of every family."""

from __future__ import annotations

import random

from families import CHUNK, STEP, WINDOW

COUNT = 20  # tokens generated
# Lengths of prompts to hit in a cache: shorter than a block, about a block, about the window, beyond a step by one
# token or many, whole blocks, whole blocks and one token (so that all but the last can be found), several steps.
_LENGTHS = (20, 33, WINDOW + 1, STEP + 1, 300, 640, 641, 700, 1110)
CASES: dict[str, tuple[int, ...]] = {
    "llama": _LENGTHS,
    "gptoss": _LENGTHS,
    "gemma3": _LENGTHS,
    "mistral": _LENGTHS,
    "llama4": (*_LENGTHS, CHUNK, CHUNK + 1, 2 * CHUNK + 40),
    "granite": (*_LENGTHS, 64, 65, 576),
    "qwen3_next": (300, 544, 545, 700, 1089, 1110),  # blocks of 544
    "deepseek_v2": _LENGTHS,
}
_random = random.Random(3)
TEXT = [_random.randrange(256) for _ in range(1400)]
