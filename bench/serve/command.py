"""`pdx bench serve`: real workloads against a running service, by vLLM's own benchmark client."""

from __future__ import annotations

import asyncio
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdx.cli.options import FOLDER, option

if TYPE_CHECKING:
    from pdx.bench.serve.client import Server
    from pdx.bench.serve.goodput import Slo
    from pdx.bench.serve.run import Settings

INTERRUPTED = 130
WORKLOADS = ("random", "long-document", "chat", "shared-prompt")


@click.command()
@option("--url", default="http://127.0.0.1:8000", help="The service: a proxy or an engine.")
@option("--compare", metavar="URL", help="Send the same to a second service too, in turns.")
@option("--label", "labels", multiple=True, help="What to call the service, and the second one. [default: its URL]")
@option(
    "--admin",
    "admins",
    multiple=True,
    metavar="URL",
    help="Where PDX's proxy names its engines (its own --admin), of the service and of the second one.",
)
@option("--model", help="The model's name at the service. [default: its first one]")
@option("--tokenizer", metavar="NAME", help="Counts tokens here. [default: where the service has the model from]")
@option("--workload", default="random", type=click.Choice(WORKLOADS))
@option("--rate", default=1.0, metavar="R", help="Requests per second, Poisson; inf: all at once.")
@option("--requests", metavar="N", default=100, type=click.IntRange(1), help="How many in all.")
@option("--input-len", metavar="N", default=8000, type=click.IntRange(1), help="Tokens of a prompt.")
@option("--output-len", metavar="N", default=200, type=click.IntRange(1), help="Tokens of an answer.")
@option(
    "--shared",
    type=int,
    metavar="N",
    help="Documents (default: a tenth of the requests) or system prompts (default: 8).",
)
@option("--shared-len", type=int, metavar="N", help="Tokens of each. [default: all but a question; half of the prompt]")
@option("--rounds", metavar="N", default=5, type=click.IntRange(1), help="Of a conversation.")
@option("--message-len", metavar="N", default=200, type=click.IntRange(1), help="Tokens of later messages.")
@option("--think", default=1.0, type=click.FloatRange(0), metavar="S", help="Mean pause before them, in s.")
@option("--slo", default="", metavar="ttft=2s,itl=50ms", help="What good means: ttft, itl, tpot, e2e at most.")
@option("--concurrency", type=click.IntRange(1), metavar="MAX", help="Most requests under way. [default: any]")
@option("--api", type=click.Choice(["completions", "chat"]), help="[default: chat for --workload chat]")
@option(
    "--blocks",
    metavar="N",
    default=4,
    type=click.IntRange(1),
    help="Parts of the workload, with --compare or --reset-cache.",
)
@option("--warmups", metavar="N", default=1, type=click.IntRange(0), help="Requests that do not count.")
@option("--seed", metavar="N", default=0, help="Of arrivals, pauses and who shares what.")
@option("--salt", default="", help="Of the texts. [default: new ones, so that no cache has them]")
@option(
    "--reset-cache",
    is_flag=True,
    help="Empty the engines' own prefix caches before each block; they need VLLM_SERVER_DEV_MODE=1.",
)
@option("--detailed", is_flag=True, help="Keep every request's figures too.")
@option("--out", type=FOLDER, default="pdx-bench/serve", help="Folder.")
def serve(
    url: str,
    compare: str | None,
    labels: tuple[str, ...],
    admins: tuple[str, ...],
    model: str | None,
    tokenizer: str | None,
    slo: str,
    concurrency: int | None,
    api: str | None,
    blocks: int,
    warmups: int,
    salt: str,
    reset_cache: bool,
    detailed: bool,
    out: Path,
    **shape: Any,
) -> None:
    """Send a workload to a running service: time to first token, between tokens, throughput and goodput.

    \b
    random          every prompt is new
    long-document   many questions about a few long documents, in random order
    chat            conversations; each round repeats what was said before
    shared-prompt   many users below a few system prompts

    Figures are those of `vllm bench serve`, by its keys. Ctrl-C keeps what was measured.
    """
    from pdx.bench.serve.goodput import Slo
    from pdx.bench.serve.run import Settings
    from pdx.bench.serve.workloads import Workload, make_shape

    workload = Workload(shape["workload"])
    settings = Settings(
        shape=make_shape(
            workload,
            requests=shape["requests"],
            input_tokens=shape["input_len"],
            output_tokens=shape["output_len"],
            rate=shape["rate"],
            seed=shape["seed"],
            shared=shape["shared"],
            shared_tokens=shape["shared_len"],
            rounds=shape["rounds"],
            message_tokens=shape["message_len"],
            think_s=shape["think"],
        ),
        api=api or ("chat" if workload is Workload.CHAT else "completions"),
        concurrency=concurrency,
        blocks=blocks if compare or reset_cache else 1,
        reset_cache=reset_cache,
        warmups=warmups,
        salt=salt or secrets.token_hex(4),
    )
    addresses = [url] if compare is None else [url, compare]
    places = list(zip(addresses, _labels(addresses, labels), _admins(addresses, admins), strict=True))
    sys.exit(_measure(settings, Slo.parse(slo), places, model, tokenizer, out, is_detailed=detailed))


def _labels(addresses: list[str], labels: tuple[str, ...]) -> list[str]:
    """:raises ConfigError: there are not as many labels as services, or two files would have one name."""
    from pdx.bench.serve.report import file_name
    from pdx.errors import ConfigError

    found = list(labels) or [address.partition("://")[2].rstrip("/") for address in addresses]
    if len(found) != len(addresses):
        raise ConfigError(f"--label is given {len(found)} times for {len(addresses)} services ({', '.join(addresses)})")
    if len(set(map(file_name, found))) < len(found):
        raise ConfigError(f"the labels {', '.join(found)} do not tell the services apart; give two by --label")
    return found


def _admins(addresses: list[str], admins: tuple[str, ...]) -> list[str]:
    """:raises ConfigError: there are more of them than services."""
    from pdx.errors import ConfigError

    if len(admins) > len(addresses):
        raise ConfigError(
            f"--admin is given {len(admins)} times for {len(addresses)} services ({', '.join(addresses)})"
        )
    return [*admins, *[""] * (len(addresses) - len(admins))]


def _measure(
    settings: Settings,
    slo: Slo,
    places: list[tuple[str, str, str]],
    model: str | None,
    tokenizer: str | None,
    out: Path,
    *,
    is_detailed: bool,
) -> int:
    """Run it, show it and keep it; returns the exit status."""
    from pdx.bench.serve.client import find_server, load
    from pdx.bench.serve.progress import ServeProgress
    from pdx.bench.serve.report import Report
    from pdx.bench.serve.run import Run, check_limits
    from pdx.bench.serve.workloads import Writer

    async def look() -> list[Server]:
        return [await find_server(url, label, model, admin) for url, label, admin in places]

    servers = asyncio.run(look())
    check_limits(settings.shape, servers)
    tokenizer = tokenizer or servers[0].root
    with ServeProgress() as progress:
        progress.say("loading vLLM's benchmark client and writing the texts")
        client = load()
        run = Run(settings, servers, client, progress)
        report = Report(settings, slo, client, out, tokenizer=tokenizer, is_detailed=is_detailed)

        def keep() -> None:
            report.write(run.tallies, is_complete=False)

        sessions = run.write(Writer(client.encoder(tokenizer), settings.salt))
        asyncio.run(run.go(sessions, on_block=keep))
    if not any(tally.answers for tally in run.tallies):
        progress.say("nothing was measured")
        return INTERRUPTED
    files = report.write(run.tallies, is_complete=run.is_complete)
    report.show(run.tallies)
    progress.say("written: " + ", ".join(map(str, files)))
    if not run.is_complete:
        return INTERRUPTED
    return 0 if any(answer.output.success for tally in run.tallies for answer in tally.answers) else 1
