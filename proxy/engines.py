"""Which engines exist: those named on the command line and those nodes report. No I/O; the clock is injected.

A node's word is good for `heartbeat_timeout_s`, and what it says is only through which node an engine's KV goes. That
an engine is not reported any more, or that its node is silent, means that no KV goes through a node: it still serves
alone. Named engines are listed for ever, others as long as they answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from pdx.errors import ConfigError
from pdx.proxy.health import Health
from pdx.security.address import base_url, is_wildcard, url_host
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.wire.messages import EngineFacts
from pdx.wire.proxy import EngineReport, NodeReport, PeerEntry

log = logging.getLogger(__name__)

MAX_NODES = 1024
MAX_EPOCHS = 2  # of one name at a time: that of a node which was started again, and the one before
MAX_ENGINES = 1024  # that nodes have reported
MAX_ENGINES_OF_NODE = 64
Drop = tuple[str, str]  # why something that a node said is not believed: for counting, and as a text
_MOST_NAMES = 4  # of models in the log, of an engine with many adapters
FORGET_S = 300.0  # an engine that no node reports is forgotten when it has not answered for so long


class Engine(msgspec.Struct, frozen=True):
    """One engine as far as routing is concerned; `url` is its identity."""

    url: str
    name: str
    prefills: bool
    decodes: bool
    named: bool  # on the command line
    node: str = ""
    detached: bool = False  # a node has reported it, and none does now: it shares no KV
    facts: EngineFacts | None = None  # None: nobody tells


class _Node(msgspec.Struct):
    seen_at: float
    engines: dict[str, EngineReport]  # by URL
    peer: PeerEntry  # without an address: it takes no peers


class _View(msgspec.Struct, frozen=True):
    """What follows from all nodes' words: good until one says something else, or the oldest word is too old."""

    oldest: float  # when the node was seen that was seen longest ago
    reported: dict[str, str]  # the node of each engine that is reported, by URL
    engines: list[Engine]
    places: Counter[str]  # that each node's engines take


class Engines:
    """The engines; every method is cheap and must be called from one thread."""

    def __init__(
        self, env: Env, health: Health, *, prefill: Iterable[str], decode: Iterable[str], heartbeat_timeout_s: float
    ) -> None:
        self._prefill = frozenset(map(base_url, prefill))
        self._decode = frozenset(map(base_url, decode))
        self._named = tuple(dict.fromkeys(map(base_url, (*prefill, *decode))))
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._health = health
        self._clock = env.clock
        # A restarted node has a new epoch. Its engines take a moment to attach again and are not detached
        # meanwhile: the old epoch's report holds for them until its heartbeat runs out.
        self._nodes: dict[tuple[str, int], _Node] = {}
        self._epochs: dict[str, list[tuple[str, int]]] = {}  # the keys of `_nodes` by name
        self._last_reports: dict[str, tuple[str, EngineReport]] = {}  # by URL: the node that said so last, and what
        self._view: _View | None = None
        self._logged: dict[str, str] = {}  # what the log says of each engine, by URL
        self._logged_nodes: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"Engines({len(self._named)} named engines, {len(self._nodes)} nodes)"

    def __len__(self) -> int:
        return len(self._viewed().engines)

    def screen(self, report: NodeReport) -> tuple[NodeReport | None, list[Drop]]:
        """What of a report to believe, None: nothing, and what not. `report` takes in what is believed.

        A URL has one owner, the node that reported it first, as long as that one is heard of and says so.
        """
        epochs = self._epochs.get(report.node, [])
        if not epochs and len(self._epochs) >= MAX_NODES:
            text = f"a report of node {report.node!r} is dropped: there are {MAX_NODES} others"
            return None, [("nodes", text)]
        if (report.node, report.epoch) not in epochs and not self._may_begin(epochs):
            text = f"a report of node {report.node!r} is dropped: {MAX_EPOCHS} other nodes report under that name"
            return None, [("epochs", text)]
        view = self._viewed()
        places = MAX_ENGINES - len(self._last_reports)
        own = MAX_ENGINES_OF_NODE - view.places[report.node]
        engines: dict[str, EngineReport] = {}
        dropped: list[Drop] = []
        for engine in report.engines:
            drop = _unroutable(report.node, engine)
            url = base_url(engine.url) if drop is None else ""
            drop = drop or _owned(report.node, url, view.reported)
            is_new = url not in self._last_reports and url not in engines
            if drop is None and is_new and min(places, own) <= 0:
                text = f"engine {engine.engine!r} of node {report.node!r} gets no requests: there are too many"
                drop = ("engines", text)
            if drop is None:
                others = engines[url].running if url in engines else 0  # other data parallel ranks of one server
                engines[url] = msgspec.structs.replace(engine, running=engine.running + others)
                places, own = places - is_new, own - is_new
            else:
                dropped.append(drop)
        return msgspec.structs.replace(report, engines=list(engines.values())), dropped

    def _may_begin(self, epochs: Sequence[tuple[str, int]]) -> bool:
        """Whether a name with these epochs may have another one: of those that are silent, none counts."""
        oldest = self._oldest()
        return sum(self._nodes[key].seen_at >= oldest for key in epochs) < MAX_EPOCHS

    def report(self, report: NodeReport) -> frozenset[str]:
        """Take in a node's word, of which `screen` left what is believed; the URLs of engines it no longer has and
        nobody else reports."""
        key = (report.node, report.epoch)
        known = self._nodes.get(key)
        before = known.engines if known is not None else {}
        engines = {base_url(engine.url): engine for engine in report.engines}
        if known is None:
            self._epochs.setdefault(report.node, []).append(key)
        is_news = known is None or known.seen_at < self._oldest() or before.keys() != engines.keys()
        if is_news or not all(self._is_said(report.node, url, engine) for url, engine in engines.items()):
            self._view = None
        self._nodes[key] = _Node(
            seen_at=self._clock(), engines=engines, peer=PeerEntry(report.node, report.listen, report.public_key)
        )
        for url, engine in engines.items():
            self._last_reports[url] = report.node, engine
            self._health.running(url, engine.running)
        return self._detached(before)

    def expire(self, members: Container[str] | None = None) -> frozenset[str]:
        """Forget silent nodes, and engines that nobody reports and that do not answer.

        Of nodes that are no `members` (None: all are) everything is forgotten.

        :returns: the URLs of engines that are not reported any more.
        """
        now, oldest = self._clock(), self._oldest()
        silent = [
            key
            for key, node in self._nodes.items()
            if node.seen_at < oldest or not (members is None or key[0] in members)
        ]
        gone = [url for key in silent for url in self._pop(key).engines]
        for url in self._last_reports.keys() - self._viewed().reported.keys():
            is_member = members is None or self._last_reports[url][0] in members
            if not is_member or self._health.of(url).well_at < now - FORGET_S:
                del self._last_reports[url]
                self._view = None
        self._health.keep({*self._named, *self._last_reports})
        return self._detached(gone)

    def all(self) -> list[Engine]:
        """All engines that may serve; among them are detached ones, and such as `Health` avoids."""
        return self._viewed().engines.copy()

    def _pop(self, key: tuple[str, int]) -> _Node:
        self._view = None
        epochs = self._epochs[key[0]]
        epochs.remove(key)
        if not epochs:
            del self._epochs[key[0]]
        return self._nodes.pop(key)

    def _detached(self, urls: Iterable[str]) -> frozenset[str]:
        reported = self._viewed().reported
        gone = frozenset(url for url in urls if url not in reported)
        for url in gone:
            self._health.running(url, 0)
        return gone

    def nodes(self) -> int:
        """How many nodes are to be believed in now."""
        oldest = self._oldest()
        return sum(node.seen_at >= oldest for node in self._nodes.values())

    def node_names(self) -> frozenset[str]:
        oldest = self._oldest()
        return frozenset(name for (name, _), node in self._nodes.items() if node.seen_at >= oldest)

    def peers(self) -> dict[tuple[str, int], PeerEntry]:
        """The nodes that others can reach, by name and epoch; of each name, the epoch first heard of last."""
        latest = {name: epoch for name, epoch in self._nodes}
        return {key: node.peer for key in latest.items() if (node := self._nodes[key]).peer.address}

    def _oldest(self) -> float:
        """Who was seen before that is silent."""
        return self._clock() - self._heartbeat_timeout_s

    def _is_said(self, node: str, url: str, engine: EngineReport) -> bool:
        """Whether that is what was last said of the engine, as far as it is in the view."""
        last = self._last_reports.get(url)
        return last is not None and last[0] == node and _lasting(last[1]) == _lasting(engine)

    def _viewed(self) -> _View:
        """Kept from one report to the next: requests are more frequent than news."""
        view, oldest = self._view, self._oldest()
        if view is None or view.oldest < oldest:
            heard = [(name, node) for (name, _), node in self._nodes.items() if node.seen_at >= oldest]
            reported: dict[str, str] = {}
            for name, node in heard:  # a later node's word replaces an earlier one's
                reported.update(dict.fromkeys(node.engines, name))
            urls = dict.fromkeys((*self._named, *self._last_reports))
            view = self._view = _View(
                oldest=min((node.seen_at for _, node in heard), default=float("inf")),
                reported=reported,
                engines=[self._engine(url, reported.get(url, "")) for url in urls],
                places=Counter(node for node, _ in self._last_reports.values()),
            )
        return view

    def _engine(self, url: str, node: str) -> Engine:
        named = url in self._named
        _, report = self._last_reports.get(url, ("", None))
        role = report.role if report is not None else "both"
        return Engine(
            url=url,
            name=report.engine if report is not None and report.engine else url,
            prefills=url in self._prefill if named else role in ("prefill", "both"),
            decodes=url in self._decode if named else role in ("decode", "both"),
            named=named,
            node=node,
            detached=report is not None and not node,
            facts=report.facts if report is not None and node else None,
        )

    # ---- the log ----------------------------------------------------------------------------

    def log_changes(self) -> None:
        """Log which nodes and engines came, changed and went since the last time. An engine is told of once it has
        answered."""
        names = self.node_names()
        for name in sorted(names - self._logged_nodes):
            log.info("node %s reports", printable(name))
        for name in sorted(self._logged_nodes - names):
            log.info("node %s does not report any more", printable(name))
        self._logged_nodes = names
        engines = {engine.url: engine for engine in self.all()}
        for url, engine in engines.items():
            line = self._described(engine)
            if self._logged.get(url) != line and (url in self._logged or self._health.of(url).is_ready):
                log.info("%s engine %s", "now" if url in self._logged else "found", printable(line))
                self._logged[url] = line
        for url in self._logged.keys() - engines.keys():
            log.info("gone: engine %s", printable(self._logged.pop(url)))

    def _described(self, engine: Engine) -> str:
        models = list(self._health.of(engine.url).models or ())
        more = f" and {len(models) - _MOST_NAMES} more" if len(models) > _MOST_NAMES else ""
        model = f"model {', '.join(models[:_MOST_NAMES])}{more}" if models else "model not known"
        role = "both" if engine.prefills and engine.decodes else "prefill" if engine.prefills else "decode"
        node = f"node {engine.node}" if engine.node else "no node"
        name = f"{engine.name} at {engine.url}" if engine.name != engine.url else engine.url
        return f"{name}: {role}, {model}, {node}"


def _lasting(engine: EngineReport) -> tuple[object, ...]:
    return (engine.engine, engine.role, engine.facts)


def _unroutable(node: str, engine: EngineReport) -> Drop | None:
    """An engine whose URL is missing or odd is attached to its node but cannot be asked anything."""
    try:
        if not is_wildcard(url_host(base_url(engine.url))):
            return None
        why = "its URL names all interfaces"
    except ConfigError as error:
        why = str(error) if engine.url else "it told no URL"
    text = f"engine {engine.engine!r} of node {node!r} gets no requests: {why}; see `pdx serve --url`"
    return ("unroutable", text)


def _owned(node: str, url: str, reported: Mapping[str, str]) -> Drop | None:
    owner = reported.get(url, node)
    if owner == node:
        return None
    text = f"node {node!r} names the engine at {url}, which is not believed: it is one of node {owner!r}"
    return ("owned", text)
