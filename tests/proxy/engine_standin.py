"""A stand-in for a vLLM engine: vLLM's HTTP protocol around a deterministic language model that is a hash.

Real engines are exercised by the end-to-end tests. This one is exact where the proxy could go wrong: an
incremental detokenizer that withholds unfinished UTF-8, sampling that looks at output tokens when asked to by a
request or by the server's own configuration (penalties, seeds, stop strings, logits processors), token limits, counts
of cached tokens, and vLLM's shapes of answers, streams and refusals.
"""

import asyncio
import collections
import hashlib
import json

import msgspec
from aiohttp import web
from other_shapes import SHAPES, answered, text_of

from pdx.wire.messages import EngineFacts

EOS, BOS, FIRST_WORD = 256, 257, 300
WORDS = [" the", " cat", " sat", "é", " on", " mat", "\n", "語", "!", " and"]
MODEL_LEN = 512
ONE_TOKEN = {"prompt": "a", "max_tokens": 1, "temperature": 0, "stream": False}  # what the proxy probes with


class Server(msgspec.Struct, frozen=True):
    """What the command line of a server adds to every request."""

    presence_penalty: float = 0.0  # --override-generation-config
    repetition_penalty: float = 1.0  # likewise; it counts the prompt's tokens like generated ones
    max_new_tokens: int = 0  # likewise; 0: no cap
    logits_processor: bool = False  # --logits-processors, one that counts the generated tokens
    details: bool = False  # --enable-prompt-tokens-details
    model_len: int = MODEL_LEN
    has_states: bool = False  # its model: prefill legs leave the prompt's last token out
    first: int | None = None  # what it samples first behind a prompt that another engine has computed

    @property
    def facts(self):
        """What its connector tells."""
        looks_back = bool(self.presence_penalty) or self.logits_processor
        return EngineFacts(self.model_len, self.max_new_tokens, looks_back, self.has_states)


def tokenize(text):
    return [BOS, *text.encode()]


def token_bytes(token):
    if token in (EOS, BOS):
        return b""
    return WORDS[token - FIRST_WORD].encode() if token >= FIRST_WORD else bytes([token])


class Detokenizer:
    """Emits text once it is whole; what the prompt left unfinished is lost, as in vLLM."""

    def __init__(self):
        self.pending = b""

    def step(self, token):
        self.pending += token_bytes(token)
        text = self.pending.decode(errors="replace")
        if text.endswith("\ufffd") and len(self.pending) < 4:
            return ""
        self.pending = b""
        return text


def next_token(ids, *, salt, may_end):
    if ids[-1] == 0xC3:
        return 0xA9  # finish an é that was begun
    draw = int.from_bytes(hashlib.sha256(f"{salt}|{ids}".encode()).digest()[:4], "big")
    kind, rest = draw % 100, draw // 100
    if kind < 4 and may_end:
        return EOS
    if kind < 20:
        return 0xC3
    return FIRST_WORD + rest % len(WORDS) if kind < 70 else 97 + rest % 26


def generate(body, prompt, limit, server):
    """(text delta, token, finish reason or None) for each token; without a limit, as vLLM's pause ends a request."""
    if not limit:
        yield "", None, "abort"
        return
    output, text, detokenizer = [], "", Detokenizer()
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    params = body.get("kv_transfer_params") or {}
    if server.has_states and "do_remote_decode" in params:
        prompt = prompt[:-1]
    while True:
        salt = f"processor{len(output)}" if server.logits_processor else ""
        penalty = body.get("presence_penalty")
        if server.presence_penalty if penalty is None else penalty:
            salt += f"penalty{sorted(set(output))}"
        if server.repetition_penalty != 1.0:
            salt += f"repetition{sorted({*prompt, *output})}"
        if body.get("seed") is not None and body.get("temperature") != 0:
            salt += f"seed{body['seed']},{len(output)}"
        may_end = not body.get("ignore_eos") and len(output) >= (body.get("min_tokens") or 0)
        token = next_token([*prompt, *output], salt=salt, may_end=may_end)
        if not output and server.first is not None and "do_remote_prefill" in params:
            token = server.first
        output.append(token)
        delta = detokenizer.step(token)
        text += delta
        found = next((stop for stop in stops if stop in text), None)
        if found is not None:
            yield text[: text.index(found)][len(text) - len(delta) :], token, "stop"
            return
        if token == EOS or token in (body.get("stop_token_ids") or []):
            yield "", token, "stop"
            return
        if len(output) >= limit:
            yield delta, token, "length"
            return
        yield delta, token, None


class StandIn:
    """One engine. `fault` breaks it; `seen`, `arrived`, `answered`, `closed` tell what happened to it."""

    def __init__(self, name="engine", server=None):
        self.name = name
        self.server = server or Server()
        self.url = ""
        self.seen = []  # (path, body, headers) of every generating request
        self.arrived = asyncio.Event()
        self.answered = asyncio.Event()  # an answer was given to its end
        self.closed = asyncio.Event()  # a request was abandoned by whoever sent it
        self.progress = asyncio.Event()  # a stream has sent something
        self.probed = []  # the answer to each GET /health, and "token" for each probe of one token
        self.fault = None
        self.hanging = 0  # requests that it never goes on with
        self.health = 200  # the answer to GET /health
        self.key = ""  # what requests must have in Authorization
        self.headers = {}  # of every answer
        self.ranks = 8  # data parallel
        self.released = asyncio.Event()  # what ends the faults "hold" and "hold_end"
        self.models_served = ["hash"]
        self.adapters = set()  # of these
        self.tokenized = []  # (body, headers) of every POST /tokenize …
        self.tokens = []  # … and the answer; None: 500
        self.done = []  # (method, path, headers, body) of every request to a route that is none of the above …
        self.gives = 200, {"Content-Type": "application/json"}, [b"{}"]  # … and the answer, in pieces
        self.has = set()  # names of responses that it keeps
        self.listed = 0  # how often GET /v1/models came
        self.end = b": keep-alive\n\ndata: [DONE]\n\n"  # of every stream
        self.runner = None
        self.settled = collections.defaultdict(asyncio.Event)  # by transfer: its node has heard what became of it

    @property
    def bodies(self):
        return [body for _, body, _ in self.seen]

    async def start(self, port=0, tls=None):
        app = web.Application(client_max_size=1 << 27)
        app.router.add_post("/v1/completions", self.serve)
        app.router.add_post("/v1/chat/completions", self.serve)
        for path in SHAPES:
            app.router.add_post(path, self.serve)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.tell_health)
        app.router.add_route("*", "/{path:.*}", self.do)
        many = {"max_line_size": 1 << 16, "max_field_size": 1 << 16}
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1, **many)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port, ssl_context=tls).start()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self):
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def tell_health(self, request):
        self.probed.append(self.health)
        return web.Response(status=self.health)

    async def models(self, request):
        self.listed += 1
        if self.fault == "hang":
            await asyncio.Event().wait()
        if self.key and request.headers.get("Authorization") != self.key:
            return refusal(401, "a key is needed")
        card = {"object": "model", "max_model_len": self.server.model_len, "owner": self.name}
        parents = {name: {"parent": self.models_served[0]} for name in self.adapters}
        cards = [{"id": name, **card, **parents.get(name, {})} for name in self.models_served]
        return web.json_response({"object": "list", "data": cards})

    async def tokenize(self, request):
        self.tokenized.append((json.loads(await request.read()), dict(request.headers)))
        if self.tokens is None:
            return refusal(500, "it has none")
        return web.json_response({"count": len(self.tokens), "max_model_len": 9, "tokens": self.tokens})

    async def do(self, request):
        raw = await request.read()
        self.done.append((request.method, request.path_qs, dict(request.headers), raw))
        if self.fault == "hang":
            await self.hang()
        if self.fault == "reset":
            request.transport.abort()
        if isinstance(self.fault, int):
            return refusal(self.fault, "as the test wishes")
        if request.path.startswith("/v1/responses/") and request.path.split("/")[3] not in {*self.has, "render"}:
            return refusal(404, f"no response {request.path}")
        status, headers, pieces = self.gives
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        for number, piece in enumerate(pieces):
            if number:
                await self.released.wait()
                if self.fault == "reset_mid":
                    request.transport.abort()
            await response.write(piece)
        return response

    async def serve(self, request):
        body = json.loads(await request.read())
        if body == ONE_TOKEN:
            self.probed.append("token")
        else:
            self.seen.append((request.path, body, dict(request.headers)))
            self.arrived.set()
        try:
            answer = await self.answer(request, body)
            if not answer.prepared:
                answer.headers.update(self.headers)
            self.answered.set()
            return answer
        except asyncio.CancelledError:
            self.closed.set()
            raise

    async def hang(self):
        self.hanging += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1

    async def answer(self, request, body):
        if self.key and request.headers.get("Authorization") != self.key:
            return refusal(401, "a key is needed")
        if self.fault == "hang":
            await self.hang()
        if self.fault == "hold":
            await self.released.wait()
        if self.fault == "reset":
            request.transport.abort()
            await asyncio.Event().wait()
        if self.fault in ("error_event", "full_event"):
            code = 500 if self.fault == "error_event" else 503
            text = b'data: {"error": {"message": "the engine is dead", "type": "E", "code": %d}}\n\n' % code
            text += b"data: [DONE]\n\n"
            return web.Response(body=text, content_type="text/event-stream")
        if self.fault == "elsewhere":
            return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})
        if isinstance(self.fault, int):
            return refusal(self.fault, "as the test wishes")
        if self.fault == "nonsense":
            return web.json_response({"no": "choices"})
        if self.fault == "no_ids" and isinstance(body.get("prompt"), list):
            return refusal(400, "it takes no ids")
        if self.ranks <= (rank := int(request.headers.get("X-data-parallel-rank", 0))):
            return refusal(400, f"rank {rank} of {self.ranks}")
        if body.get("model", "") not in ("", None, *self.models_served):
            return refusal(404, f"The model `{body['model']}` does not exist.")
        chat = request.path.endswith("chat/completions")
        shape = SHAPES.get(request.path)
        if shape is not None:
            return await self.other(request, body, shape)
        prompts = [chat_prompt(body)] if chat else prompts_of(body)
        limit = int(body.get("max_completion_tokens") or body.get("max_tokens") or (MODEL_LEN if chat else 16))
        model_len = self.server.model_len
        if not prompts or limit > model_len or max(map(len, prompts)) >= model_len:
            return refusal(400, f"{limit} tokens after {[len(each) for each in prompts]} are too many")
        if body.get("stream_options") and not body.get("stream"):
            return refusal(400, "stream options without a stream")
        wanted = body.get("stream_options") or {}
        options = {name: switch(wanted.get(name)) for name in ("include_usage", "continuous_usage_stats")}
        interval = body.get("stream_interval")
        if any(value not in (True, False) for value in options.values()) or (interval is not None and interval < 1):
            return refusal(400, "odd stream options")
        limit = min(limit, self.server.max_new_tokens or limit)
        if (body.get("min_tokens") or 0) > limit:
            return refusal(400, "min_tokens above max_tokens")
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.headers.get('X-Request-Id') or body.get('request_id')}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1_700_000_001 if body.get("stream") else 1_700_000_000,  # legs are not of the same second
            "model": "hash",
        }
        limits = [min(limit, model_len - len(each)) if self.fault != "abort" else 0 for each in prompts]
        if body.get("stream"):
            return await self.stream(request, body | {"stream_options": options}, head, chat, prompts[0], limits[0])
        await self.kv_of(body)
        return web.json_response(self.whole(body, head, chat, prompts, limits))

    async def kv_of(self, body):
        """The KV of a prompt that another engine computes: here, or not to come."""
        params = body.get("kv_transfer_params") or {}
        if params.get("is_early"):
            await self.settled[params["transfer_id"]].wait()

    async def other(self, request, body, shape):
        prompt = tokenize(text_of(body))
        if shape.limit == "max_tokens" and "max_tokens" not in body:
            return refusal(400, "max_tokens: Field required")
        await self.kv_of(body)
        limit = min(body.get(shape.limit) or MODEL_LEN, self.server.model_len - len(prompt)) * (self.fault != "abort")
        steps = list(generate({**body, "stop": body.get("stop_sequences")}, prompt, limit, self.server))
        return await answered(self, request, shape(self, body, prompt, steps))

    def cached(self, body, prompt):
        """Of a prompt's tokens, those that were in the cache, and those that were put there."""
        params = body.get("kv_transfer_params") or {}
        loaded = len(prompt) - 1 if params.get("do_remote_prefill") else len(prompt) // 16 * 16
        return params.get("remote_prefill_cached_tokens", loaded), len(prompt) - loaded

    def usage(self, body, prompt, completion, details=True):
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        if details and self.server.details:
            params = body.get("kv_transfer_params") or {}
            # What a connector loads counts as cached, unless the request says what was cached where it was computed.
            cached = prompt - 1 if params.get("do_remote_prefill") else prompt // 16 * 16
            told = {"cached_tokens": params.get("remote_prefill_cached_tokens", cached)}
            usage["prompt_tokens_details"] = told | {"created_cache_tokens": prompt - cached}
        return usage

    def whole(self, body, head, chat, prompts, limits):
        choices, generated = [], 0
        for prompt, limit in zip(prompts, limits, strict=True):
            for _ in range(body.get("n") or 1):
                steps = list(generate(body, prompt, limit, self.server))
                text = "".join(delta for delta, _, _ in steps)
                tokens = [token for _, token, _ in steps if token is not None]
                generated += len(tokens)
                choice = {"index": len(choices), "finish_reason": steps[-1][2], "stop_reason": None}
                choice["logprobs"] = {"tokens": tokens} if body.get("logprobs") else None
                if chat:
                    choice["message"] = {"role": "assistant", "content": text}
                else:
                    choice["text"] = (bytes(prompt[1:]).decode() if body.get("echo") else "") + text
                wanted = body.get("return_token_ids")
                choice["token_ids"] = tokens if wanted else None
                choice["prompt_token_ids"] = prompt if wanted else None
                choices.append(choice)
        kv = {"from": self.name} if body.get("kv_transfer_params") else None
        usage = self.usage(body, sum(map(len, prompts)), generated)
        return {**head, "choices": choices, "usage": usage, "kv_transfer_params": kv, "metrics": None}

    async def stream(self, request, body, head, chat, prompt, limit):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **self.headers})
        await response.prepare(request)
        if self.fault != "comment_first":
            await self.kv_of(body)
        if self.fault == "hang_first":
            await self.hang()
        if self.fault in ("comment", "comment_first"):
            await response.write(b": keep-alive\n\n")
        if self.fault == "comment":
            return response
        if self.fault in ("reset_first", "comment_first"):
            await self.released.wait()
        if self.fault == "reset_first":
            request.transport.abort()
        options = body["stream_options"]
        if chat:
            head = {**head, "object": "chat.completion.chunk"}
            await send(response, {**head, "choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        count = 0
        for delta, token, finish in generate(body, prompt, limit, self.server):
            count += 1
            choice = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None}
            ids = {"prompt_token_ids": None, "token_ids": None}
            choice |= {"delta": {"content": delta}} if chat else {"text": delta, **ids}
            if body.get("logprobs"):
                choice["logprobs"] = {"tokens": [token]}
            chunk = {**head, "choices": [choice]}
            if options.get("include_usage") and options.get("continuous_usage_stats"):
                chunk["usage"] = self.usage(body, len(prompt), count, details=False)
            await send(response, chunk)
            self.progress.set()
            if count == 2 and self.fault == "reset_mid":
                await response.write(b'data: {"half": ')  # dies in the middle of an event
                request.transport.abort()
            if count == 2 and self.fault == "end_mid":
                return response
            if count == 2 and self.fault == "hang_mid":
                await self.hang()
        if options.get("include_usage"):
            await send(response, {**head, "choices": [], "usage": self.usage(body, len(prompt), count)})
        if self.fault == "hold_end":
            await self.released.wait()
        await response.write(self.end)
        if self.fault == "reset_after":
            request.transport.abort()
        if self.fault == "hang_after":
            await asyncio.Event().wait()
        return response


async def send(response, chunk):
    await response.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")


def switch(value):
    """What vLLM takes for true or false."""
    return {"no": False, "false": False, "yes": True, "true": True, None: False}.get(value, value)


def refusal(status, message):
    fault = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
    return web.json_response(fault, status=status)


def prompts_of(body):
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [tokenize(prompt)] if prompt else []
    if not isinstance(prompt, list) or not prompt:
        return []
    if isinstance(prompt[0], int):
        return [prompt]
    return [tokenize(each) if isinstance(each, str) else each for each in prompt]


def chat_prompt(body):
    return tokenize("".join(f"<{each['role']}>{each['content']}" for each in body["messages"]) + "<assistant>")


def transfer_of(engine):
    return engine.bodies[-1]["kv_transfer_params"]["transfer_id"]
