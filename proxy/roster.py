"""Which engines exist: those named on the command line and those nodes report. No I/O; the clock is injected.

A node's word is good for `heartbeat_timeout_s`. The command line's word is good for ever: such an engine is
always listed, but when a node that reported it says that it went away, requests on it are given up anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from pdx.address import base_url, is_wildcard, url_host
from pdx.errors import ConfigError
from pdx.messages import EngineFacts, EngineReport, NodeReport, PeerEntry

MAX_NODES = 1024
MAX_LIVES = 2  # of one name at a time: that of a node which was started again, and the one before


class Engine(msgspec.Struct, frozen=True):
    """One engine as far as routing is concerned; `url` is its identity."""

    url: str
    name: str
    prefills: bool
    decodes: bool
    named: bool  # on the command line
    node: str = ""
    running: int = 0  # unfinished requests, whoever sent them, at the node's last report
    facts: EngineFacts | None = None  # None: nobody has told


class Refusal(msgspec.Struct, frozen=True):
    """Something that a node said and that is not believed; `reason` is for counting."""

    reason: str
    text: str


class _Node(msgspec.Struct):
    seen_at: float
    engines: dict[str, EngineReport]  # by URL
    peer: PeerEntry  # without an address: it takes no peers


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

    def screen(self, report: NodeReport) -> tuple[NodeReport | None, list[Refusal]]:
        """What of a report to believe, None: nothing, and what not. `report` takes in what is believed.

        A URL has one owner, the node that reported it first, as long as that one is heard of and says so.
        """
        names = {name for name, _ in self._nodes}
        lives = [key for key in self._nodes if key[0] == report.node]
        if report.node not in names and len(names) >= MAX_NODES:
            text = f"a report of node {report.node!r} is dropped: there are {MAX_NODES} others"
            return None, [Refusal("nodes", text)]
        if (report.node, report.epoch) not in lives and not self._may_begin(lives):
            text = f"a report of node {report.node!r} is dropped: {MAX_LIVES} other nodes report under that name"
            return None, [Refusal("lives", text)]
        reported = self._reported()
        engines, refusals = [], []
        for engine in report.engines:
            refusal = _unroutable(report.node, engine) or _owned(report.node, engine, reported)
            if refusal is None:
                engines.append(engine)
            else:
                refusals.append(refusal)
        return msgspec.structs.replace(report, engines=engines), refusals

    def _may_begin(self, lives: Sequence[tuple[str, int]]) -> bool:
        """Whether a name with these lives may have another one: of those that are silent, none counts."""
        oldest = self._clock() - self._heartbeat_timeout_s
        return sum(self._nodes[key].seen_at >= oldest for key in lives) < MAX_LIVES

    def report(self, report: NodeReport) -> frozenset[str]:
        """Take in a node's word, of which `screen` left what is believed; the URLs of engines it no longer has and
        nobody else reports."""
        key = (report.node, report.epoch)
        before = self._nodes[key].engines if key in self._nodes else {}
        self._nodes[key] = _Node(
            seen_at=self._clock(),
            engines={base_url(engine.url): engine for engine in report.engines},
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
            facts=engine.facts,
        )


def _unroutable(node: str, engine: EngineReport) -> Refusal | None:
    """An engine whose URL is missing or odd is attached to its node but cannot be asked anything."""
    try:
        if not is_wildcard(url_host(base_url(engine.url))):
            return None
        why = "its URL names all interfaces"
    except ConfigError as error:
        why = str(error) if engine.url else "it told no URL"
    text = f"engine {engine.engine!r} of node {node!r} gets no requests: {why}; see `pdx serve --url`"
    return Refusal("unroutable", text)


def _owned(node: str, engine: EngineReport, reported: Mapping[str, tuple[str, EngineReport]]) -> Refusal | None:
    url = base_url(engine.url)
    owner = reported[url][0] if url in reported else node
    if owner == node:
        return None
    text = f"node {node!r} names the engine at {url}, which is not believed: it is one of node {owner!r}"
    return Refusal("owned", text)
