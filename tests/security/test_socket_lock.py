"""The lock beside a socket: one owner, who is named to whoever comes second."""

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from pdx.errors import ConfigError, NodeRunning
from pdx.security.socket_lock import owned, remove_socket

OWNER = """
import sys
from pathlib import Path
from pdx.security.socket_lock import owned
with owned(Path(sys.argv[1]), RuntimeError):
    print("owned", flush=True)
    sys.stdin.read()
"""


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_path_has_one_owner_as_long_as_that_lives(tmp_path):
    path = tmp_path / "node.sock"
    command = [sys.executable, "-c", OWNER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "owned\n"
        with pytest.raises(NodeRunning, match=f"^{owner.pid}$"), owned(path, NodeRunning):
            pass
        owner.kill()
    with owned(path, NodeRunning):
        assert (tmp_path / "node.sock.lock").read_text() == str(os.getpid())
        with pytest.raises(NodeRunning, match=f"^{os.getpid()}$"), owned(path, NodeRunning):
            pass
    with owned(path, NodeRunning):
        pass


def test_who_listens_owns_the_path_also_without_its_lock_file(tmp_path):
    """What cleans up old files in /tmp once took the lock, and the next node took the socket."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as listener, owned(path, NodeRunning):
        listener.bind(str(path))
        listener.listen(0)
        (tmp_path / "node.sock.lock").unlink()
        for _ in range(3):  # the last ones find a full queue
            with pytest.raises(NodeRunning, match=f"^({os.getpid()}|unknown)$"), owned(path, NodeRunning):
                pass
    with owned(path, NodeRunning):  # a socket that nobody listens at is nobody's
        remove_socket(path)
    assert not path.exists()


def test_a_lock_that_was_removed_in_the_same_moment_is_taken_anew(tmp_path, monkeypatch):
    path, lock, real = tmp_path / "node.sock", tmp_path / "node.sock.lock", fcntl.flock
    removed = []

    def remove_first(fd, how):
        if not removed:
            removed.append(lock.unlink())
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with owned(path, NodeRunning):
        assert lock.read_text() == str(os.getpid())
        with pytest.raises(NodeRunning), owned(path, NodeRunning):
            pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_fake_file_system_without_locks_is_said(tmp_path, monkeypatch, number):
    """As Lustre may be mounted."""
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(ConfigError, match="flock"), owned(tmp_path / "tier", NodeRunning):
        pass


def test_what_is_read_only_is_nobodys_where_a_fake_file_system_locks_only_what_is_written(tmp_path, monkeypatch):
    """As NFS does."""
    (tmp_path / "tier.lock").touch()
    real = os.open
    monkeypatch.setattr(fcntl, "flock", failing(errno.EBADF))
    monkeypatch.setattr(
        os, "open", lambda path, flags, *mode: (failing(errno.EROFS) if flags & os.O_RDWR else real)(path, flags, *mode)
    )
    with owned(tmp_path / "tier", NodeRunning, may_be_read_only=True) as lock:
        assert (lock.is_held, lock.is_written) == (False, False)


def test_only_a_socket_is_removed(tmp_path):
    path = tmp_path / "node.sock"
    remove_socket(path)
    path.write_text("a file of somebody who mistyped an address")
    with pytest.raises(ConfigError, match="is no socket"):
        remove_socket(path)
    assert path.exists()
