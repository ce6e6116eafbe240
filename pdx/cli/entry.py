"""The `pdx` program. Ctrl-C ends it without a traceback even during the imports, which take a while."""

from __future__ import annotations

import signal


def run() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pdx.cli.main import main

    signal.signal(signal.SIGINT, before)
    main()
