"""Controllers at the control socket: what they say is relayed to the node that they name, and its answer to them.

Who may come in, and with which rights, is `pdx.proxy.control`'s business: it asks the roster anew with every message.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter, OrderedDict

from pdx.errors import Exhausted, PdxError, PeerRefused, ProtocolError
from pdx.proxy.cache.instances import Instances
from pdx.proxy.cache.orders import Orders
from pdx.proxy.control import MAX_PEERS, Control, FromController, Rights
from pdx.security.roster import RIGHTS_TO
from pdx.telemetry.faults import Faults, printable
from pdx.wire.messages import (
    VERSION,
    Bye,
    Hello,
    Order,
    Outcome,
    PeerEntry,
    PeerList,
    Refused,
    Reply,
    ToController,
    Welcome,
)

AT_A_TIME = 64  # orders of one controller
MAX_CONTROLLERS = 256  # attached; of more, the one that was silent for longest has to say hello again
WAIT_S = 10.0  # that a node has to answer


class _Controller:
    """One that is attached; `key` is what it was let in with."""

    def __init__(self, route: bytes, key: str) -> None:
        self.route = route
        self.key = key


class Controllers:
    """All calls on one event loop. `close` ends what is under way."""

    def __init__(
        self, control: Control, instances: Instances, orders: Orders, *, counters: Counter[str], faults: Faults
    ) -> None:
        self._control = control
        self._instances = instances
        self._orders = orders
        self._counters = counters
        self._faults = faults
        self._epoch = secrets.randbits(62)
        self._attached: OrderedDict[bytes, _Controller] = OrderedDict()  # by route
        self._under_way: Counter[bytes] = Counter()  # orders by route, also of those that said hello again since
        self._peers = PeerList([])
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send_peers(self, entries: list[PeerEntry]) -> None:
        """Tell all which nodes there are, and each that comes later."""
        self._peers = PeerList(entries[:MAX_PEERS])
        for controller in list(self._attached.values()):
            self._tell(controller, self._peers)

    def said(self, route: bytes, key: str, rights: Rights, message: FromController) -> None:
        """Somebody with the rights of a controller has said something."""
        controller = self._attached.get(route)
        if controller is None or controller.key != key:
            controller = None
        else:
            self._attached.move_to_end(route)
        if isinstance(message, Hello):
            self._hello(_Controller(route, key), message)
        elif isinstance(message, Bye):
            self._attached.pop(route, None)
        elif isinstance(message, Order):
            try:
                self._order(controller, rights, message)
            except PdxError as error:
                self._counters["controllers_denied"] += 1
                self._faults.warn(f"controllers_denied {rights.name}", printable(f"{rights.name}: {error}"))
                self._tell(controller or _Controller(route, key), Reply(message.number, Refused.of(error)))

    def _hello(self, controller: _Controller, hello: Hello) -> None:
        if hello.version != VERSION:
            text = f"this proxy speaks version {VERSION}, and the controller {hello.version}"
            self._tell(controller, Refused.of(ProtocolError(text)))
        elif hello.kind != "controller":
            text = f"a {hello.kind} attaches to its node, not to the proxy"
            self._tell(controller, Refused.of(PeerRefused(text)))
        else:
            self._attached[controller.route] = controller
            if len(self._attached) > MAX_CONTROLLERS:
                self._attached.popitem(last=False)
            self._tell(controller, Welcome(self._epoch, os.getpid()))
            self._tell(controller, self._peers)

    def _tell(self, controller: _Controller, message: ToController) -> None:
        if not self._control.tell_controller(controller.route, controller.key, message):
            self._attached.pop(controller.route, None)

    def _order(self, controller: _Controller | None, rights: Rights, order: Order) -> None:
        """:raises PdxError: it is not relayed."""
        if controller is None:
            raise PeerRefused("say hello first")
        _check(rights, order)
        if self._under_way[controller.route] >= AT_A_TIME:
            raise Exhausted("orders", f"{AT_A_TIME} verbs of this controller are under way")
        self._under_way[controller.route] += 1
        task = asyncio.create_task(self._relay(controller, order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, controller: _Controller, order: Order) -> None:
        try:
            with self._faults.contain("an order of a controller"):
                self._tell(controller, Reply(order.number, await self._outcome(controller.key, order)))
        finally:
            self._under_way[controller.route] -= 1
            if not self._under_way[controller.route]:
                del self._under_way[controller.route]

    async def _outcome(self, key: str, order: Order) -> Outcome:
        try:
            self._instances.check_heard(self._instances.get(order.node))
            return await self._orders.ask(
                order.node, order.verb, WAIT_S, check=lambda: _check(self._control.rights(key), order)
            )
        except PdxError as error:
            return Refused.of(error)


def _check(rights: Rights | None, order: Order) -> None:
    """:raises PeerRefused: they do not let it be said."""
    if rights is None:
        raise PeerRefused("the roster has no such controller any more")
    right = RIGHTS_TO[type(order.verb)]
    if rights.may is not None and right not in rights.may:
        raise PeerRefused(f"the roster does not let controller {rights.name!r} say {right!r}")
