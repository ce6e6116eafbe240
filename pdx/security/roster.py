"""The nodes, with addresses and keys: from a file or, on this host, from the proxy.

    [nodes.alpha]
    address = "tcp://10.0.0.1:7700"
    key = "<public key, as `pdx keygen` prints it>"
    next_key = "..."                    # valid as well, while the node changes to it; may be left out
    engine_hosts = ["192.168.7.1"]      # where its engines serve besides the address's host; may be left out

    [proxy]
    address = "tcp://10.0.0.9:7600"
    key = "..."

    [proxies.second]                    # each further one, if there are several
    address = "tcp://10.0.0.10:7600"
    key = "..."

    [readers.router]                    # may read the events of nodes, and nothing else
    key = "..."

If there is a file, it alone names the nodes. For a node with a key but no `address`, the address is the one that it
tells itself, through a proxy, else the one that the cluster tells (`Found`): the process there must prove the key.
Without a file, names come from the proxy, but only addresses of this host are believed. An address from anywhere else,
above all from a request, is never dialled. No sockets here.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import zmq
from msgspec import Meta

from pdx.config import check_name
from pdx.errors import ConfigError, PeerUnknown
from pdx.security.address import address_host, by_name, check_address, check_hosts, is_found_address
from pdx.security.curve_keys import KeyPair, check_key, secure_client
from pdx.security.reread import Reread
from pdx.wire.proxy import PeerEntry

log = logging.getLogger(__name__)

MAX_NODES = 1024
MAX_READERS = 256
MAX_PROXIES = 64
_MAX_FILE_BYTES = 1 << 20
_MAX_WARNED = 4096


class ReaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One reader of events in the file."""

    key: Annotated[str, Meta(max_length=40)]


class RosterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node, or the proxy, in the file."""

    address: Annotated[str, Meta(max_length=256)] = ""  # may be left out if there is a key
    key: Annotated[str, Meta(max_length=40)] = ""
    next_key: Annotated[str, Meta(max_length=40)] = ""
    engine_hosts: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=16)] = []

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, any of which it may prove."""
        return (self.key, self.next_key) if self.next_key else (self.key,)


_Entry = TypeVar("_Entry", RosterEntry, ReaderEntry)
_NOBODY: Mapping[str, str] = MappingProxyType({})


class Found(NamedTuple):
    """Addresses by name, as a cluster tells them (`pdx.discovery`); they prove no identity."""

    nodes: Mapping[str, str] = _NOBODY
    proxies: Mapping[str, str] = _NOBODY
    is_assigned: bool = False  # the cluster itself assigns these addresses; else processes announce them


class RosterFile(msgspec.Struct, frozen=True):
    """The checked contents of a roster file."""

    nodes: dict[str, RosterEntry]
    proxy: RosterEntry | None = None
    proxies: dict[str, RosterEntry] = {}
    readers: dict[str, ReaderEntry] = {}

    @classmethod
    def load(cls, path: str | Path, *, has_keys: bool) -> RosterFile:
        """Read and check a file. `has_keys`: this process has a key, so every entry needs one.

        :raises ConfigError: it cannot be read, others may write it, or an entry is wrong; the text names both.
        """
        try:
            with open(path, "rb") as file:
                info = os.fstat(file.fileno())
                text = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            why = f"roster {path}: {error.strerror}; the documentation's page on hosts shows what is in one"
            raise ConfigError(why) from error
        if info.st_mode & 0o022 or info.st_uid not in (os.getuid(), 0):
            raise ConfigError(
                f"roster {path}: others may change it (mode {info.st_mode & 0o777:04o}): chmod go-w {path}"
            )
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"roster {path}: more than {_MAX_FILE_BYTES} bytes")
        try:
            tables = tomllib.loads(text.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"roster {path}: {error}") from error
        return cls._checked(tables, str(path), has_keys=has_keys)

    @classmethod
    def _checked(cls, tables: dict[str, object], path: str, *, has_keys: bool) -> RosterFile:
        def all_of(name: str, kind: type[_Entry], most: int) -> dict[str, _Entry]:
            found = tables.get(name, {})
            if not isinstance(found, dict):
                raise ConfigError(f"roster {path}: {name} is not {known}")
            if len(found) > most:
                raise ConfigError(f"roster {path}: {len(found)} {name}; at most {most} are possible")
            for each in found:
                check_name(each, f"roster {path}")
            return {
                each: _entry(value, kind, f"roster {path}: {name}.{each}", has_keys) for each, value in found.items()
            }

        known = "[nodes.NAME], [proxy], [proxies.NAME] or [readers.NAME]"
        if unknown := sorted(tables.keys() - {"nodes", "proxy", "proxies", "readers"}):
            raise ConfigError(f"roster {path}: {', '.join(unknown)} is not {known}")
        nodes, readers = all_of("nodes", RosterEntry, MAX_NODES), all_of("readers", ReaderEntry, MAX_READERS)
        proxies = all_of("proxies", RosterEntry, MAX_PROXIES)
        proxy = _entry(tables["proxy"], RosterEntry, f"roster {path}: proxy", has_keys) if "proxy" in tables else None
        owners: dict[str, str] = {}
        keys = [(f"nodes.{name}", key) for name, entry in nodes.items() for key in entry.keys]
        keys += [(f"readers.{name}", entry.key) for name, entry in readers.items()]
        keys += [(f"proxies.{name}", entry.key) for name, entry in proxies.items()]
        keys += [("proxy", proxy.key)] if proxy else []
        for where, key in keys:
            if key and owners.setdefault(key, where) != where:
                raise ConfigError(f"roster {path}: {owners[key]} and {where} have the same key")
        return cls(nodes, proxy, proxies, readers)


def _entry(value: object, kind: type[_Entry], where: str, has_keys: bool) -> _Entry:
    try:
        entry = msgspec.convert(value, kind)
        if isinstance(entry, RosterEntry) and not entry.key and (has_keys or entry.next_key):
            raise ConfigError("a key is missing")
        if isinstance(entry, RosterEntry) and entry.next_key and ": nodes." not in where:
            raise ConfigError("only nodes have a next_key")
        if isinstance(entry, RosterEntry) and (entry.address or not has_keys):
            check_address(entry.address, has_keys=has_keys)
        if isinstance(entry, RosterEntry):
            check_hosts(entry.engine_hosts)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error
    for key in entry.keys if isinstance(entry, RosterEntry) else [entry.key]:
        if key or isinstance(entry, ReaderEntry):
            check_key(key, where)
    return entry


class Roster:
    """The nodes that may be dialled and admitted. Not thread-safe, but any thread may read `listeners`."""

    def __init__(self, path: str, *, has_keys: bool, counters: Counter[str] | None = None) -> None:
        """`path`: empty for no file: then the proxy's list counts (see `take_proxy_list`). `counters`: see `Reread`.

        :raises ConfigError: there are keys but no file, or the file is wrong.
        """
        if has_keys and not path:
            raise ConfigError("keys need a roster file that names the peers and their keys (--roster)")
        self._path = path
        self._has_keys = has_keys
        self._file: RosterFile | None = None
        self._by_key: dict[str, str] = {}
        self._nodes: dict[str, RosterEntry] = {}  # of the file, with known addresses; without a file, the proxy's list
        self._told: dict[str, str] = {}  # addresses told by proxies
        self._found = Found()
        self._known: dict[str, str] = {}  # last found addresses of nodes for which the file has none
        self._proxies: dict[str, RosterEntry] = {}  # found proxies, by address
        self.listeners: frozenset[str] = frozenset()  # keys of nodes and of readers of events
        self._warned: set[str] = set()
        self._reread: Reread[RosterFile] | None = None
        if path:
            self._reread = Reread(self._load, path, what="the roster", counters=counters)
            self._set(self._reread.value)

    def _load(self) -> RosterFile:
        file = RosterFile.load(self._path, has_keys=self._has_keys)
        if self.members and not file.nodes:  # it is being written, or the disk is full
            raise ConfigError(f"roster {self._path}: it names no nodes any more")
        return file

    def proxy_at(self, address: str) -> RosterEntry | None:
        """The file's entry for the proxy at this address: the one with that address, or found there, else `[proxy]`."""
        if self._file is None:
            return None
        of_file = self._file.proxy
        named = [*self._file.proxies.values(), *([of_file] if of_file is not None else [])]
        return next((each for each in named if each.address == address), self._proxies.get(address, of_file))

    def proxy_key(self, address: str) -> str:
        """The key that the proxy there must prove; empty: none, or unknown."""
        proxy = self.proxy_at(address)
        return proxy.key if proxy is not None else ""

    def is_proxys(self, key: str, address: str) -> bool:
        """Whether the proxy there may still prove this key (empty: none), even if discovery no longer finds it."""
        if self._file is not None and self.proxy_at(address) is None:
            return not key or any(each.key == key for each in self._file.proxies.values())
        return self.proxy_key(address) == key

    @property
    def proxies(self) -> list[str]:
        """The addresses of found proxies for which the file has a key but no address."""
        return list(self._proxies)

    def proxy_name(self, public_key: str) -> str:
        """The NAME of the `[proxies.NAME]` with this key; empty: none."""
        named = self._file.proxies if self._file is not None else {}
        return next((name for name, each in named.items() if each.key == public_key), "")

    def node(self, name: str) -> RosterEntry | None:
        """The file's entry for a node."""
        return self._file.nodes.get(name) if self._file is not None else None

    def entry(self, name: str) -> RosterEntry:
        """The address at which to dial the node, and its valid keys. :raises PeerUnknown: it has no address."""
        found = self._nodes.get(name)
        if found is None:
            known = ", ".join(sorted(self._nodes)[:16]) or "nobody"
            raise PeerUnknown(
                f"no node is named {name!r:.80} in the roster ({self._path or 'told by the proxy'}: {known})"
            )
        return found

    def address_of(self, name: str) -> str:
        """The address at which to dial the node; empty: none."""
        found = self._nodes.get(name)
        return found.address if found is not None else ""

    def host_of(self, name: str) -> str:
        """The node's host by the file or by a cluster that assigns addresses, not by the node; empty: unknown."""
        entry = self.node(name)
        if entry is None or entry.address:
            return address_host(entry.address) if entry is not None else ""
        found = self._known.get(name, "") if self._found.is_assigned else ""
        return address_host(found) if found else ""

    @property
    def names(self) -> list[str]:
        """All nodes that can be dialled now."""
        return list(self._nodes)

    @property
    def members(self) -> set[str]:
        """All nodes of the file, even without an address."""
        return set(self._file.nodes) if self._file is not None else set()

    def check_self(self, name: str, public_key: str, address: str) -> str:
        """Check this node against its own entry in the file; return a warning, or an empty text.

        :raises ConfigError: the key is another node's, or the name has another key: no peer would admit this node.
        """
        if self._file is None:
            return ""
        owner = self._by_key.get(public_key) if public_key else name
        entry = self._file.nodes.get(name)
        if owner is not None and owner != name:
            raise ConfigError(f"roster {self._path}: this node's key is that of {owner!r}, not of {name!r}; see --name")
        if entry is None:
            return f"{self._path} does not name this node, {name!r}: peers with that roster turn it down"
        if entry.key and public_key not in entry.keys:
            raise ConfigError(f"roster {self._path}: {name!r} has another key than this node; see --keys")
        if entry.address and self.published_address(name, address) != entry.address:
            return f"{self._path} says that this node is at {entry.address}, but it listens at {address}"
        return ""

    def published_address(self, name: str, bound: str) -> str:
        """The address that node `name` tells others: the file's if that is `by_name` of `bound`, where it listens, else
        `bound`."""
        entry = self.node(name)
        return entry.address if entry is not None and entry.address and by_name(entry.address, bound) else bound

    def admits_name(self, name: str) -> bool:
        """Whether a node of that name may dial; without a file, any may that can reach the socket."""
        return self._file is None or name in self._file.nodes

    def name_of(self, key: str) -> str | None:
        """The name of the node with this key; None: there is none."""
        return self._by_key.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def is_named(self, name: str, key: str, address: str) -> bool:
        """Whether the file still has this node, with the same key and, if it was dialled, the same address. A change of
        a found or told address does not end a connection: clusters err, and the key was proved."""
        if self._file is None:
            return True
        entry = self._file.nodes.get(name)
        if entry is None or (self._has_keys and key not in entry.keys):
            return False
        return not (address and entry.address) or address == entry.address

    def secure_proxy(self, socket: zmq.Socket[bytes], own: KeyPair | None, address: str = "") -> None:
        """Set up CURVE, if this node has `own` keys, on a socket that will connect to the proxy or worker at `address`.

        A Unix socket that the roster does not name as the proxy's is this user's alone, and needs no keys.

        :raises ConfigError: this node has keys, but the roster lacks the proxy's.
        """
        proxy = self.proxy_at(address)
        if not address.startswith("ipc://") or (proxy is not None and proxy.address == address):
            secure_client(socket, own=own, server_key=self.proxy_key(address))

    def refresh(self) -> bool:
        """Read the file again if it changed; return whether an entry changed. A wrong file changes nothing."""
        if self._reread is None or not self._reread.refresh():
            return False
        self._set(self._reread.value)
        return True

    def take_proxy_list(self, entries: Iterable[PeerEntry]) -> None:
        """Take in the proxy's list: with a file, addresses for the file's nodes; without, the nodes of this host."""
        told = {one.name: one for one in entries if one.name and one.address and self._is_believed(one)}
        if self._file is None:
            self._nodes = {name: RosterEntry(one.address, one.public_key) for name, one in told.items()}
        else:
            self._told = {name: one.address for name, one in told.items()}
            self._settle(self._file)

    def find(self, found: Found) -> bool:
        """Take in what the cluster says now; return whether that is new. A node that it no longer names keeps its
        address: clusters err, and a node that is gone does not answer."""
        if found is self._found or self._file is None:
            return False
        self._found = found
        self._settle(self._file)
        return True

    def _is_believed(self, entry: PeerEntry) -> bool:
        if self._file is not None:
            known = self._file.nodes.get(entry.name)
            is_there = known is not None and (
                known.address == entry.address if known.address else is_found_address(entry.address)
            )
            is_same = known is not None and is_there and entry.public_key in ("", *known.keys)
            if not is_same:
                self._warn(entry, f"{self._path} does not say so")
            return is_same
        try:
            check_address(entry.address, has_keys=False)
        except ConfigError as error:
            self._warn(entry, str(error))
            return False
        return True

    def _warn(self, entry: PeerEntry, why: str) -> None:
        if entry.name not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(entry.name)
            log.warning("the proxy's word that %r is at %r is not believed: %s", entry.name, entry.address, why)

    def _set(self, file: RosterFile) -> None:
        self._file = file
        self._settle(file)
        self._by_key = {key: name for name, entry in file.nodes.items() for key in entry.keys if key}
        self.listeners = frozenset((*self._by_key, *(entry.key for entry in file.readers.values())))

    def _settle(self, file: RosterFile) -> None:
        """Work out the addresses of all nodes and proxies in the file."""
        self._nodes = {name: entry for name, entry in file.nodes.items() if entry.address}
        known, self._known = self._known, {}
        for name in file.nodes.keys() - self._nodes.keys():
            found = self._found.nodes.get(name, "")
            if is_found_address(found) or (found := known.get(name, "")):
                self._known[name] = found
            if address := self._told.get(name, found):
                self._nodes[name] = msgspec.structs.replace(file.nodes[name], address=address)
        self._proxies = {}
        for name, address in self._found.proxies.items():
            entry = file.proxies.get(name, file.proxy)
            is_new = len(self._proxies) < MAX_PROXIES and (name in file.proxies or address not in self._proxies)
            if entry is not None and not entry.address and is_new and is_found_address(address):
                self._proxies[address] = entry
