"""This node's own key, which may be exchanged while it runs, and which of its keys a peer proves meanwhile."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from functools import partial

from pdx.errors import ConfigError
from pdx.security.curve_keys import KeyPair
from pdx.security.reread import Reread
from pdx.security.roster import Roster

log = logging.getLogger(__name__)


class NodeKeys:
    """One thread."""

    def __init__(self, path: str, counters: Counter[str]) -> None:
        """`path`: of the secret key file; empty: this node has no key. :raises ConfigError: see `KeyPair.load`."""
        self._file: Reread[KeyPair] | None = None
        if path:
            self._file = Reread(partial(KeyPair.load, path), path, what="the node's key", counters=counters)
        self.own = self._file.value if self._file is not None else None  # what is proved to others from now on
        self._refused = ""  # the new key that was said not to be used yet
        self._proved: dict[str, str] = {}  # by peers that have, or may have, one of two

    def renewed(self, roster: Roster, name: str, address: str) -> KeyPair | None:
        """Another key than before, which is `own` from now on. Not before the roster has it, too: the node would shut
        itself out."""
        if self._file is None:
            return None
        self._file.refresh()
        fresh = self._file.value
        if fresh == self.own:
            return None
        try:
            roster.check_self(name, fresh.public, address)
        except ConfigError as error:
            if self._refused != fresh.public:
                self._refused = fresh.public
                log.warning("the node's new key is not used yet: %s", error)
            return None
        self.own = fresh
        log.info("new connections have the node's new key, %s", fresh.public)
        return fresh

    def of_peer(self, name: str, keys: Collection[str]) -> str:
        """Which of its `keys` a peer is to prove that is dialled: what it proved last, and another one where that has
        failed."""
        known = self._proved.get(name, "")
        return known if known in keys else next(iter(keys), "")

    def proved(self, name: str, key: str) -> None:
        self._proved[name] = key

    def failed(self, name: str, key: str, keys: Collection[str]) -> None:
        """Nobody has proved it there."""
        self._proved[name] = next((other for other in keys if other != key), key)

    def forget(self, names: Collection[str]) -> None:
        """Nothing is kept of others than these."""
        self._proved = {name: key for name, key in self._proved.items() if name in names}
