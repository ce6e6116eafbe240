"""Kubernetes: the EndpointSlices of a service, whose ports `node` and `control` are those of nodes and proxies.

A node has the name of its pod or of its host, a proxy that of its pod. The pod's service account must be allowed to
get, list and watch EndpointSlices; nothing is written. Its token and the API's certificate are files that are renewed
while the pod runs, so each round reads them again.
"""

from __future__ import annotations

import os
import random
import re
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from pdx.discovery.discovery import ANSWER_S, MAX_FOUND, WATCH_S, Announced, answer, asked, lines, session
from pdx.errors import ConfigError, ProtocolError
from pdx.security.address import bracketed
from pdx.security.roster import Found

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PORTS = {"node": "nodes", "control": "proxies"}  # by their names in the service
_NAME = re.compile(r"(?P<service>[a-z0-9-]{1,63})(?:\.(?P<namespace>[a-z0-9-]{1,63}))?")
_MAX_FILE_BYTES = 1 << 20


_Text = Annotated[str, Meta(max_length=256)]


class _Port(msgspec.Struct):
    name: _Text | None = None
    port: int | None = None


class _Target(msgspec.Struct):
    name: _Text = ""


class _Endpoint(msgspec.Struct):
    addresses: list[_Text] = []
    target: _Target | None = msgspec.field(name="targetRef", default=None)
    host: _Text | None = msgspec.field(name="nodeName", default=None)


class _Meta(msgspec.Struct):
    name: _Text = ""
    version: _Text = msgspec.field(name="resourceVersion", default="")


class _Slice(msgspec.Struct):
    metadata: _Meta
    kind: _Text = msgspec.field(name="addressType", default="")
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[_Slice]


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _End(NamedTuple):
    """One name of an endpoint, with its address."""

    part: str  # of `Found`
    name: str
    address: str


_list = msgspec.json.Decoder(_List)
_event = msgspec.json.Decoder(_Event)
_slice = msgspec.json.Decoder(_Slice)


class Kubernetes:
    """A service's EndpointSlices as a source. All but the constructor belongs to one event loop."""

    is_assigned = True

    def __init__(self, service: str, namespace: str, *, api: str, account: Path) -> None:
        """`namespace`: empty for the pod's. `api`: its URL. `account`: the folder with the service account's files."""
        self._service = service
        self._namespace = namespace
        self._api = api
        self._account = account
        self._slices: dict[tuple[str, str], list[_End]] = {}  # by kind of address and name
        self._count = 0  # of slices and names

    @classmethod
    def named(cls, name: str) -> Kubernetes:
        """`name`: SERVICE[.NAMESPACE]. :raises ConfigError: it has another form, or this is not a pod."""
        match = _NAME.fullmatch(name)
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{each}", "") for each in ("HOST", "PORT"))
        if match is None:
            raise ConfigError(f"--discover kubernetes:{name:.100}: write kubernetes:SERVICE[.NAMESPACE]")
        if not host or not port.isdigit():
            raise ConfigError("--discover kubernetes: this is not a pod: KUBERNETES_SERVICE_HOST and _PORT are not set")
        return cls(
            match["service"], match["namespace"] or "", api=f"https://{bracketed(host)}:{port}", account=_ACCOUNT
        )

    def __str__(self) -> str:
        return f"Kubernetes at {self._api}"

    def _read(self, name: str) -> str:
        with (self._account / name).open() as file:
            return file.read(_MAX_FILE_BYTES).strip()

    async def follow(self, own: Announced | None, changed: Callable[[], None]) -> None:
        """See `Source`: pods need not announce themselves."""
        namespace = self._namespace or self._read("namespace")
        url = f"{self._api}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        ask = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
        headers = {"Authorization": f"Bearer {self._read('token')}", "Accept": "application/json"}
        tls = ssl.create_default_context(cadata=self._read("ca.crt"))
        async with session(tls, headers=headers) as http:
            async with asked(http, "GET", url, ANSWER_S, params=ask) as told:
                listed = _list.decode(await answer(told))
            self._slices, self._count = {}, 0
            for each in listed.items:
                self._put(each)
            changed()
            watch_s = random.uniform(WATCH_S, 1.5 * WATCH_S)
            ask |= {"watch": "1", "resourceVersion": listed.metadata.version, "timeoutSeconds": f"{watch_s:.0f}"}
            async with asked(http, "GET", url, watch_s + ANSWER_S, params=ask) as told:
                async for line in lines(told):
                    self._heed(_event.decode(line))
                    changed()

    def _heed(self, event: _Event) -> None:
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):  # mostly 410: the changes since then are not kept
            raise ProtocolError(f"{event.type:.20}: {bytes(event.object)[:200].decode(errors='replace')}")
        said = _slice.decode(event.object)
        if event.type == "DELETED":
            self._forget(said)
        else:
            self._put(said)

    def _put(self, said: _Slice) -> None:
        self._forget(said)
        ends = self._slices[said.kind, said.metadata.name] = list(_ends(said))
        self._count += 1 + len(ends)
        if self._count > MAX_FOUND:
            raise ProtocolError(f"more than {MAX_FOUND} slices and names")

    def _forget(self, said: _Slice) -> None:
        ends = self._slices.pop((said.kind, said.metadata.name), None)
        self._count -= 1 + len(ends) if ends is not None else 0

    def found(self) -> Found:
        """See `Source`. If a pod has addresses of both kinds, the IPv4 one is taken."""
        found: dict[str, dict[str, str]] = {part: {} for part in _PORTS.values()}
        for _, ends in sorted(self._slices.items()):
            for end in ends:
                found[end.part].setdefault(end.name, end.address)
        return Found(**found, is_assigned=self.is_assigned)

    async def leave(self) -> None:
        """No-op: Kubernetes notices by itself."""


def _ends(said: _Slice) -> Iterator[_End]:
    # Only one port per name: a slice has many endpoints, and may have many ports.
    for port in {port.name: port for port in said.ports or ()}.values():
        part = _PORTS.get(port.name or "")
        for each in said.endpoints or () if part else ():
            for name in (each.target.name if each.target is not None else "", each.host):
                if name and part and each.addresses:
                    yield _End(part, name, f"tcp://{bracketed(each.addresses[0])}:{port.port}")
