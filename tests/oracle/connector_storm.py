"""Random requests, and all that may befall them, on engines that share a node: every token against the oracle, nothing
hung, nothing left.

`python tests/oracle/connector_storm.py --requests 20000` runs long; `--help` says what it can be told. The same seed
plays the same events, but threads and the node are real, so that moments differ.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from exact_engine import FOREIGN, PDX, Engine, LoRARequest, Shape, WorkerLoRAManager, check_nothing_left, tokens
from exact_kinds import KINDS
from exact_model import Picture
from exact_releases import missing
from exact_turning import ToyTurning
from foreign_connector import CLAIMS, Claim
from node_harness import NodeProcess

from pdx.bench.harness.tiny_llama import make_model
from pdx.config import NodeConfig
from pdx.testing.waiting import DEADLINE_S, came_true
from pdx.vllm import turning

DOCUMENTS = (90, 200, 330, 500, 700)  # tokens of the beginnings that prompts share
MAX_PROMPT = 1500
MAX_LIVE = 14
COUNTS = (1, 2, 5, 20, 40)  # of generated tokens
HUNG_S = 120.0
WEIGHTS = "adapter_model.safetensors"
STORMS = 6  # on the same engines
EXTRA = {"chunk_tokens": 64, "transfer_wait_s": 3.0, "reserve_wait_s": 0.5, "lease_s": 4.0, "lookup_s": 1.0}
SMALL: dict[str, Any] = {"blocks": 160, "budget": 160, "seqs": 6, "extra": EXTRA}
ALWAYS = {**SMALL, "extra": {**EXTRA, "load": "always"}}  # whether it pays or not
# Into as many parts as the model has heads, and two of its layers: the chunks of engines of any ranks and stages.
CUT = {**SMALL, "extra": {**EXTRA, "load": "always", "shards": 4, "stages": "2,2"}}
MOVED = {**SMALL, "kind": "one layer", "extra": {**EXTRA, "load": "always", "moved": True}}
SHAPES = {
    "sync": [Shape(**ALWAYS), Shape(**ALWAYS, threshold=32)],  # which takes long to compute what a load has lost
    "async": [Shape(**ALWAYS, asynchronous=True)] * 2,
    "mixed": [Shape(**SMALL), Shape(**SMALL, asynchronous=True), Shape(**SMALL, threshold=48)],
    "drafts": [Shape(**SMALL, drafts=True), Shape(**SMALL), Shape(**SMALL, drafts=True, asynchronous=True)],
    "drafters": [
        Shape(**ALWAYS, drafts=True, draft_layers=1),
        Shape(**ALWAYS, drafts=True, draft_layers=1, threshold=48),
        Shape(**ALWAYS, drafts=True, draft_layers=1, asynchronous=True),
        Shape(**ALWAYS, drafts=True, draft_layers=1, drafter="another one"),
        Shape(**ALWAYS, kind="undrafted", asynchronous=True),
    ],
    "beside": [Shape(**SMALL, beside=(FOREIGN, PDX)), Shape(**SMALL, beside=(FOREIGN, PDX), asynchronous=True)],
    "graphs": [Shape(**ALWAYS, asynchronous=True, graphs=100)] * 2,
    "stages": [
        Shape(**ALWAYS, stages=(1, 2)),
        Shape(**{**ALWAYS, "extra": {**ALWAYS["extra"], "stages": "1,2"}}, threshold=48),
    ],
    "ranks": [
        Shape(**CUT),
        Shape(**CUT, ranks=2),
        Shape(**CUT, ranks=4, asynchronous=True),
        Shape(**CUT, ranks=2, stages=(2, 2)),
    ],
    "second": [Shape(**ALWAYS, runner=2), Shape(**ALWAYS, runner=2, asynchronous=True, graphs=100)],
    "late": [Shape(**ALWAYS, asynchronous=True, defers=True), Shape(**ALWAYS, asynchronous=True, runner=2, caps=True)],
    "moved": [  # any tokens of any prompts, wherever they were computed, beside requests that must meet none of these
        Shape(**MOVED),
        Shape(**MOVED, asynchronous=True),
        Shape(**MOVED, threshold=48),
    ],
    # Of a model of several layers what is moved is wrong: the answers of requests that ask for it are not looked at.
    "moved-wrongly": [Shape(**{**MOVED, "kind": "full"}), Shape(**{**MOVED, "kind": "full"}, asynchronous=True)],
    "content": [
        Shape(**SMALL, content=True),
        Shape(**SMALL, content=True, asynchronous=True),
        Shape(**SMALL, content=True, weights=1),
    ],
}

HERE = {mode: shapes for mode, shapes in SHAPES.items() if not any(map(missing, shapes))}  # what this vLLM can do
KIND_MODES = ("sync", "async", "mixed", "graphs")  # in which a model may be of any kind


def modes_of(kind: str) -> Sequence[str]:
    """The modes for models of this kind: who has heads that ranks may have among them?"""
    if kind == "heads":
        return *KIND_MODES, "ranks"
    return [mode for mode in SHAPES if mode != "ranks"] if kind == "full" else KIND_MODES


REQUESTS = ("plain", "plain", "twin", "forward", "forward", "together")
TROUBLE = ("abort", "lose", "reset", "retrain")
NODE_TROUBLE = ("kill", "stop")


@dataclass(frozen=True)
class Event:
    """Something happens, `after` so many steps. Numbers that choose among things are taken modulo their count."""

    kind: str = "plain"
    after: int = 0
    engine: int = 0  # where; a request of two legs decodes on the next one
    base: int = 0  # a document, or a conversation that goes on
    cut: int = 0  # tokens that its beginning is shorter
    tail: int = 1  # tokens behind it …
    tail_seed: int = 0  # … which others have, too
    count: int = 0  # index in COUNTS
    pick: int = 0  # what it happens to
    beside: int = 0  # for engines that see such: 1 a picture, 2 an adapter, 3 both

    @classmethod
    def drawn(cls, rng: random.Random, kinds: Sequence[str], pace: int) -> Event:
        """A random one; `pace`: steps between two, on average."""
        return cls(
            rng.choice(kinds),
            int(rng.expovariate(1 / pace)),
            rng.randrange(8),
            rng.randrange(12),
            rng.choice((0, 0, rng.randrange(700))),
            rng.randrange(150),
            rng.randrange(40),
            rng.randrange(len(COUNTS)),
            rng.randrange(1000),
            rng.randrange(4),
        )


class Adapters:
    """Two of them, under the same names and in the same folders for good, and trained again now and then."""

    _numbers = itertools.count(1)  # vLLM's: another one each time that an adapter is added

    def __init__(self, folder: Path) -> None:
        self._requests = [LoRARequest(name, 1, str(folder / name)) for name in ("sql", "chat")]
        for number in range(len(self._requests)):
            self.train(number)

    def of(self, number: int) -> Any:
        return self._requests[number % len(self._requests)]

    def train(self, number: int) -> None:
        """It has other weights from now on, for those that come and for engines that have not loaded it."""
        old, added = self.of(number), next(self._numbers)
        folder = Path(old.lora_path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / WEIGHTS).write_text(str(added))
        self._requests[number % len(self._requests)] = LoRARequest(old.lora_name, added, old.lora_path)


def of_kind(shape: Shape, kind: str) -> Shape:
    """The same for another kind of model, with room for as many requests, unless it is of one of its own."""
    if shape.kind != "full":
        return shape
    groups = KINDS[kind].groups
    blocks = shape.blocks * KINDS["full"].block // KINDS[kind].block + 20 * (len(groups) - 1)
    return replace(shape, kind=kind, blocks=blocks)


def read_adapter(manager: Any, lora_request: Any) -> int:
    """In the place of vLLM's function that loads one: what `Adapters` has written."""
    return int(Path(lora_request.lora_path, WEIGHTS).read_text())


class StormNode:
    """A node that may be stopped, or killed and started again."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self.process = NodeProcess(config).wait_ready()
        self._is_stopped = self._is_dead = False

    def kill(self) -> None:
        self.go_on()
        self.process.kill()
        self._is_dead = True

    def stop(self) -> None:
        if not self._is_dead:
            self.process.signal(signal.SIGSTOP)
            self._is_stopped = True

    @property
    def is_well(self) -> bool:
        return not (self._is_stopped or self._is_dead)

    def go_on(self) -> None:
        """It runs again."""
        if self._is_stopped:
            self.process.signal(signal.SIGCONT)
            self._is_stopped = False
        if self._is_dead:
            self.process = NodeProcess(self._config).wait_ready()
            self._is_dead = False

    def left(self) -> str:
        """What requests have left in it beside chunks; empty: nothing."""
        status = self.process.status()
        is_rest = not status.leases and not status.transfers and set(status.chunks) <= {"sealed"}
        return "" if is_rest else f"{status.leases} leases, {status.transfers} transfers, chunks {status.chunks}"

    def close(self) -> None:
        self.go_on()
        self.process.close()


@dataclass
class _Live:
    engine: Engine
    prompt: list[int]
    then: Callable[[list[int]], None] | None = None
    is_exact: bool = True
    since: float = field(default_factory=time.monotonic)


class Storm:
    """Plays events on engines. `name`: storms of other names have nothing in common."""

    def __init__(self, name: str, engines: Sequence[Engine], node: StormNode | None = None) -> None:
        self._name, self._engines, self._node = name, engines, node
        self._documents = [tokens(DOCUMENTS[each % len(DOCUMENTS)], (name, each)) for each in range(7)]
        self._adapters = Adapters(engines[0].model.parent / "adapters")
        self._misled: set[str] = set()  # engines whose other connector has broken a promise
        self._answers: list[list[int]] = []
        self._live: dict[str, _Live] = {}
        self._turn = self._number = self._well_at = 0
        self.counts: Counter[str] = Counter()
        self.slowest_s = 0.0

    def play(self, events: Sequence[Event]) -> None:
        """All of them, in order.

        :raises AssertionError: an answer is wrong, or something is hung.
        """
        for event in events:
            for _ in range(event.after):
                self._step()
            while len(self._live) >= MAX_LIVE:
                self._step()
            getattr(self, f"_{event.kind}")(event)
            self.counts[event.kind] += 1

    def settle(self) -> None:
        """Let all requests end, and see that nothing is left.

        :raises AssertionError: something is.
        """
        if self._node is not None:
            self._node.go_on()
        while self._live or any(engine.is_busy for engine in self._engines):
            self._step()
        check_nothing_left(self._engines)
        if self._node is not None:
            node = self._node
            assert came_true(lambda: not node.left(), DEADLINE_S), f"the node still holds {node.left()}"

    # ---- events -----------------------------------------------------------------------------

    def _plain(self, event: Event) -> None:
        prompt = self._prompt(event)
        self._add(self._engine(event), prompt, COUNTS[event.count], **self._beside(event, prompt))

    def _twin(self, event: Event) -> None:
        """A request, and some steps later one with the same beginning: what befalls the first may befall it, too."""
        self._plain(event)
        for _ in range(event.pick % 8):
            self._step()
        self._plain(replace(event, tail_seed=event.tail_seed + 1))

    def _forward(self, event: Event) -> None:
        """The decode leg comes with the first token of the prefill leg."""
        prompt, transfer = self._prompt(event), self._transfer()
        count, beside = max(2, COUNTS[event.count]), self._beside(event, prompt)

        def decode(first: list[int]) -> None:
            params = {"do_remote_prefill": True, "transfer_id": transfer, "prefill_tokens": len(prompt)}
            self._add(self._engine(event, 1), prompt + first, count - 1, params, **beside)

        params = {"do_remote_decode": True, "transfer_id": transfer}
        self._add(self._engine(event), prompt, 1, params, decode, **beside)

    def _together(self, event: Event) -> None:
        """Both legs come at once."""
        prompt, transfer = self._prompt(event), self._transfer()
        beside = self._beside(event, prompt)
        self._add(self._engine(event), prompt, 1, {"do_remote_decode": True, "transfer_id": transfer}, **beside)
        params = {"do_remote_prefill": True, "transfer_id": transfer, "is_early": True}
        self._add(self._engine(event, 1), prompt, COUNTS[event.count], params, **beside)

    def _abort(self, event: Event) -> None:
        if self._live:
            name = sorted(self._live)[event.pick % len(self._live)]
            engine = self._live.pop(name).engine
            engine.abort(name)
            engine.taken(name)

    def _lose(self, event: Event) -> None:
        """The next loads of an engine miss chunks from some one on, or a single one."""
        first, alone = event.pick % 5, event.pick % 2
        self._engine(event).faults.lose(lambda chunk: chunk == first if alone else chunk >= first, 1 + event.pick % 3)

    def _reset(self, event: Event) -> None:
        """The engine's cache is reset, and sometimes the connector's, after which it shares with no other engine. What
        runs may be preempted for it, which vLLM refuses during a load."""
        with contextlib.suppress(RuntimeError):
            self._engine(event).scheduler.reset_prefix_cache(
                reset_running_requests=event.pick % 3 == 2, reset_connector=event.pick % 7 == 6
            )

    def _retrain(self, event: Event) -> None:
        self._adapters.train(event.pick)

    def _kill(self, event: Event) -> None:
        if self._node is not None and self._node.is_well:
            self._node.kill()
            self._well_at = self._turn + event.pick

    def _stop(self, event: Event) -> None:
        if self._node is not None and self._node.is_well:
            self._node.stop()
            self._well_at = self._turn + event.pick

    # ---- requests ---------------------------------------------------------------------------

    def _engine(self, event: Event, leg: int = 0) -> Engine:
        return self._engines[(event.engine + leg) % len(self._engines)]

    def _prompt(self, event: Event) -> list[int]:
        bases = self._documents + self._answers
        base = bases[event.base % len(bases)]
        beginning = base[: max(1, len(base) - event.cut)]
        prompt = (beginning + tokens(event.tail, (self._name, "tail", event.tail_seed)))[:MAX_PROMPT]
        if self._moves(event) and event.beside & 2:  # it has lost some
            first = 1 + event.pick % 40
            prompt = prompt[:first] + prompt[first + event.pick * 7 % 400 :]
        return prompt

    def _moves(self, event: Event) -> bool:
        return bool(self._engine(event).shape.extra.get("moved"))

    def _beside(self, event: Event, prompt: list[int]) -> dict[str, Any]:
        """What the request has beside tokens. Pictures are called by a counter that begins anew again and again."""
        if self._moves(event) and event.beside & 1:
            return {"hints": {"version": 1, "reuse": "moved"}}
        if not self._engine(event).shape.content:
            return {}
        length = 12 if event.beside & 1 and len(prompt) > 40 else 0
        offset = event.pick % max(1, len(prompt) // 2 - length)
        picture = Picture(offset, length, event.pick % 5, f"mm-{event.pick % 3}")
        lora = self._adapters.of(event.pick) if event.beside & 2 else None
        return {"lora": lora, "pictures": [picture] if length else []}

    def _transfer(self) -> str:
        return f"{self._name}-{self._number:016d}"[-64:]

    def _add(
        self,
        engine: Engine,
        prompt: list[int],
        count: int,
        params: dict[str, Any] | None = None,
        then: Callable[[list[int]], None] | None = None,
        hints: dict[str, Any] | None = None,
        **beside: Any,
    ) -> None:
        params = {**(params or {}), "pdx_hints": hints} if hints else params
        self._number += 1
        name = f"{self._name}-{self._number}"
        if engine.shape.beside and self._number % 3 == 0:
            promised = len(prompt) // 2 // 16 * 16
            is_broken = not engine.shape.asynchronous and self._number % 2 == 0
            CLAIMS[name] = Claim(promised, promised // 32 * 16 if is_broken else promised)
            if is_broken:  # by vLLM's own fault others find the blocks, and are wrong; the store shall not be
                self._misled.add(engine.name)
        is_exact = not hints or len(engine.mixers) == 1
        self._live[name] = _Live(engine, prompt, then, is_exact)
        self.counts["moved"] += bool(hints)
        engine.add(name, prompt, count, params, **beside)

    def _step(self) -> None:
        """Of one engine, in turns."""
        self._turn += 1
        if self._node is not None and not self._node.is_well and self._turn >= self._well_at:
            self._node.go_on()
        engine = self._engines[self._turn % len(self._engines)]
        for name in engine.step() if engine.is_busy else ():
            self._finished(name)
        if self._turn % 500 == 0:
            now = time.monotonic()
            hung = [name for name, live in self._live.items() if now - live.since > HUNG_S]
            states = [(name, self._live[name].engine.requests[name].status.name) for name in hung]
            assert not hung, f"hung: {states}"

    def _finished(self, name: str) -> None:
        live = self._live.pop(name, None)
        if live is None:  # aborted in the step that ended it
            return
        if live.is_exact and live.engine.name not in self._misled:
            live.engine.check(name)
        answer = live.engine.taken(name)
        self.slowest_s = max(self.slowest_s, time.monotonic() - live.since)
        self.counts["finished"] += 1
        self.counts["tokens"] += len(answer)
        self._answers = [*self._answers[-20:], live.prompt + answer]
        if live.then is not None:
            live.then(answer)


@contextlib.contextmanager
def storm_bed(mode: str, folder: Path, kind: str = "full", **node: Any) -> Iterator[tuple[list[Engine], StormNode]]:
    """Engines of this mode and kind on a node of their own, whose arena is full soon."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(WorkerLoRAManager, "_load_adapter", read_adapter))
        stack.enter_context(patch.object(turning, "turning_of", lambda *_: ToyTurning()))
        config = NodeConfig(**{"address": f"ipc://{folder}/{mode}.sock", "arena_bytes": 6 << 20, **node})
        served = StormNode(config)
        stack.callback(served.close)
        engines: list[Engine] = []
        for number, shape in enumerate(SHAPES[mode]):
            model = folder / f"model-{shape.weights}"
            if not model.exists():
                dims = {"hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "intermediate": 64}
                make_model(model, layers=2, **dims, seed=shape.weights)
            engines.append(Engine(f"{mode}-{number}", model, config.address, of_kind(shape, kind)))
            stack.callback(engines[-1].close)
        yield engines, served


def main() -> None:
    """Play random events until so many requests have finished, and print counts as JSON. It ends where something is
    wrong, hung or left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="in each mode; default: %(default)s")
    parser.add_argument("--mode", action="append", choices=SHAPES, help="default: all, one after the other")
    parser.add_argument("--kind", choices=KINDS, default="full", help="of the model; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", action="store_true", help="the node is neither killed nor stopped")
    parser.add_argument("--disk", action="store_true", help="the node has a disk, too")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pdx-storm-"))
    try:
        for mode in chosen.mode or [mode for mode in modes_of(chosen.kind) if mode in HERE]:
            disk = {"disks": [str(folder / f"{mode}-disk")], "disk_limit_bytes": 200 << 20, "disk_reserve_bytes": 0}
            if chosen.disk:
                Path(disk["disks"][0]).mkdir(mode=0o700)
            totals, rng = Counter[str](), random.Random(f"{mode} {chosen.seed}")
            while totals["finished"] < chosen.requests:  # engines whose connector was reset share with no other
                with storm_bed(mode, folder, chosen.kind, **(disk if chosen.disk else {})) as (engines, node):
                    _run(mode, engines, node, rng, totals, chosen)
                print(json.dumps({"mode": mode, "kind": chosen.kind, "seed": chosen.seed, **totals}), flush=True)  # noqa: T201
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    mode: str, engines: list[Engine], node: StormNode, rng: random.Random, totals: Counter[str], chosen: Any
) -> None:
    """Some storms on these engines, each with its own prompts."""
    kinds = [*REQUESTS] * 10 + [*TROUBLE] * 2 + ([] if chosen.calm else [*NODE_TROUBLE])
    started = time.monotonic()
    for number in range(STORMS):
        storm = Storm(f"{mode}-{chosen.seed}-{totals['storms']}-{number}", engines, node)
        storm.play([Event.drawn(rng, kinds, 12) for _ in range(150)])
        storm.settle()
        totals.update(storm.counts)
        totals["slowest_s"] = max(totals["slowest_s"], round(storm.slowest_s))
    totals["storms"] += STORMS
    for engine in engines:
        found = {"loads": engine.faults.loads, "loads_lost": engine.faults.lost, "preempted": engine.preemptions}
        totals.update(found)
    totals["seconds"] += round(time.monotonic() - started)


if __name__ == "__main__":
    main()
