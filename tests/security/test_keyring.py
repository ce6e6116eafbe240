"""Key pairs and their files: secret ones stay secret, and what is no key is refused."""

from __future__ import annotations

import os
import stat

import pytest
import zmq
import zmq.auth
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import ConfigError
from pdx.security.curve_keys import KeyPair, check_key, secure_client


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "keys"


def test_a_pair_is_written_for_its_owner_and_read_back(folder):
    keys = KeyPair.make()
    mask = os.umask(0)
    try:
        secret, public = keys.save(folder, "alpha")
    finally:
        os.umask(mask)
    assert (secret.name, public.name) == ("alpha.key_secret", "alpha.key")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, secret, public)] == [0o700, 0o600, 0o644]
    assert sorted(path.name for path in folder.iterdir()) == ["alpha.key", "alpha.key_secret"]
    with pytest.raises(ConfigError, match="name the file NAME.key_secret"):
        KeyPair.load(public)
    assert KeyPair.load(secret) == keys
    assert keys.secret not in public.read_text()
    assert keys.secret not in f"{keys} {keys!r} {[keys]}"
    assert keys.public in repr(keys)
    assert zmq.auth.load_certificate(secret) == (keys.public.encode(), keys.secret.encode())
    assert zmq.auth.load_certificate(public) == (keys.public.encode(), None)
    with pytest.raises(ConfigError, match="pdx keygen"):
        KeyPair.load(folder / "nobody.key_secret")
    with pytest.raises(ConfigError, match="cannot be written"):
        keys.save(public / "folder", "alpha")


def test_the_public_key_is_computed_not_believed(folder):
    keys, other = KeyPair.make(), KeyPair.make()
    secret, _ = keys.save(folder, "alpha")
    secret.write_text(secret.read_text().replace(keys.public, other.public))
    assert KeyPair.load(secret).public == keys.public


def test_keys_are_not_written_over(folder):
    old, new = KeyPair.make(), KeyPair.make()
    secret, public = old.save(folder, "alpha")
    with pytest.raises(ConfigError, match="exists already; --force"):
        new.save(folder, "alpha")
    public.unlink()
    with pytest.raises(ConfigError, match="key_secret exists already"):
        new.save(folder, "alpha")
    assert KeyPair.load(secret) == old
    new.save(folder, "alpha", force=True)
    assert KeyPair.load(secret) == new


def test_a_planted_link_is_replaced_not_followed(folder):
    victim = folder.parent / "victim"
    victim.write_text("precious")
    folder.mkdir(mode=0o700)
    for name in ("alpha.key_secret", "alpha.key_secret.new", "alpha.key"):
        (folder / name).symlink_to(victim)
    KeyPair.make().save(folder, "alpha", force=True)
    assert victim.read_text() == "precious"
    assert not (folder / "alpha.key_secret").is_symlink()


@pytest.mark.parametrize("mode", [0o604, 0o610])
def test_a_secret_that_others_can_read_is_refused(folder, mode):
    secret, _ = KeyPair.make().save(folder, "alpha")
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {secret}"):
        KeyPair.load(secret)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no secret key"),
        ('secret-key = "short"', "not a CURVE key"),
        (f'secret-key = "{"~" * 40}"', "not a CURVE key"),
        (f'secret-key = "{"#" * 40}"', "not a CURVE key"),  # beyond 32 bits
        (f'secret-key = "{"é" * 40}"', "not a CURVE key"),
        (f'# secret-key = "{"a" * 40}"', "holds no secret key"),
    ],
)
def test_what_is_no_secret_key_is_refused_without_showing_it(tmp_path, text, why):
    path = tmp_path / "x.key_secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=why) as caught:
        KeyPair.load(path)
    assert str(path) in str(caught.value)
    assert "~~~" not in str(caught.value)


@given(st.text(max_size=45))
def test_any_text_is_a_key_or_refused(text):
    try:
        check_key(text, "here")
    except ConfigError:
        return
    assert len(zmq.utils.z85.decode(text.encode())) == 32


def test_keys_come_in_twos():
    keys = KeyPair.make()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        secure_client(socket, own=None, server_key="")
        assert socket.getsockopt(zmq.MECHANISM) == zmq.NULL
        with pytest.raises(ConfigError, match="needs its own"):
            secure_client(socket, own=None, server_key=keys.public)
        with pytest.raises(ConfigError, match="has to be in the roster"):
            secure_client(socket, own=keys, server_key=None)
        secure_client(socket, own=keys, server_key=KeyPair.make().public)
        assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    finally:
        socket.close()
        context.term()
