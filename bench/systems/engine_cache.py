"""Emptying an engine's own prefix cache, so that only its KV connector can know what was asked before."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from pdx.bench.harness.web import direct
from pdx.errors import PdxError

PATH = "/reset_prefix_cache"
FREE_S = 10.0  # until blocks that a connector still saves or loads are free
LOOK_S = 0.1
ANSWER_S = 30.0


class CacheNotReset(PdxError):
    """The engine's own cache still has what it had; the text says why, and what would help."""


def reset(url: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Empty the prefix cache of the engine at `url`, and leave alone what its connector keeps.

    Asks again for up to `FREE_S` while blocks are in use.

    :raises CacheNotReset: it cannot be asked, or blocks stay in use.
    """
    for _ in range(round(FREE_S / LOOK_S)):
        if _ask(url):
            return
        sleep(LOOK_S)
    raise CacheNotReset(
        f"{url} did not empty its prefix cache within {FREE_S:g} s: blocks are in use; has it other clients?"
    )


def _ask(url: str) -> bool:
    """Whether it was emptied."""
    post = urllib.request.Request(url + PATH, b"", method="POST")
    try:
        with direct.open(post, timeout=ANSWER_S) as answer:
            return bool(json.load(answer).get("success"))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                raise CacheNotReset(
                    f"{url} has no POST {PATH}: start that engine with VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from None
            said = error.read().decode(errors="replace")[:300]
        raise CacheNotReset(f"{url} refuses POST {PATH}: HTTP {error.code}: {said}") from None
    except (OSError, ValueError, AttributeError) as error:
        raise CacheNotReset(f"{url} does not answer POST {PATH} as vLLM does: {error}") from error
