"""`pdx bench serve` with vLLM's real load generator, against stand-ins: what is sent, when, and what is kept."""

import json
import os
import signal
from collections import defaultdict
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from serve_standin import Conduct, StandIn
from standin_server import asked_text

from pdx.bench.harness.tiny_llama import make_model
from pdx.bench.serve import run as serve_run
from pdx.cli.main import main

pytest.importorskip("torch")
if serve_run.find_spec("vllm") is None:
    pytest.skip("vLLM's load generator is what is used here", allow_module_level=True)

# Importing it takes many seconds.
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
SMALL = ["--input-len", "60", "--output-len", "5", "--rate", "inf", "--warmups", "0"]


@pytest.fixture(scope="module", autouse=True)
def quiet():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # a tokenizer that is not here is not to be looked for elsewhere
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One character is one token."""
    folder = tmp_path_factory.mktemp("model")
    return str(make_model(folder, layers=1, hidden=64, heads=1, kv_heads=1, head_dim=64, intermediate=64))


@pytest.fixture
def bench(tokenizer, tmp_path):
    """Runs `pdx bench serve`: exit status, output, and the files by name."""

    def run(*argv):
        done = CliRunner().invoke(main, ["bench", "serve", "--out", str(tmp_path), *map(str, argv)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        files = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        return SimpleNamespace(status=done.exit_code, text=done.output, files=files)

    return run


def sent(server):
    return [seen.body["prompt"] for seen in server.seen]


def by(key, found):
    groups = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    return groups


def test_random_prompts_are_all_new(bench, tokenizer):
    with StandIn(tokenizer) as server:
        done = bench("--url", server.url, "--label", "a", "--requests", 6, "--slo", "ttft=60s,itl=60s", *SMALL)
        again = bench("--url", server.url, "--label", "b", "--requests", 6, *SMALL)
    assert done.status == again.status == 0, done.text
    assert len(set(sent(server))) == len({prompt[:20] for prompt in sent(server)}) == 12
    assert all(seen.body["temperature"] == 0 and seen.body["ignore_eos"] for seen in server.seen)
    result = done.files["serve-a.json"]
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert result["pdx"]["goodput"]["good"] == 6
    assert result["pdx"]["is_complete"]


def test_no_prompt_ends_in_half_a_character(bench, tokenizer):
    with StandIn(tokenizer) as server:
        assert bench("--url", server.url, "--label", "a", "--requests", 40, *SMALL).status == 0
    assert any("\ufffd" in prompt for prompt in sent(server))
    assert not any(prompt.endswith("\ufffd") for prompt in sent(server))


def test_shared_texts_begin_prompts_equally_often(bench, tokenizer):
    with StandIn(tokenizer) as server:
        argv = ["--url", server.url, "--workload", "long-document", "--requests", 6, "--shared", 2, "--shared-len", 50]
        assert bench(*argv, *SMALL).status == 0
    assert sorted(len(found) for found in by(lambda text: text[:10], sent(server)).values()) == [3, 3]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_rounds_of_a_conversation_tell_all_that_was_said(bench, tokenizer, api):
    with StandIn(tokenizer) as server:
        argv = ["--url", server.url, "--workload", "chat", "--requests", 12, "--rounds", 3, "--message-len", 20]
        done = bench(*argv, *SMALL, "--api", api)
    assert done.status == 0, done.text
    assert list(next(iter(done.files.values()))["pdx"]["ttft_by_round_ms"]) == ["0", "1", "2"]
    conversations = by(lambda seen: asked_text(seen.body)[:15], server.seen)
    assert sorted(map(len, conversations.values())) == [3, 3, 3, 3]
    for rounds in conversations.values():
        for before, after in zip(rounds, rounds[1:], strict=False):
            assert before.arrived < after.arrived
            assert asked_text(after.body).startswith(asked_text(before.body) + before.answer)


def test_failed_requests_are_counted_and_named_and_are_not_fatal(bench, tokenizer):
    odd = {1: Conduct(status=400, message="too much of it"), 3: Conduct(tokens=2)}
    with StandIn(tokenizer, lambda number, _body: odd.get(number, Conduct())) as server:
        done = bench("--url", server.url, "--requests", 6, "--slo", "e2e=60s", *SMALL)
    assert done.status == 0
    result = next(iter(done.files.values()))
    assert (result["completed"], result["failed"]) == (4, 2)
    assert result["pdx"]["goodput"]["share"] == pytest.approx(4 / 6)
    assert "the answer ended after 2 of 5 tokens" in result["pdx"]["errors"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # vLLM leaves its session open
@pytest.mark.parametrize("at", [0, 3])
def test_ctrl_c_keeps_whole_blocks(bench, tokenizer, at):
    def conduct(number, _body):
        if number == at:
            os.kill(os.getpid(), signal.SIGINT)
        return Conduct(hangs=number >= at)

    with StandIn(tokenizer, conduct) as server:
        argv = ["--requests", 6, "--concurrency", 1, "--blocks", 2, "--reset-cache"]
        done = bench("--url", server.url, "--label", "a", *argv, *SMALL)
    assert done.status == 130
    assert list(done.files) == (["serve-a.json"] if at else [])
    if at:
        assert done.files["serve-a.json"]["completed"] == 3
        assert not done.files["serve-a.json"]["pdx"]["is_complete"]


def test_two_services_get_the_same_in_turns(bench, tokenizer):
    with StandIn(tokenizer) as one, StandIn(tokenizer) as two:
        argv = ["--url", one.url, "--compare", two.url, "--label", "one", "--label", "two", "--blocks", 3]
        done = bench(*argv, "--requests", 9, *SMALL, "--slo", "ttft=60s")
    assert done.status == 0, done.text
    assert sorted(sent(one)) == sorted(sent(two))
    order = by_blocks([(seen.arrived, "one") for seen in one.seen] + [(seen.arrived, "two") for seen in two.seen])
    assert order == ["one", "two", "two", "one", "one", "two"]
    assert sorted(done.files) == ["comparison.json", "serve-one.json", "serve-two.json"]
    compared = done.files["comparison.json"]
    assert (compared["first"], compared["second"]) == ("one", "two")
    assert compared["answers"] == {"both_answered": 9, "same": 9}
    assert len(compared["ratios"]["mean_ttft_ms"]["blocks"]) == 3


def by_blocks(arrivals):
    """Which server got each three requests."""
    names = [name for _, name in sorted(arrivals)]
    parts = [set(names[at : at + 3]) for at in range(0, len(names), 3)]
    assert all(len(part) == 1 for part in parts)
    return [part.pop() for part in parts]


def known(found):
    """Tokens from the engine's own cache, and from its connector."""
    return found["local"], found["external"]


LONG = ["--workload", "long-document", "--requests", 6, "--shared", 1, "--shared-len", 50, *SMALL, "--concurrency", 1]


def test_where_tokens_were_found_is_told_by_the_engine(bench, tokenizer):
    with StandIn(tokenizer) as server:
        done = bench("--url", server.url, "--label", "a", *LONG)
        assert "reset" not in server.events
    told = done.files["serve-a.json"]["pdx"]["found_tokens"]
    assert known(told["all"]) == known(told["engines"][server.url]) == (50, 0)
    assert done.files["serve-a.json"]["pdx"]["blocks"][0]["found_tokens"] == told
    assert "50 local, 0 external" in done.text


def test_with_empty_caches_only_a_connector_can_know_a_document(bench, tokenizer):
    with StandIn(tokenizer) as server:
        done = bench("--url", server.url, "--label", "a", *LONG, "--reset-cache", "--blocks", 3)
    assert done.status == 0, done.text
    assert server.events == ["reset", "asked", "asked"] * 3
    result = done.files["serve-a.json"]["pdx"]
    assert [known(block["found_tokens"]["all"]) for block in result["blocks"]] == [(10, 0), (10, 10), (10, 10)]
    assert known(result["found_tokens"]["all"]) == (30, 20)


@pytest.mark.parametrize(
    ("server", "named"),
    [
        ({"resets": False}, "start that engine with VLLM_SERVER_DEV_MODE=1"),
        ({"metrics": ""}, "the service is no engine"),
    ],
)
def test_a_cache_that_cannot_be_emptied_ends_the_run_before_it_begins(bench, tokenizer, server, named):
    with StandIn(tokenizer, **server) as stand_in:
        done = bench("--url", stand_in.url, *LONG, "--reset-cache")
    assert done.status == 1
    assert named in done.text
    assert stand_in.events == []


def test_the_engines_behind_a_proxy_are_asked(bench, tokenizer):
    with StandIn(tokenizer) as prefill, StandIn(tokenizer) as decode:
        page = "".join(
            f'pdx_proxy_engine_in_flight{{engine="e{number}",url="{url}"}} 0.0\n'
            for number, url in enumerate((prefill.url, decode.url))
        )
        decode.found["external_kv_transfer"] = 7  # of an earlier day
        with StandIn(tokenizer) as proxy, StandIn(tokenizer, metrics=page) as admin:
            asked = ["--url", proxy.url, "--admin", admin.url]
            done = bench(*asked, "--label", "a", *LONG, "--reset-cache", "--blocks", 1)
    assert done.status == 0, done.text
    assert (prefill.events, decode.events, "reset" in proxy.events) == (["reset"], ["reset"], False)
    told = done.files["serve-a.json"]["pdx"]["found_tokens"]["engines"]
    assert {url: known(found) for url, found in told.items()} == {prefill.url: (0, 0), decode.url: (0, 0)}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--input-len", 99, "--output-len", 2], "101 tokens"),
        (["--model", "other", *SMALL], "no model 'other' (it has: toy)"),
        (["--tokenizer", "/nowhere/to/be/found", *SMALL], "the tokenizer '/nowhere/to/be/found' cannot be loaded"),
        (["--compare", "http://127.0.0.1:1", *SMALL], "no OpenAI server answers at http://127.0.0.1:1/v1/models"),
        (["--compare", "http://other", "--label", "a/b", "--label", "a b", *SMALL], "do not tell the services apart"),
    ],
)
def test_what_cannot_be_run_is_refused(bench, tokenizer, argv, named):
    with StandIn(tokenizer, max_model_len=100) as server:
        done = bench("--url", server.url, "--requests", 1, *argv)
    assert done.status == 1
    assert named in done.text
    assert not server.seen


def test_a_service_that_refuses_the_first_request(bench, tokenizer):
    with StandIn(tokenizer, lambda *_: Conduct(status=404, message="who are you")) as server:
        done = bench("--url", server.url, "--requests", 1, *SMALL, "--warmups", 1)
    assert done.status == 1
    assert "does not answer the first request: " in done.text
