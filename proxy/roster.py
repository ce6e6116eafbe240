"""Which engines exist: those named on the command line and those nodes report. No I/O; the clock is injected.

A node's word is good for `heartbeat_timeout_s`. The command line's word is good for ever: such an engine is
always listed, but when a node that reported it says that it went away, requests on it are given up anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import msgspec

from pdx.errors import ConfigError
from pdx.messages import EngineReport, NodeReport, PeerEntry

MAX_NODES = 1024


class Engine(msgspec.Struct, frozen=True):
    """One engine as far as routing is concerned; `url` is its identity."""

    url: str
    name: str
    prefills: bool
    decodes: bool
    named: bool  # on the command line
    node: str = ""
    running: int = 0  # unfinished requests, whoever sent them, at the node's last report


class _Node(msgspec.Struct):
    seen_at: float
    engines: dict[str, EngineReport]  # by URL
    peer: PeerEntry  # without an address: it takes no peers


def base_url(text: str) -> str:
    """`text` as an engine's identity.

    :raises ConfigError: not a plain http(s) base URL; credentials in it would end up in logs and metrics.
    """
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
        plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError("an engine's URL does not parse; write http://host:port") from error
    if not plain or parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("an engine's URL must be plain http://host:port, without user, query or fragment")
    return url


class Roster:
    """The engines; every method is cheap and must be called from one thread."""

    def __init__(
        self,
        *,
        prefill: Iterable[str],
        decode: Iterable[str],
        heartbeat_timeout_s: float,
        suspect_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._prefill = frozenset(map(base_url, prefill))
        self._decode = frozenset(map(base_url, decode))
        self._named = tuple(dict.fromkeys(map(base_url, (*prefill, *decode))))
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._suspect_s = suspect_s
        self._clock = clock
        # A restarted node has a new epoch. Its engines take a moment to attach again and are not lost
        # meanwhile: the old epoch vouches for them until its heartbeat runs out.
        self._nodes: dict[tuple[str, int], _Node] = {}
        self._suspect_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"Roster({len(self._named)} named engines, {len(self._nodes)} nodes)"

    def report(self, report: NodeReport) -> frozenset[str]:
        """Take in a node's word; the URLs of engines it no longer has and nobody else reports."""
        key = (report.node, report.epoch)
        if key not in self._nodes and len(self._nodes) >= MAX_NODES:
            return frozenset()
        before = self._nodes[key].engines if key in self._nodes else {}
        self._nodes[key] = _Node(
            seen_at=self._clock(),
            engines=_routable(report.engines),
            peer=PeerEntry(report.node, report.listen, report.public_key),
        )
        return frozenset(before.keys() - self._reported().keys())

    def expire(self) -> frozenset[str]:
        """Forget silent nodes; the URLs of engines that nobody vouches for any more."""
        oldest = self._clock() - self._heartbeat_timeout_s
        silent = [key for key, node in self._nodes.items() if node.seen_at < oldest]
        gone: set[str] = set()
        for key in silent:
            gone.update(self._nodes.pop(key).engines)
        return frozenset(gone - self._reported().keys() - set(self._named))

    def engines(self) -> list[Engine]:
        """All engines that are to be believed in now."""
        reported = self._reported()
        listed = [self._engine(url, reported.get(url)) for url in self._named]
        listed += [self._engine(url, found) for url, found in reported.items() if url not in self._named]
        return listed

    def nodes(self) -> int:
        """How many nodes are to be believed in now."""
        oldest = self._clock() - self._heartbeat_timeout_s
        return sum(node.seen_at >= oldest for node in self._nodes.values())

    def peers(self) -> dict[tuple[str, int], PeerEntry]:
        """The nodes that others can reach, by name and epoch; of each name, the epoch first heard of last."""
        latest = {name: epoch for name, epoch in self._nodes}
        return {key: node.peer for key in latest.items() if (node := self._nodes[key]).peer.address}

    def suspect(self, url: str) -> None:
        """The engine refused a connection: avoid it for a moment."""
        self._suspect_until[url] = self._clock() + self._suspect_s

    def is_suspect(self, url: str) -> bool:
        """Whether the engine refused a connection a moment ago."""
        until = self._suspect_until.get(url)
        if until is not None and until <= self._clock():
            del self._suspect_until[url]
            return False
        return until is not None

    def _reported(self) -> dict[str, tuple[str, EngineReport]]:
        oldest = self._clock() - self._heartbeat_timeout_s
        found: dict[str, tuple[str, EngineReport]] = {}
        for (name, _epoch), node in self._nodes.items():  # a later node's word replaces an earlier one's
            if node.seen_at >= oldest:
                found.update((url, (name, engine)) for url, engine in node.engines.items())
        return found

    def _engine(self, url: str, found: tuple[str, EngineReport] | None) -> Engine:
        named = url in self._named
        node, engine = found or ("", EngineReport(engine="", role="both", url=url, running=0))
        return Engine(
            url=url,
            name=engine.engine or url,
            prefills=url in self._prefill if named else engine.role in ("prefill", "both"),
            decodes=url in self._decode if named else engine.role in ("decode", "both"),
            named=named,
            node=node,
            running=engine.running,
        )


def _routable(engines: Iterable[EngineReport]) -> dict[str, EngineReport]:
    """By URL; an engine whose URL is missing or odd is attached to its node but cannot be asked anything."""
    found: dict[str, EngineReport] = {}
    for engine in engines:
        try:
            found[base_url(engine.url)] = engine
        except ConfigError:
            continue
    return found
