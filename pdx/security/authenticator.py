"""Who may connect to the CURVE sockets of one ZMQ context: answers ZMQ's ZAP questions, on its owner's loop.

A key that is admitted comes with every message as its User-Id, so whoever reads a message asks the roster anew whose
key that is, and a key that was taken from the roster is worth nothing from then on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import zmq
from zmq.utils import z85

from pdx.security.curve_keys import DOMAIN

log = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"  # ZMQ asks there
_BURST = 64
_MAX_WARNED = 1024  # keys; more are counted only


class Gate:
    """The ZAP socket of a context; bound before the sockets it guards. All calls on one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        admits: Callable[[str], bool],
        whence: Callable[[], list[str]] = list,
        counters: Counter[str],
    ) -> None:
        """`admits`: whether a public key may come in. Refusals are counted as `peers_denied`.

        `whence`: where those who ask may come from; empty: ZMQ knows.
        """
        self._admits = admits
        self._whence = whence
        self._counters = counters
        self._warned: set[str] = set()
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.bind(_ENDPOINT)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def serve(self) -> bool:
        """Answer what is waiting; True: there may be more."""
        for _ in range(_BURST):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self.socket.send_multipart(self._answer(question), zmq.NOBLOCK)
        return True

    def close(self) -> None:
        """Nobody is admitted any more. Idempotent."""
        self.socket.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        # version, request, domain, address, identity, mechanism, credentials; only ZMQ itself can reach this socket
        version, request, domain, address, _, mechanism, *credentials = question
        if domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            key = z85.encode(credentials[0])
            if self._admits(key.decode("ascii")):
                return [version, request, b"200", b"OK", key, b""]
            self._deny(key.decode("ascii"), address)
        else:
            self._deny(mechanism.decode("ascii", "replace"), address)
        # 300: for now. After 400 ZMQ would never try again, though tomorrow the roster may have that key.
        return [version, request, b"300", b"not in the roster", b"", b""]

    def _deny(self, what: str, address: bytes) -> None:
        self._counters["peers_denied"] += 1
        if what not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(what)
            where = " or ".join(self._whence()[:4]) or address.decode("ascii", "replace")
            log.warning("%s at %s is not in the roster and was not let in", what, where)


def user_of(frame: zmq.Frame) -> str:
    """The public key with which the sender of a received frame was admitted; empty without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
