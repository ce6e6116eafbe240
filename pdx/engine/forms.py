"""The form of a request's chunks: exact, lossy below memory, moved or blended; and what nodes are told of their tokens.

Requests of a form are kept apart from all others, in the engine's own cache by their cache salt and in the store by
their keys: no exact request ever finds what they load or save.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable

import msgspec

from pdx.engine.request import State, TrackedRequest
from pdx.engine.step import BlockHashing, EngineRequest
from pdx.errors import LayoutError
from pdx.memory.form import MOVED, form_of, lossy_fingerprint
from pdx.memory.keys import KEY_BYTES
from pdx.memory.layout import CacheGroups
from pdx.wire.hints import Envelope, Hints, Verdict
from pdx.wire.moved import MAX_TOKENS, PromptTokens

_NOT_APART = "the engine's own cache would give its blocks to requests that are exact"


class Forms:
    """The forms of one engine's requests. One thread: the scheduler's."""

    def __init__(self, groups: CacheGroups, hashing: BlockHashing, *, not_moved: str) -> None:
        """`not_moved`: why this engine loads no tokens at other positions; empty: it does."""
        self._groups = groups
        self._hashing = hashing
        self._not_moved = not_moved
        self.fingerprint = groups.fingerprint()  # what keys of exact chunks are made with

    # ---- a new request ----------------------------------------------------------------------

    def of(self, request: EngineRequest, envelope: Envelope, *, is_new: bool, count: Callable[..., None]) -> Envelope:
        """The envelope with the form that the request's chunks get, if it asks for one. Its hints, which nodes see,
        name a lossy form only.

        A request that cannot have the form it asks for gets exact chunks, and never finds others. `is_new`: it has no
        blocks of the engine's own cache yet. `count`: `NodeLink.count`.
        """
        hints, verdicts = envelope.hints, list[Verdict]()
        lossy, no_codec = self._lossy(hints)
        approximate, no_reuse = "", ""
        if hints.reuse is not None:
            no_reuse = self._why_not_reused(request, hints.reuse, is_lossy=bool(lossy))
            approximate = "" if no_reuse else hints.reuse
        form = lossy or approximate
        if not self._hashing.keep_apart(request, form if is_new else "") or (form and not is_new):
            no_codec = _NOT_APART if hints.codec not in (None, "none") else no_codec
            no_reuse = no_reuse or (_NOT_APART if approximate else "")
            lossy, approximate = "", ""
        if hints.codec is not None:
            verdicts.append(Verdict("codec", "refused", no_codec[:200]) if no_codec else Verdict("codec", "accepted"))
        if no_codec:
            text = "request %s is stored exactly, not by the codec that it asks for: %s"
            count("codec_refused", text, request.request_id, no_codec)
        if no_reuse:
            verdicts.append(Verdict("reuse", "refused", no_reuse[:200]))
            text = "request %s finds nothing that was %s: %s"
            count("moved_refused", text, request.request_id, str(hints.reuse).partition(":")[0], no_reuse)
        elif approximate and approximate != MOVED:
            verdicts.append(Verdict("reuse", "accepted"))
        if not (verdicts or approximate):
            return envelope
        hints = msgspec.structs.replace(hints, form=lossy, codec=None, reuse=None)
        return Envelope(hints, envelope.said, (*envelope.decided, *verdicts), approximate)

    def _lossy(self, hints: Hints) -> tuple[str, str]:
        """The lossy form that is asked for, or why there is none."""
        if hints.codec in (None, "none"):
            return "", ""
        try:
            if not self._groups.is_single:
                raise LayoutError("it is for models of one cache group of full attention")
            return str(form_of(self._groups[0], str(hints.codec))), ""
        except LayoutError as error:
            return "", str(error)

    def _why_not_reused(self, request: EngineRequest, reuse: str, *, is_lossy: bool) -> str:
        if is_lossy:
            return "not beside a lossy codec"
        if reuse != MOVED:  # what was blended is found by its keys
            return "" if self._groups.is_single else "it is for models of one cache group of full attention"
        if self._not_moved:
            return self._not_moved
        if self._hashing.beside(request) is None:
            return "its blocks have more than tokens, or an adapter that is not known here"
        return ""

    # ---- keys and names ---------------------------------------------------------------------

    def fingerprint_of(self, envelope: Envelope) -> bytes:
        """What keys are made with: of exact chunks, or of those of one form."""
        form = envelope.form or envelope.hints.form
        return lossy_fingerprint(self.fingerprint, form) if form else self.fingerprint

    def scope(self, tracked: TrackedRequest) -> bytes | None:
        """See `PromptTokens.scope`; None: its tokens are neither told nor found."""
        if self._not_moved or tracked.hints.form or tracked.state is State.LEFT_OUT:
            return None
        beside = self._hashing.beside(tracked.request)
        if beside is None:
            return None
        digest = hashlib.blake2b(key=self.fingerprint, digest_size=KEY_BYTES, person=b"pdx-scope-1")
        digest.update(len(tracked.hints.salt).to_bytes(8, "little") + tracked.hints.salt + beside)
        return digest.digest()

    def prompt_tokens(self, tracked: TrackedRequest, first: int, count: int) -> PromptTokens | None:
        """What a node is told of the tokens of whole chunks [first, first + count), for others to find them; None:
        nothing."""
        size = self._groups.chunk_tokens
        if count < 1 or (scope := self.scope(tracked)) is None:
            return None
        start, end = first * size, (first + min(count, MAX_TOKENS // size)) * size
        return PromptTokens(scope, self.ids(tracked, start, end), size, start, bool(tracked.envelope.form))

    def ids(self, tracked: TrackedRequest, first: int, end: int) -> bytes:
        """Its tokens, as messages encode them."""
        try:
            ids = array("I", self._hashing.tokens(tracked.request, first, end))
        except (OverflowError, TypeError):  # not a token id: nothing matches
            return b""
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()
