"""Admission by CURVE keys at the sockets of a ZMQ context: answers ZMQ's ZAP questions."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Container, Sequence

import zmq
from zmq.utils import z85

from pdx.security.curve_keys import KeyPair
from pdx.security.tcp_filter import TcpFilter

log = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"  # where ZMQ asks
_DOMAIN = b"pdx"  # of ZAP
_BURST = 64  # questions answered at a time
_MAX_WARNED = 1024  # keys; further ones are only counted


class Gate:
    """The ZAP handler of a context, one per context. Open from construction to `close`; not thread-safe.

    Every message has its sender's admitted key as its User-Id.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        own: KeyPair,
        *,
        admits: Container[str],
        counters: Counter[str],
        filters: Sequence[TcpFilter],
    ) -> None:
        """`own`: the key that the sockets prove. `admits`: public keys to admit. Refusals are counted as
        `peers_denied`. `filters`: the ports in front of the sockets, which know the addresses of new connections."""
        self._own = own
        self._admits = admits
        self._counters = counters
        self._filters = filters
        self._warned: set[str] = set()
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def prove(self, own: KeyPair) -> None:
        """Prove another key from now on, at sockets that are guarded and bound later."""
        self._own = own

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Require an admitted key of every connection to this socket; call it before the socket binds."""
        self._own.show(socket)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> None:
        """Answer waiting questions."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                question = self.socket.recv_multipart(zmq.NOBLOCK)
                self.socket.send_multipart(self._answer(question), zmq.NOBLOCK)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        # version, request, domain, address, identity, mechanism, credentials; only ZMQ itself can reach this socket
        version, request, domain, address, _, mechanism, *credentials = question
        who = mechanism.decode("ascii", "replace")
        if domain == _DOMAIN and mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            who = z85.encode(credentials[0]).decode("ascii")
            if who in self._admits:
                return [version, request, b"200", b"OK", who.encode(), b""]
        self._counters["peers_denied"] += 1
        if who not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(who)
            newcomers = sorted({each for port in self._filters for each in port.newcomers()})
            where = " or ".join(newcomers[:4]) or address.decode("ascii", "replace")
            log.warning("%s at %s is not in the roster and was not let in", who, where)
        # 300 is temporary: after 400 ZMQ would never try again, though the roster may get that key later.
        return [version, request, b"300", b"not in the roster", b"", b""]

    def close(self) -> None:
        """Idempotent."""
        self.socket.close()
