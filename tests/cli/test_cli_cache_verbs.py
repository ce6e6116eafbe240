"""`pdx cache` and two real nodes: tables and JSON, jobs that are waited for or cancelled, and what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from cache_bed import CHUNK, bed, prompt
from click.testing import CliRunner
from raw_engine import CHUNK_BYTES

from pdx.cli.cache_options import _of_file
from pdx.cli.main import main
from pdx.client.controller import Controller
from pdx.errors import SelectionError
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Ping

SALT = "PDX_CACHE_SALT"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two nodes; see `cache_bed`."""
    with bed(tmp_path_factory.mktemp("two")) as made:
        yield made


@pytest.fixture
def pdx(two):
    """`pdx cache …` with both nodes."""
    reach = [word for address in two.addresses for word in ("--node", address)]

    def run(*arguments, status=0, env=None):
        done = CliRunner().invoke(main, ["cache", *arguments, *reach], env={SALT: "", "COLUMNS": "200", **(env or {})})
        assert done.exit_code == status, (done.output, done.stderr, done.exception)
        return done

    return run


def listed(tokens):
    return ",".join(map(str, tokens))


def cells(done):
    """The rows of a table."""
    rows = [line.strip()[1:-1].split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def host(pdx, tokens):
    """How many tokens memory has, by node."""
    found = json.loads(pdx("lookup", "--ids", listed(tokens), "--json").stdout)
    return {node: tiers["host"] for node, tiers in found["tiers"].items()}


# ---- each command -------------------------------------------------------------------------------


def test_an_engine_is_drained_wherever_it_is_attached(two, pdx, monkeypatch):
    monkeypatch.setattr("pdx.cli.cache._LOOK_S", 0.02)
    name, alpha = "e" * 16, two.engines["alpha"].scheduler
    alpha.ask(Ping(running=3))
    told = pdx("drain", name).stdout.splitlines()
    assert told == [
        f"{name} of node {node} gets no more requests, and has {n}" for node, n in (("alpha", 3), ("beta", 0))
    ]
    threading.Timer(0.1, alpha.tell, [Ping(running=0)]).start()
    assert "alpha gets no more requests, and has 0" in pdx("drain", name, "--wait").stdout
    undone = json.loads(pdx("drain", name, "--undo", "--json").stdout)
    assert {node: each["draining"] for node, each in undone.items()} == {"alpha": False, "beta": False}
    assert "no engine http://h:1 is attached to node alpha" in pdx("drain", "http://h:1", status=1).stderr


def test_lookup_shows_tokens_by_node_and_tier(two, pdx):
    tokens = prompt(4, 3)
    two.save("alpha", tokens)
    pdx("pin", "alpha/host", "--ids", listed(tokens[:CHUNK]))
    done = pdx("lookup", "--ids", listed(tokens))
    assert "of 64 tokens in whole chunks" in done.stdout
    assert cells(done) == [
        ["alpha", "host", "64", "16", ""],
        ["alpha", "disk", "0", "", ""],
        ["beta", "host", "0", "", ""],
        ["beta", "disk", "0", "", ""],
    ]
    found = json.loads(pdx("lookup", "beta", "--ids", listed(tokens), "--json").stdout)
    assert (found["tokens"], found["tiers"]) == (64, {"beta": {"host": 0, "disk": 0}})
    pdx("unpin", "alpha/host", "--ids", listed(tokens[:CHUNK]))


def test_a_prompt_comes_from_a_file_or_a_request_and_its_salt_from_where_nobody_sees_it(two, pdx, tmp_path):
    tokens = prompt()
    two.save("alpha", tokens, request="cmpl-77-0", salt="tenant é")
    file, salt = tmp_path / "ids.json", tmp_path / "salt"
    file.write_text(json.dumps(tokens))
    salt.write_text("tenant é\n")
    assert cells(pdx("lookup", "alpha", "--file", str(file)))[0][2] == "0"
    assert cells(pdx("lookup", "alpha", "--file", str(file), "--salt-file", str(salt)))[0][2] == "64"
    assert cells(pdx("lookup", "alpha", "--file", str(file), env={SALT: "tenant é"}))[0][2] == "64"
    assert cells(pdx("lookup", "alpha", "--request", "cmpl-77"))[0][2] == "64"
    one = pdx("lookup", "--request", "cmpl-77", status=1)
    assert cells(one)[0][:3] == ["alpha", "host", "64"]
    assert "beta: no request whose id contains 'cmpl-77'" in one.stderr


def test_move_waits_says_what_was_done_and_first_what_would_be(two, pdx):
    tokens = prompt()
    two.save("alpha", tokens)
    asked = ("move", "alpha/host", "beta/disk", "--ids", listed(tokens))
    planned = pdx(*asked, "--dry-run").stdout
    assert planned == f"would move 4 of 4 chunks from host to beta/disk (4 chunks, {4 * CHUNK_BYTES >> 10}.0 KiB)\n"
    assert host(pdx, tokens) == {"alpha": 64, "beta": 0}
    assert pdx(*asked).stdout.startswith("done: move 4 of 4 chunks from host to beta/disk: 4 of 4 chunks, 256.0 KiB")
    assert host(pdx, tokens) == {"alpha": 0, "beta": 0}
    back = json.loads(pdx("move", "beta/disk", "alpha/host", "--keep", "--ids", listed(tokens), "--json").stdout)
    assert (back["state"], back["instance"], back["chunks_done"]) == ("done", "beta", 4)
    assert host(pdx, tokens) == {"alpha": 64, "beta": 0}


def test_a_job_goes_on_without_the_command_and_is_asked_for(two, pdx):
    tokens = prompt()
    two.save("alpha", tokens)
    job = pdx("move", "alpha/host", "alpha/disk", "--ids", listed(tokens), "--detach").stdout.strip()
    assert job.startswith("alpha:")
    assert pdx("check", job, "--wait").stdout.startswith("done: move 4 of 4 chunks")
    assert pdx("check", job).stdout.startswith("done: move 4 of 4 chunks")
    assert json.loads(pdx("check", job, "--json").stdout)["job"] == job
    assert pdx("cancel", job).stdout.startswith("done: "), "one that is over stays as it is"
    first, second = pdx("jobs", "alpha").stdout.splitlines()[:2]
    assert first == job
    assert re.fullmatch(r"    begun .+ ago, done: move 4 of 4 chunks.*", second)
    assert job in [each["job"] for each in json.loads(pdx("jobs", "--json").stdout)]


def test_a_prompt_is_loaded_ahead_into_memory(two, pdx):
    tokens = prompt()
    two.save("alpha", tokens)
    ids = ("--ids", listed(tokens))
    pdx("move", "alpha/host", "alpha/disk", *ids)
    assert cells(pdx("prefetch", "alpha", *ids, "--dry-run")) == [["alpha", "host", "4", "256.0 KiB"]]
    assert "this node has no tier 'gpu'; it has 'host', 'disk'" in pdx("prefetch", "alpha/gpu", *ids, status=1).stderr
    assert host(pdx, tokens) == {"alpha": 0, "beta": 0}
    assert "being loaded" in pdx("prefetch", "alpha/host", *ids).stdout
    wait_until(lambda: host(pdx, tokens)["alpha"] == 64, timeout_s=60)
    assert cells(pdx("prefetch", "alpha/host", *ids))[0][2] == "0"


def test_clear_pin_and_evict(two, pdx):
    tokens = prompt()
    two.save("alpha", tokens)
    ids = ("--ids", listed(tokens))
    assert "would be pinned" in pdx("pin", "alpha/host", *ids, "--dry-run").stdout
    assert cells(pdx("pin", "alpha/host", *ids)) == [["alpha", "host", "4", "256.0 KiB"]]
    assert "is pinned in host" in pdx("move", "alpha/host", "alpha/disk", *ids, status=1).stderr
    pdx("unpin", "alpha/host", *ids)
    assert json.loads(pdx("clear", "alpha/host", *ids, "--dry-run", "--json").stdout)["alpha"]["dry_run"]
    assert cells(pdx("clear", "*", *ids))[0] == ["alpha", "host", "4", "256.0 KiB"]
    assert host(pdx, tokens) == {"alpha": 0, "beta": 0}
    assert pdx("clear", "alpha/disk", "--everything").stdout.startswith("done: ")
    two.save("alpha", tokens)
    assert cells(pdx("evict", "alpha", "--below", "1", "--bytes", "64KiB", "--dry-run"))[0][2] == "1"
    assert int(cells(pdx("evict", "alpha", "--below", "1"))[0][2]) >= 4
    assert host(pdx, tokens) == {"alpha": 0, "beta": 0}


def test_health_query_ip_and_ls(two, pdx):
    assert cells(pdx("health")) == [["alpha", "well", ""], ["beta", "well", ""]]
    assert cells(pdx("query-ip", "beta")) == [["beta", f"{two.address('beta')}.peers"]]
    two.save("alpha", prompt(), session="carol")
    assert ["alpha", "carol", "4", "256.0 KiB"] in cells(pdx("ls", "--session", "carol"))
    assert set(json.loads(pdx("ls", "--json").stdout)) == {"alpha", "beta"}


# ---- Ctrl-C, and a node that hangs --------------------------------------------------------------


def test_ctrl_c_cancels_the_job_and_says_so(two):
    """The move waits: the node that it goes to is stopped."""
    tokens = prompt(8)
    two.save("alpha", tokens)
    beta, address = two.cluster.nodes["beta"], two.address("alpha")
    beta.signal(signal.SIGSTOP)
    try:
        arguments = ("cache", "move", "alpha/host", "beta/disk", "--ids", listed(tokens), "--node", address)
        command = [sys.executable, "-P", "-m", "pdx.cli.main", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, Controller(address) as cache:
            wait_until(lambda: any(not job.is_over for job in cache.jobs("alpha")["alpha"]), what="the job runs")
            (job,) = [job for job in cache.jobs("alpha")["alpha"] if not job.is_over]
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate()
            assert process.returncode == 130
            assert output.startswith("cancelled: move 8 of 8 chunks from host to beta/disk"), output
            assert cache.check_finish(job).status.state == "cancelled"
            assert cache.lookup(tokens)["alpha"]["host"] == 8 * CHUNK
    finally:
        beta.signal(signal.SIGCONT)
    wait_until(lambda: two.cluster.peer("alpha", "beta").state == "ready", what="the peer is back")


# ---- what is wrong is said ----------------------------------------------------------------------

IDS = ("--ids", listed(range(40)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lookup",), "name a prompt by one of --ids, --text, --file and --request, not by none"),
        (("lookup", *IDS, "--text", "a"), "not by --ids and --text"),
        (("lookup", "--ids", "1,two,3"), "--ids: 'two', number 1 of them, is no id of a token"),
        (("lookup", "--ids", listed(range(15)) + ",-4"), "token 15 is -4"),
        (("lookup", "--text", "some words"), "nobody makes tokens of a text: give ids"),
        (("lookup", "--file", "EMPTY"), "EMPTY is empty"),
        (("lookup", "--file", "MISSING"), "MISSING cannot be read: No such file or directory"),
        (("lookup", "--file", "BYTES"), "BYTES is no text in UTF-8"),
        (("lookup", "--file", "WORDS"), "token 1 is 'b': ids of tokens are whole numbers"),
        (("lookup", *IDS, "--salt-file", "MISSING"), "--salt-file MISSING cannot be read"),
        (("clear", "alpha", "--everything", *IDS), "--everything names all chunks"),
        (("move", "alpha/host", "alpha/disk", *IDS), "none of 2 chunks is in host"),
        (("compress", "alpha", "zstd", *IDS), "'alpha' names no tier: write NODE/TIER"),
        (("health", "--proxy", "http://127.0.0.1:1"), "--node names nodes of this host and --proxy those"),
        (("health", "--token-file", "WORDS"), "--token-file is for a --proxy"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_one_line(pdx, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    for name, data in (("EMPTY", b" \n"), ("BYTES", b"\xff\xfe\x00"), ("WORDS", b'[1, "b"]')):
        (tmp_path / name).write_bytes(data)
    done = pdx(*arguments, status=1)
    assert words in done.stderr
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("--node", "ipc://PLACE/none.sock", "--timeout", "0.1"), "start one with: pdx node"),
        (("--proxy", "PLACE/none.sock"), "the proxy at PLACE/none.sock does not answer"),
        (("--proxy", "ftp://host"), "'ftp://host' is no URL of HTTP"),
    ],
)
def test_who_does_not_answer_is_named(tmp_path, where, words):
    done = CliRunner().invoke(main, ["cache", "jobs", *(word.replace("PLACE", str(tmp_path)) for word in where)])
    assert words.replace("PLACE", str(tmp_path)) in done.stderr


# ---- --file, whatever is there -------------------------------------------------------------------


def test_brackets_without_end_are_a_text(tmp_path):
    file = tmp_path / "prompt"
    file.write_text("[" * 200_000)
    assert _of_file(file, "", "").text == "[" * 200_000


def test_a_fifo_that_nobody_writes_to_is_empty(tmp_path):
    file = tmp_path / "fifo"
    os.mkfifo(file)
    with pytest.raises(SelectionError, match="is empty"):
        _of_file(file, "", "")


def test_what_is_written_to_a_pipe_is_read_to_its_end():
    reads, writes = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writes, b"[1, 2"), os.write(writes, b", 3]"), os.close(writes)))
    writer.start()
    try:
        assert list(_of_file(f"/dev/fd/{reads}", "", "").tokens) == [1, 2, 3]
    finally:
        writer.join()
        os.close(reads)
