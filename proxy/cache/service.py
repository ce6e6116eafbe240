"""All that the proxy has for controllers, put together: verbs over HTTP."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec
from aiohttp import web

from pdx.errors import Exhausted, LegFailed, NoEngine
from pdx.proxy.body import Intake
from pdx.proxy.cache.access import Access, Token
from pdx.proxy.cache.instances import Instances
from pdx.proxy.cache.orders import Orders
from pdx.proxy.cache.routes import Routes
from pdx.proxy.cache.verbs import Index, Verbs
from pdx.proxy.config import ProxyConfig
from pdx.proxy.control import Control
from pdx.proxy.engines import Engines
from pdx.proxy.leg import Legs
from pdx.proxy.metrics import Metrics
from pdx.security.address import base_url
from pdx.telemetry.faults import Faults
from pdx.wire.proxy import NodeReport, Reply
from pdx.wire.verbs import Model

_TOKENIZE_S = 30.0
_ALL_BODIES = 8  # times the largest body: what bodies of verbs may hold together


class _Tokens(msgspec.Struct):
    tokens: list[int]


class CacheControl:
    """One per proxy, on its event loop."""

    def __init__(
        self,
        config: ProxyConfig,
        control: Control,
        *,
        engines: Engines,
        legs: Callable[[], Legs],
        metrics: Metrics,
        counters: Counter[str],
        faults: Faults,
        index: Index | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`legs`: how engines are asked, once the proxy is started. `index`: see `Verbs`.

        :raises ConfigError: the token's file is wrong.
        """
        self._engines = engines
        self._legs = legs
        self._instances = Instances(members=control.members, silent_s=config.heartbeat_timeout_s, clock=clock)
        self._orders = Orders(control.order, counters=counters, faults=faults)
        self._verbs = Verbs(self._instances, self._orders, self._tokenize, index=index)
        token = Token(config.cache_token_file) if config.cache_token_file else None
        largest = config.max_body_bytes
        self._routes = Routes(
            self._verbs,
            Access(token, counters=counters, faults=faults, clock=clock),
            nodes=self._instances.all,
            intake=Intake(each_bytes=largest, all_bytes=_ALL_BODIES * largest, timeout_s=config.body_timeout_s),
            metrics=metrics,
        )

    def install(self, app: web.Application) -> None:
        """Serve verbs there."""
        self._routes.install(app)

    def report(self, report: NodeReport) -> None:
        """A node has reported."""
        if self._instances.report(report):
            self._orders.lost(report.node, "was started again")

    def replied(self, node: str, reply: Reply) -> None:
        """A node has answered."""
        self._orders.replied(node, reply)

    async def _tokenize(self, model: Model, body: bytes) -> list[int]:
        """The tokens that an engine makes of a text. It is asked without a key: a controller's is none of its own.

        :raises NoEngine: it cannot be asked, or answers with something else.
        """
        url = base_url(model.url) if model.url else ""
        engine = next((each for each in self._engines.all() if each.url == url), None)
        if engine is None:
            raise NoEngine(f"engine {model.engine!r} serves no HTTP that this proxy knows, so give token ids")
        try:
            answer, raw = await self._legs().ask(engine, "/tokenize", headers={}, timeout_s=_TOKENIZE_S, payload=body)
            if answer.status == 200:
                return msgspec.json.decode(raw, type=_Tokens).tokens
            why = f"status {answer.status}"
        except (LegFailed, Exhausted, msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = str(error)
        raise NoEngine(f"engine {model.engine!r} made no tokens of the text ({why[:200]}), so give token ids")
