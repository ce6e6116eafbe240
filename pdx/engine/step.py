"""What an engine tells the scheduler half of a request, and of one step. Plain data, with nobody's scheduler in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

# (request, hash of the block before `start` or None, start, end) -> chained hash of tokens [start, end)
BlockHasher = Callable[[Any, bytes | None, int, int], bytes]


class LeftOut(NamedTuple):
    """Why nothing of a request is saved or found. `reason`: under which it is counted; empty: it is as it should be.
    `text`: what is logged, with a place for the request's name."""

    reason: str
    text: str


class BlockHashing:
    """How an engine hashes its requests' blocks, as far as the scheduler half must know. Engines override what they
    can do."""

    def __init__(self, hasher: BlockHasher) -> None:
        self.tail = hasher

    def keep_apart(self, request: Any, form: str) -> bool:
        """From now on the engine's own cache gives no blocks of this request to another one, nor to it, unless that one
        was kept apart by the same word; empty: as ever. False: the engine cannot do that."""
        return not form

    def beside(self, request: Any) -> bytes | None:
        """What is in the hashes of this request's blocks beside its tokens and its cache salt, for a digest; None: more
        than this engine can say, or than its KV at other positions could be used with."""
        return None

    def tokens(self, request: Any, first: int, end: int) -> Sequence[int]:
        """The request's tokens [first, end), as far as they are known. Asked where `beside` is not None."""
        raise NotImplementedError

    def name_inputs(self, request: Any, is_new: bool) -> LeftOut | None:
        """Hashes of this request's blocks are of content alone from now on, or why it is left out. `is_new`: of others
        the engine has looked hashes up already."""
        return None

    def shorten(self, request: Any) -> bool:
        """From now on the request's prompt is without its last token. False: the engine cannot do that."""
        return False


class EngineRequest(Protocol):
    """A request as its engine has it. The scheduler half keeps it until `finished` and reads these names, no others but
    `cache_salt`, a text that separates tenants, where there is one."""

    @property
    def request_id(self) -> str:
        """Its name, which no other request of the engine has at the same time."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: of the prompt, and generated. Drafts that may be rejected are not among them."""

    @property
    def num_preemptions(self) -> int:
        """How often it has lost its blocks."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The chained hash of each full block of known tokens."""

    @property
    def kv_transfer_params(self) -> Any:
        """Its part in a transfer (`pdx.engine.request.TransferParams`), as it came from the network; or None."""


class StepLimits(msgspec.Struct, frozen=True):
    """What an engine takes into one step at most."""

    tokens: int = 8192
    requests: int = 256
    request_tokens: int = 0  # of one request's prompt; 0: as many as the step takes


class StepRequest(msgspec.Struct, frozen=True):
    """One request of a step, which computes its tokens [computed, computed + scheduled)."""

    request_id: str
    computed: int
    scheduled: int
    known: int  # of the prompt, and generated: KV of a token beyond it may be rejected
    blocks: Sequence[Sequence[int]]  # for each cache group; empty: no new ones
    has_all_blocks: bool = True  # False: `blocks` follow those that the half has been told of


class StepRecord(msgspec.Struct, frozen=True):
    """One step of an engine, whose scheduler has just made it up.

    A request may be left out that has no new blocks and is not in `SchedulerHalf.due`: there is nothing to do for it.
    """

    requests: Sequence[StepRequest] = ()
    num_tokens: int = 0  # of all requests of the step, whether told of or not
    is_busy: bool = False  # requests that ran before would stand still while the scheduler waits
