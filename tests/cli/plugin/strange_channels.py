"""Channels as somebody else may write them: one that works, and others that fail in their own ways."""

import mmap
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from pdx.transports.channel import Availability, Channel, Listener, Notification, Region, RemoteRegion, Transfer


class Over(Transfer):
    def poll(self):
        return True

    def abort(self):
        pass


class Link(Channel):
    """Maps the peer's file and copies into it; notifications are bytes in another file."""

    def __init__(self, source, detail):
        self.source = source
        path, self.mailbox = detail.decode().split("|")
        with open(path, "r+b") as file:
            self.target = mmap.mmap(file.fileno(), 0)

    def write(self, pieces, notify):
        for piece in pieces:
            data = self.source.view[piece.local : piece.local + piece.nbytes]
            self.target[piece.remote : piece.remote + piece.nbytes] = data
        with open(self.mailbox, "ab") as file:
            file.write(b"!")
        return Over(threading.Event())

    def close(self):
        pass


class Mailbox(Listener):
    def __init__(self, memory):
        self.memory = memory
        fd, name = tempfile.mkstemp(dir=memory.path.parent)
        os.close(fd)
        self.path = Path(name)
        self.taken = 0

    def invite(self, token):
        detail = f"{self.memory.path}|{self.path}".encode()
        return RemoteRegion(Copying.scheme, self.memory.nbytes, token, detail)

    def grant(self, token, offset, nbytes):
        pass

    def revoke(self, token, offset, nbytes):
        return True

    def take(self):
        fresh = self.path.stat().st_size - self.taken
        self.taken += fresh
        return [Notification(bytes(16), b"!")] * fresh

    def expel(self, token):
        pass

    def close(self):
        pass


class Copying(Region):
    scheme = "copying"

    @classmethod
    def availability(cls):
        print("libraries talk a lot")  # noqa: T201
        return Availability(True)

    @classmethod
    def register(cls, memory, *, host="127.0.0.1", wake=None):
        region = cls(memory, host, wake)
        region.mailbox = None
        return region

    def listen(self):
        self.mailbox = self.mailbox or Mailbox(self.memory)
        return self.mailbox

    def connect(self, remote, *, timeout_s=5.0):
        return Link(self.memory, remote.detail)

    def close(self):
        pass


class Absent(Copying):
    @classmethod
    def availability(cls):
        return Availability(False, "no carrier pigeon", "buy one")


class Hanging(Copying):
    def connect(self, remote, *, timeout_s=5.0):
        signal.pause()


class Crashing(Copying):
    def listen(self):
        sys.stderr.write("pigeon down\n")
        sys.stderr.flush()
        os.abort()


class Lying(Copying):
    """Its transfers end well, but one byte of each is wrong."""

    def connect(self, remote, *, timeout_s=5.0):
        link = super().connect(remote)
        honest = link.write

        def write(pieces, notify):
            transfer = honest(pieces, notify)
            link.target[pieces[0].remote] ^= 1
            return transfer

        link.write = write
        return link
