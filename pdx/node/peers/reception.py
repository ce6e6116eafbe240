"""The accepting side of links: who is let in through the door, and the sessions of those who were.

Whoever has no session may only say hello. A name has one session; a new hello ends the one before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from pdx.errors import PeerRefused, ProtocolError
from pdx.node.peers.handshake import SessionState, SessionStep, check_hello
from pdx.node.peers.link import FAREWELL_MS, LinkHandler, PeerSession, refusal
from pdx.node.peers.lives import Lives
from pdx.security.door import Door
from pdx.security.roster import Roster
from pdx.telemetry.faults import Faults
from pdx.wire.burst import burst
from pdx.wire.peer_messages import (
    Chosen,
    LetGo,
    Offer,
    PeerBye,
    PeerFrame,
    PeerHello,
    PeerPing,
    Want,
    decode_peer,
    encode_peer,
)

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024
_LAST_SEQ = (1 << 63) - 1  # of what is said to somebody without a session: nothing follows it


class Reception:
    """All sessions. One thread; `now` is the clock of `Links`, which stands still while this node hears nobody."""

    def __init__(
        self,
        door: Door,
        handler: LinkHandler,
        *,
        roster: Roster,
        has_keys: bool,
        lives: Lives,
        on_life: Callable[[str, int, str], None],
        counters: Counter[str],
        faults: Faults,
    ) -> None:
        """`on_life` is called with the name, epoch and kernel of a peer that was let in, before its session begins."""
        self._door, self._handler, self._roster, self._has_keys = door, handler, roster, has_keys
        self._lives, self._on_life, self._counters, self._faults = lives, on_life, counters, faults
        self._sessions: dict[bytes, PeerSession] = {}  # by route
        self._by_name: dict[str, tuple[bytes, PeerSession]] = {}
        self._numbers = 0

    @property
    def sessions(self) -> list[PeerSession]:
        """Those that are not over."""
        return list(self._sessions.values())

    def serve(self, now: float) -> None:
        """Take what has come in."""
        for _ in burst():
            session = None
            try:
                arrival = self._door.receive()
                if arrival is None:
                    return
                session = self._sessions.get(arrival.route)
                with self._faults.contain("a message of a peer", passing=(ProtocolError,)) as part:
                    envelope = decode_peer(arrival.frame)
                    if session is not None:
                        self._hear(arrival.route, session, arrival.key, envelope, now)
                    else:
                        self._hear_stranger(arrival.route, arrival.key, envelope, now)
                if part.has_failed:
                    self._end_failed(arrival.route)
            except ProtocolError as error:
                self._faults.dropped(repr(session.name) if session else "a node without a session", error)

    def tick(self, now: float, *, ping_s: float, timeout_s: float) -> None:
        """Signs of life, and silences."""
        for route, session in list(self._sessions.items()):
            with self._faults.contain("the tick of a peer's session") as part:
                if now - session.pinged_at >= ping_s:
                    session.ping(now)
                if session.fault or now - session.heard_at > timeout_s:
                    why = session.fault or f"nothing heard for {timeout_s:g} s"
                    self._end(route, session, SessionStep.SILENT, why)
            if part.has_failed:
                self._end_failed(route)

    def obey_roster(self) -> None:
        """The roster has changed: whoever it names no longer, or with another key, is parted with."""
        for route, session in list(self._sessions.items()):
            is_named = self._roster.admits_name(session.name)
            if not is_named or (self._has_keys and self._roster.name_of(session.key) != session.name):
                self._end(route, session, SessionStep.SILENT, "the roster has changed")

    def end_other_life(self, name: str, epoch: int, host: str) -> None:
        """`name` lives in this epoch on this kernel: its session of another one is over, and its process dead, unless
        names are not proved by keys and it may run all the same (`PeerSession.is_dead_if`)."""
        previous = self._by_name.get(name)
        if previous is None or previous[1].epoch == epoch:
            return
        if previous[1].is_dead_if(epoch, host):
            self._end(*previous, SessionStep.RESTARTED, f"it was started anew (epoch {epoch})")
        else:
            session = previous[1]
            is_here = host == session.host
            first = f"process {session.pid} of this name runs" if is_here else "another host has this name"
            why = f"{first}, and another node was started with it (epoch {epoch}): use another --name, or keys"
            self._end(*previous, SessionStep.SILENT, why)

    def close(self) -> None:
        """Say bye to all and close the door. The handler is not called. Idempotent."""
        for session in self._sessions.values():
            session.end(SessionStep.BYE, PeerBye())
        self._sessions.clear()
        self._by_name.clear()
        self._door.close(linger_ms=FAREWELL_MS)

    def _hear(self, route: bytes, session: PeerSession, key: str, envelope: PeerFrame, now: float) -> None:
        if self._has_keys and self._roster.name_of(key) != session.name:
            raise ProtocolError(f"sent with a key that is not that of {session.name!r}")
        body = session.numbering.unpack(envelope)
        session.heard_at = now
        match body:
            case PeerPing():
                pass
            case PeerBye():
                self._end(route, session, SessionStep.BYE, "it said bye")
            case Chosen() | Offer() | LetGo() | Want() if session.state is SessionState.OPEN:
                self._handler.session_message(session, body)
            case _:
                raise ProtocolError(f"a {type(body).__name__} in a session that is {session.state}")

    def _hear_stranger(self, route: bytes, key: str, envelope: PeerFrame, now: float) -> None:
        hello = envelope.body
        if isinstance(hello, PeerBye):
            return
        if not isinstance(hello, PeerHello):
            self._turn_away(route, "say hello first")
            return
        # A connection that is gone may leave a hello behind; it says nothing about who is alive now.
        if self._door.post(route, encode_peer(PeerFrame(1, PeerPing()))):
            raise ProtocolError(f"the hello of {hello.name[:80]!r} outlived its connection")
        try:
            schemes = self._admit(key, hello)
        except PeerRefused as error:
            self._counters["peers_refused"] += 1
            log.warning("peer %r was turned down: %s", hello.name[:80], error)
            self._turn_away(route, str(error))
            return
        self._on_life(hello.name, hello.epoch, hello.host)
        self._handler.peer_hello(self._open(route, key, envelope.seq, hello, now), schemes)

    def _open(self, route: bytes, key: str, seq: int, hello: PeerHello, now: float) -> PeerSession:
        previous = self._by_name.get(hello.name)
        if previous is not None:  # the same life, which lost its link before this side noticed
            self._end(*previous, SessionStep.SILENT, "it dialled anew")
        self._numbers += 1
        session = PeerSession(
            self._numbers,
            hello,
            key=key,
            identity=self._handler.identity,
            post=lambda frame: self._door.post(route, frame),
            forget=lambda session: self._forget(route, session),
        )
        session.numbering.pack(PeerPing())  # it was said before there was a session
        session.numbering.unpack(PeerFrame(seq, hello))
        session.heard_at = session.pinged_at = now
        self._sessions[route] = session
        self._by_name[hello.name] = (route, session)
        return session

    def _admit(self, key: str, hello: PeerHello) -> list[str]:
        """The schemes to open for a peer.

        :raises PeerRefused: it is not let in.
        """
        authenticated = (self._roster.name_of(key) or "nobody in the roster") if self._has_keys else None
        buried = self._lives.is_over(hello.name, hello.epoch)
        schemes = check_hello(self._handler.identity(), hello, authenticated=authenticated, buried=buried)
        if not self._roster.admits_name(hello.name):
            raise PeerRefused(f"no node is named {hello.name[:80]!r} in the roster")
        if len(self._sessions) >= MAX_SESSIONS and hello.name not in self._by_name:
            raise PeerRefused(f"{MAX_SESSIONS} peers are here already")
        return schemes

    def _end(self, route: bytes, session: PeerSession, step: SessionStep, why: str) -> None:
        session.end(step, refusal(why) if step is SessionStep.SILENT else None)
        self._forget(route, session)
        if step is not SessionStep.BYE:
            log.warning("the session of peer %r is over: %s", session.name, why)
        self._handler.session_over(session, step)

    def _end_failed(self, route: bytes) -> None:
        """What was done for this session ended in an internal error: the session ends, too."""
        session = self._sessions.get(route)
        if session is not None:
            with self._faults.contain("the end of a peer's session"):
                self._end(route, session, SessionStep.SILENT, "an internal error")

    def _forget(self, route: bytes, session: PeerSession) -> None:
        del self._sessions[route]
        if self._by_name.get(session.name) == (route, session):
            del self._by_name[session.name]

    def _turn_away(self, route: bytes, text: str) -> None:
        self._counters["strangers"] += 1
        self._door.post(route, encode_peer(PeerFrame(_LAST_SEQ, refusal(text))))
