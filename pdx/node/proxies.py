"""The proxies, with all their workers, that a node reports to and takes messages from.

Proxies are independent of each other. Each says how many workers it has; their addresses follow from that number
(`pdx.security.address.worker_address`), so the node never dials an address from a message.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdx.config import NodeConfig
from pdx.errors import ConfigError, NodeError, ProtocolError
from pdx.node.events.follower import Follower
from pdx.node.proxy_line import ProxyLine
from pdx.node.reports import heartbeat
from pdx.security.address import worker_address
from pdx.wire.messages import MAX_FRAME_BYTES, Cancel, Outcome, Refused, encode
from pdx.wire.proxy import Arriving, Follow, NodeReport, Order, PeerEntry, PeerList, Prefilled, Reply
from pdx.wire.verbs import AnyVerb

if TYPE_CHECKING:
    from pdx.node.service import Service

log = logging.getLogger("pdx.node")


def proxies_of(config: NodeConfig) -> list[str]:
    """The addresses of all proxies to report to, which one setting lists with commas."""
    return list(dict.fromkeys(each for word in config.proxy.split(",") if (each := word.strip())))


class Proxies:
    """All lines to proxies. Owned by the control loop. Open from construction to `close`; nothing blocks."""

    def __init__(
        self,
        addresses: Sequence[str],
        service: Service,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
    ) -> None:
        """:raises ConfigError: see `Roster.secure_proxy`."""
        self._service = service
        self._faults = service.env.faults
        self._context = context
        self._poller = poller
        self._named = list(addresses)
        self._all: dict[str, ProxyLine] = {}  # by address
        self._by_socket: dict[zmq.Socket[bytes], ProxyLine] = {}
        self._next_report = 0.0
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for address in addresses:
                self._open(address, address, 0)
            undo.pop_all()

    def _open(self, address: str, base: str, number: int) -> None:
        """Open a line in place of the present one, which stays if this fails."""
        connections = self._service.peers.connections
        line = ProxyLine(
            self._context,
            address,
            base,
            number,
            roster=connections.roster,
            own=connections.own,
            follower=Follower(self._service.events, self._service.epoch),
            faults=self._faults,
        )
        self._end(address)
        self._all[address] = line
        for socket in line.sockets:
            self._by_socket[socket] = line
            self._poller.register(socket, zmq.POLLIN)

    def _try_open(self, address: str, base: str, number: int) -> None:
        try:
            self._open(address, base, number)
        except (ConfigError, zmq.ZMQError) as error:
            text = f"worker {number} of the proxy at {base} is not reported to, or not with the node's new key: {error}"
            self._faults.warn(f"proxy {address}", text)

    def _end(self, address: str) -> None:
        if (line := self._all.pop(address, None)) is not None:
            for socket in line.sockets:
                del self._by_socket[socket]
                self._poller.unregister(socket)
            line.close()

    def close(self) -> None:
        """Idempotent."""
        for address in list(self._all):
            self._end(address)

    def look(self) -> None:
        """At each tick: open lines to newly discovered proxies, and end those to proxies that are no longer discovered
        and not connected. A connected proxy stays as long as the roster has its key, whatever discovery says. When this
        node's key changes, its lines are opened anew."""
        own, roster = self._service.peers.connections.own, self._service.peers.connections.roster
        wanted = {*self._named, *roster.proxies}
        kept = wanted | {each.base for each in self._all.values() if each.is_up}
        for address, each in list(self._all.items()):
            if each.base not in kept or not roster.is_proxys(each.key, each.base):
                self._end(address)
            elif each.own != own:
                self._try_open(address, each.base, each.number)
        for address in wanted - self._all.keys():
            self._try_open(address, address, 0)

    # ---- from proxies -----------------------------------------------------------------------

    def serve(self, source: object) -> bool:
        """Take in messages that have come on a socket; False: it is not a proxy's."""
        proxy = self._by_socket.get(source) if isinstance(source, zmq.Socket) else None
        if proxy is None:
            return False
        if proxy.heed_events():
            self._next_report = 0.0
        if not proxy.is_up:
            proxy.follower.gone()
        for message in proxy.receive():
            with self._faults.contain("a message of the proxy"):
                self._heed(proxy, message)
        return True

    def _heed(self, proxy: ProxyLine, message: object) -> None:
        service = self._service
        match message:
            case Arriving(session, salt):
                service.look_ahead.arriving((salt, session))
            case Cancel(transfer):
                service.cancel(transfer, "the proxy")
            case Follow():
                proxy.follower.asked(message)
            case Prefilled(transfer):
                service.transfers.prefilled(transfer, service.env.clock(), "the proxy")
            case PeerList(peers, workers, tag):
                proxy.peers, proxy.tag = peers, tag
                if not proxy.number:
                    self._heed_workers(proxy.base, workers)
                service.peers.take_proxy_list(self._peers())
            case Order(number, verb):
                self._reply(proxy, number, self._carried_out(verb))

    def _peers(self) -> list[PeerEntry]:
        """The peers that any connected proxy lists, or, if none is connected, any of the last ones. A proxy that has
        just started does not know all nodes yet."""
        up = [each for each in self._all.values() if each.is_up]
        return list({peer.name: peer for each in up or self._all.values() for peer in each.peers}.values())

    def _heed_workers(self, base: str, workers: int) -> None:
        wanted = {worker_address(base, number): number for number in range(1, workers)}
        for address, number in wanted.items():
            if address not in self._all:
                self._try_open(address, base, number)
        for address, each in list(self._all.items()):
            if each.base == base and each.number and address not in wanted:
                self._end(address)

    def _carried_out(self, verb: AnyVerb) -> Outcome:
        """The outcome of a verb that a controller has sent through a proxy."""
        name = type(verb).__name__
        outcome: Outcome = Refused(NodeError.__name__, f"an internal error ended this {name}; see the node's log")
        try:
            with self._faults.contain(f"a {name} of the proxy's", passing=(NodeError, ProtocolError)):
                outcome = self._service.control(verb)
        except (NodeError, ProtocolError) as error:
            self._service.counters["refused"] += 1
            outcome = Refused.of(error)
        return outcome

    def _reply(self, proxy: ProxyLine, number: int, outcome: Outcome) -> None:
        reply = Reply(number, outcome)
        if len(encode(reply)) > MAX_FRAME_BYTES:
            reply = Reply(number, Refused(NodeError.__name__, f"the answer has more than {MAX_FRAME_BYTES} bytes"))
        if not proxy.send(reply):
            self._service.counters["replies_dropped"] += 1

    # ---- to proxies -------------------------------------------------------------------------

    def tell_changes(self) -> None:
        """Tell the proxies that follow which chunks have changed."""
        for proxy in self._all.values():
            proxy.follower.turn(proxy.send)

    def report(self, now: float) -> None:
        """Send the heartbeat if it is due or there is news. Marks of a transfer are news to its proxy; while no proxy
        is connected, the last 4,096 marks wait."""
        service = self._service
        up = [proxy for proxy in self._all.values() if proxy.is_up]
        is_due = now >= self._next_report or service.has_news
        if not up or not (is_due or service.marks):
            return
        if is_due:
            self._next_report = now + service.config.report_s
        report = heartbeat(service)
        for proxy in up:
            mine = self._marks_of(proxy, report)
            if (is_due or mine.marks) and not proxy.send(mine):
                service.counters["reports_dropped"] += 1

    def _marks_of(self, proxy: ProxyLine, report: NodeReport) -> NodeReport:
        """The report with only the marks of this proxy's transfers, and of those that no proxy claims."""
        others = [each for each in self._all.values() if each is not proxy]
        found = [
            mark
            for mark in report.marks
            if proxy.concerns(mark.transfer) or not any(each.concerns(mark.transfer) for each in others)
        ]
        return msgspec.structs.replace(report, marks=found)
