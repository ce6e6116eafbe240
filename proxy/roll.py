"""The proxy's log says who is there: each engine with its model, its node and its address, when that changes."""

from __future__ import annotations

import logging

from pdx.proxy.engines import Engine, Engines
from pdx.proxy.health import Health
from pdx.telemetry.faults import printable

log = logging.getLogger(__name__)

_MOST_NAMES = 4  # of an engine with many adapters


class Roll:
    """Call `look` regularly. An engine is told of once it has answered."""

    def __init__(self, engines: Engines, health: Health) -> None:
        self._engines = engines
        self._health = health
        self._told: dict[str, str] = {}  # by URL
        self._nodes: frozenset[str] = frozenset()

    def look(self) -> None:
        """Log what has changed since the last time."""
        nodes = self._engines.node_names()
        for name in sorted(nodes - self._nodes):
            log.info("node %s reports", printable(name))
        for name in sorted(self._nodes - nodes):
            log.info("node %s does not report any more", printable(name))
        self._nodes = nodes
        engines = {engine.url: engine for engine in self._engines.all()}
        for url, engine in engines.items():
            line = self._line(engine)
            if self._told.get(url) != line and (url in self._told or self._health.of(url).is_ready):
                log.info("%s engine %s", "found" if url not in self._told else "now", printable(line))
                self._told[url] = line
        for url in self._told.keys() - engines.keys():
            log.info("gone: engine %s", printable(self._told.pop(url)))

    def _line(self, engine: Engine) -> str:
        models = list(self._health.of(engine.url).models or ())
        more = f" and {len(models) - _MOST_NAMES} more" if len(models) > _MOST_NAMES else ""
        model = f"model {', '.join(models[:_MOST_NAMES])}{more}" if models else "model not known"
        role = "both" if engine.prefills and engine.decodes else "prefill" if engine.prefills else "decode"
        node = f"node {engine.node}" if engine.node else "no node"
        name = f"{engine.name} at {engine.url}" if engine.name != engine.url else engine.url
        return f"{name}: {role}, {model}, {node}"
