"""`pdx bench`: finds the bench. What they do is in `pdx.bench`."""

from __future__ import annotations

import click

from pdx.cli.lazy_group import LazyGroup

BENCHES = {
    "breakdown": "pdx.cli.bench_breakdown:breakdown",
    "transfer": "pdx.cli.bench_transfer:transfer",
    "store": "pdx.cli.bench_store:store",
    "proxy": "pdx.cli.bench_proxy:proxy",
    "serve": "pdx.cli.bench_serve:serve",
}


class Benches(LazyGroup):
    """The subcommands of `pdx bench`."""

    where = BENCHES


@click.group(cls=Benches)
def bench() -> None:
    """Measure: a handoff part by part beside vLLM's own, channels, the store, the proxy, and a whole service.

    \b
    Where does a request's time go?      pdx bench breakdown
    How fast is each channel here?       pdx bench transfer
    And the tiers of the store?          pdx bench store
    What does the proxy cost?            pdx bench proxy
    How does a running service do?       pdx bench serve --url http://127.0.0.1:8000
    """
