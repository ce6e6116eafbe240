"""Which engines exist: those named on the command line and those nodes report. No I/O; the clock is injected.

A node's word is good for `heartbeat_timeout_s`, and what it says is only through which node an engine's KV goes. That
an engine is not reported any more, or that its node is silent, means that no KV goes through a node: it still serves
alone. Named engines are listed for ever, others as long as they answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from pdx.errors import ConfigError
from pdx.memory.apart import differing
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
_MOST_CHARS = 1000  # of a line there
_MOST_TOLD = 16  # pairs, and sentences about them
FORGET_S = 300.0  # an engine that no node reports is forgotten when it was silent for so long, or cannot be reached


class Engine(msgspec.Struct, frozen=True):
    """One engine as far as routing is concerned; `url` is its identity."""

    url: str
    name: str
    prefills: bool
    decodes: bool
    named: bool  # on the command line
    node: str = ""
    detached: bool = False  # a node has reported it, and none does now: it shares no KV
    draining: bool = False  # others are asked first
    facts: EngineFacts | None = None  # None: nobody tells
    layout: bytes = b""  # of its chunks: those of other layouts are none to it; empty: nobody tells
    reaches: frozenset[str] = frozenset()  # nodes to which its own one has written a probe

    @property
    def role(self) -> str:
        return "both" if self.prefills and self.decodes else "prefill" if self.prefills else "decode"

    def shares_with(self, other: Engine) -> bool:
        """Whether one can read the other's chunks, as far as that is known."""
        return self.layout == other.layout or not (self.layout and other.layout)


class _Node(msgspec.Struct):
    seen_at: float
    engines: dict[str, EngineReport]  # by URL
    peer: PeerEntry  # without an address: it takes no peers
    reaches: frozenset[str]  # see `NodeReport`


class _View(msgspec.Struct, frozen=True):
    """What follows from all nodes' words: good until one says something else, or the oldest word is too old."""

    oldest: float  # when the node was seen that was seen longest ago
    reported: dict[str, str]  # the node of each engine that is reported, by URL
    engines: list[Engine]
    by_url: dict[str, Engine]
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
        self.health = health
        self._clock = env.clock
        health.titled = self.titled
        # A restarted node has a new epoch. Its engines take a moment to attach again and are not detached
        # meanwhile: the old epoch's report holds for them until its heartbeat runs out.
        self._nodes: dict[tuple[str, int], _Node] = {}
        self._epochs: dict[str, list[tuple[str, int]]] = {}  # the keys of `_nodes` by name
        self._last_reports: dict[str, tuple[str, EngineReport]] = {}  # by URL: the node that said so last, and what
        self._view: _View | None = None
        self._logged: dict[str, str] = {}  # what the log says of each engine, by URL
        self._logged_nodes: frozenset[str] = frozenset()
        self._logged_apart: frozenset[str] = frozenset()

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
                if (other := engines.get(url)) is not None:  # another data parallel rank of one server
                    running, draining = engine.running + other.running, engine.draining or other.draining
                    one = min(engine, other, key=lambda each: each.engine)  # always the same: it names the server
                    engine = msgspec.structs.replace(one, running=running, draining=draining)
                engines[url] = engine
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
        reaches = frozenset(report.reaches)
        is_news = known is None or known.seen_at < self._oldest() or before.keys() != engines.keys()
        is_news = is_news or known is None or known.reaches != reaches
        if is_news or not all(self._is_said(report.node, url, engine) for url, engine in engines.items()):
            self._view = None
        self._nodes[key] = _Node(
            seen_at=self._clock(),
            engines=engines,
            peer=PeerEntry(report.node, report.listen, report.public_key),
            reaches=reaches,
        )
        for url, engine in engines.items():
            if (last := self._last_reports.get(url)) is not None and _life(last[1]) != _life(engine):
                self.health.renew(url)
            self._last_reports[url] = report.node, engine
            self.health.running(url, engine.running)
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
            if not is_member or self.health.of(url).well_at < now - FORGET_S:
                del self._last_reports[url]
                self._view = None
        self.health.keep({*self._named, *self._last_reports})
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
            self.health.running(url, 0)
        return gone

    def nodes(self) -> int:
        """How many nodes are to be believed in now; one that was started again is one."""
        return len(self.node_names())

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
            reaches = {name: node.reaches for name, node in heard}
            urls = dict.fromkeys((*self._named, *self._last_reports))
            listed = {url: self._engine(url, reported.get(url, ""), reaches) for url in urls}
            view = self._view = _View(
                oldest=min((node.seen_at for _, node in heard), default=float("inf")),
                reported=reported,
                engines=[*listed.values()],
                by_url=listed,
                places=Counter(node for node, _ in self._last_reports.values()),
            )
        return view

    def _engine(self, url: str, node: str, reaches: Mapping[str, frozenset[str]]) -> Engine:
        named = url in self._named
        _, report = self._last_reports.get(url, ("", None))
        role = report.role if report is not None else "both"
        told = report if node else None
        return Engine(
            url=url,
            name=report.engine if report is not None and report.engine else url,
            prefills=url in self._prefill if named else role in ("prefill", "both"),
            decodes=url in self._decode if named else role in ("decode", "both"),
            named=named,
            node=node,
            detached=report is not None and not node,
            draining=told is not None and told.draining,
            facts=told.facts if told is not None else None,
            layout=told.layout if told is not None else b"",
            reaches=reaches.get(node, frozenset()),
        )

    # ---- who can share KV -------------------------------------------------------------------

    def pairs(self) -> tuple[int, list[tuple[str, str]]]:
        """Of the nodes of prefill and of decode engines: how many have a way between them through which a probe has
        gone, or are one; and some of those that have not."""
        engines = self.all()
        decoding = {engine.node for engine in engines if engine.decodes and engine.node}
        prefilling = {engine.node: engine for engine in engines if engine.prefills and engine.node}
        count, missing = 0, list[tuple[str, str]]()
        for node, engine in prefilling.items():
            reached = decoding & {node, *engine.reaches}
            count += len(reached)
            if len(missing) < _MOST_TOLD and len(reached) < len(decoding):
                missing += [(node, other) for other in sorted(decoding - reached)]
        return count, missing[:_MOST_TOLD]

    def apart(self) -> list[str]:
        """Of engines that could share requests, but can read none of the KV of any that they could share them with: a
        sentence for each that names one of those, and says why."""
        models: dict[str, list[Engine]] = {}
        for engine in self.all():
            if engine.layout and (model := self._model(engine)):
                models.setdefault(model, []).append(engine)
        found: dict[str, None] = {}
        for engines in models.values():
            layouts: dict[bytes, list[Engine]] = {}
            for engine in engines:
                layouts.setdefault(engine.layout, []).append(engine)
            if len(layouts) == 1:
                continue
            # Of two layouts one is another one than that of any engine.
            prefill = {engine.layout: engine for engine in reversed(engines) if engine.prefills}
            decode = {engine.layout: engine for engine in reversed(engines) if engine.decodes}
            candidates = [*islice(prefill.values(), 2), *islice(decode.values(), 2)]
            for alike in layouts.values():
                if len(found) == _MOST_TOLD:
                    return list(found)
                one = alike[0]
                if not _can_share(alike):
                    others = (each for each in candidates if each.layout != one.layout and _can_share([one, each]))
                    found |= {self.why_apart(one, other): None for other in islice(others, 1)}
        return list(found)

    def why_apart(self, one: Engine, other: Engine) -> str:
        """Of two engines of different layouts, whichever comes first."""
        one, other = sorted((one, other), key=lambda each: (each.decodes, each.url))
        reports = [self._last_reports[each.url][1] for each in (one, other)]
        why = differing(*reports) or "one of them has had its weights changed, or its cache reset"
        return f"{self.titled(one.url)} and {self.titled(other.url)} share no KV: {why}"

    def _model(self, engine: Engine) -> str:
        models = self.health.of(engine.url).models
        return next(iter(models), "") if models else self._last_reports[engine.url][1].shape.get("model", "")

    # ---- the log ----------------------------------------------------------------------------

    def log_changes(self) -> None:
        """Log which nodes and engines came, changed and went since the last time. An engine is told of once it has
        answered."""
        names = self.node_names()
        for name in sorted(names - self._logged_nodes):
            log.info("joined: node %s", printable(name))
        for name in sorted(self._logged_nodes - names):
            log.info("left: node %s", printable(name))
        self._logged_nodes = names
        for url, engine in self._viewed().by_url.items():
            line = self._described(engine)
            if self._logged.get(url) != line and (url in self._logged or self.health.of(url).is_ready):
                log.info("%s: %s", "changed" if url in self._logged else "joined", printable(line, _MOST_CHARS))
                self._logged[url] = line
        for url in self._logged.keys() - self._viewed().by_url.keys():
            log.info("left: %s", printable(self._logged.pop(url), _MOST_CHARS))
        apart = frozenset(self.apart())
        for text in sorted(apart - self._logged_apart):
            log.warning("%s", printable(text, _MOST_CHARS))
        self._logged_apart = apart

    def titled(self, url: str) -> str:
        """The engine at this URL, with its role, its models and its node."""
        engine = self._viewed().by_url.get(url)
        return f"engine {url}" if engine is None else self._described(engine)

    def _described(self, engine: Engine) -> str:
        models = list(self.health.of(engine.url).models or ())
        more = f" and {len(models) - _MOST_NAMES} more" if len(models) > _MOST_NAMES else ""
        model = f"model {', '.join(models[:_MOST_NAMES])}{more}" if models else "model not known"
        node = f"node {engine.node}" if engine.node else "no node"
        name = f"{engine.name} at {engine.url}" if engine.name != engine.url else engine.url
        return f"engine {name} ({engine.role}, {model}, {node}{', draining' if engine.draining else ''})"


def _can_share(engines: Sequence[Engine]) -> bool:
    """Whether there are two among them of which one prefills and the other one decodes."""
    prefill = [each.url for each in engines if each.prefills]
    decode = [each.url for each in engines if each.decodes]
    return bool(prefill and decode) and len({*prefill, *decode}) > 1


def _lasting(engine: EngineReport) -> tuple[object, ...]:
    return (engine.engine, engine.role, engine.facts, engine.layout, engine.draining)


def _life(engine: EngineReport) -> tuple[object, ...]:
    """What stays as long as it runs."""
    return (engine.engine, engine.facts, engine.shape)


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
