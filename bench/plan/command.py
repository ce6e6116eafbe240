"""`pdx plan`: how many prefillers and decoders, whether to disaggregate at all, when to load instead of computing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from pdx.cli.options import FOLDER, Sectioned, option

_SHARE = click.FloatRange(0.01, 1.0)


@click.command(
    cls=Sectioned,
    sections={
        "--model": "Engines and links",
        "--rate": "Load and goal",
        "--prefillers": "Sizes to judge",
        "--mfu": "Assumptions",
        "--out": "Options",
    },
)
@option("--model", default="", help="A preset's name, or a Hugging Face config.json.  [default: llama-3.1-8b]")
@option("--gpu", default="h100", help="a100, l40s, h20, h800, h100, h200 or b200.")
@option("--tp", default="auto", help="GPUs of one engine (tensor parallelism).")
@option("--weights", default="", type=click.Choice(["", "bf16", "fp8", "int4"]), help="[default: the model's]")
@option("--kv", default="", type=click.Choice(["", "bf16", "fp8"]), help="[default: the model's]")
@option("--link", default="400Gbps", help="Between engines, of each GPU: 400Gbps or 50GB/s.")
@option("--arena", default="host", type=click.Choice(["host", "gpu"]), help="Of the nodes.")
@option("--rate", default=10.0, help="Requests per second (Poisson).")
@option("--input", "input_tokens", default="8k", help="Tokens of a prompt.")
@option("--output", "output_tokens", default="200", help="Tokens of an answer, mean.")
@option("--ttft", default="1s", help="The SLO's time to the first token.")
@option("--itl", default="50ms", help="The SLO's time between tokens.")
@option("--share", default=0.95, help="Of requests and tokens that keep the SLO.")
@option("--reuse", default=0.0, help="Share of each prompt that is loaded, not computed.")
@option("--reuse-link", default="", metavar="SPEED", help="It comes over, per engine, as achieved: 200Gbps.")
@option("--prefillers", default=0, type=click.IntRange(0), help="Judge this number, with --decoders.")
@option("--decoders", default=0, type=click.IntRange(0), help="Judge this number, with --prefillers.")
@option("--mfu", default=0.5, type=_SHARE, help="Share of peak FLOPS that prefill reaches.")
@option("--mbu", default=0.7, type=_SHARE, help="Share of memory speed that decoding reaches.")
@option("--link-share", default=0.8, type=_SHARE, help="Share of nominal speed, link and PCIe.")
@option("--step", default="3ms", help="The engine's own time per step.")
@option("--control", default="8ms", help="Of a handoff, besides wire and scatter.")
@option("--links", default="32Gbps,64Gbps,128Gbps", help="To load KV over, as achieved.")
@option("--out", type=FOLDER, help="Folder for plan.json and plan.png.")
@option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def plan(*, out: Path | None, as_json: bool, **options: Any) -> None:
    """Say what a deployment needs, from the shapes of the model and the speeds of the machine.

    \b
    pdx plan --model llama-3.1-70b --gpu h100 --rate 10 --input 8k --output 200 --ttft 2s --itl 40ms
    """
    import msgspec
    from rich.console import Console

    from pdx.bench.harness.report import replace_file
    from pdx.bench.plan.model import make
    from pdx.bench.plan.options import parse
    from pdx.bench.plan.tables import show
    from pdx.errors import ConfigError

    parsed = parse(SimpleNamespace(**options))
    pair = {"prefillers": options["prefillers"], "decoders": options["decoders"]}
    found = make(parsed.case, hardware=parsed.hardware, links=parsed.links, **pair)
    if out is not None:
        from pdx.bench.plan.plots import draw

        try:
            replace_file(out / "plan.json", msgspec.json.format(msgspec.json.encode(found), indent=1))
        except OSError as error:
            raise ConfigError(f"{out / 'plan.json'} cannot be written: {error}") from error
        for path in (out / "plan.json", draw(found, out / "plan.png")):
            click.echo(f"wrote {path}", err=True)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        show(found, Console(width=None if os.isatty(1) else 120, highlight=False))
