"""In what a prompt differs from those before it: as far as names of blocks and keys of chunks can tell."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from pdx.memory.keys import KEY_BYTES
from pdx.node.sessions import differing
from pdx.telemetry.recent import remember
from pdx.wire.messages import Admit, Hello

MAX_BEGUN = 4096  # first blocks, and cache salts, that are remembered


class _First(msgspec.Struct, frozen=True):
    """Who last asked for a prompt that begins with a block."""

    hello: Hello
    parent: bytes  # what leads up to the first chunk: the layout's


class Begun:
    """The first blocks of the last prompts. Owned by the control loop; each call costs the same.

    The name of a block covers its tokens and what the engine hashes with them: the cache salt, an adapter, images. The
    key of a chunk covers the layout, too. So a layout is told apart from the rest, and a salt by its digest; tokens
    cannot be compared, because a name does not say them.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[bytes, _First] = OrderedDict()
        self._salts: OrderedDict[bytes, None] = OrderedDict()  # empty: none

    def note(self, hello: Hello, ask: Admit) -> None:
        """A process has asked so."""
        name = ask.blocks[:KEY_BYTES]
        if name:
            remember(self._first, name, _First(hello, ask.parent), MAX_BEGUN)
            remember(self._salts, ask.hints.salt, None, MAX_BEGUN)

    def differs(self, hello: Hello, ask: Admit) -> str:
        """In what a prompt of which nothing is known differs from those before it; empty: that cannot be told."""
        name = ask.blocks[:KEY_BYTES]
        if not name or not self._first:
            return ""
        if (seen := self._first.get(name)) is not None:
            if seen.parent == ask.parent:
                return ""
            fields = differing(hello, seen.hello) or "its chunks have another layout"
            return f"engine {seen.hello.engine!r} has had the same first block, but under other keys: {fields}"
        is_all = max(len(self._first), len(self._salts)) < MAX_BEGUN  # else some may be forgotten
        if ask.hints.salt not in self._salts:
            why = "its cache salt is new here" if is_all else "its cache salt was in none of them"
            why = why if ask.hints.salt else "it has no cache salt, and all of them had one"
        else:
            why = "the tokens differ, or what its engine hashes with them"
            why += ", or the cache salt, of which there are several" if len(self._salts) > 1 else ""
        before = "no prompt before it" if is_all else f"none of the last {len(self._first)} prompts"
        return f"{before} began with its first block: {why}"
