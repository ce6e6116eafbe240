"""Blended KV of prompts that are made of documents, kept in a node for the engines there (experimental).

A document is known as a prompt of its own: its chunks' keys identify it, wherever it stands in another prompt. A
blender reads the documents' chunks, turns their keys to their new positions, recomputes a share of the tokens, and
stores the result as chunks of a form (`pdx.memory.form.blended_form`), which only requests that ask for it find.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pdx.blend.layers import blended
from pdx.blend.pages import pack, turned, unpacked
from pdx.client.connection import Connection, attached
from pdx.engine.turning import Turning
from pdx.errors import ArenaFull, LayoutError
from pdx.memory.form import blended_form, layout_of_shape
from pdx.memory.slot import Slot
from pdx.wire.hints import parse
from pdx.wire.messages import Abort, Admit, Admitted, Done, Fill, Release
from pdx.wire.tokens import chosen, chunk_keys, form_keys, number_of
from pdx.wire.verbs import Advise, Advised, Model, ModelList, Models

_LEASE_S = 60.0
_ASK_AGAIN_S = 0.01


@dataclass(frozen=True)
class Blended:
    """What a blend has made. `reuse`: the hint of requests that want it. `tokens`: the prompt's tokens in whole chunks,
    which are there now; `found`: how many of these were known, not computed. `share`: how much of the known ones was
    recomputed, on average over the layers. `is_new`: it was not there before."""

    reuse: str
    tokens: int
    found: int
    share: float
    is_new: bool


@dataclass(frozen=True)
class Blender:
    """Blends for one engine, whose model has one shard. One thread.

    `node`: attached as a client. `model`: what the engine has told about its keys. `causal`: the same weights, as a
    causal language model of transformers. `turning`: of the engine's pages. `wait_s`: how long to wait for documents
    from a tier.
    """

    node: Connection
    model: Model
    causal: Any
    turning: Turning
    wait_s: float = 5.0

    @classmethod
    @contextmanager
    def at(cls, address: str, folder: Path, *, engine: str = "", timeout_s: float = 5.0) -> Iterator[Self]:
        """A blender at the node at `address`, for the vLLM engine there, on a CPU, that has the weights in `folder`;
        `engine`: which one it is (`pdx.wire.tokens.chosen`).

        :raises NodeUnavailable: no node answers. :raises SelectionError: there is no such engine.
        :raises LayoutError: its keys cannot be turned, or its pages are not known.
        """
        from transformers import AutoModelForCausalLM
        from vllm.config import ModelConfig

        from pdx.vllm.identity import model_identity
        from pdx.vllm.turning import turning_in

        with attached(address, timeout_s, "controller") as asking:
            model = chosen(asking.call_for(Models(), timeout_s, ModelList).models, engine)[0]
        layout = layout_of_shape(model.shape)
        dtype = layout.dtype.removeprefix("torch.").partition(" ")[0]
        if model_identity(ModelConfig(str(folder), dtype=dtype), "auto") != layout.model:
            raise LayoutError(
                f"the weights in {folder} are not those of engine {model.engine!r}, or quantised otherwise"
            )
        causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        turning = turning_in(layout, layout.backend, causal.config.to_dict())
        with attached(address, timeout_s) as node:
            yield cls(node, model, causal, turning)

    def __post_init__(self) -> None:
        shards = number_of(self.model, "num_shards")
        if shards != 1:
            raise LayoutError(f"chunks of {shards} shards are not blended: an engine of one rank has one")

    def blend(self, documents: Sequence[Sequence[int]], share: float = 0.15, *, salt: str = "") -> Blended:
        """Blend the prompt that is made of these documents, in this order, and store it. `salt`: the cache salt of the
        requests that will use it, and of those that brought the documents.

        :raises SelectionError: they fill no chunk, or are no tokens of this model.
        :raises ArenaFull: the node has no room for it now. :raises ArenaTooSmall: never.
        """
        tokens = [token for document in documents for token in document]
        size = number_of(self.model, "chunk_tokens")
        form = blended_form(share, [len(each) for each in documents])
        keys = form_keys(self.model, tokens, salt, form)
        end = len(keys) * size
        answer = self._room(keys)
        if not answer.granted:
            return Blended(form, end, end, share, is_new=False)
        try:
            kv, fresh, known = self._known(documents, salt, size)
            again = 1.0 if fresh.all() else share
            kv = blended(self.causal, tokens, kv, again, known=known, fresh=fresh)
            for number, slot in zip(answer.granted, answer.granted_slots, strict=True):
                pack(kv[:, :, :, number * size : (number + 1) * size], self._pages(slot), self.turning.elements)
            filled = Fill(answer.granted_slots, layers=len(kv), seal=True, blended=again)
            self.node.call_for(filled, self.wait_s, Done)
        except BaseException:
            self.node.tell(Abort(answer.granted_slots))
            raise
        return Blended(form, end, int((~fresh[:end]).sum()), share, is_new=True)

    @property
    def _num_layers(self) -> int:
        return int(self.causal.config.get_text_config().num_hidden_layers)

    @property
    def _page_elements(self) -> int:
        elements = self.turning.elements
        return 2 * elements.num_heads * elements.block_tokens * len(elements.key_elements)

    def _room(self, keys: list[bytes]) -> Admitted:
        """Reserve room for the missing chunks before anything is computed: requests wait for them from then on."""
        layers = self._num_layers
        blocks = number_of(self.model, "chunk_tokens") // self.turning.elements.block_tokens
        nbytes = layers * blocks * self._page_elements * self.turning.dtype.itemsize
        answer = self._call(Admit(keys, nbytes=nbytes, layers=layers, layout=self.model.layout))
        if answer.full:
            raise ArenaFull(f"no room for {len(keys)} chunks of {nbytes:,} bytes now")
        return answer

    def _known(self, documents: Sequence[Sequence[int]], salt: str, size: int) -> tuple[Tensor, Tensor, int]:
        """The KV of all tokens: where the node has whole chunks, theirs at the new positions; also which tokens have
        none, and how many leading ones are exact."""
        heads, dim = self.turning.elements.num_heads, len(self.turning.elements.key_elements)
        count = sum(map(len, documents))
        kv = torch.zeros(self._num_layers, 2, heads, count, dim)
        fresh = torch.ones(count, dtype=torch.bool)
        first = known = 0
        for number, document in enumerate(documents):
            at = first
            for chunk in self._chunks(document, salt, size):
                kv[:, :, :, at : at + size] = turned(chunk, self.turning.rope, first)
                fresh[at : at + size] = False
                at += size
            known = at if not number else known
            first += len(document)
        return kv, fresh, known

    def _chunks(self, document: Sequence[int], salt: str, size: int) -> list[Tensor]:
        """KV of the leading whole chunks that the node has of a document, at its own positions."""
        if len(document) < size:
            return []
        keys = chunk_keys(self.model, document, salt)
        until = time.monotonic() + self.wait_s
        while True:
            answer = self._call(Admit(keys, lease_s=_LEASE_S))
            if not answer.waiting or time.monotonic() > until:
                break
            time.sleep(_ASK_AGAIN_S)
        try:
            # Documents recur, prompts made of them hardly do, and would else evict the documents one by one.
            hints = parse({"version": 1, "priority": 1}, salt or None).hints
            self.node.call_for(Advise(hints, keys[: answer.hits]), self.wait_s, Advised)
            found = [unpacked(self._pages(slot), self.turning.elements) for slot in answer.slots]
            for slot in answer.slots:
                self.node.arena.check(slot)
            return found
        finally:
            if answer.lease:
                self.node.tell(Release(answer.lease))

    def _pages(self, slot: Slot) -> Tensor:
        """The chunk's pages, [layers, blocks, elements of a page]."""
        return torch.frombuffer(self.node.arena.view(slot), dtype=self.turning.dtype).view(
            self._num_layers, -1, self._page_elements
        )

    def _call(self, ask: Admit) -> Admitted:
        return self.node.call_for(ask, self.wait_s, Admitted)
