"""Makes the cases: always the same for a given model and seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from pdx.bench.parity import fields
from pdx.bench.parity.records import Call, Case, Way, body, posted

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LIMIT = {COMPLETIONS: "max_tokens", CHATS: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
SHORT = {COMPLETIONS: "completions", CHATS: "chats", RESPONSES: "responses", MESSAGES: "messages"}
HIDDEN = "not for clients"  # the group of routes that configure or describe engines
FORM = {"Content-Type": "multipart/form-data; boundary=xx"}
_STEP = 120  # tokens: an engine computes several prompts of this length in one step
_ANSWER = 12  # tokens of a usual answer
_LONG_ANSWER = 400  # tokens of an answer whose client leaves
_IDS_BELOW = 1 << 20  # from this context length on, no prompts of about that length are sent
_WORDS = ["the", "a", "cat", "dog", "house", "tree", "river", "stone", "runs", "sings", "over", "under", "7", "é", "語"]


class Maker:
    """Makes cases for one server. `model`: its model; `length`: the context length, in tokens."""

    def __init__(self, model: str, length: int, seed: int) -> None:
        self.model = model
        self.length = length
        self._random = random.Random(seed)
        self._size = max(16, min(700, length // 3))  # bytes of a long prompt: each may be a token
        self._shared = self._text(self._size // 2)

    def cases(self, count: int, libraries: Iterable[str] = (), *, only: str = "") -> list[Case]:
        """A random sample of `count` cases; if there are fewer, all of them and mixtures of their fields. `only`: all
        cases with this text in their names instead of a sample. `libraries`: the client libraries to use, too.
        """
        cases = [*self._all_cases(), *self._calls(libraries)]
        cases = _with_unique_names([*cases, *self._mixed(count - len(cases))])
        if only:
            return [case for case in cases if only in case.name]
        chosen = set(self._random.sample(range(len(cases)), count))
        return [case for number, case in enumerate(cases) if number in chosen]

    def _all_cases(self) -> Iterator[Case]:
        yield from self._generating()
        yield from self._prompts()
        yield from self._bodies()
        yield from self._headers()
        yield from self._methods()
        yield from self._other_endpoints()
        yield from self._disconnecting()

    def _text(self, size: int) -> str:
        """Random words, `size` bytes or slightly more in all."""
        words: list[str] = []
        while size > 0:
            words.append(self._random.choice(_WORDS))
            size -= len(words[-1].encode()) + 1
        return " ".join(words)

    def _usual_request(self, route: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The usual greedy request to a generating route, updated with `overrides`."""
        # vLLM 0.32 on a CPU crashes on a request with a seed whose prompt takes more than one step.
        most = min(self._size, _STEP) if "seed" in overrides else self._size
        text = self._text(self._random.choice((30, most)))
        made: dict[str, Any] = {"model": self.model, LIMIT[route]: _ANSWER, "temperature": 0}
        if route == COMPLETIONS:
            made["prompt"] = text
        elif route == RESPONSES:
            made["input"] = text
        else:
            made["messages"] = [{"role": "user", "content": text}]
        return made | dict(overrides)

    def _case(self, route: str, name: str, overrides: Mapping[str, Any], **more: Any) -> Case:
        request = self._usual_request(route, overrides)
        return posted(f"{SHORT[route]} {name}", route, request, is_random=_is_random(route, request), **more)

    # ---- fields -----------------------------------------------------------------------------

    def _generating(self) -> Iterator[Case]:
        tables: dict[str, dict[str, dict[str, Any]]] = {
            COMPLETIONS: fields.SAMPLING | fields.COMPLETIONS | fields.REFUSED,
            CHATS: fields.SAMPLING | fields.CHATS | fields.TOOLS | fields.REFUSED,
            RESPONSES: fields.RESPONSES,
            MESSAGES: fields.MESSAGES,
        }
        for route, table in tables.items():
            limits = {name: {LIMIT[route]: value} for name, value in fields.LIMITS.items()}
            if route == CHATS:  # the engine would fill its whole context
                del limits["limit-None"]
            for name, overrides in (table | limits).items():
                yield self._case(route, name, overrides)
                if "stream" not in overrides and name not in fields.REFUSED:
                    yield self._case(route, f"{name} streamed", {**overrides, "stream": True})

    def _mixed(self, count: int) -> Iterator[Case]:
        """Random combinations of several fields."""
        tables = {
            COMPLETIONS: [*fields.SAMPLING.values(), *fields.COMPLETIONS.values()],
            CHATS: [*fields.SAMPLING.values(), *fields.CHATS.values()],
        }
        for number in range(count):
            route = self._random.choice((COMPLETIONS, CHATS))
            overrides: dict[str, Any] = {}
            for each in self._random.sample(tables[route], self._random.choice((2, 2, 3, 4))):
                overrides |= each
            if self._random.random() < 0.5:
                overrides["stream"] = True
            if overrides.get("n") is not None and overrides.get("stream") and "echo" in overrides:
                del overrides["echo"]
            yield self._case(route, f"mixture {number}", overrides)

    def _prompts(self) -> Iterator[Case]:
        """Prompts of all lengths and forms; some repeat another one or its beginning, to hit the prefix cache."""
        text = self._text(self._size)
        ids = [self._random.randrange(32, 127) for _ in range(self._size)]
        prompts: dict[str, Any] = {
            "letter": "a",
            "long": text,
            "again": text,
            "shared": f"{self._shared} {self._text(40)}",
            "shared again": f"{self._shared} {self._text(40)}",
            "odd letters": "\u0000 \ud83d\ude00 \u202e e\u0301 \ufffd \r\n\t",
            "ids": ids,
            "ids in a list": [ids],
            "ids, two lists": [ids, ids[:20]],
            "two": [text, "and another"],
            "one in a list": [text],
            "many": [f"{number} {self._text(20)}" for number in range(8)],
            "empty": "",
            "none": [],
            "empty in a list": [""],
            "no ids": [[]],
            "null": None,
            "number": 5,
            "object": {"text": "a"},
            "mixed": ["a", [65, 66]],
            "id below 0": [-1, 65],
            "id of no token": [65, 1 << 40],
            "ids as text": ["65", 66],
            "fractions": [65.5],
        }
        if self.length < _IDS_BELOW:
            prompts |= {
                "too long": [65] * (self.length + 1),
                "much too long": [65] * (2 * self.length),
                "as long as it can be": [65] * (self.length - 1),
            }
        for name, prompt in prompts.items():
            yield self._case(COMPLETIONS, f"prompt {name}", {"prompt": prompt})
            yield self._case(COMPLETIONS, f"prompt {name} streamed", {"prompt": prompt, "stream": True})
        request = self._usual_request(COMPLETIONS, {})
        del request["prompt"]
        yield posted("completions prompt missing", COMPLETIONS, request)
        user = {"role": "user", "content": text}
        parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        talks: dict[str, Any] = {
            "turns": [user, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}],
            "system": [{"role": "system", "content": "Be brief."}, user],
            "developer": [{"role": "developer", "content": "Be brief."}, user],
            "parts": [{"role": "user", "content": parts}],
            "picture": [{"role": "user", "content": [*parts, picture]}],
            "named": [{**user, "name": "somebody"}],
            "tool": [user, {"role": "tool", "content": "5", "tool_call_id": "x"}],
            "unknown role": [{"role": "king", "content": "a"}],
            "no role": [{"content": "a"}],
            "no content": [{"role": "user"}],
            "null content": [{"role": "user", "content": None}],
            "empty content": [{"role": "user", "content": ""}],
            "none": [],
            "null": None,
            "text": "hello",
            "list of texts": ["hello"],
        }
        for name, messages in talks.items():
            yield self._case(CHATS, f"messages {name}", {"messages": messages})
            yield self._case(MESSAGES, f"messages {name}", {"messages": messages})
            yield self._case(RESPONSES, f"input {name}", {"input": messages})
        yield self._case(CHATS, "messages turns streamed", {"messages": talks["turns"], "stream": True})

    # ---- HTTP -------------------------------------------------------------------------------

    def _bodies(self) -> Iterator[Case]:
        for name, content in fields.BROKEN.items():
            for route in (COMPLETIONS, CHATS) if name in ("empty", "cut", "list") else (COMPLETIONS,):
                yield posted(f"{SHORT[route]} body {name}", route, content)
        usual = self._usual_request(COMPLETIONS, {})
        text = body(usual).decode()
        forms: dict[str, bytes] = {
            "utf-8 mark": b"\xef\xbb\xbf" + text.encode(),
            "utf-16": text.encode("utf-16"),
            "twice named": text.replace('"temperature": 0', '"temperature": 1.5, "temperature": 0').encode(),
            "not a number": text.replace('"temperature": 0', '"temperature": NaN').encode(),
            "infinite": text.replace('"temperature": 0', '"temperature": Infinity').encode(),
            "half a pair": text.replace('"prompt": "', '"prompt": "\\ud83d ').encode(),
            "spaces": text.replace(",", "\n\t ,").encode(),
            "unicode names": text.replace('"prompt"', '"pro\\u006dpt"').encode(),
            "large": body({**usual, "something_new": "x" * (1 << 20)}),
            "many fields": body({**usual, **{f"field{number}": number for number in range(600)}}),
        }
        for name, content in forms.items():
            yield posted(f"completions body {name}", COMPLETIONS, content)
        yield posted("completions body in pieces", COMPLETIONS, usual, way=Way.CHUNKED)
        yield posted("completions body in pieces streamed", COMPLETIONS, {**usual, "stream": True}, way=Way.CHUNKED)
        types = ("text/plain", "application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON", "odd")
        for kind in types:
            yield posted(f"completions type {kind}", COMPLETIONS, usual, headers={"Content-Type": kind})
        yield Case(name="completions type none", endpoint=COMPLETIONS, path=COMPLETIONS, content=body(usual))
        packed = {"Content-Encoding": "gzip"}
        yield posted("completions body packed, it says", COMPLETIONS, usual, headers=packed)

    def _headers(self) -> Iterator[Case]:
        header_sets = {
            "own id": {"X-Request-Id": "parity-7"},
            "odd id": {"X-Request-Id": "a b/c"},
            "rank 0": {"X-data-parallel-rank": "0"},
            "rank 7": {"X-data-parallel-rank": "7"},
            "rank below 0": {"X-data-parallel-rank": "-1"},
            "rank of letters": {"X-data-parallel-rank": "x"},
            "load as text": {"endpoint-load-metrics-format": "TEXT"},
            "load as JSON": {"endpoint-load-metrics-format": "JSON"},
            "load in an odd form": {"endpoint-load-metrics-format": "XML"},
            "trace": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
            "40 KB": {"X-Odd": "x" * 40_000},
            "a hundred": {f"X-Odd-{number}": "x" for number in range(100)},
            "accept": {"Accept": "text/html", "Accept-Language": "de"},
            "page": {"Origin": "https://example.org"},
            "close": {"Connection": "close"},
            "session": {"X-Session-ID": "parity"},
        }
        for name, headers in header_sets.items():
            for route in (COMPLETIONS, CHATS):
                if route == CHATS and name in ("40 KB", "a hundred", "accept", "close"):
                    continue
                yield self._case(route, f"header {name}", {}, headers=headers)
                yield self._case(route, f"header {name} streamed", {"stream": True}, headers=headers)

    def _methods(self) -> Iterator[Case]:
        """Methods, slashes and paths."""
        for path in (COMPLETIONS, CHATS, RESPONSES, MESSAGES, "/tokenize", "/v1/models", "/version", "/nowhere"):
            for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "POST"):
                if method == "POST" and path in SHORT:
                    continue
                yield Case(name=f"{method} {path}", endpoint="methods", path=path, method=method)
        usual = body(self._usual_request(COMPLETIONS, {}))
        kind = {"Content-Type": "application/json"}
        for path in (
            "/v1/completions/",
            "//v1/completions",
            "/v1/completions?a=b",
            "/V1/completions",
            "/v1/complet%69ons",
        ):
            yield Case(name=f"POST {path}", endpoint="methods", path=path, headers=kind, content=usual)
        for path in ("/v1/models/", "/v1/models?a=b", "/v1/", "/", "/health/", "/nowhere/"):
            yield Case(name=f"GET {path}", endpoint="methods", path=path, method="GET")
        page = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        yield Case(name="preflight", endpoint="methods", path=COMPLETIONS, method="OPTIONS", headers=page)

    def _other_endpoints(self) -> Iterator[Case]:
        """Endpoints other than the four that generate."""
        for path in (
            "/v1/models",
            "/version",
            "/health",
            "/ping",
            "/load",
            "/tokenizer_info",
            "/v1/responses/resp_none",
        ):
            yield Case(name=f"GET {path}", endpoint=path.replace("resp_none", "{id}"), path=path, method="GET")
        for path in ("/metrics", "/openapi.json", "/docs", "/is_sleeping", "/server_info", "/kv_event_sources"):
            yield Case(name=f"GET {path}", endpoint=HIDDEN, path=path, method="GET")
        for path in (
            "/sleep",
            "/reset_prefix_cache",
            "/collective_rpc",
            "/v1/load_lora_adapter",
            "/inference/v1/generate",
        ):
            yield posted(f"POST {path}", HIDDEN, {}, path=path)
        yield Case(name="POST /ping", endpoint="/ping", path="/ping")
        cancel = "/v1/responses/resp_none/cancel"
        yield Case(name=f"POST {cancel}", endpoint="/v1/responses/{id}", path=cancel)
        words = self._text(40)
        talk = {"messages": [{"role": "user", "content": words}]}
        model = {"model": self.model}
        requests: list[tuple[str, dict[str, Any]]] = [
            ("/tokenize", {"prompt": words}),
            ("/tokenize", {"prompt": words, "add_special_tokens": False, "return_token_strs": True}),
            ("/tokenize", talk),
            ("/tokenize", {"prompt": 5}),
            ("/tokenize", {"prompt": words, "model": "no/such-model"}),
            ("/detokenize", {"tokens": [65, 66, 67]}),
            ("/detokenize", {"tokens": []}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "a"}),
            ("/v1/messages/count_tokens", talk),
            ("/v1/messages/count_tokens", {}),
            ("/v1/completions/render", {"prompt": words}),
            ("/v1/chat/completions/render", talk),
            ("/v1/chat/completions/batch", {"messages": [talk["messages"]] * 2, "max_tokens": 5, "temperature": 0}),
            ("/invocations", {"prompt": words, "max_tokens": 5, "temperature": 0}),
            ("/invocations", {**talk, "max_tokens": 5, "temperature": 0}),
            ("/invocations", {"something": 5}),
            ("/cohere/v2/chat", {**talk, "max_tokens": 5, "temperature": 0}),
            ("/cohere/v2/chat", {**talk, "max_tokens": 5, "temperature": 0, "stream": True}),
            ("/generative_scoring", {"query": words, "items": ["a", "b"], "label_token_ids": [65, 66]}),
            *((path, {"input": [words, "b"]}) for path in ("/v1/embeddings", "/pooling", "/classify")),
            ("/v2/embed", {"texts": [words], "input_type": "search_query"}),
            *((path, {"text_1": words, "text_2": ["b"]}) for path in ("/score", "/v1/score")),
            *((path, {"query": words, "documents": ["b"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            ("/v1/embeddings", {"input": [words], "encoding_format": "base64"}),
            ("/v1/embeddings", {"input": 5}),
        ]
        for number, (path, payload) in enumerate(requests):
            yield posted(f"{path} {number}", path, model | payload)
            if number % 3 == 0:
                yield posted(f"{path} {number}, broken", path, body(model | payload)[:-3])
        sound = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--xx--\r\n'
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            yield Case(name=f"POST {path}", endpoint=path, path=path, headers=FORM, content=sound)

    def _disconnecting(self) -> Iterator[Case]:
        """Clients that disconnect early, each followed by a usual request."""
        for route in SHORT:
            then = body(self._usual_request(route, {}))
            most = min(_LONG_ANSWER, self.length // 2)
            for way in (Way.LEAVES, Way.UNREAD, Way.UNSENT):
                for stream in (True, False) if way is Way.UNREAD else (True,):
                    overrides = {LIMIT[route]: most, "stream": stream}
                    if route in (COMPLETIONS, CHATS):
                        overrides["ignore_eos"] = True
                    name = f"client {way}, {'streamed' if stream else 'whole'}"
                    yield self._case(route, name, overrides, way=way, then=then)

    # ---- client libraries -------------------------------------------------------------------

    def _calls(self, libraries: Iterable[str]) -> Iterator[Case]:
        messages = [{"role": "user", "content": self._text(60)}]
        chat = {"model": self.model, "messages": messages, "max_tokens": _ANSWER}
        greedy = {"extra_body": {"temperature": 0}}  # newer clients have no parameter for it
        ours: dict[str, list[tuple[str, dict[str, Any]]]] = {
            "openai": [
                ("models.list", {}),
                ("chat.completions.create", {**chat, "temperature": 0}),
                ("chat.completions.create", {**chat, "temperature": 0.8, "seed": 3, "n": 2}),
                ("chat.completions.create", {**chat, "temperature": 0, "logprobs": True, "top_logprobs": 1}),
                ("chat.completions.create", {**chat, "model": "no/such-model"}),
                ("chat.completions.create", {**chat, "temperature": 9}),
                ("completions.create", {"model": self.model, "prompt": "a", "max_tokens": 5, "temperature": 0}),
                ("completions.create", {"model": self.model, "prompt": ["a", "b"], "max_tokens": 5, "temperature": 0}),
                ("responses.create", {"model": self.model, "input": "a", "max_output_tokens": 9, "temperature": 0}),
                ("responses.retrieve", {"response_id": "resp_none"}),
                ("embeddings.create", {"model": self.model, "input": "a"}),
            ],
            "anthropic": [
                ("messages.create", {**chat, **greedy}),
                ("messages.create", {**chat, **greedy, "system": "Be brief.", "stop_sequences": ["a"]}),
                ("messages.create", {**chat, "model": "no/such-model"}),
                ("messages.create", {**chat, "messages": []}),
                ("messages.count_tokens", {"model": self.model, "messages": messages}),
            ],
        }
        for library in libraries:
            for number, (method, arguments) in enumerate(ours[library]):
                yield _library_case(library, method, arguments, number)
                if method.endswith(".create") and not method.startswith("embeddings"):
                    yield _library_case(library, method, {**arguments, "stream": True}, number, "streamed")


def _library_case(library: str, method: str, arguments: dict[str, Any], number: int, how: str = "whole") -> Case:
    call = Call(library=library, method=method, fields=arguments)
    return Case(name=f"{library} {method} {number} {how}", endpoint=f"the {library} client", call=call)


def _is_random(route: str, asked: Mapping[str, Any]) -> bool:
    """Whether tokens are sampled without a seed, so that two answers differ."""
    heat, has_seed = asked.get("temperature", 0), route in (COMPLETIONS, CHATS) and asked.get("seed") is not None
    return (heat is None or (isinstance(heat, float | int) and heat > 0)) and not has_seed and asked.get("top_k") != 1


def disconnects(case: Case) -> bool:
    """Whether the case checks the load of the whole server, so that no other request may run meanwhile."""
    return case.way in (Way.LEAVES, Way.UNREAD, Way.UNSENT)


def _with_unique_names(cases: list[Case]) -> list[Case]:
    """Number repeated names, so that each name is unique."""
    seen: dict[str, int] = {}
    found = []
    for case in cases:
        seen[case.name] = number = seen.get(case.name, 0) + 1
        found.append(case if number == 1 else msgspec.structs.replace(case, name=f"{case.name} ({number})"))
    return found
