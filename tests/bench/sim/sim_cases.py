"""Small traces and cases for the tests of the simulator."""

from __future__ import annotations

import random

from pdx.bench.plan.machines import Assumptions, Engine, find_gpu, speeds_of
from pdx.bench.plan.shapes import find_model
from pdx.bench.sim.engine import Settings
from pdx.bench.sim.requests import Request, Trace
from pdx.bench.sim.simulation import Case
from pdx.bench.sim.tier import Device

BLOCK = 64
MODEL = Engine(find_model("llama-3.1-8b"), speeds_of(find_gpu("h100"), Assumptions(), 1, 2), 1)
BLOCK_BYTES = MODEL.kv_token_bytes * BLOCK


def key(number):
    return number.to_bytes(16, "big")


def request(numbers, at_s=0.0, output=1, **more):
    return Request(at_s, len(numbers) * BLOCK, output, [key(number) for number in numbers], **more)


def some(count, seed=1, most=40):
    """Prompts that share beginnings, more than a small memory holds."""
    drawn = random.Random(seed)
    paths = [[(at + 1) * 1000 + block for block in range(most)] for at in range(count // 4)]
    requests = []
    for at in range(count):
        path = drawn.choice(paths)
        own = [10_000_000 + at * 100 + block for block in range(drawn.randrange(5))]
        requests.append(
            request([*path[: drawn.randrange(1, most)], *own], at_s=at * 0.05, output=drawn.randrange(1, 40))
        )
    return Trace("small", BLOCK, requests)


def disk(blocks, gb_s=5.0):
    speeds = {"load_bytes_s": gb_s * 1e9, "store_bytes_s": gb_s * 1e9}
    return Device(name="disk", kind="disk", room_bytes=int(blocks * BLOCK_BYTES) + 1, latency_s=1e-4, **speeds)


def case(blocks=300, **settings):
    ways = {"batch": 8, "host_bytes_s": 50e9, "looks_ahead": True, **settings.pop("ways", {})}
    return Case(model=MODEL, settings=Settings(**ways), host_bytes=int(blocks * BLOCK_BYTES) + 1, **settings)
