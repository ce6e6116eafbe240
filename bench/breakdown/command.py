"""`pdx bench breakdown`: where a request's time goes, compared with vLLM's own disaggregation in the same run."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdx.bench.harness.lists import counts
from pdx.cli.options import FOLDER, option
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdx.bench.systems.system import Bed, System

TINY = "tiny"
GIB, MIB = 1 << 30, 1 << 20
# Defaults that the environment overrides. The last one enables resets of the engines' prefix caches.
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
KV_SPACE, KV_FLAG = "VLLM_CPU_KVCACHE_SPACE", "--kv-cache-memory-bytes"
SLACK_BLOCKS = 2  # an engine takes these beyond those of its requests


@click.command()
@option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model. [default: a tiny Llama with 64 KB of KV per token, made on the spot]",
)
@option("--tokens", type=counts(), default="1000,4000,8000", help="Lengths of prompts.")
@option("--concurrency", type=counts(), default="1,4", help="Requests sent at once.")
@option("--systems", default="pdx,nixl,plain", help="What is compared; all: what runs here.")
@option("--output-tokens", default=32, type=click.IntRange(2, 4096), help="Of each answer.")
@option("--rounds", default=5, type=click.IntRange(1, 1000), help="How often all is measured.")
@option(
    "--warmups",
    default=2,
    type=click.IntRange(0, 100),
    help="Batches of the longest prompts that each system gets before it is measured.",
)
@option("--out", type=FOLDER, default="pdx-bench/breakdown", help="Folder for results.")
@option("--max-engines", type=click.IntRange(1, 64), help="Engines at a time. [default: as memory allows]")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def breakdown(
    model: Path | None,
    tokens: tuple[int, ...],
    concurrency: tuple[int, ...],
    systems: str,
    output_tokens: int,
    rounds: int,
    warmups: int,
    out: Path,
    max_engines: int | None,
    flags: tuple[str, ...],
) -> None:
    """Send the same prompts to PDX, to vLLM's own connectors and to plain vLLM in turns, and show where the time went.

    Flags after -- go to every engine: pdx bench breakdown --model ./Llama-3.1-8B -- --gpu-memory-utilization 0.4

    Writes result.json after every batch, then breakdown.json (the figures and their goals) and pictures. Ctrl-C ends
    it early: what was measured by then is kept, and the exit status is 130.
    """
    from pdx.bench.breakdown.run import Plan, run
    from pdx.bench.breakdown.turns import Settings
    from pdx.bench.systems.names import SYSTEMS

    settings = Settings(
        tokens=tuple(sorted(tokens)),
        concurrency=tuple(sorted(concurrency)),
        output_tokens=output_tokens,
        rounds=rounds,
        warmups=warmups,
    )
    chosen, not_run = choose_systems(systems, SYSTEMS)
    out.mkdir(parents=True, exist_ok=True)
    longest = max(tokens) + output_tokens + 1
    bed = make_bed(model, out, flags, longest=longest, together=max(concurrency))
    plan = Plan(
        settings=settings,
        systems=chosen,
        not_run=not_run,
        bed=bed,
        max_engines=max_engines or room_for_engines(bed),
        out=out,
        is_tiny=model is None,
    )
    sys.exit(run(plan))


def choose_systems(names: str, known: Mapping[str, System]) -> tuple[dict[str, System], dict[str, str]]:
    """The systems that can run, in the order of `known`, and why the others cannot.

    :raises ConfigError: a name is unknown, or no system can run.
    """
    wanted = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"unknown system {unknown[0]!r} (known: {', '.join(known)}, or all)")
    not_run = {name: why for name in known if name in wanted and (why := known[name].why_not())}
    chosen = {name: known[name] for name in known if name in wanted and name not in not_run}
    if not chosen:
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in not_run.items()))
    return chosen, not_run


def make_bed(model: Path | None, out: Path, flags: tuple[str, ...], *, longest: int, together: int) -> Bed:
    """The model, made if none is given, and the settings of its engines. On a CPU their KV cache has room for
    `together` requests of `longest` tokens and no more, so that warming up touches all of it.

    :raises ConfigError: the folder has no model, or the size of its KV cache is unknown.
    """
    from pdx.bench.harness.prompts import model_facts
    from pdx.bench.harness.report import SCRATCH
    from pdx.bench.systems.system import Bed, is_cpu_build

    own: tuple[str, ...] = ("--disable-uvicorn-access-log",)
    if model is None:
        from pdx.bench.harness.tiny_llama import make_model

        model, name = make_model(SCRATCH / "bench" / "model"), TINY
        own = (*own, "--dtype", "float32")
    else:
        name = model.resolve().name
    facts = model_facts(model, name, (*own, *flags), is_on_gpu=not is_cpu_build())
    block_tokens = facts["block_tokens"]
    blocks = together * -(-longest // block_tokens) + SLACK_BLOCKS
    nbytes = blocks * block_tokens * facts["kv_bytes_per_token"]
    if is_cpu_build():
        own = (*own, "--enforce-eager")
        if KV_SPACE not in os.environ:  # vLLM would prefer it to the flag
            own = (*own, KV_FLAG, str(nbytes))
    return Bed(
        model=model,
        served_name=name,
        flags=(*own, *flags),
        env={name: os.environ.get(name, value) for name, value in ENV.items()},
        logs=out / "logs",
        max_model_len=longest + block_tokens,
        arena=f"{max(1024, -(-nbytes * 5 // (4 * MIB)))}MiB",
    )


def room_for_engines(bed: Bed) -> int:
    """How many engines fit on this machine now."""
    from pdx.bench.systems.fleet import engines_that_fit
    from pdx.cli.serve import flag

    kv_bytes = flag(bed.flags, KV_FLAG)
    if kv_bytes is None:
        return engines_that_fit(bed)
    return engines_that_fit(replace(bed, env={**bed.env, KV_SPACE: str(int(kv_bytes) / GIB)}))
