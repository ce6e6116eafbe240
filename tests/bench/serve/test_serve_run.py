"""`pdx bench serve` with vLLM's real client, against stand-ins: what is sent, when, and what is kept of the answers."""

import asyncio
import gc
import json
import os
import shlex
import signal
from collections import defaultdict
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from serve_standin import Conduct, StandIn

from pdx.bench.harness.tiny_llama import make_model
from pdx.bench.serve import client as serve_client
from pdx.bench.serve.goodput import Slo
from pdx.bench.serve.report import DETAILS, Report, vllm_command
from pdx.bench.serve.run import Answer, Block, Settings, Tally
from pdx.bench.serve.workloads import Workload, make_shape
from pdx.cli.main import main

pytest.importorskip("torch")
if serve_client.find_spec("vllm") is None:
    pytest.skip("vLLM's benchmark client is what is used here", allow_module_level=True)

pytestmark = pytest.mark.timeout(180)
SMALL = ["--input-len", "60", "--output-len", "5", "--rate", "inf", "--warmups", "0"]


@pytest.fixture(scope="module")
def client():
    """vLLM's client, imported before anything is looked at for leaks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # a tokenizer that is not here is not to be looked for elsewhere
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        return serve_client.load()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One character is one token."""
    folder = tmp_path_factory.mktemp("model")
    return str(make_model(folder, layers=1, hidden=64, heads=1, kv_heads=1, head_dim=64, intermediate=64))


@pytest.fixture
def bench(client, tokenizer, tmp_path):
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


def test_random_prompts_are_all_new_and_have_the_length_asked_for(bench, tokenizer):
    with StandIn(tokenizer) as server:
        done = bench("--url", server.url, "--label", "a", "--requests", 6, "--slo", "ttft=60s,itl=60s", *SMALL)
        again = bench("--url", server.url, "--label", "b", "--requests", 6, *SMALL)
    assert done.status == again.status == 0, done.text
    assert {len(prompt) for prompt in sent(server)} == {60}
    assert len(set(sent(server))) == 12
    assert all(seen.body["temperature"] == 0 and seen.body["ignore_eos"] for seen in server.seen)
    result = done.files["serve-a.json"]
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert result["pdx"]["goodput"] == {
        "good": 6,
        "share": 1.0,
        "per_s": pytest.approx(6 / result["duration"]),
        "missed": {"ttft": 0, "itl": 0},
    }
    assert result["pdx"]["is_complete"]
    assert result["pdx"]["prompt_tokens"] == {"min": 60, "mean": 60.0, "max": 60}
    assert result["pdx"]["client"]["cpu_s"] > 0
    assert "goodput" in done.text


def test_the_same_salt_and_seed_send_the_same(bench, tokenizer):
    with StandIn(tokenizer) as server:
        for _ in range(2):
            bench("--url", server.url, "--workload", "shared-prompt", "--requests", 4, "--salt", "x", *SMALL)
    prompts = sent(server)
    assert sorted(prompts[:4]) == sorted(prompts[4:])


def test_shared_texts_are_the_same_letters_at_the_beginning(bench, tokenizer):
    with StandIn(tokenizer) as server:
        argv = ["--url", server.url, "--workload", "long-document", "--requests", 6, "--shared", 2, "--shared-len", 50]
        assert bench(*argv, *SMALL).status == 0
        assert bench(*argv, *SMALL, "--api", "chat").status == 0
    texts, chats = server.seen[:6], server.seen[6:]
    assert sorted(len(found) for found in by(lambda seen: seen.body["prompt"][:50], texts).values()) == [3, 3]
    assert sorted(len(found) for found in by(lambda seen: seen.body["messages"][0]["content"], chats).values()) == [
        3,
        3,
    ]
    assert [message["role"] for message in chats[0].body["messages"]] == ["system", "user"]


def by(key, found):
    groups = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    return groups


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_rounds_of_a_conversation_follow_each_other_and_tell_all_that_was_said(bench, tokenizer, api):
    with StandIn(tokenizer) as server:
        argv = ["--url", server.url, "--workload", "chat", "--requests", 12, "--rounds", 3, "--message-len", 20]
        done = bench(*argv, *SMALL, "--think", 0.02, "--api", api)
    assert done.status == 0, done.text
    assert list(next(iter(done.files.values()))["pdx"]["ttft_by_round_ms"]) == ["0", "1", "2"]
    conversations = by(lambda seen: history(seen)[:60], server.seen)
    assert sorted(map(len, conversations.values())) == [3, 3, 3, 3]
    for rounds in conversations.values():
        for before, after in zip(rounds, rounds[1:], strict=False):
            assert before.left < after.arrived
            told = history(before) + before.answer
            assert history(after).startswith(told)
            assert len(history(after)) == len(told) + 20


def history(seen):
    if "prompt" in seen.body:
        return seen.body["prompt"]
    return "".join(message["content"] for message in seen.body["messages"])


def test_no_more_requests_are_under_way_than_allowed(bench, tokenizer):
    with StandIn(tokenizer, lambda *_: Conduct(pause_s=0.01)) as server:
        done = bench("--url", server.url, "--requests", 9, "--concurrency", 2, *SMALL)
    events = sorted([(seen.arrived, 1) for seen in server.seen] + [(seen.left, -1) for seen in server.seen])
    running = [sum(step for _, step in events[: end + 1]) for end in range(len(events))]
    assert max(running) <= 2
    result = next(iter(done.files.values()))
    assert result["max_concurrency"] == 2
    assert max(result["queue_times"]) > 0


def test_failed_requests_are_counted_and_named_and_are_not_fatal(bench, tokenizer):
    def conduct(number, _body):
        odd = {1: Conduct(status=400, message="too much of it"), 3: Conduct(tokens=2)}
        return odd.get(number, Conduct())

    with StandIn(tokenizer, conduct) as server:
        done = bench("--url", server.url, "--requests", 6, "--slo", "e2e=60s", *SMALL)
    assert done.status == 0
    result = next(iter(done.files.values()))
    assert (result["completed"], result["failed"]) == (4, 2)
    assert result["pdx"]["goodput"]["share"] == pytest.approx(4 / 6)
    refused, ended = sorted(result["pdx"]["errors"])
    assert "400" in refused
    assert "too much of it" in refused
    assert ended == "the answer ended after 2 of 5 tokens"
    assert "too much of it" in done.text


def test_a_failed_round_ends_its_conversation(bench, tokenizer):
    with StandIn(tokenizer, lambda number, _body: Conduct(status=500 if number == 1 else 200)) as server:
        done = bench("--url", server.url, "--workload", "chat", "--requests", 3, "--rounds", 3, "--think", 0, *SMALL)
    result = next(iter(done.files.values()))
    assert len(server.seen) == 2
    assert (result["completed"], result["failed"], result["pdx"]["planned"]) == (1, 1, 3)


def test_all_requests_failing_is_a_failure(bench, tokenizer):
    with StandIn(tokenizer, lambda *_: Conduct(status=503, message="no engine")) as server:
        done = bench("--url", server.url, "--requests", 2, *SMALL)
    assert done.status == 1
    assert "2 requests failed: HTTP 503" in done.text


def test_ctrl_c_keeps_what_was_answered(bench, tokenizer):
    def conduct(number, _body):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return Conduct(hangs=number >= 3)

    with StandIn(tokenizer, conduct) as server:
        done = bench("--url", server.url, "--requests", 9, "--concurrency", 1, *SMALL)
    assert done.status == 130
    result = next(iter(done.files.values()))
    assert (result["completed"], result["pdx"]["planned"], result["pdx"]["is_complete"]) == (3, 9, False)
    assert len(server.seen) == 4
    assert "interrupted" in done.text


def test_ctrl_c_before_any_answer(bench, tokenizer):
    def conduct(_number, _body):
        os.kill(os.getpid(), signal.SIGINT)
        return Conduct(hangs=True)

    with StandIn(tokenizer, conduct) as server:
        done = bench("--url", server.url, "--requests", 2, "--concurrency", 1, *SMALL)
    assert (done.status, done.files) == (130, {})
    assert "nothing was measured" in done.text


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
    means = [done.files[f"serve-{name}.json"]["mean_ttft_ms"] for name in ("one", "two")]
    assert compared["ratios"]["mean_ttft_ms"]["all"] == pytest.approx(means[1] / means[0])
    rates = [done.files[f"serve-{name}.json"]["pdx"]["goodput"]["per_s"] for name in ("one", "two")]
    assert compared["ratios"]["goodput"]["all"] == pytest.approx(rates[0] / rates[1])


def by_blocks(arrivals):
    """Which server got each three requests."""
    names = [name for _, name in sorted(arrivals)]
    parts = [set(names[at : at + 3]) for at in range(0, len(names), 3)]
    assert all(len(part) == 1 for part in parts)
    return [part.pop() for part in parts]


def found(computed, local, external):
    return {"computed": computed, "local": local, "external": external}


LONG = ["--workload", "long-document", "--requests", 6, "--shared", 1, "--shared-len", 50, *SMALL, "--concurrency", 1]


def test_where_tokens_were_found_is_told_by_the_engine(bench, tokenizer):
    with StandIn(tokenizer) as server:
        done = bench("--url", server.url, "--label", "a", *LONG)
        assert "reset" not in server.events
    told = done.files["serve-a.json"]["pdx"]["found_tokens"]
    assert told == {"all": found(310, 50, 0), "engines": {server.url: found(310, 50, 0)}}
    assert done.files["serve-a.json"]["pdx"]["blocks"][0]["found_tokens"] == told
    assert "where engines found the tokens of prompts" in done.text
    assert "50 (14%)" in done.text


def test_with_empty_caches_only_a_connector_can_know_a_document(bench, tokenizer):
    with StandIn(tokenizer) as server:
        done = bench("--url", server.url, "--label", "a", *LONG, "--reset-cache", "--blocks", 3)
    assert done.status == 0, done.text
    assert server.events == ["reset", "asked", "asked"] * 3
    result = done.files["serve-a.json"]["pdx"]
    assert result["reset_cache"] is True
    assert [block["found_tokens"]["all"] for block in result["blocks"]] == [
        found(110, 10, 0),
        found(100, 10, 10),
        found(100, 10, 10),
    ]
    assert result["found_tokens"]["all"] == found(310, 30, 20)


def test_two_services_have_their_caches_emptied_in_turns(bench, tokenizer):
    with StandIn(tokenizer) as one, StandIn(tokenizer) as two:
        argv = ["--url", one.url, "--compare", two.url, "--label", "one", "--label", "two", "--blocks", 2]
        done = bench(*argv, *LONG, "--reset-cache")
    assert done.status == 0, done.text
    assert one.events == two.events == ["reset", "asked", "asked", "asked"] * 2


@pytest.mark.parametrize(
    ("server", "named"),
    [
        ({"resets": "no"}, "start that engine with VLLM_SERVER_DEV_MODE=1"),
        ({"metrics": ""}, "the service is no engine"),
    ],
)
def test_a_cache_that_cannot_be_emptied_ends_the_run_before_it_begins(bench, tokenizer, server, named):
    with StandIn(tokenizer, **server) as stand_in:
        done = bench("--url", stand_in.url, *LONG, "--reset-cache")
    assert done.status == 1
    assert named in done.text
    assert stand_in.events == []


def test_a_service_that_does_not_tell_is_measured_and_said_so(bench, tokenizer):
    with StandIn(tokenizer, metrics="") as server:
        done = bench("--url", server.url, "--label", "a", *LONG)
    assert done.status == 0
    assert done.files["serve-a.json"]["pdx"]["found_tokens"] == {"all": None, "engines": {}}
    assert "where the tokens of prompts were found is not known" in done.text


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
    assert told == {prefill.url: found(0, 0, 0), decode.url: found(0, 0, 0)}  # this proxy answers by itself


def test_warm_ups_do_not_count(bench, tokenizer):
    with StandIn(tokenizer) as server:
        done = bench("--url", server.url, "--requests", 2, *SMALL, "--warmups", 2)
    assert len(server.seen) == 4
    assert next(iter(done.files.values()))["completed"] == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--input-len", 99, "--output-len", 2], "101 tokens"),
        (["--model", "other", *SMALL], "no model 'other' (it has: toy)"),
        (["--tokenizer", "/nowhere/to/be/found", *SMALL], "the tokenizer '/nowhere/to/be/found' cannot be loaded"),
        (["--label", "a", "--label", "b", *SMALL], "--label is given 2 times for 1 services"),
        (["--compare", "http://127.0.0.1:1", *SMALL], "no OpenAI server answers at http://127.0.0.1:1/v1/models"),
        (["--compare", "http://other", "--label", "a/b", "--label", "a b", *SMALL], "do not tell the services apart"),
        (["--slo", "speed=1s", *SMALL], "speed=1s"),
        (["--rate", "0", *SMALL[:4]], "--rate 0"),
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
    assert "does not answer the first request: HTTP 404" in done.text


def test_without_vllm_it_says_what_to_install(bench, tokenizer, monkeypatch):
    monkeypatch.setattr(serve_client, "find_spec", lambda name: None)
    with StandIn(tokenizer) as server:
        done = bench("--url", server.url, "--requests", 1, *SMALL)
    assert done.status == 1
    assert "pip install vllm" in done.text


def test_the_keys_and_figures_are_those_of_vllm_bench_serve(client, tokenizer, tmp_path):
    """vLLM's own program measures a stand-in; from what it kept of each request we make the same file."""
    with StandIn(tokenizer) as server:
        theirs = vllm_bench_serve(server.url, tokenizer, tmp_path)
    assert theirs["completed"] == 7
    settings = Settings(
        shape=make_shape(Workload.RANDOM, requests=7, input_tokens=60, output_tokens=5, rate=200.0, seed=0),
        api="completions",
    )
    slo = Slo(ttft=sorted(theirs["ttfts"])[3] * 1000, e2e=60_000)
    report = Report(settings, slo, client, tmp_path, tokenizer=tokenizer, is_detailed=True)
    (path,) = report.write([tally_of(theirs, server.url)], is_complete=True)
    ours = json.loads(path.read_text())
    assert set(ours) - {"pdx"} == set(theirs)
    told_otherwise = {"date", "label", "request_goodput", "queue_times"}
    for key in set(theirs) - told_otherwise:
        assert ours[key] == pytest.approx(theirs[key]) if is_number(theirs[key]) else ours[key] == theirs[key], key
    assert ours["request_goodput"] == pytest.approx(4 / theirs["duration"])
    short = Report(settings, slo, client, tmp_path, tokenizer=tokenizer)
    (path,) = short.write([tally_of(theirs, server.url)], is_complete=True)
    assert set(json.loads(path.read_text())) - {"pdx"} == set(theirs) - set(DETAILS)


@pytest.mark.parametrize("workload", [Workload.RANDOM, Workload.LONG_DOCUMENT, Workload.SHARED_PROMPT])
def test_the_equal_command_is_one_that_vllm_takes(client, workload):
    shape = make_shape(workload, requests=20, input_tokens=800, output_tokens=30, rate=2.5, seed=7)
    tally = Tally(serve_client.Server("a", "http://host:1", "toy", "/models/toy", None))
    command = vllm_command(Settings(shape=shape, api="completions", concurrency=3), Slo(ttft=100, e2e=2000), tally)
    parsed = vllm_parser().parse_args(shlex.split(command.removeprefix("vllm bench serve")))
    assert (parsed.base_url, parsed.model, parsed.served_model_name) == ("http://host:1", "/models/toy", "toy")
    assert (parsed.num_prompts, parsed.request_rate, parsed.seed, parsed.max_concurrency) == (20, 2.5, 7, 3)
    assert parsed.goodput == ["ttft:100", "e2el:2000"]
    assert parsed.temperature == 0
    if workload is Workload.RANDOM:
        assert (parsed.dataset_name, parsed.input_len, parsed.output_len) == ("random", 800, 30)
    else:
        assert (parsed.dataset_name, parsed.prefix_repetition_num_prefixes) == ("prefix_repetition", shape.shared)
        assert parsed.prefix_repetition_prefix_len + parsed.prefix_repetition_suffix_len == 800
        assert parsed.prefix_repetition_output_len == 30
        assert parsed.ignore_eos


def is_number(value):
    return isinstance(value, int | float)


def vllm_parser():
    """Of `vllm bench serve`."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser


def vllm_bench_serve(url, tokenizer, folder):
    """The file that `vllm bench serve --save-result --save-detailed` writes."""
    from vllm.benchmarks.serve import main_async

    argv = f"--base-url {url} --model {tokenizer} --served-model-name toy --dataset-name random --input-len 60"
    argv += " --output-len 5 --num-prompts 7 --request-rate 200 --temperature 0 --ready-check-timeout-sec 0"
    argv += " --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,95,99 --goodput ttft:60000 --disable-tqdm"
    argv += f" --save-result --save-detailed --result-dir {folder} --result-filename theirs.json"
    asyncio.run(main_async(vllm_parser().parse_args(argv.split())))
    gc.unfreeze()  # it has frozen everything
    found = json.loads((folder / "theirs.json").read_text())
    (folder / "theirs.json").unlink()
    return found


def tally_of(theirs, url):
    outputs = [
        SimpleNamespace(
            success=not error,
            ttft=ttft,
            itl=itl,
            latency=latency,
            start_time=start,
            output_tokens=output_len,
            prompt_len=input_len,
            error=error,
            generated_text=text,
            client_queue_time=0.0,
            input_audio_duration=0.0,
        )
        for ttft, itl, latency, start, output_len, input_len, error, text in zip(
            *(theirs[key] for key in ("ttfts", "itls", "latencies", "start_times", "output_lens", "input_lens")),
            *(theirs[key] for key in ("errors", "generated_texts")),
            strict=True,
        )
    ]
    server = serve_client.Server("ours", url, "toy", theirs["model_id"], None)
    answers = [Answer(number, 0, 0.0, output) for number, output in enumerate(outputs)]
    return Tally(server, [Block(len(outputs), True, answers, theirs["duration"])])
