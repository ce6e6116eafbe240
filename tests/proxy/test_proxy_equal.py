"""Whatever the mode, the client gets what a single engine would have answered: text, usage, finish reason, shape."""

import asyncio
import json
import random

import pytest
from engine_standin import Server
from proxy_harness import CHAT, COMPLETIONS, ENDED, FORWARDED, HALF, cluster, events, within


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
PROMPTS = [f"prompt {number}" for number in range(40)]


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("options", [None, USAGE, {**USAGE, "continuous_usage_stats": True}])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_stream(path, options, details):
    async with cluster(server=Server(details=details)) as made:
        modes = set()
        for prompt in PROMPTS[:16]:
            body = {"model": "hash", "temperature": 0, "max_tokens": 12, "stream": True}
            body |= {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
            if options:
                body["stream_options"] = options
            modes.add(await assert_equal(made, path, body))
        assert modes == ({"forward", "sampled"} if path == COMPLETIONS else {"sampled"})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_whole(made, path):
    modes = set()
    for prompt in PROMPTS:
        body = {"model": "hash", "temperature": 0, "max_tokens": 12}
        body |= {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
        modes.add(await assert_equal(made, path, body))
    assert modes == ({"forward", "sampled"} if path == COMPLETIONS else {"sampled"})
    legs = [body["kv_transfer_params"] for body in made.decode.bodies if "kv_transfer_params" in body]
    assert len(legs) >= len(PROMPTS) * 2 // 3
    assert all(leg["do_remote_prefill"] for leg in legs)
    if path == CHAT:  # sent before the prefill leg has counted any tokens
        assert all(leg["is_early"] for leg in legs)
    else:
        assert all(leg["prefill_tokens"] > 1 for leg in legs)


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


@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": "no"}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": "no"}},
        {"stream_options": {"include_usage": "perhaps"}},
        {"stream_options": {"never_heard_of": 7}},
        {"stream_interval": 0},
    ],
)
async def test_no_token_is_sent_before_an_engine_has_read_odd_stream_options(made, fields):
    for prompt in (FORWARDED, ENDED):
        body = {"prompt": prompt, "temperature": 0, "stream": True, **fields}
        assert await assert_equal(made, COMPLETIONS, body) != "forward"


async def test_forwarded_token_is_sent_before_the_decode_leg_starts(made):
    body = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 12, "stream": True}
    made.decode.fault = "hang"
    async with made.client.post(made.url + COMPLETIONS, json=body) as response:
        assert response.headers["x-pdx-mode"] == "forward"
        first = json.loads((await response.content.readuntil(b"\n\n"))[6:])
        assert first["choices"][0]["text"]
        assert first["choices"][0]["finish_reason"] is None


async def test_first_token_that_is_half_a_character_is_sampled_by_the_decoder(made):
    body = {"prompt": HALF, "temperature": 0, "max_tokens": 6}
    assert await assert_equal(made, COMPLETIONS, body) == "sampled"
    assert await assert_equal(made, COMPLETIONS, {**body, "stream": True}) == "sampled"
    assert await made.metric("pdx_proxy_fallbacks_total", reason="first_token") == 2
    assert made.decode.bodies[-1]["kv_transfer_params"]["do_remote_prefill"]


async def test_without_forward_every_completion_is_sampled():
    async with cluster(forward=False) as made:
        for prompt in PROMPTS[:5]:
            assert await assert_equal(made, COMPLETIONS, {"prompt": prompt, "temperature": 0}) == "sampled"


SERVERS = {
    "penalty": Server(presence_penalty=1.5),
    "repetition": Server(repetition_penalty=1.2),
    "processor": Server(logits_processor=True),
    "cap": Server(max_new_tokens=5),
    "cap of one": Server(max_new_tokens=1),
    "short": Server(model_len=24),
}


@pytest.mark.parametrize(("name", "stream"), [*((name, True) for name in SERVERS), ("penalty", False), ("cap", False)])
async def test_what_a_server_adds_to_every_request(name, stream):
    async with cluster(server=SERVERS[name]) as made:
        modes = set()
        for prompt in PROMPTS[:12]:
            for fields in ({}, {"max_tokens": 3}, {"max_tokens": 12, "min_tokens": 6}, {"presence_penalty": 0}):
                body = {"model": "hash", "temperature": 0, "prompt": prompt, "stream": stream, **fields}
                modes.add(await assert_equal(made, COMPLETIONS, body))
        looks_back = SERVERS[name].facts.looks_back
        assert modes == ({"sampled"} if looks_back else {"forward", "sampled"})
        assert bool(await made.metric("pdx_proxy_fallbacks_total", reason="engine_looks_back")) == looks_back


@pytest.mark.parametrize("whose", ["prefill", "decode"])
async def test_one_engine_of_a_pair_that_looks_back_is_enough(whose):
    servers = [Server(), Server(logits_processor=True)]
    first, last = servers if whose == "decode" else reversed(servers)
    async with cluster(server=first, decode_server=last) as made:
        body = {"prompt": FORWARDED, "temperature": 0}
        assert await assert_equal(made, COMPLETIONS, body) == "sampled"


async def test_engines_of_which_nothing_is_known_are_not_forwarded():
    async with cluster(known=False, server=Server(presence_penalty=1.5)) as made:
        for prompt in PROMPTS:
            assert await assert_equal(made, COMPLETIONS, {"prompt": prompt, "temperature": 0}) == "sampled"
        assert await made.metric("pdx_proxy_fallbacks_total", reason="engine_unknown") == len(PROMPTS)
        urls = [made.prefill.url, made.decode.url]
        reports = [(name, name, url) for name, url in zip(("prefill", "decode"), urls, strict=True)]
        await made.node.report(*reports, facts=[Server().facts, None])  # by a connector that does not tell
        await made.metric_reaches(2, "pdx_proxy_reports_total")
        assert await assert_equal(made, COMPLETIONS, {"prompt": FORWARDED, "temperature": 0}) == "sampled"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("other", [Server(presence_penalty=1.5), Server(max_new_tokens=3), Server(model_len=8), None])
async def test_an_engine_that_would_continue_otherwise_is_not_asked_to(other, stream):
    """The planned decoder refuses connections; both engines that are left add something of their own to requests."""
    async with cluster(decodes=2, known=False, server=Server(max_new_tokens=3), decode_server=Server()) as made:
        planned, spare = made.decodes
        reports = [("p", "prefill", made.prefill.url, 0), ("d", "decode", planned.url, 0)]
        reports.append(("e", "decode", spare.url, 9))
        spare.server = other or Server()
        facts = [made.prefill.server.facts, planned.server.facts, other and other.facts]
        await made.node.report(*reports, facts=facts)
        await made.metric_reaches(2, "pdx_proxy_reports_total")
        body = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 12}
        status, _, alone = await made.post(COMPLETIONS, body, base=spare.url)
        await planned.stop()
        got_status, headers, got = await made.post(COMPLETIONS, {**body, "stream": stream})
        assert len(made.prefill.bodies) == 1
        assert all(seen["prompt"] == FORWARDED for seen in spare.bodies)
        if stream:  # its first token was sent when the decoder's connection was refused
            assert "error" in events(got)[-1]
        else:
            assert (got_status, headers["x-pdx-mode"]) == (status, "sampled")
            assert status != 200 or normal_whole(got) == normal_whole(alone)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("news", ["detached", "unknown", "another"])
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


TALK = {"messages": [{"role": "user", "content": "hello"}]}
SEVERAL = [
    (COMPLETIONS, {"prompt": FORWARDED, "n": 3}, "n"),
    (CHAT, {**TALK, "n": 2}, "chat"),
    (COMPLETIONS, {"prompt": ["one", "another one", "x"]}, "prompts"),
    (COMPLETIONS, {"prompt": [[7, 8, 9], [7]], "n": 2, "logprobs": 1}, "prompts"),
]


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize(("path", "body", "why"), SEVERAL)
async def test_several_answers_or_prompts_are_one_prefill(path, body, why, details):
    async with cluster(server=Server(details=details)) as made:
        body = {**body, "temperature": 0, "max_tokens": 5}
        assert await assert_equal(made, path, body) == "sampled"
        _, headers, _ = await made.post(path, body)
        assert (await made.timeline(headers["x-pdx-transfer-id"]))["why"] == why
        first, last = made.prefill.bodies[-1], made.decode.bodies[-1]
        assert (first.get("n", 1), last.get("n")) == (1, body.get("n"))
        assert (
            first["prompt" if path == COMPLETIONS else "messages"]
            == last["prompt" if path == COMPLETIONS else "messages"]
        )
        params = last["kv_transfer_params"]
        assert params["transfer_id"] == first["kv_transfer_params"]["transfer_id"]
        if why == "prompts":
            assert not params.keys() & {"is_early", "prefill_tokens"}


@pytest.mark.parametrize(("path", "body", "why"), SEVERAL)
async def test_where_prefill_fails_one_engine_answers_all(path, body, why):
    async with cluster() as made:
        made.prefill.fault = 500
        assert await assert_equal(made, path, {**body, "temperature": 0, "max_tokens": 5}) == "alone"
