"""vLLM's own /metrics over a batch of requests: read before and after it, and subtracted. Also resets prefix caches."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import astuple, dataclass

import msgspec

from pdx.bench.breakdown.records import Engines
from pdx.bench.harness import web
from pdx.bench.harness.web import direct
from pdx.errors import PdxError
from pdx.testing.waiting import came_true

READ_S = 10.0
COUNTED_S = 10.0  # until an engine's metrics include the last request
QUEUE = "vllm:request_queue_time_seconds_sum"  # arrived in the scheduler -> scheduled
FIRST = "vllm:time_to_first_token_seconds_sum"  # arrived at the API server -> first token
PREFILL = "vllm:request_prefill_time_seconds_sum"  # scheduled -> first token
FINISHED = "vllm:request_prefill_time_seconds_count"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SOURCES = {"computed": "local_compute", "local": "local_cache_hit", "external": "external_kv_transfer"}
_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Found(msgspec.Struct, frozen=True):
    """Prompt tokens by where the engine found them, according to its own metrics."""

    computed: float
    local: float  # its own prefix cache
    external: float  # its KV connector

    @property
    def prompt(self) -> float:
        return self.computed + self.local + self.external


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over all requests that an engine has finished."""

    finished: float
    queue_s: float
    prefill_s: float
    first_s: float
    computed_tokens: float
    local_tokens: float = 0.0  # of prompts, found in the engine's own prefix cache
    external_tokens: float = 0.0  # of prompts, found by its KV connector

    @property
    def found(self) -> Found:
        """All prompt tokens by where they were found."""
        return Found(self.computed_tokens, self.local_tokens, self.external_tokens)

    def since(self, before: Sums) -> Sums:
        return Sums(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def parse(text: str) -> Sums:
    """The sums in one page of /metrics, over all models and engine indices; a missing metric counts as 0."""
    found = {QUEUE: 0.0, PREFILL: 0.0, FIRST: 0.0, FINISHED: 0.0, **dict.fromkeys(SOURCES, 0.0)}
    for name, labels, value in _SAMPLE.findall(text):
        if name == BY_SOURCE:
            for key, source in SOURCES.items():
                found[key] += float(value) * (f'source="{source}"' in labels)
        elif name in found:
            found[name] += float(value)
    return Sums(found[FINISHED], found[QUEUE], found[PREFILL], found[FIRST], *(found[key] for key in SOURCES))


def read(url: str) -> Sums:
    """The sums of the engine at `url`. :raises OSError: it does not answer."""
    return parse(page(url))


def page(url: str) -> str:
    """The text of /metrics of the server at `url`. :raises OSError: it does not answer."""
    return web.get(f"{url}/metrics", READ_S).decode()


def engines(prefill: Sums, decode: Sums | None = None) -> Engines:
    """Means per request of a batch. `decode`: None if one engine does everything."""
    return Engines(
        prefill_queue_ms=_queue_ms(prefill),
        prefill_ms=1e3 * prefill.prefill_s / prefill.finished,
        decode_queue_ms=_queue_ms(decode) if decode else 0.0,
        decode_first_ms=1e3 * decode.prefill_s / decode.finished if decode else 0.0,
        computed_tokens=decode.computed_tokens / decode.finished if decode else 0.0,
    )


def _queue_ms(sums: Sums) -> float:
    """The mean time for which a request was queued.

    vLLM's own figure begins when the scheduler takes the request, which it does not do during a step. This matters when
    requests arrive together: several requests are therefore timed from the API server on, which includes some IPC.
    """
    queue_s = sums.queue_s if sums.finished == 1 else max(sums.queue_s, sums.first_s - sums.prefill_s)
    return 1e3 * queue_s / sums.finished


class Watch:
    """Compares the metrics of some engines before and after one batch of requests."""

    def __init__(self, *urls: str) -> None:
        """The same URL twice counts once."""
        self._before = {url: read(url) for url in dict.fromkeys(urls)}

    def end(self, requests: int) -> list[Sums] | None:
        """Each engine's sums over the batch; None: an engine has not counted exactly `requests` within `COUNTED_S`.

        Engines count a request when it ends, a moment after they send its last token.
        """
        added: list[Sums] = []

        def have_counted() -> bool:
            added[:] = [read(url).since(before) for url, before in self._before.items()]
            return all(sums.finished >= requests for sums in added)

        came_true(have_counted, COUNTED_S, pause_s=0.1)
        return added if all(sums.finished == requests for sums in added) else None


PATH = "/reset_prefix_cache"
FREE_S = 10.0  # until blocks that a connector still saves or loads are free
LOOK_S = 0.1
ANSWER_S = 30.0


class CacheNotReset(PdxError):
    """An engine's prefix cache was not emptied; the text says why, and what would help."""


def reset(url: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Empty the prefix cache of the engine at `url`, but not its connector's cache.

    Retries for up to `FREE_S` while blocks are in use.

    :raises CacheNotReset: the engine refuses or does not answer as vLLM does, or blocks stay in use.
    """
    for _ in range(round(FREE_S / LOOK_S)):
        if _ask(url):
            return
        sleep(LOOK_S)
    raise CacheNotReset(
        f"{url} did not empty its prefix cache within {FREE_S:g} s: blocks are in use; has it other clients?"
    )


def _ask(url: str) -> bool:
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
