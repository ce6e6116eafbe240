"""`pdx bench reuse`: requests per second at equal TTFT with repeated prompts, against vLLM alone and LMCache."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdx.bench.harness.lists import NAMES, comma_separated
from pdx.cli.options import FOLDER, Sectioned, option
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.bench.reuse.systems import Sizes
    from pdx.bench.reuse.workload import Settings
    from pdx.bench.systems.system import Bed

WORKLOADS = ("documents", "sessions")
QUICK = {"documents": 6, "tokens": 1000, "sessions": 6, "turns": 3, "loads": (0.6, 1.0), "repeats": 1}
MIB = 1 << 20
ROOM = 1.25  # of the memory that keeps KV, as a multiple of the working set
SLACK = 2  # blocks


def _above_0(word: str) -> float:
    value = float(word)
    if not value > 0:
        raise ValueError(f"{word!r} is not above 0")
    return value


NUMBERS = comma_separated(_above_0)


@click.command(
    cls=Sectioned,
    sections={
        "--documents": "Documents and sessions",
        "--loads": "Rates",
        "--disk": "Stores",
        "--seed": "Options",
    },
)
@option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model. [default: a tiny Llama with 64 KB of KV per token, made on the spot]",
)
@option("--systems", default="recompute,own-cache,pdx-both", help="What is compared; all: everything.")
@option("--workloads", default=",".join(WORKLOADS), type=NAMES, help="documents, sessions.")
@option("--documents", metavar="N", default=8, type=click.IntRange(2, 10_000), help="Long documents.")
@option("--tokens", metavar="N", default=2000, type=click.IntRange(16), help="Of a document.")
@option("--question-tokens", metavar="N", default=32, type=click.IntRange(1), help="Of a question about it.")
@option("--rounds", metavar="N", default=2, type=click.IntRange(1), help="Questions about each at each load.")
@option("--sessions", metavar="N", default=8, type=click.IntRange(2, 10_000), help="Chats at each load.")
@option("--turns", metavar="N", default=3, type=click.IntRange(2), help="Requests of a chat.")
@option("--first-tokens", metavar="N", type=click.IntRange(1), help="Of its first message. [default: half a document]")
@option("--message-tokens", metavar="N", default=200, type=click.IntRange(1), help="Of its later messages.")
@option("--output-tokens", default=16, type=click.IntRange(2, 4096), help="Of each answer.")
@option("--loads", default="0.5,0.75,1", type=NUMBERS, help="Rates, as shares of what the system answers in a burst.")
@option("--rates", default="", type=NUMBERS, help="Requests per second, Poisson, in place of --loads; inf: a burst.")
@option("--targets", default="2,4", type=NUMBERS, help="TTFT, in times of computing alone.")
@option("--repeats", metavar="N", default=2, type=click.IntRange(1, 1000), help="How often all is measured.")
@option("--disk", default="", metavar="FOLDER", help="On the disk that pdx-both-disk is measured with.")
@option("--gbit", default=15.0, type=click.FloatRange(0, min_open=True), help="Gb/s to the store for all hosts.")
@option("--seed", default=0, help="Of arrivals, pauses and which document is when.")
@option("--max-engines", type=click.IntRange(1, 64), help="Engines at a time. [default: as memory allows]")
@option("--quick", is_flag=True, help="Small, once, a few minutes; for whatever else is not said.")
@option("--out", type=FOLDER, default="pdx-bench/reuse", help="Folder for results.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def reuse(
    context: click.Context,
    /,
    model: Path | None,
    systems: str,
    targets: tuple[float, ...],
    disk: str,
    gbit: float,
    max_engines: int | None,
    quick: bool,
    out: Path,
    flags: tuple[str, ...],
    **shape: object,
) -> None:
    """Ask engines for what they, or a store beside them, have seen before, at rising load.

    \b
    documents   questions about each of a few long documents, in random order
    sessions    chats, in which each request repeats the conversation so far

    Each engine's own KV cache is too small for all repeated text. Reports for each system: TTFT and time between
    tokens, requests per second within a TTFT, and where its tokens were found. Flags after -- go to every engine.

    Writes result.json after every load, then reuse.json and reuse.png. Ctrl-C ends it early: what was measured by then
    is kept, and the exit status is 130.
    """
    from pdx.bench.breakdown.command import KV_SPACE, choose_systems, room_for_engines
    from pdx.bench.reuse.run import Plan, run
    from pdx.bench.reuse.systems import contenders
    from pdx.bench.reuse.workload import Settings

    if quick:
        shape |= {name: value for name, value in QUICK.items() if _is_default(context, name)}
    shape["first_tokens"] = shape["first_tokens"] or max(1, int(str(shape["tokens"])) // 2)
    settings = Settings(**shape)  # type: ignore[arg-type]
    for name in settings.workloads:
        if name not in WORKLOADS:
            raise click.BadParameter(f"{name!r} is none; there are {', '.join(WORKLOADS)}", param_hint="'--workloads'")
    settings.check()
    if KV_SPACE in os.environ:
        raise ConfigError(f"{KV_SPACE} is set, and this bench chooses the size of each engine's KV cache: unset it")
    out.mkdir(parents=True, exist_ok=True)
    bed, sizes = prepare(model, out, flags, settings, gbit, disk)
    chosen, not_run = choose_systems(systems, contenders(sizes))
    plan = Plan(
        settings=settings,
        systems=chosen,
        not_run=not_run,
        bed=bed,
        targets=targets,
        max_engines=max_engines or room_for_engines(bed),
        out=out,
        facts={"gbit": gbit, "own_cache_bytes": sizes.own_cache, "arena_of_many": sizes.arena_of_many},
    )
    sys.exit(run(plan))


def prepare(
    model: Path | None, out: Path, flags: tuple[str, ...], settings: Settings, gbit: float, disk: str
) -> tuple[Bed, Sizes]:
    """How engines are started, each with a KV cache of a few requests, and how much memory keeps KV beside them.

    :raises ConfigError: `model` is not the folder of a model, or the size of its KV cache is unknown.
    """
    from pdx.bench.breakdown.command import KV_FLAG, make_bed
    from pdx.bench.harness.prompts import model_facts
    from pdx.bench.reuse.systems import Sizes
    from pdx.bench.reuse.workload import TOGETHER
    from pdx.bench.systems.system import is_cpu_build

    bed = make_bed(model, out, flags, longest=settings.longest, together=TOGETHER)
    facts = model_facts(bed.model, bed.served_name, bed.flags, is_on_gpu=not is_cpu_build())
    block, kv_bytes = facts["block_tokens"], facts["kv_bytes_per_token"]
    longest = (-(-settings.longest // block) + SLACK) * block
    working_set = max(map(settings.working_set, settings.workloads))
    small = TOGETHER * longest * kv_bytes
    everything = int(ROOM * working_set * kv_bytes) + small
    bed = replace(bed, flags=(*bed.flags, KV_FLAG, str(small)), arena=f"{-(-everything // MIB)}MiB")
    return bed, Sizes(own_cache=everything, arena_of_many=small, gbit=gbit, disk=disk)


def _is_default(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
