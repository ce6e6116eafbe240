"""Whatever the mode, the client gets what a single engine would have answered: text, usage, finish reason, shape."""

import asyncio
import json
import random

import pytest
from engine_standin import Server
from proxy_harness import CHAT, COMPLETIONS, ENDED, FORWARDED, HALF, TALK, cluster, events, patience, within


def normal_whole(raw):
    answer = json.loads(raw)
    answer.pop("id")
    answer["kv_transfer_params"] = None
    return answer


def normal_stream(raw):
    """What a client makes of a stream, and that it is one stream: one id, one object, one model."""
    found = events(raw)
    assert found[-1] == "[DONE]"
    chunks = found[:-1]
    assert len({(each["id"], each["object"], each["model"], each["created"]) for each in chunks}) == 1
    text, finish, usages, logprobs = "", None, [], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            finish = choice.get("finish_reason") or finish
            logprobs.append(choice.get("logprobs"))
        usages.append(chunk.get("usage"))
    return text, finish, [each for each in usages if each], [each for each in logprobs if each]


async def assert_equal(made, path, body):
    """Ask an engine and the proxy; the mode it was served in."""
    status, _, alone = await made.post(path, body, base=made.decode.url, headers={"X-Request-Id": "x"})
    got_status, headers, split = await made.post(path, body)
    assert got_status == status, split
    if status != 200:
        assert split == alone
    elif body.get("stream"):
        assert headers["content-type"].startswith("text/event-stream")
        assert normal_stream(split) == normal_stream(alone)
    else:
        assert normal_whole(split) == normal_whole(alone)
        if headers["x-pdx-mode"] == "forward":
            assert json.loads(split)["kv_transfer_params"] is None, "it is an engine's own"
    return headers["x-pdx-mode"]


USAGE = {"include_usage": True}
OPTIONS = [{}, {"stream_options": USAGE}, {"stream_options": {**USAGE, "continuous_usage_stats": True}}]
PROMPTS = [f"prompt {number}" for number in range(8)]


def asked(path, prompt, **more):
    said = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    return {"model": "hash", "temperature": 0, "max_tokens": 12, **said, **more}


@pytest.mark.parametrize("details", [False, True])
async def test_stream(details):
    async with cluster(server=Server(details=details)) as made:
        for path, wanted in ((COMPLETIONS, {"forward", "sampled"}), (CHAT, {"sampled"})):
            for options in OPTIONS:
                bodies = [asked(path, prompt, stream=True, **options) for prompt in PROMPTS]
                assert {await assert_equal(made, path, body) for body in bodies} == wanted


FIELDS = {
    "max_tokens": [None, 1, 2, 3, 30, 511, 512, 513, 0, -1, "5"],
    "min_tokens": [None, 1, 5, 40],
    "stop": [None, [], "t", [" the", "a"]],
    "stop_token_ids": [None, [97, 98], [300, 301]],
    "ignore_eos": [None, True, False],
    "presence_penalty": [None, 0, 1.5],
    "seed": [None, 7],
    "temperature": [0, 0.0, 0.7],
    "logprobs": [None, 2],
    "echo": [None, False, True],
    "n": [None, 1, 2],
    "stream_options": [None, {"include_usage": True}, {"include_usage": "no"}, {"include_usage": "perhaps"}],
    "stream_interval": [None, 1, 0],
    "something_new": [None, "x"],
    "prompt": ["hello", ["hello"], ["a", "b"], [257, 104, 105], [[257, 104]], "", [], None]
    + ["x" * length for length in (505, 510, 511)],
}


@pytest.mark.parametrize("seed", range(2))
async def test_any_mix_of_fields(seed):
    """Random bodies, legal or not: same answer, or same refusal."""
    dice = random.Random(seed)
    modes = []
    async with cluster() as made:
        for turn in range(60):
            body = {"model": "hash", "temperature": 0, "prompt": f"{seed} {turn}"}
            if dice.random() < 0.5:
                body["stream"] = True
            for name, values in FIELDS.items():
                if dice.random() < 0.2:
                    body[name] = dice.choice(values)
            odd = body.get("max_tokens") in (0, -1, "5")
            several = (body.get("n") or 1) > 1 or body.get("prompt") == ["a", "b"]
            if odd or (body.get("stream") and (several or body.get("echo"))):
                continue  # the stand-in itself does not do these
            modes.append(await assert_equal(made, COMPLETIONS, body))
    assert {"alone", "forward", "sampled"} == set(modes), modes


async def test_no_token_is_sent_before_an_engine_has_read_odd_stream_options(made):
    for fields in (
        {"stream_options": {"include_usage": "no"}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": "no"}},
        {"stream_options": {"include_usage": "perhaps"}},
        {"stream_options": {"never_heard_of": 7}},
        {"stream_interval": 0},
    ):
        for prompt in (FORWARDED, ENDED):
            body = {"prompt": prompt, "temperature": 0, "stream": True, **fields}
            assert await assert_equal(made, COMPLETIONS, body) != "forward"


STREAM = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 12, "stream": True}


async def first_event(response):
    return json.loads((await within(response.content.readuntil(b"\n\n")))[6:])


async def test_the_prefill_engines_token_is_sent_before_the_decode_engine_has_one(made):
    made.decode.fault = "hang_first"
    async with made.client.post(made.url + COMPLETIONS, json=STREAM) as response:
        assert response.headers["x-pdx-mode"] == "forward"
        first = await first_event(response)
        assert first["choices"][0]["text"]
        assert first["choices"][0]["finish_reason"] is None
        assert made.decode.bodies[0]["kv_transfer_params"]["is_early"], "its leg was sent with the other one"


async def test_a_decode_engine_that_has_the_first_token_first_sends_it(made):
    """It has all KV before the prefill engine has answered: that one's token is one too many."""
    want = (await made.post(COMPLETIONS, STREAM, base=made.decode.url))[2]
    made.prefill.fault = "hold"
    made.decode.arrived.clear()
    request = asyncio.create_task(made.client.post(made.url + COMPLETIONS, json=STREAM))
    await within(asyncio.gather(made.prefill.arrived.wait(), made.decode.arrived.wait()))
    made.decode.settled[made.decode.bodies[-1]["kv_transfer_params"]["transfer_id"]].set()
    async with await within(request) as response:
        first = await within(response.content.readuntil(b"\n\n"))
        made.prefill.released.set()
        raw = first + await within(response.read())
    assert normal_stream(raw) == normal_stream(want)


@pytest.mark.parametrize("mode", ["forward", "alone"])
async def test_a_comment_of_the_decode_engine_is_not_its_first_token(made, mode):
    """So the prefill engine's goes to the client and, if that one fails, the request is counted as served alone."""
    want = (await made.post(COMPLETIONS, STREAM, base=made.decode.url))[2]
    made.prefill.fault, made.decode.fault = "hold", "comment_first"
    async with made.client.post(made.url + COMPLETIONS, json=STREAM) as response:
        raw = await within(response.content.readuntil(b"\n\n"))
        assert raw == b": keep-alive\n\n"
        if mode == "forward":
            made.prefill.released.set()
            raw += await within(response.content.readuntil(b"\n\n"))
        else:
            await made.prefill.stop()
            await made.metric_reaches(1, "pdx_proxy_fallbacks_total", reason="prefill_reset")
        made.decode.released.set()
        raw += await within(response.read())
    assert normal_stream(raw) == normal_stream(want)
    assert await made.metric("pdx_proxy_requests_total", mode=mode) == 1


END_OF_TEXT = 256


@pytest.mark.parametrize("first", [ord("q"), 0xC3, END_OF_TEXT])
async def test_a_decode_engine_that_samples_another_first_token_is_asked_to_go_on_after_it(first):
    """What the client has cannot be taken back, and all behind it fits to it."""
    async with cluster(server=Server(details=True), decode_server=Server(first=first, details=True)) as made:
        differing = 0
        for body in [{**STREAM, "prompt": prompt, "min_tokens": 3, **more} for prompt in PROMPTS for more in OPTIONS]:
            _, _, alone = await made.post(COMPLETIONS, body, base=made.prefill.url)
            own = {**body, "kv_transfer_params": {"do_remote_prefill": True}}
            _, _, other = await made.post(COMPLETIONS, own, base=made.decode.url)
            made.decode.seen.clear()
            status, headers, got = await made.post(COMPLETIONS, body)
            assert status == 200
            if len(made.decode.seen) == 1:  # it was sampled there, or is of the same text
                assert normal_stream(got)[:2] == normal_stream(other)[:2]
                continue
            differing += 1
            assert headers["x-pdx-mode"] == "forward"
            assert normal_stream(got) == normal_stream(alone)
            early, continued = made.decode.bodies
            assert early["kv_transfer_params"]["is_early"]
            assert (continued["prompt"][:-1], continued["max_tokens"]) == ([257, *body["prompt"].encode()], 11)
            assert "kv_transfer_params" not in continued
        assert await made.metric("pdx_proxy_fallbacks_total", reason="first_token_differs") == differing > 3
        assert await made.metric("pdx_proxy_engine_failures_total") == 0


@pytest.mark.parametrize("fault", ["reset_first", "hang_first"])
async def test_a_decode_engine_that_dies_behind_the_first_token_is_replaced(fault):
    """Another one computes the prompt, and its first token is the one that the client has."""
    async with cluster(decodes=2, **patience(fault.removesuffix("_first"))) as made:
        want = (await made.post(COMPLETIONS, STREAM, base=made.prefill.url))[2]
        made.decodes[0].fault = made.decodes[1].fault = fault
        async with made.client.post(made.url + COMPLETIONS, json=STREAM) as response:
            raw = await within(response.content.readuntil(b"\n\n"))
            broken, spare = made.decodes if made.decodes[0].seen else reversed(made.decodes)
            spare.fault = None
            broken.released.set()
            raw += await made.outlast(response.read())
        assert normal_stream(raw) == normal_stream(want)
        assert [len(engine.seen) for engine in (broken, spare)] == [1, 1]
        assert await made.metric("pdx_proxy_failovers_total", leg="decode") == 1


async def test_first_token_that_is_half_a_character_is_sampled_by_the_decoder(made):
    assert await assert_equal(made, COMPLETIONS, {**STREAM, "prompt": HALF}) == "sampled"
    assert await made.metric("pdx_proxy_fallbacks_total", reason="first_token") == 1
    assert made.decode.bodies[-1]["kv_transfer_params"]["do_remote_prefill"]


async def test_without_forward_every_completion_is_sampled():
    async with cluster(forward=False) as made:
        for prompt in PROMPTS:
            assert await assert_equal(made, COMPLETIONS, {**STREAM, "prompt": prompt}) == "sampled"


SERVERS = {
    "penalty": Server(presence_penalty=1.5),
    "repetition": Server(repetition_penalty=1.2),
    "processor": Server(logits_processor=True),
    "cap": Server(max_new_tokens=5),
    "cap of one": Server(max_new_tokens=1),
    "short": Server(model_len=24),
    "states": Server(has_states=True),
}


@pytest.mark.parametrize(("name", "stream"), [*((name, True) for name in SERVERS), ("penalty", False), ("cap", False)])
async def test_what_a_server_adds_to_every_request(name, stream):
    async with cluster(server=SERVERS[name]) as made:
        modes = set()
        for prompt in PROMPTS[:6]:
            for fields in ({}, {"max_tokens": 3}, {"max_tokens": 12, "min_tokens": 6}, {"presence_penalty": 0}):
                body = {"model": "hash", "temperature": 0, "prompt": prompt, "stream": stream, **fields}
                modes.add(await assert_equal(made, COMPLETIONS, body))
        looks_back = SERVERS[name].facts.looks_back
        is_sampled = looks_back or not stream or name in ("cap of one", "states")
        assert modes == ({"sampled"} if is_sampled else {"forward", "sampled"})
        counted = bool(await made.metric("pdx_proxy_fallbacks_total", reason="engine_looks_back"))
        assert counted == (looks_back and stream)


@pytest.mark.parametrize("whose", ["prefill", "decode"])
async def test_one_engine_of_a_pair_that_looks_back_is_enough(whose):
    servers = [Server(), Server(logits_processor=True)]
    first, last = servers if whose == "decode" else reversed(servers)
    async with cluster(server=first, decode_server=last) as made:
        assert await assert_equal(made, COMPLETIONS, STREAM) == "sampled"


async def test_engines_of_which_nothing_is_known_are_not_forwarded():
    async with cluster(known=False, server=Server(presence_penalty=1.5)) as made:
        for prompt in PROMPTS:
            assert await assert_equal(made, COMPLETIONS, {**STREAM, "prompt": prompt}) == "sampled"
        assert await made.metric("pdx_proxy_fallbacks_total", reason="engine_unknown") == len(PROMPTS)
        urls = [made.prefill.url, made.decode.url]
        reports = [(name, name, url) for name, url in zip(("prefill", "decode"), urls, strict=True)]
        await made.node.report(*reports, facts=[Server().facts, None])  # by a connector that does not tell
        await made.metric_reaches(2, "pdx_proxy_reports_total")
        assert await assert_equal(made, COMPLETIONS, STREAM) == "sampled"


@pytest.mark.parametrize(
    ("other", "stream"),
    [(Server(presence_penalty=1.5), True), (Server(max_new_tokens=3), False), (None, True)],
)
async def test_another_decode_engine_answers_as_it_does_alone(other, stream):
    """The planned one refuses connections; both engines that are left add something of their own to requests."""
    async with cluster(decodes=2, known=False, server=Server(max_new_tokens=3), decode_server=Server()) as made:
        planned, spare = made.decodes
        reports = [("p", "prefill", made.prefill.url, 0), ("d", "decode", planned.url, 0)]
        reports.append(("e", "decode", spare.url, 9))
        spare.server = other or Server()
        facts = [made.prefill.server.facts, planned.server.facts, other and other.facts]
        await made.node.report(*reports, facts=facts)
        await made.metric_reaches(2, "pdx_proxy_reports_total")
        body = {**STREAM, "stream": stream}
        status, _, alone = await made.post(COMPLETIONS, body, base=spare.url)
        await planned.stop()
        got_status, _, got = await made.post(COMPLETIONS, body)
        assert len(made.prefill.bodies) == 1
        assert all(seen["prompt"] == FORWARDED for seen in spare.bodies)
        assert got_status == status
        normal = normal_stream if stream else normal_whole
        assert status != 200 or normal(got) == normal(alone)


@pytest.mark.parametrize(("news", "stream"), [("detached", True), ("unknown", True), ("another", False)])
async def test_what_is_known_of_the_decoder_when_the_first_token_comes_decides(made, news, stream):
    """While the prompt is computed the engines' node says something else of them: no answer ends with that."""
    made.prefill.fault = "hold"
    body = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 12, "stream": stream}
    request = asyncio.create_task(made.post(COMPLETIONS, body))
    await within(made.prefill.arrived.wait())
    engines = [] if news == "detached" else [("p0", "prefill", made.prefill.url), ("d0", "decode", made.decode.url)]
    made.decode.server = Server(logits_processor=news == "another")
    facts = None if news == "unknown" else made.decode.server.facts
    await made.node.report(*engines, facts=facts)
    await made.metric_reaches(2, "pdx_proxy_reports_total")
    made.prefill.released.set()
    status, headers, got = await within(request)
    assert (status, headers["x-pdx-mode"]) == (200, "sampled")
    _, _, alone = await made.post(COMPLETIONS, body, base=made.decode.url, headers={"X-Request-Id": "x"})
    normal = normal_stream if stream else normal_whole
    assert normal(got) == normal(alone)


SEVERAL = [
    (COMPLETIONS, {"prompt": FORWARDED, "n": 3}, "stream"),
    (CHAT, {"messages": TALK["messages"], "n": 2}, "chat"),
    (COMPLETIONS, {"prompt": ["one", "another one", "x"]}, "prompts"),
    (COMPLETIONS, {"prompt": [[7, 8, 9], [7]], "n": 2, "logprobs": 1}, "prompts"),
]


@pytest.mark.parametrize(("path", "body", "why"), SEVERAL)
async def test_several_answers_or_prompts_are_one_prefill(path, body, why):
    async with cluster(server=Server(details=True)) as made:
        body = {**body, "temperature": 0, "max_tokens": 5}
        assert await assert_equal(made, path, body) == "sampled"
        _, headers, _ = await made.post(path, body)
        assert (await made.timeline(headers["x-pdx-transfer-id"]))["why"] == why
        first, last = made.prefill.bodies[-1], made.decode.bodies[-1]
        assert (first.get("n", 1), last.get("n")) == (1, body.get("n"))
        what = "prompt" if path == COMPLETIONS else "messages"
        assert first[what] == last[what]
        params = last["kv_transfer_params"]
        assert params["transfer_id"] == first["kv_transfer_params"]["transfer_id"]
        if why == "prompts":
            assert not params.keys() & {"is_early", "prefill_tokens"}


async def test_where_prefill_fails_one_engine_answers_all(made):
    made.prefill.fault = 500
    for path, body, _ in SEVERAL:
        assert await assert_equal(made, path, {**body, "temperature": 0, "max_tokens": 5}) == "alone"
