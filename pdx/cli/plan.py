"""`pdx plan`: how many prefillers and decoders, whether to disaggregate at all, when to load instead of computing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console

from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.bench.plan.options import Options

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SHARE = click.FloatRange(0.01, 1.0)


@click.command()
@click.option("--model", default="", help="A preset's name, or a Hugging Face config.json.  [default: llama-3.1-8b]")
@click.option("--gpu", default="h100", show_default=True, help="a100, l40s, h20, h800, h100, h200 or b200.")
@click.option("--tp", default="auto", show_default=True, help="GPUs of one engine (tensor parallelism).")
@click.option("--weights", default="", type=click.Choice(["", "bf16", "fp8", "int4"]), help="[default: the model's]")
@click.option("--kv", default="", type=click.Choice(["", "bf16", "fp8"]), help="[default: the model's]")
@click.option("--link", default="400Gbps", show_default=True, help="Between engines, of each GPU: 400Gbps or 50GB/s.")
@click.option("--arena", default="host", show_default=True, type=click.Choice(["host", "gpu"]), help="Of the nodes.")
@click.option("--rate", default=10.0, show_default=True, help="Requests per second (Poisson).")
@click.option("--input", "input_tokens", default="8k", show_default=True, help="Tokens of a prompt, mean.")
@click.option("--output", "output_tokens", default="200", show_default=True, help="Tokens of an answer, mean.")
@click.option(
    "--input-variation", default=0.0, type=click.FloatRange(0, 5), help="Of prompts: standard deviation / mean."
)
@click.option("--ttft", default="1s", show_default=True, help="The SLO's time to the first token.")
@click.option("--itl", default="50ms", show_default=True, help="The SLO's time between tokens.")
@click.option("--share", default=0.95, show_default=True, help="Of requests and tokens that keep the SLO.")
@click.option("--reuse", default=0.0, help="Share of each prompt that is loaded, not computed.")
@click.option("--reuse-link", default="", metavar="SPEED", help="It comes over, per engine, as achieved: 200Gbps.")
@click.option("--prefillers", default=0, type=click.IntRange(0), help="Judge this number, with --decoders.")
@click.option("--decoders", default=0, type=click.IntRange(0), help="Judge this number, with --prefillers.")
@click.option("--mfu", default=0.5, show_default=True, type=_SHARE, help="Share of peak FLOPS that prefill reaches.")
@click.option("--mbu", default=0.7, show_default=True, type=_SHARE, help="Share of memory speed that decoding reaches.")
@click.option(
    "--link-share", default=0.8, show_default=True, type=_SHARE, help="Share of nominal speed, link and PCIe."
)
@click.option("--step", default="3ms", show_default=True, help="The engine's own time per step.")
@click.option("--control", default="8ms", show_default=True, help="Of a handoff, besides wire and scatter.")
@click.option("--links", default="32Gbps,64Gbps,128Gbps", show_default=True, help="To load KV over, as achieved.")
@click.option("--memory", default="", metavar="SIZE", help="For weights and KV, with --calibrate: 64GiB.")
@click.option(
    "--calibrate", type=_FILE, metavar="FILE", help="Speeds measured by pdx bench breakdown, not a data sheet's."
)
@click.option("--check", type=_FILE, metavar="FILE", help="Compare the model with what pdx bench breakdown measured.")
@click.option("--system", default="", help="Of that result.  [default: PDX's first]")
@click.option("--at", default=0, type=click.IntRange(0), help="With --check: prompt tokens to calibrate with.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for plan.json and two PNGs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def plan(*, check: Path | None, at: int, out: Path | None, as_json: bool, **options: Any) -> None:
    """Say what a deployment needs, from the shapes of the model and the speeds of the machine.

    \b
    pdx plan --model llama-3.1-70b --gpu h100 --rate 10 --input 8k --output 200 --ttft 2s --itl 40ms
    pdx plan --check result.json        the model against what `pdx bench breakdown` measured
    pdx plan --calibrate result.json    the same questions for the machine that was measured
    """
    from pdx.bench.plan.options import Options

    asked = msgspec.convert(options, Options)
    if check is None:
        _plan(asked, out, as_json)
    else:
        _check(asked, check, at, out, as_json)


def _plan(options: Options, out: Path | None, as_json: bool) -> None:
    from pdx.bench.plan.model import make
    from pdx.bench.plan.options import ask
    from pdx.bench.plan.tables import show

    asked = ask(options)
    pair = {"prefillers": options.prefillers, "decoders": options.decoders}
    found = make(asked.case, hardware=asked.hardware, links=asked.links, **pair, with_curve=out is not None)
    if out is not None:
        from pdx.bench.plan.plots import draw, pyplot

        pyplot()  # refuse before anything is written
        _save(found, out / "plan.json")
        for path in draw(found, out):
            click.echo(f"wrote {path}", err=True)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        show(found, _console())


def _check(options: Options, path: Path, at: int, out: Path | None, as_json: bool) -> None:
    from pdx.bench.plan.check import check, speeds, table
    from pdx.bench.plan.fit import load_result
    from pdx.bench.plan.shapes import find_model

    shapes = find_model(options.model) if options.model else None
    found = check(load_result(path), system=options.system, at=at, shapes=shapes)
    if out is not None:
        _save(found, out / "plan-check.json")
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        console = _console()
        console.print(table(found))
        console.print(speeds(found.calibration), highlight=False)
        errors = ", ".join(f"{name} {error:.1%}" for name, error in found.errors.items())
        console.print(f"median error of what was predicted: {errors or 'nothing to predict'}", highlight=False)


def _save(value: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    click.echo(f"wrote {path}", err=True)


def _console() -> Console:
    return Console(width=None if os.isatty(1) else 120, highlight=False)
