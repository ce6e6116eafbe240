"""This node's own key, which may be replaced while it runs."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

from pdx.errors import ConfigError
from pdx.security.curve_keys import KeyPair
from pdx.security.reread import Reread
from pdx.security.roster import Roster

log = logging.getLogger(__name__)


class OwnKey:
    """The key file of this node. Not thread-safe."""

    def __init__(self, path: str, counters: Counter[str]) -> None:
        """`path`: of the secret key file; empty: this node has no key. :raises ConfigError: see `KeyPair.load`."""
        self._file: Reread[KeyPair] | None = None
        if path:
            self._file = Reread(partial(KeyPair.load, path), path, what="the node's key", counters=counters)
        self._refused = ""  # the new key about which a warning was logged

    @property
    def in_file(self) -> KeyPair | None:
        """The key pair as last read."""
        return self._file.value if self._file is not None else None

    def after(self, own: KeyPair | None, roster: Roster, name: str, address: str) -> KeyPair | None:
        """The key to prove from now on instead of `own`: a new one in the file, but only once the roster has it, too,
        or the node would shut itself out."""
        if self._file is not None:
            self._file.refresh()
        fresh = self.in_file
        if fresh is None or fresh == own:
            return own
        try:
            roster.check_self(name, fresh.public, address)
        except ConfigError as error:
            if self._refused != fresh.public:
                self._refused = fresh.public
                log.warning("the node's new key is not used yet: %s", error)
            return own
        return fresh
