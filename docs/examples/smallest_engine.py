"""The smallest engine that saves its KV cache to PDX and loads from there: one request at a time, on a CPU.

    python docs/examples/smallest_engine.py [ADDRESS]

ADDRESS is that of a running node (default: PDX_NODE, else this host's node). The model is a toy: what it keeps for a
token depends on all tokens before, so a wrong byte would change the answer. docs/tutorials/add-an-engine.md explains
the rest.
"""

import hashlib
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from pdx.config import connector_config
from pdx.engine.scheduler import SchedulerHalf
from pdx.engine.step import BlockHashing, StepRecord, StepRequest
from pdx.engine.worker import WorkerHalf
from pdx.memory.layout import KvLayout

LAYERS, BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 3, 64, 16, 64
PIECE_TOKENS = 100  # of a prompt in one step
TIMEOUT_S = 10.0  # with the node's answers; a server would rather compute
VOCABULARY, PRIME = 1000, 2_147_483_647
LAYOUT = KvLayout(
    model="toy, weights of 2026",
    dtype="int64",
    num_layers=LAYERS,
    num_heads=1,
    head_dim=1,
    block_tokens=BLOCK_TOKENS,
    page_bytes=BLOCK_TOKENS * 2 * 8,
    chunk_tokens=CHUNK_TOKENS,
    order="LBNHC",
    backend="toy",
    isa="",
    num_shards=1,
    hashing="sha256",
)


def chained_hash(request: Any, parent: bytes | None, start: int, end: int) -> bytes:
    """The hash of tokens [start, end) and, by `parent`, of all before them."""
    return hashlib.sha256((parent or bytes(32)) + repr(request.all_token_ids[start:end]).encode()).digest()


@dataclass(eq=False)
class Request:
    """What the connector reads of a request (`pdx.engine.step.EngineRequest`), and where its KV is."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)  # the engine's own: where its KV is

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated ones."""
        return len(self.all_token_ids)

    def hash_full_blocks(self) -> None:
        """Keep `block_hashes` up with the tokens."""
        while (end := (len(self.block_hashes) + 1) * BLOCK_TOKENS) <= self.num_tokens:
            parent = self.block_hashes[-1] if self.block_hashes else None
            self.block_hashes.append(chained_hash(self, parent, end - BLOCK_TOKENS, end))


@dataclass
class Answer:
    """What became of a request."""

    tokens: list[int]
    loaded: int = 0  # tokens of the prompt that came from PDX
    computed: int = 0  # tokens of the prompt that the model computed


class Engine:
    """Both halves of the connector, a paged KV cache and the toy model. Not for several threads."""

    def __init__(self, address: str, name: str) -> None:
        settings = {"node": address, "start_node": False, "chunk_tokens": CHUNK_TOKENS, "lookup_s": TIMEOUT_S}
        config = connector_config(settings)
        self.pages = [torch.zeros(BLOCKS, BLOCK_TOKENS, 2, dtype=torch.int64) for _ in range(LAYERS)]
        self.free = list(range(BLOCKS))
        self.worker = WorkerHalf(config, LAYOUT, name, 0)
        self.worker.register({f"layer.{layer}": pages for layer, pages in enumerate(self.pages)}, BLOCKS)
        self.scheduler = SchedulerHalf(config, LAYOUT, name, BlockHashing(chained_hash))
        if not (self.worker.link.is_attached and self.scheduler.link.wait_attached(TIMEOUT_S)):
            sys.exit(f"no node answers at {config.node_address()}; start one: pdx node")

    def generate(self, name: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> Answer:
        """Answer one request; `params` are its `kv_transfer_params`."""
        request = Request(name, list(prompt), len(prompt), params)
        request.hash_full_blocks()
        while (found := self.scheduler.matched_tokens(request, 0)) is None:
            self.step()  # the node has not decided yet; other requests could compute meanwhile
        request.block_ids = [self.free.pop() for _ in range(-(-(len(prompt) + max_tokens) // BLOCK_TOKENS))]
        self.scheduler.allocated(request, [request.block_ids], found)
        loaded = min(found, self.load(request)) if found else 0
        start = min(loaded, len(prompt) - 1)  # the last token is computed in any case: the answer comes from it
        answer = Answer([], loaded=start, computed=len(prompt) - start)
        while len(answer.tokens) < max_tokens:
            end = min(request.num_tokens, start + PIECE_TOKENS)
            self.step(request, start, end)
            start = end
            if end == request.num_tokens:
                answer.tokens.append(self.next_token(request))
                request.all_token_ids.append(answer.tokens[-1])
                request.hash_full_blocks()
        self.finish(request)
        return answer

    def load(self, request: Request) -> int:
        """Step until the load is over; how many leading tokens have come."""
        finished: set[str] = set()
        while request.request_id not in finished:
            finished, missing = self.step()
        self.scheduler.loaded(request.request_id)
        came = [block not in missing for block in request.block_ids]
        return BLOCK_TOKENS * (came.index(False) if False in came else len(came))

    def step(self, request: Request | None = None, start: int = 0, end: int = 0) -> tuple[set[str], set[int]]:
        """Compute tokens [start, end) of a request, or nothing; whose load is over, and blocks that did not come."""
        plan = self.scheduler.plan_step(record_of(request, start, end))
        self.worker.begin(plan)
        for layer in range(LAYERS):
            for position in range(start, end):
                self.compute(layer, request, position)
            self.worker.save_layer(f"layer.{layer}")
        self.worker.end_forward()
        return self.worker.finished_loads()

    def finish(self, request: Request) -> None:
        """Give back what the request holds, and tell the workers of it."""
        self.scheduler.finished(request)
        self.free += request.block_ids
        while self.scheduler.has_unsent_plans():
            self.step()

    # ---- the model ------------------------------------------------------------------------------

    def compute(self, layer: int, request: Request, position: int) -> None:
        """The "KV" of one token in one layer, from that token and the cache's entry of the one before."""
        before = int(self.entry(layer, request, position - 1)[0]) if position else layer
        token = request.all_token_ids[position]
        self.entry(layer, request, position)[:] = torch.tensor([(before * 31 + token + 1) % PRIME, token])

    def next_token(self, request: Request) -> int:
        """The answer, from the cache's last entries of all layers."""
        last = request.num_tokens - 1
        return sum(int(self.entry(layer, request, last)[0]) for layer in range(LAYERS)) % VOCABULARY

    def entry(self, layer: int, request: Request, position: int) -> torch.Tensor:
        """Where the "KV" of a token is: [2] of [block, token, 2]."""
        return self.pages[layer][request.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS]

    def close(self) -> None:
        """Detach from the node."""
        self.scheduler.close()
        self.worker.close()


def record_of(request: Request | None, start: int, end: int) -> StepRecord:
    """The step that computes tokens [start, end) of a request, or nothing."""
    if request is None:
        return StepRecord()
    told = StepRequest(request.request_id, start, end - start, request.num_tokens, [request.block_ids])
    return StepRecord([told], num_tokens=end - start)


def answer_of(prompt: list[int], count: int) -> list[int]:
    """What the model answers, without any cache: to compare with."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        states = list(range(LAYERS))
        for token in tokens:
            states = [(state * 31 + token + 1) % PRIME for state in states]
        tokens.append(sum(states) % VOCABULARY)
    return tokens[len(prompt) :]


def main(address: str) -> None:
    """Two engines on one node: the second takes a request over, and then finds its prompt again."""
    one, two = Engine(address, f"one-{secrets.token_hex(4)}"), Engine(address, f"two-{secrets.token_hex(4)}")
    try:
        prompt = [secrets.randbelow(VOCABULARY) for _ in range(200)]
        transfer = secrets.token_hex(16)  # whoever knows it could take the request over
        send = {"do_remote_decode": True, "transfer_id": transfer}
        receive = {"do_remote_prefill": True, "transfer_id": transfer, "prefill_tokens": len(prompt)}
        prefill = one.generate("prefill", prompt, 1, send)
        decode = two.generate("decode", prompt, 8, receive)
        print(f"handoff: engine one computed {prefill.computed} tokens, engine two {decode.computed}")  # noqa: T201
        assert prefill.tokens + decode.tokens[1:] == decode.tokens == answer_of(prompt, 8)

        longer = [*prompt, 1, 2, 3]
        again = two.generate("again", longer, 8)
        print(f"reuse: engine two loaded {again.loaded} tokens and computed {again.computed}")  # noqa: T201
        assert again.tokens == answer_of(longer, 8)
    finally:
        one.close()
        two.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
