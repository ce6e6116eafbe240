"""All that the proxy has for controllers, put together: verbs over HTTP."""

from __future__ import annotations

from aiohttp import web

from pdx.proxy.body import Intake
from pdx.proxy.cache.access import Access, Token
from pdx.proxy.cache.instances import Instances
from pdx.proxy.cache.orders import Orders
from pdx.proxy.cache.routes import Routes
from pdx.proxy.cache.verbs import Verbs
from pdx.proxy.config import ProxyConfig
from pdx.proxy.control import Control
from pdx.proxy.engines import Engines
from pdx.proxy.following import Following
from pdx.proxy.metrics import Metrics
from pdx.telemetry.env import Env
from pdx.wire.proxy import NodeReport, Reply

_ALL_BODIES = 8  # times the largest body: what bodies of verbs may hold together


class CacheControl:
    """One per proxy, on its event loop."""

    def __init__(
        self,
        config: ProxyConfig,
        control: Control,
        env: Env,
        *,
        engines: Engines,
        metrics: Metrics,
        chunks: Following | None,
    ) -> None:
        """`chunks`: see `Verbs`.

        :raises ConfigError: the token's file is wrong.
        """
        self._instances = Instances(control, env, silent_s=config.heartbeat_timeout_s)
        self._orders = Orders(control, env)
        self.verbs = Verbs(self._instances, self._orders, engines, chunks)
        token = Token(config.cache_token_file) if config.cache_token_file else None
        largest = config.max_body_bytes
        self._routes = Routes(
            self.verbs,
            Access(token, env),
            self._instances,
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
