"""This node's own key, which may be exchanged while it runs."""

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
    """One thread."""

    def __init__(self, path: str, counters: Counter[str]) -> None:
        """`path`: of the secret key file; empty: this node has no key. :raises ConfigError: see `KeyPair.load`."""
        self._file: Reread[KeyPair] | None = None
        if path:
            self._file = Reread(partial(KeyPair.load, path), path, what="the node's key", counters=counters)
        self._refused = ""  # the new key that was said not to be used yet

    @property
    def in_file(self) -> KeyPair | None:
        """As it was read last."""
        return self._file.value if self._file is not None else None

    def after(self, own: KeyPair | None, roster: Roster, name: str, address: str) -> KeyPair | None:
        """The key to be proved from now on by a node that proves `own`. Another one only when the roster has it, too:
        the node would shut itself out."""
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
