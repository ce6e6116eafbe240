"""One test per class of vulnerability that this kind of software had; each names the records it comes from."""

import ast
import contextlib
import functools
import os
import re
import socket
import stat
from pathlib import Path

import msgspec
import pytest
import zmq
from connection_stage import Raw, Stage
from node_harness import Wire, arenas_of, refused_node

import pdx.config
import pdx.memory.keys
from pdx.engine.params import TransferParams, parse_params
from pdx.errors import ConfigError, PeerUnknown, ProtocolError
from pdx.node.daemon import Daemon
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Bye, Cancel, Push, Refused, Release

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("pdx", "proxy", "kernels", "transports") for path in (ROOT / folder).rglob("*.py"))
CODE_FROM_BYTES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code"}
CODE_FROM_BYTES |= {"xmlrpc", "rpyc", "diskcache", "multiprocessing.managers", "multiprocessing.connection"}
CODE_FROM_BYTES |= {"multiprocessing.reduction", "torch.multiprocessing"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "load_pyobj", "__reduce__", "__reduce_ex__", "__setstate__", "loads_pickle"}


@functools.cache
def all_nodes():
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            found.setdefault(type(node), []).append((path, node))
    return found


def nodes(*kinds):
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node) for kind in kinds for path, node in all_nodes().get(kind, ())
    ]


def test_no_pickle_anywhere():
    """CVE-2025-29783, -32444, -47277, CVE-2024-50050, CVE-2026-3059/3060/3989, -93088, -93034, -86793, -105192,
    -26220, -115912, CVE-2025-69872: on the wire, in shared memory, on disk, behind a deny list."""
    assert {"pdx", "proxy", "kernels", "transports"} == {path.relative_to(ROOT).parts[0] for path in SOURCES}
    found = []
    for where, node in nodes(ast.Import, ast.ImportFrom):
        names = [alias.name for alias in node.names]
        modules = names if isinstance(node, ast.Import) else [node.module or "", *(f"{node.module}.{n}" for n in names)]
        found += [(where, name) for name in modules if name in CODE_FROM_BYTES or name.split(".")[0] in CODE_FROM_BYTES]
    for where, node in nodes(ast.Attribute, ast.FunctionDef):
        name = node.attr if isinstance(node, ast.Attribute) else node.name
        found += [(where, name)] if name in ATTRIBUTES else []
    assert not found


def test_no_code_from_the_wire_or_the_disk():
    """CVE-2026-107204 (/run_script); torch.load and numpy.load unpickle."""
    found = []
    for where, node in nodes(ast.Call):
        match node.func:
            case ast.Name(id=name) if name in CALLS:
                found.append((where, name))
            case ast.Attribute(value=ast.Name(id="torch" | "np" | "numpy"), attr="load"):
                found.append((where, "load"))
        found += [(where, "shell=True") for k in node.keywords if k.arg == "shell"]
        found += [(where, "allow_pickle") for k in node.keywords if k.arg == "allow_pickle"]
    assert not found


def test_no_socket_on_all_interfaces():
    """CVE-2025-32444, -47277, -30202, CVE-2026-107205, -103765, -106037."""
    pattern = re.compile(r"tcp://\*|tcp://0\.0\.0\.0|^0\.0\.0\.0$|^::$|^\*$")
    strings = [(where, node.value) for where, node in nodes(ast.Constant) if isinstance(node.value, str)]
    assert not [(where, text) for where, text in strings if pattern.search(text) and where.startswith("pdx/node")]
    assert not [(where, text) for where, text in strings if re.search(r"tcp://(\*|0\.0\.0\.0)", text)]


def node_that_fails(settings):
    """What a node that does not start says."""
    with pytest.raises(ConfigError) as failed:
        Daemon(pdx.config.NodeConfig(arena_bytes=1 << 20, **settings))
    return str(failed.value)


def test_processes_reach_their_node_through_a_unix_socket_only(place):
    for address in ("tcp://127.0.0.1:5555", "tcp://*:5555", "ipc://@pdx", "pgm://239.0.0.1:1"):
        assert "is not an ipc:///absolute/path address" in node_that_fails({"address": address})
        assert not arenas_of(address)


BEYOND = [
    *(
        (setting, where, why)
        for setting in ("listen", "proxy")
        for where, why in (
            ("tcp://0.0.0.0:5555", "all interfaces"),
            ("tcp://10.0.0.1:5555", "beyond this host, which needs keys"),
            ("ipc://@pdx", "is not an ipc:///absolute/path address"),
            ("pgm://239.0.0.1:1", "is not an address"),
        )
    ),
    ("metrics", "0.0.0.0:9400", "all interfaces"),
    ("metrics", "[::]:9400", "all interfaces"),
    ("metrics", "10.0.0.1:9400", "beyond this host"),
    ("metrics", "metrics.example:9400", "name an IP address"),
    ("metrics", "9400", "is not an address"),
]


def test_a_node_without_keys_talks_to_nobody_beyond_its_host(place, address):
    """CVE-2025-32444, -47277, -30202, CVE-2026-103765, -106037, -107205: open to the network by default."""
    for setting, where, why in BEYOND:
        assert why in node_that_fails({"address": address, setting: where})
        assert not arenas_of(address)
        assert not [path for path in place.rglob("*") if path.is_socket()]


def test_every_place_that_listens_is_known():
    """Each of them is tested for what it listens on: here, and in tests/transports for the channels."""
    binds = {where.partition(":")[0] for where, node in nodes(ast.Attribute) if node.attr in ("bind", "server_bind")}
    assert {path for path in binds if not path.startswith("transports/")} == {
        "pdx/node/metrics.py",  # tests/node/test_node_metrics.py
        # Sends to whoever subscribes, and reads topics and numbers: with --events; beyond this host to who has a key.
        "pdx/node/events/publisher.py",  # tests/node/events/test_publisher.py
        "pdx/node/handover.py",  # tests/cuda/test_gpu_handover.py
        "pdx/security/accept_queue.py",  # tests/node/test_process_socket.py
        "pdx/security/tcp_filter.py",  # tests/security/test_tcp_filter.py
        "pdx/security/peer_socket.py",
        "pdx/security/gate.py",  # inside one process: tests/node/peers/test_connections_trust.py
        "proxy/server.py",  # the admin socket: tests/proxy/test_proxy_clients.py
        "pdx/cli/ports.py",  # it does not listen: it only keeps ports that are free
    }


def test_socket_lock_log_and_arena_are_this_users_alone(start_node, place):
    """CVE-2025-69872, CVE-2026-103765: no authentication is needed where nobody else can open the folder."""
    mask = os.umask(0)
    try:
        node = start_node()
    finally:
        os.umask(mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (*place.iterdir(), *arenas_of(node.address))}
    modes.pop("node.sock.log")  # in a folder of mode 0700; it holds no data
    assert sorted(name for name in modes if not name.startswith("pdx-")) == [
        "node.sock",
        "node.sock.lock",
        "node.sock.peers",
        "node.sock.peers.lock",
    ]
    assert len(modes) == 5
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_folder_others_can_enter_is_refused(place):
    folder = place / "open"
    folder.mkdir()
    for mode in (0o755, 0o770, 0o701):
        folder.chmod(mode)
        assert "with mode 0700" in node_that_fails({"address": f"ipc://{folder}/node.sock"})
        assert not list(folder.iterdir())


def test_a_planted_link_is_not_followed(place, address):
    """Neither the lock nor the arena is opened through a symbolic link."""
    victim = place / "victim"
    victim.write_text("precious")
    (place / "node.sock.lock").symlink_to(victim)
    result = refused_node(address)
    assert result.returncode != 0
    assert victim.read_text() == "precious"
    (place / "node.sock.lock").unlink()


def test_an_address_in_a_request_is_never_dialled(start_node, attach):
    """CVE-2026-116176 (an address inside a request id), CVE-2026-94624 (arbitrary remote hosts), CVE-2026-107207:
    a peer is named, and what its name stands for is the roster's word."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        evil = f"tcp://127.0.0.1:{trap.getsockname()[1]}"
        node = start_node()
        wire = attach(node, kind="scheduler")
        keys = [b"k" * 16]
        transfer = "transfer-0123456789"
        wire.ask(Admit(keys, source=evil))
        wire.ask(Admit(keys, source=evil, transfer=transfer))
        wire.ask(Admit(keys, 4096, transfer=transfer, push_to=evil, part="writes"))
        wire.ask(Push(keys, evil))
        status = wire.status()
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert [peer.address for peer in status.peers if peer.address or peer.state != "closed"] == []


def test_names_without_end_open_no_sockets(place):
    """CVE-2026-94624: arbitrary peers exhausted the sockets of a node."""
    stage = Stage(place)
    try:
        alpha = stage.node("alpha")
        before = len(os.listdir("/proc/self/fd"))
        for number in range(2000):
            with pytest.raises(PeerUnknown):
                alpha.connections.dial(f"tcp://evil{number}.example:1")
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, what="no file more is open")
        assert alpha.connections.peers == []
    finally:
        stage.close()


def test_one_peer_cannot_speak_in_the_session_of_another(place):
    """CVE-2026-112266, CVE-2026-96762/96763: who guesses a number of somebody else's push reaches only its own.

    What the node makes of it: tests/node/peers/test_inbound_pushes.py.
    """
    stage = Stage(place)
    try:
        beta = stage.node("beta")
        with Raw(stage, beta) as one, Raw(stage, beta) as two:
            one.hello(name="one")
            two.hello(name="two")
            stage.until(lambda: len(beta.connections.peers) == 2)
            by_name = {session.name: session for session in beta.connections.peers}
            two.send(Release(1, complete=False))
            stage.until(lambda: beta.core.saw("heard"))
            assert beta.core.saw("heard") == [(by_name["two"], Release(1, complete=False), 0)]
            assert by_name["one"].token != by_name["two"].token
            two.send(Bye())
            stage.until(lambda: beta.core.saw("over"))
            assert list(beta.connections.peers) == [by_name["one"]]
    finally:
        stage.close()


def test_each_lesson_of_others_is_a_row_of_the_page():
    """Its rows name tests, which tests/test_docs.py looks for."""
    lessons = (
        "29783 32444 47277 30202 46570 50050 3059 3060 3989 93088 93034 86793 15969 92972 93838 112266 111392 94622 "
        "94623 94624 94626 94627 116176 105754 115912 105192 107204 107205 107206 107207 10813 103764 103765 106037 "
        "96762 96763 96764 26220 103041 24253 24254 24255 47623 69872 6250"
    )
    rows = re.findall(r"^\| (.*CVE-.*) \|", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
    assert [row for row in rows if "::test_" not in row] == []
    assert set(re.findall(r"CVE-\d+-(\d+)", " ".join(rows))) == set(lessons.split())


def test_whatever_a_request_says_of_a_transfer_is_one_error_at_most():
    """CVE-2026-94622, -94626: a field that was missing or huge ended the engine; the scheduler runs these alone."""
    values = (None, {}, [1], -1, "x" * 9999, "\ud800", True)
    for said in (
        *({name: value} for name in TransferParams.__struct_fields__ for value in values),
        *({"do_remote_prefill": True, "transfer_id": name} for name in (7, "", "a/b", "x" * 65, ["a" * 16])),
        *({"do_remote_decode": True, "do_remote_prefill": each, "prefill_tokens": 1 << 70} for each in (0, 1, True)),
        *([], "x", 7, b"", {1: 2}, {"do_remote_prefill": True, "remote_host": "evil", "tp_size": 1 << 60}),
    ):
        with contextlib.suppress(ProtocolError):
            msgspec.msgpack.encode(parse_params(said))


def test_no_pattern_comes_from_a_message():
    """CVE-2026-96764: a client's regular expression may take for ever."""
    found = set()
    for where, node in nodes(ast.Call):
        match node.func:
            case ast.Attribute(value=ast.Name(id="re")) if not isinstance(node.args[0], ast.Constant):
                found.add(where.partition(":")[0])
    assert found <= {"pdx/store/remote/s3_backend.py"}  # of a table there


def test_libzmq_is_none_that_runs_code_of_strangers():
    """CVE-2019-6250."""
    assert zmq.zmq_version_info() >= (4, 3, 1)


def test_strangers_get_no_handle(start_node):
    """CVE-2026-92972, -107205: what memory there is, and where, is told after hello only."""
    node = start_node()
    with Wire(node.address) as stranger:
        answer = stranger.ask(Cancel("transfer-0123456789"))
        assert isinstance(answer, Refused)
        assert "/dev/shm" not in answer.text
    assert "transfers_given_up" not in node.status().counters


def test_transfer_ids_are_long_and_of_harmless_characters():
    """CVE-2026-112266, -94627: guessable, shared or prefix-matched ids; -116176: an address inside an id."""
    from pdx.wire.messages import ToNode, decode_to_node, encode

    for bad in ("", "a" * 15, "a" * 65, "a" * 16 + "\n", "10.0.0.1:5555/aaaaaaaa", "../../../../../etc/passwd"):
        with pytest.raises(ProtocolError):
            decode_to_node(encode(ToNode(1, False, Cancel(bad))))


def test_keys_depend_on_everything_that_decides_what_the_bytes_mean():
    """CVE-2026-10813 (16-bit hashes), CVE-2025-46570 (no salt): the engine's chained hash, which covers tokens,
    adapter, inputs and salt, is the whole message; the layout is the key of the MAC."""
    key = pdx.memory.keys.chunk_key(b"f" * 16, b"h" * 32)
    assert len(key) >= 16
    assert (
        len({key, pdx.memory.keys.chunk_key(b"g" * 16, b"h" * 32), pdx.memory.keys.chunk_key(b"f" * 16, b"i" * 32)})
        == 3
    )


def test_the_default_folder_is_checked_every_time(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = pdx.config.runtime_folder()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        pdx.config.default_node()
