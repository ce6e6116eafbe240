"""What an engine tells the scheduler half about a request and about a step: plain data, of no particular engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

# (request, hash of the block before `start` or None, start, end) -> chained hash of tokens [start, end)
BlockHasher = Callable[[Any, bytes | None, int, int], bytes]


class LeftOut(NamedTuple):
    """Why nothing of a request is saved or found. `reason`: the counter; empty: it is intended, and not counted.
    `text`: the log message, with a placeholder for the request's id."""

    reason: str
    text: str


class BlockHashing:
    """How an engine hashes its requests' blocks, as far as the scheduler half must know. Engines override what they can
    do."""

    def __init__(self, hasher: BlockHasher) -> None:
        self.tail = hasher

    def keep_apart(self, request: Any, form: str) -> bool:
        """Keep the engine's own cache from sharing blocks between this request and others, unless these were kept apart
        by the same `form`; empty: by none. False: the engine cannot do that."""
        return not form

    def beside(self, request: Any) -> bytes | None:
        """What the hashes of this request's blocks cover beside its tokens and its cache salt, as input of a digest.
        None: the engine cannot tell, or its KV could not be used at other positions."""
        return None

    def tokens(self, request: Any, first: int, end: int) -> Sequence[int]:
        """The request's tokens [first, end), as far as they are known. Only called if `beside` is not None."""
        raise NotImplementedError

    def name_inputs(self, request: Any, is_new: bool) -> LeftOut | None:
        """Have this request's blocks hashed by content alone from now on, or return why it is left out. `is_new`: the
        engine has not looked up its hashes yet."""
        return None

    def shorten(self, request: Any) -> bool:
        """Drop the last token of the request's prompt. False: the engine cannot do that."""
        return False


class EngineRequest(Protocol):
    """A request as its engine has it. The scheduler half keeps it until `finished` and reads these attributes and,
    where they exist, `cache_salt`, a text that separates tenants, and `trace_headers` (`pdx.engine.spans`)."""

    @property
    def request_id(self) -> str:
        """Its id, unique among the engine's current requests."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Known tokens, of the prompt and generated. Drafts that may be rejected do not count."""

    @property
    def num_preemptions(self) -> int:
        """How often it has lost its blocks."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The chained hash of each full block of known tokens."""

    @property
    def kv_transfer_params(self) -> Any:
        """Its part in a transfer (`pdx.engine.params.TransferParams`), as it came from the network; or None."""


class StepLimits(msgspec.Struct, frozen=True):
    """The most that an engine takes into one step."""

    tokens: int = 8192
    requests: int = 256
    request_tokens: int = 0  # of one request's prompt; 0: as many as the step takes


class StepRequest(msgspec.Struct, frozen=True):
    """One request of a step, which computes its tokens [computed, computed + scheduled)."""

    request_id: str
    computed: int
    scheduled: int
    known: int  # of the prompt, and generated: KV of tokens beyond these may be rejected
    blocks: Sequence[Sequence[int]]  # for each cache group; empty: no new ones
    has_all_blocks: bool = True  # False: `blocks` follow those that were told before


class StepRecord(msgspec.Struct, frozen=True):
    """One step, which the engine's scheduler has just composed.

    A request may be left out if it has no new blocks and is not in `SchedulerHalf.due`: there is nothing to do for it.
    """

    requests: Sequence[StepRequest] = ()
    num_tokens: int = 0  # of all requests of the step, also those left out
    is_busy: bool = False  # running requests would stand still while the scheduler waits
