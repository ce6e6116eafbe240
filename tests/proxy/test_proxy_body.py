"""Clients' bodies: what comes in of them, and that the legs' bodies say what the client's said."""

import asyncio
import codecs
import gzip
import json
import re
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest import mock

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from engine_standin import Server
from hypothesis import example, given
from hypothesis import strategies as st
from proxy_harness import CHAT, COMPLETIONS, FORWARDED, Ahead, begin, cluster, run, until, within
from read_at_once import classify, parse, single_prompt

from pdx.errors import RequestRefused
from pdx.proxy import body as body_module
from pdx.proxy import outline as outline_module
from pdx.proxy.body import LENIENT_BYTES, PIECE, Intake, as_engines_read, encode, parsing
from pdx.proxy.outline import in_turns
from pdx.proxy.plan import Mode, planning, strip_control
from pdx.proxy.routes import GENERATING, Route

BODY = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 4}

NUMBERS = ["0", "-0", "1e2", "1E400", "-1e-400", "NaN", "Infinity", "-Infinity", "1" * 4300, "1" * 5000, "0.1"]
STRINGS = ['"a"', '"\\ud800"', '"\\u00e9"', '"é"', '"語"', '"\\""', '""', '"\\u0000"', '"\\ud83d\\ude00"', '"\udcff"']
LEAVES = [*NUMBERS, *STRINGS, "null", "true", "false", "[]", "{}", "[" * 900 + "]" * 900, "[" * 1500 + "]" * 1500]
LEAVES += ["nul", "01", "[1,]", '"\\x"', "'a'", '{"a":1,"a":2}']
VALUES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: "[ " + " , ".join(each) + "\n]")
        | st.lists(st.tuples(st.sampled_from(STRINGS), inner), max_size=3).map(lambda each: as_object(each))
    ),
    max_leaves=4,
)
NAMES = ['"prompt"', '"pr\\u006fmpt"', '"stop"', '"stream"', '"max_tokens"', '"vllm_xargs"', '"seed"', '"messages"']
NAMES += ['"kv_transfer_params"', '"kv_transfer_par\\u0061ms"', '"never_heard_of"', *STRINGS]


def as_object(pairs):
    return "{" + ",".join(f"{name} : {value}" for name, value in pairs) + "}"


def read(raw):
    """As an engine reads it; None: not at all."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return {name: as_engines_read(name, body[name]) for name in body} if isinstance(body, dict) else body


def same(one, other):
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@given(
    pairs=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=5),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)
@example(pairs=[('"a"', '"\ud800"')], encoding="utf-8")
@example(pairs=[('"a"', "1" * 5000)], encoding="utf-8")
@example(pairs=[('"a"', "1" * 5000), ('"a"', "0")], encoding="utf-8")
def test_an_engine_reads_what_the_client_wrote_and_no_transfer_parameter(pairs, encoding):
    inner = ('"vllm_xargs"', as_object(pairs))
    with suppress(RequestRefused):
        clean, _ = strip_control(parse(as_object([*pairs, inner]).encode(encoding, "surrogatepass")))
        sent = read(bytes(encode(clean))) or {}
        assert "kv_transfer_params" not in {*sent, *(sent.get("vllm_xargs") or ())}
    raw = as_object(pairs).encode(encoding, "surrogatepass")
    wanted = read(raw)
    try:
        sent = read(bytes(encode(parse(raw))))
    except RequestRefused:
        assert wanted is None
        return
    names = [json.loads(name) for name, _ in pairs]
    if wanted is not None or len(set(names)) == len(names):  # else the reader may have balked at what does not count
        assert same(sent, wanted)


@given(
    pairs=st.lists(
        st.tuples(st.sampled_from([*NAMES, '"n"', '"temperature"', '"min_tok\\u0065ns"']), VALUES), max_size=4
    ),
    prompt=st.sampled_from(['"a"', "[1, 2]", "[ [1,2]]", '["\\ud800"]', "[1.0]", '"\\u0000"']),
    route=st.sampled_from(sorted(GENERATING)),
)
@example(pairs=[('"stre\\u0061m"', "true"), ('"stream"', "1")], prompt='"a"', route=Route.COMPLETIONS)
@example(pairs=[('"vllm_xargs"', '{"a":1,"a":2}'), ('"x"', "NaN")], prompt="[1, 2]", route=Route.COMPLETIONS)
def test_a_body_is_served_alike_however_it_is_written(pairs, prompt, route):
    raw = as_object([*pairs, ('"pr\\u006fmpt"', prompt)]).encode("utf-8", "surrogatepass")
    wanted = read(raw)
    if wanted is not None:
        plans = [classify(route, strip_control(parse(each))[0]) for each in (raw, json.dumps(wanted).encode())]
        assert plans[0] == plans[1]


@given(raw=st.binary(max_size=60) | st.binary(max_size=20).map(lambda inner: b'{"prompt":"' + inner + b'"}'))
def test_nonsense_is_not_taken_for_a_body(raw):
    wanted = read(raw)
    try:
        sent = read(bytes(encode(parse(raw))))
    except RequestRefused:
        assert not isinstance(wanted, dict)
    else:
        assert same(sent, wanted)


@contextmanager
def as_if_large(step):
    """Bodies are read as large ones are, in pieces of a few bytes."""
    with (
        mock.patch.multiple(body_module, LENIENT_BYTES=0, _NAME_BYTES=32, _SEND_BYTES=8),
        mock.patch.object(outline_module, "STEP", step),
    ):
        yield


LENIENT_ONLY = re.compile(r"NaN|Infinity|\\ud|[\ud800-\udfff]")
BACKSLASHES = st.integers(0, 40).map(lambda count: json.dumps("a" * (count % 9) + "\\" * count + '"[{' * (count % 3)))


@given(
    pairs=st.lists(st.tuples(st.sampled_from(NAMES), VALUES | BACKSLASHES), max_size=5),
    before=st.sampled_from(["", " ", "\n" * 9]),
    step=st.sampled_from([2, 8, 64]),
)
@example(pairs=[('"a"', '["\\u00e9"]'), ('"b"', "[1]")], before="", step=64)
def test_a_large_body_is_read_in_pieces_as_a_small_one_is_as_a_whole(pairs, before, step):
    text = before + as_object(pairs)
    raw = text.encode("utf-8", "surrogatepass")
    wanted = read(raw)
    with as_if_large(step):
        try:
            body = parse(raw)
        except RequestRefused:
            assert wanted is None or LENIENT_ONLY.search(text)
            return
    names = [json.loads(name) for name, _ in pairs]
    if wanted is not None or len(set(names)) == len(names):
        assert same(read(bytes(encode(body))), wanted)
    assert "kv_transfer_params" not in (read(bytes(encode(strip_control(body)[0]))) or {})


@given(raw=st.text(alphabet='{}[]":,\\ 1', max_size=60).map(str.encode))
def test_what_is_no_json_hides_no_field_in_a_large_body(raw):
    with as_if_large(8), suppress(RequestRefused):
        body, _ = strip_control(parse(b'{"prompt":%b,"kv_transfer_params":{"a":%b}}' % (raw, raw)))
        assert "kv_transfer_params" not in (read(bytes(encode(body))) or {})


@pytest.mark.parametrize(
    ("form", "item"), [("%s", "1234567,"), ("[%s]", "1234567,"), ('[["a"],%s]', '"ab","é",'), ("%s", '[1],{"":2},')]
)
def test_a_large_body_gives_others_their_turn(form, item):
    """What is done at once is no larger than a piece: a list of ids kept the loop for half a second."""
    prompt = form % f"[{item * (32 * PIECE // len(item.encode()))}1]"
    raw = f'{{"prompt":{prompt}}}'.encode()
    decoded, turns = [], 0
    decoder = body_module._fields

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main():
        beside = asyncio.create_task(others())
        body = await in_turns(parsing(raw))
        assert turns >= 2 * 31, "its text is checked, and its fields are found"
        if item.startswith("1") and not form.startswith("[["):
            await in_turns(planning(Route.COMPLETIONS, body))
            assert turns >= 3 * 31, "its ids are counted"
        beside.cancel()

    told = SimpleNamespace(decode=lambda text: decoded.append(len(text)) or decoder.decode(text))
    with mock.patch.object(body_module, "_fields", told):
        run(main)
    assert max(decoded) < 100


def list_of_one(prompt):
    """How it was decided while prompts were still read."""

    def is_int(value):
        return isinstance(value, int) and not isinstance(value, bool)

    if isinstance(prompt, list) and len(prompt) == 1 and not is_int(prompt[0]):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt or None
    return prompt if isinstance(prompt, list) and prompt and all(map(is_int, prompt)) else None


PROMPTS = st.recursive(
    st.sampled_from(["a", "", "[", "]", '["', ",", "\\", 0, 7, -1, 1.5, 1e30, True, None, {}, []]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(prompt=PROMPTS, indent=st.sampled_from([None, 0, 2]))
def test_one_prompt_is_told_from_its_bytes(prompt, indent):
    raw = parse(json.dumps({"prompt": prompt}, indent=indent).encode())["prompt"]
    found = single_prompt(raw)
    wanted = list_of_one(prompt)
    ids = 0 if isinstance(wanted, str) else len(wanted or ())
    assert found == (None if wanted is None else (len(bytes(raw)), ids))


def test_what_only_a_lenient_reader_takes_may_not_be_large():
    padding = "x" * LENIENT_BYTES
    assert read(encode(parse(b'{"a":NaN}'))) is not None
    for odd in ("NaN", '"\\ud800"'):
        with pytest.raises(RequestRefused) as caught:
            parse(as_object([('"prompt"', f'"{padding}"'), ('"a"', odd)]).encode())
        assert "xxx" not in str(caught.value)


def test_halves_of_surrogate_pairs_cost_no_more_than_other_text():
    """Each was a call of Python's: 64 MiB of them took nine seconds."""
    own = codecs.lookup_error("surrogatepass")
    codecs.register_error("surrogatepass", lambda error: pytest.fail("a call for each"))
    try:
        assert "prompt" in parse(b'{"prompt":"%b"}' % (b"\xed\xa0\x80" * LENIENT_BYTES))
    finally:
        codecs.register_error("surrogatepass", own)


def test_a_body_may_be_long_but_not_of_names():
    long = {"messages": [{"role": "user", "content": "hello"}] * 40_000, "model": "m"}
    raw = json.dumps(long).encode()
    assert json.loads(bytes(encode(parse(raw)))) == long
    many = {f"name{number}": 1 for number in range(40_000)}
    for more in (long, {"prompt": list(range(100_000))}):
        with pytest.raises(RequestRefused, match="more than 2048 names"):
            parse(json.dumps({**more, **many}).encode())
    with pytest.raises(RequestRefused, match=r"600\d\d\d bytes beside .*; it may have 262144"):
        parse(b'{"prompt":%s1}' % (b" " * 600_000))
    with pytest.raises(RequestRefused, match="2000 fields; it may have 1024"):
        parse(json.dumps({f"name{number}": 1 for number in range(2000)}).encode())
    with pytest.raises(RequestRefused):
        parse(json.dumps({"prompt": "a", "vllm_xargs": {f"name{number}": 1 for number in range(10_000)}}).encode())


def test_values_too_long_to_be_looked_at_are_not_neutral():
    for name, mode in (("stop", Mode.SAMPLED), ("stream_options", Mode.ALONE), ("response_format", Mode.SAMPLED)):
        body = parse(json.dumps({"prompt": "a", name: ["x" * 10_000]}).encode())
        assert classify(Route.COMPLETIONS, body).mode is mode


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_large_bodies_reach_both_engines_whole(path):
    async with cluster(server=Server(model_len=1 << 20)) as made:
        text = "é large prompt " * 20_000
        body = {"max_tokens": 3, "temperature": 0, "odd": {"a": [None, "x"]}}
        body |= {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        status, _, raw = await made.post(path, body, base=made.decode.url)
        assert (await made.post(path, body))[0] == status == 200, raw
        for engine in (made.prefill, made.decode):
            seen = engine.bodies[-1]
            assert seen.pop("kv_transfer_params")["transfer_id"]
            seen.pop("stream", None)
            assert seen | {"max_tokens": 3} == body


async def test_token_ids_that_no_engine_takes_go_to_none(made):
    for prompt, count in (([7] * 513, "at least 513"), ([[7] * 600], "600")):
        status, _, raw = await made.post(COMPLETIONS, {**BODY, "prompt": prompt})
        fault = json.loads(raw)["error"]
        assert (status, fault["type"], fault["param"]) == (400, "BadRequestError", "input_tokens")  # as vLLM does
        assert f"length is 512 tokens. However, your prompt contains {count} input tokens" in fault["message"]
        assert fault["message"].endswith(f"(parameter=input_tokens, value={count.split()[-1]})")
    assert made.prefill.seen == made.decode.seen == []
    for taken in ({"prompt": [7] * 505}, {"prompt": [7] * 600, "truncate_prompt_tokens": 9}):
        await made.post(COMPLETIONS, {**BODY, **taken})
    assert len(made.decode.seen) == 2


def large(pieces):
    """A request whose body has some bytes more than so many pieces."""
    return {**BODY, "user": "u" * pieces * PIECE}


async def answered(reader):
    head = await within(reader.readuntil(b"\r\n\r\n"))
    return int(head.split()[1]), head.decode().lower()


@pytest.mark.parametrize("packed", [gzip.compress(b"{}"), b"not packed"], ids=["gzip", "nonsense"])
async def test_a_packed_body_is_refused_and_not_unpacked(made, packed):
    """Engines take none, and a megabyte may be a gigabyte."""
    reader, writer = await begin(made.url, len(packed), more="Content-Encoding: gzip\r\n")
    writer.write(packed)
    assert (await answered(reader))[0] == 415
    assert b"gzip" in await within(reader.readuntil(b"}}"))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await answered(reader))[0] == 200, "what nobody unpacks breaks no connection"
    writer.close()
    assert made.prefill.seen == made.decode.seen == []


async def test_a_body_that_is_announced_too_large_or_becomes_so_is_refused():
    async with cluster(max_body_bytes=3 * PIECE, max_bodies_bytes=3 * PIECE) as made:
        for length, sent in ((3 * PIECE + 1, b""), (None, b"%x\r\n" % (4 * PIECE) + b"x" * 4 * PIECE)):
            reader, writer = await begin(made.url, length)
            writer.write(sent)
            assert (await answered(reader))[0] == 413
            writer.close()
        assert made.prefill.seen == made.decode.seen == []
        assert (await made.post(COMPLETIONS, large(2)))[0] == 200, "nothing is held of them"


async def test_each_worker_has_room_for_the_largest_body():
    async with cluster(workers=8, max_body_bytes=4 * PIECE, max_bodies_bytes=16 * PIECE) as made:
        assert (await made.post(COMPLETIONS, large(3)))[0] == 200


async def test_a_connection_closed_before_its_body_is_no_internal_error():
    """It makes room for others, or its client goes: aiohttp says so with a RuntimeError."""
    intake = Intake(each_bytes=PIECE, all_bytes=PIECE, timeout_s=60.0)
    content = StreamReader(BaseProtocol(asyncio.get_running_loop()), PIECE)
    with pytest.raises(RequestRefused, match="did not arrive whole"):
        async with intake.body(SimpleNamespace(content=content, content_length=10)):
            pass


async def test_all_bodies_together_are_bounded():
    async with cluster(max_body_bytes=4 * PIECE, max_bodies_bytes=4 * PIECE) as made:
        writers = []
        for _ in range(4):
            _, writer = await begin(made.url, 2 * PIECE)
            writer.write(b" " * PIECE)
            writers.append(writer)

        async def is_full():
            nonlocal status, headers, raw
            status, headers, raw = await made.post(COMPLETIONS, large(1))
            return status == 503

        status, headers, raw = 0, {}, b""
        await until(is_full)
        assert headers["Retry-After"] == "1"
        assert json.loads(raw)["error"]["message"]
        assert await made.metric("pdx_proxy_exhausted_total", lack="bodies") == 1
        assert await made.metric("pdx_proxy_requests_total", outcome="unavailable") == 1
        assert (await made.post(COMPLETIONS, BODY))[0] == 200, "few slow clients keep no small request out"
        for writer in writers:
            writer.close()

        async def is_empty():
            return (await made.post(COMPLETIONS, large(3)))[0] == 200

        await until(is_empty)


async def test_a_body_counts_until_its_request_ends():
    async with cluster(max_body_bytes=3 * PIECE, max_bodies_bytes=3 * PIECE) as made:
        made.decode.fault = "hold"
        request = asyncio.create_task(made.post(COMPLETIONS, large(1)))
        await within(made.decode.arrived.wait())
        assert (await made.post(COMPLETIONS, large(2)))[0] == 503
        made.release()
        assert (await request)[0] == 200
        assert (await made.post(COMPLETIONS, large(2)))[0] == 200


async def test_a_body_that_does_not_go_on_is_given_up():
    async with cluster(body_timeout_s=0.05) as made:
        reader, writer = await begin(made.url, 1000)
        writer.write(b'{"prompt":')
        assert (await answered(reader))[0] == 408
        writer.close()
        assert made.prefill.seen == []


@pytest.mark.parametrize(
    ("pieces", "pause_s", "given_up_s"), [(0, 50.0, None), (100, 1.0, None), (0, 70.0, 60), (100, 2.5, 99)]
)
def test_a_body_has_a_minute_and_a_second_for_each_piece(pieces, pause_s, given_up_s):
    """A few clients that send a byte now and then would have all the room that there is for bodies."""
    left = iter(range(pieces))

    async def readexactly(size):
        await asyncio.sleep(pause_s)
        if next(left, None) is None:
            raise asyncio.IncompleteReadError(b"", size)
        return b"x" * size

    intake = Intake(each_bytes=8 << 20, all_bytes=8 << 20, timeout_s=60.0)

    async def main():
        content = SimpleNamespace(readexactly=readexactly)
        async with intake.body(SimpleNamespace(content=content, content_length=None)) as raw:
            return len(raw)

    with asyncio.Runner(loop_factory=Ahead) as runner:
        if given_up_s is None:
            assert runner.run(main()) == pieces * PIECE
            return
        with pytest.raises(RequestRefused, match="a second more for each 65536 bytes") as caught:
            runner.run(main())
        assert (caught.value.status, runner.get_loop().time()) == (408, given_up_s)
        assert intake.held_bytes == 0
