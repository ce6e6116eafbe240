"""`python -m pdx.node '<NodeConfig as JSON>' [--detach]`: how an engine starts the node of its host."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from pdx.config import ALL_CPUS, NodeConfig, parse
from pdx.errors import PdxError
from pdx.node.daemon import run
from pdx.telemetry import logs


def main() -> int:
    """Run the node; return 1 if it cannot start. With --detach, return at once and run it in an orphaned process."""
    if "--detach" in sys.argv[2:] and os.fork():
        return 0
    logs.set_up()
    os.sched_setaffinity(0, ALL_CPUS)  # else it inherits the pinning of the engine that starts it
    try:
        run(parse(NodeConfig, msgspec.json.decode(sys.argv[1])))
    except PdxError as error:
        logging.getLogger("pdx.node").error("%s", error)  # noqa: TRY400 - the message says it all
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
