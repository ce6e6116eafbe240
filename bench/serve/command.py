"""`pdx bench serve`: real workloads against a running service, sent by vLLM's own load generator."""

from __future__ import annotations

import asyncio
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdx.cli.options import FOLDER, Sectioned, option
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.bench.serve.run import Server

INTERRUPTED = 130
WORKLOADS = ("random", "long-document", "chat", "shared-prompt")
_SOME = click.IntRange(1)


@click.command(
    cls=Sectioned,
    sections={
        "--workload": "Requests",
        "--slo": "Measurement",
        "--out": "Options",
    },
)
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
@option("--requests", metavar="N", default=100, type=_SOME, help="How many in all.")
@option("--input-len", metavar="N", default=8000, type=_SOME, help="Tokens of a prompt.")
@option("--output-len", metavar="N", default=200, type=_SOME, help="Tokens of an answer.")
@option(
    "--shared",
    type=_SOME,
    metavar="N",
    help="Documents (default: a tenth of the requests) or system prompts (default: 8).",
)
@option("--shared-len", type=_SOME, metavar="N", help="Of each. [default: all but a question; half of the prompt]")
@option("--rounds", metavar="N", default=5, type=_SOME, help="Of a conversation.")
@option("--message-len", metavar="N", default=200, type=_SOME, help="Tokens of later messages.")
@option("--slo", default="", metavar="ttft=2s,itl=50ms", help="What good means: ttft, itl, tpot, e2e at most.")
@option("--concurrency", type=_SOME, metavar="MAX", help="Most requests under way. [default: any]")
@option("--api", type=click.Choice(["completions", "chat"]), help="[default: chat for --workload chat]")
@option("--blocks", metavar="N", default=4, type=_SOME, help="Of the workload, with --compare or --reset-cache.")
@option("--warmups", metavar="N", default=1, type=click.IntRange(0), help="Requests that do not count.")
@option("--seed", metavar="N", default=0, help="Of arrivals and texts.")
@option("--salt", default="", help="Of the texts. [default: new ones, so that no cache has them]")
@option(
    "--reset-cache",
    is_flag=True,
    help="Empty the engines' own prefix caches before each block; they need VLLM_SERVER_DEV_MODE=1.",
)
@option("--out", type=FOLDER, default="pdx-bench/serve", help="Folder.")
def serve(
    url: str,
    compare: str | None,
    labels: tuple[str, ...],
    admins: tuple[str, ...],
    model: str | None,
    tokenizer: str | None,
    slo: str,
    out: Path,
    **shape: Any,
) -> None:
    """Send a workload to a running service: time to first token, between tokens, throughput and goodput.

    \b
    random          every prompt is new
    long-document   many questions about a few long documents, in random order
    chat            conversations; each round repeats what was said before
    shared-prompt   many users below a few system prompts

    Requests and figures are those of `vllm bench serve`, by its keys. Ctrl-C keeps the blocks that were measured.
    """
    from pdx.bench.harness import interrupts
    from pdx.bench.harness.report import console
    from pdx.bench.serve.report import Report, Slo
    from pdx.bench.serve.run import Generator, Settings, check_limits, find_server, run

    shape["api"] = shape["api"] or ("chat" if shape["workload"] == "chat" else "completions")
    shape["salt"] = shape["salt"] or secrets.token_hex(4)
    if not (compare or shape["reset_cache"]):
        shape["blocks"] = 1
    settings, objectives = Settings(**shape), Slo.parse(slo)
    settings.check()
    addresses = [url] if compare is None else [url, compare]
    places = list(zip(addresses, _labels(addresses, labels), _admins(addresses, admins), strict=True))

    async def look() -> list[Server]:
        return [await find_server(address, label, model, admin) for address, label, admin in places]

    servers = asyncio.run(look())
    check_limits(settings, servers)
    tokenizer = tokenizer or servers[0].root
    report = Report(settings, objectives, out, tokenizer=tokenizer)
    console.print("loading vLLM's load generator and writing the texts")
    generator = Generator(settings, tokenizer)

    def say(line: str) -> None:
        console.print(line, markup=False)

    try:
        interrupts.run(run(settings, servers, generator, say=say))
        is_complete = True
    except KeyboardInterrupt:
        is_complete = False
        say("interrupted; whole blocks are kept")
    if not any(server.blocks for server in servers):
        say("nothing was measured")
        sys.exit(INTERRUPTED)
    files = report.write(servers, is_complete=is_complete)
    report.show(servers)
    say("written: " + ", ".join(map(str, files)))
    is_answered = any(
        not error for server in servers for b in server.blocks for r in b.results for error in r["errors"]
    )
    sys.exit(INTERRUPTED if not is_complete else 0 if is_answered else 1)


def _labels(addresses: list[str], labels: tuple[str, ...]) -> list[str]:
    """One label per service. :raises ConfigError: their number is wrong, or two labels give the same file name."""
    from pdx.bench.serve.report import file_name

    found = list(labels) or [address.partition("://")[2].rstrip("/") for address in addresses]
    if len(found) != len(addresses):
        raise ConfigError(f"--label is given {len(found)} times for {len(addresses)} services ({', '.join(addresses)})")
    if len(set(map(file_name, found))) < len(found):
        raise ConfigError(f"the labels {', '.join(found)} do not tell the services apart; give two by --label")
    return found


def _admins(addresses: list[str], admins: tuple[str, ...]) -> list[str]:
    """One URL per service, empty if not given. :raises ConfigError: there are more URLs than services."""
    if len(admins) > len(addresses):
        raise ConfigError(
            f"--admin is given {len(admins)} times for {len(addresses)} services ({', '.join(addresses)})"
        )
    return [*admins, *[""] * (len(addresses) - len(admins))]
