"""One test per class of vulnerability that this kind of software had; each names the records it comes from."""

import ast
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from node_harness import Wire, arenas_of

import pdx.config
import pdx.keys
from pdx.errors import ConfigError
from pdx.messages import Cancel, Refused

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("pdx", "proxy", "kernels", "transports") for path in (ROOT / folder).rglob("*.py"))
CODE_FROM_BYTES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code"}
CODE_FROM_BYTES |= {"xmlrpc", "rpyc", "diskcache", "multiprocessing.managers", "multiprocessing.connection"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "load_pyobj", "__reduce__", "__reduce_ex__", "__setstate__", "loads_pickle"}


def nodes(kind):
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, kind):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_the_scan_sees_the_sources():
    assert len(SOURCES) > 30
    assert {"pdx", "proxy", "kernels"} <= {path.relative_to(ROOT).parts[0] for path in SOURCES}


def test_no_pickle_anywhere():
    """CVE-2025-29783, -32444, -47277, CVE-2024-50050, CVE-2026-3059/3060/3989, -93088, -93034, -86793, -105192,
    -26220, -115912, CVE-2025-69872: on the wire, in shared memory, on disk, behind a deny list."""
    found = []
    for where, node in nodes((ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names]
        modules = names if isinstance(node, ast.Import) else [node.module or "", *(f"{node.module}.{n}" for n in names)]
        found += [(where, name) for name in modules if name in CODE_FROM_BYTES or name.split(".")[0] in CODE_FROM_BYTES]
    for where, node in nodes((ast.Attribute, ast.FunctionDef)):
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


@pytest.mark.parametrize("setting", ["address", "proxy"])
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "tcp://*:5555", "ipc://@pdx", "pgm://239.0.0.1:1"])
def test_a_node_speaks_through_unix_sockets_only(place, setting, address):
    settings = {"address": f"ipc://{place}/node.sock", setting: address}
    result = subprocess.run(
        [sys.executable, "-m", "pdx.node", str(settings).replace("'", '"')],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 1
    assert "is not an ipc:///absolute/path address" in result.stderr
    assert not arenas_of(settings["address"])


def test_socket_lock_log_and_arena_are_this_users_alone(start_node, place):
    """CVE-2025-69872, CVE-2026-103765: no authentication is needed where nobody else can open the door."""
    mask = os.umask(0)
    try:
        node = start_node()
    finally:
        os.umask(mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (*place.iterdir(), *arenas_of(node.address))}
    modes.pop("node.sock.log")  # behind the folder's door; it holds no data
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_others_can_enter_is_refused(place, mode):
    folder = place / "open"
    folder.mkdir()
    folder.chmod(mode)
    result = subprocess.run(
        [sys.executable, "-m", "pdx.node", f'{{"address": "ipc://{folder}/node.sock"}}'],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 1
    assert "with mode 0700" in result.stderr
    assert not list(folder.iterdir())


def test_a_planted_link_is_not_followed(place, address):
    """Neither the lock nor the arena is opened through a symbolic link."""
    victim = place / "victim"
    victim.write_text("precious")
    (place / "node.sock.lock").symlink_to(victim)
    result = subprocess.run(
        [sys.executable, "-m", "pdx.node", f'{{"address": "{address}"}}'],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode != 0
    assert victim.read_text() == "precious"
    (place / "node.sock.lock").unlink()


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
    from pdx.errors import ProtocolError
    from pdx.messages import ToNode, decode_to_node, encode

    for bad in ("", "a" * 15, "a" * 65, "a" * 16 + "\n", "10.0.0.1:5555/aaaaaaaa", "../../../../../etc/passwd"):
        with pytest.raises(ProtocolError):
            decode_to_node(encode(ToNode(1, False, Cancel(bad))))


def test_keys_depend_on_everything_that_decides_what_the_bytes_mean():
    """CVE-2026-10813 (16-bit hashes), CVE-2025-46570 (no salt): the engine's chained hash, which covers tokens,
    adapter, inputs and salt, is the whole message; the layout is the key of the MAC."""
    key = pdx.keys.chunk_key(b"f" * 16, b"h" * 32)
    assert len(key) >= 16
    assert len({key, pdx.keys.chunk_key(b"g" * 16, b"h" * 32), pdx.keys.chunk_key(b"f" * 16, b"i" * 32)}) == 3


def test_the_default_folder_is_checked_every_time(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = pdx.config.runtime_folder()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        pdx.config.default_node()
