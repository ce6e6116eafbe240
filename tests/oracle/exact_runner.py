"""A model runner around `exact_model`: a paged cache, and the calls of vLLM's runners to a connector's worker side.

See gpu_model_runner.py in vllm/v1/worker for the order of a step, mamba_utils.py (`preprocess_mamba`) for states, which
it copies from slot to slot before it binds the connector's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from exact_hooks import FirstRunner, Hooks
from exact_kinds import Kind, Pages, Tables, layer_name
from exact_model import Beside, Picture, State, Words, advance, embed, keys, keys_of, mixed, sample, seen, sums_of
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

_Move = tuple[Tables, int, int]  # of a request's states: its blocks, and from which slot to which
# (request id, tokens, how many to propose) -> draft tokens
Drafter = Callable[[str, list[int], int], list[int]]


@dataclass
class _State:
    """A request as the runner has it: its tokens, its blocks, and how many tokens are its prompt's."""

    tokens: list[int]
    blocks: Tables
    num_prompt: int
    features: list[Any]
    lora: Any


@dataclass
class _Work:
    """Tokens [start, start + count) of a request, and what the layers so far have made of them."""

    state: _State
    start: int
    count: int
    drafts: list[int]  # the last ones of these tokens
    hidden: Words


class NoWorker:
    """The worker side where there is no connector: nothing happens."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None

    def get_transfer_results(self, finished: set[str]) -> Any:
        return KVConnectorOutput()

    def get_finished(self, finished: set[str]) -> tuple[None, None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


class Stage(NamedTuple):
    """Of a pipeline: what is called of the worker side of a connector in each rank, these layers of the model, and the
    ranks' cache of them."""

    ranks: Sequence[Hooks]
    layers: range
    pages: Pages


@dataclass
class Runner:
    """`workers`: the worker side of a connector, in the ranks of each stage of a pipeline, which have so many layers
    (`layers`; empty: there is one, which has all). Nothing of it is called but by `start` and at start-up. `hooks`:
    which runner of vLLM's calls them.

    `skips_hooks`: of a step of so many tokens, whether it runs as one graph, which calls no hook of a layer.
    `draft_layers`: so many last layers belong to a draft model: they run after the step's transfers were asked for, as
    with EAGLE in vLLM's runners, and sampling does not see them; drafts of a request are wrong unless every byte of
    their pages is right. `weights`: of the model.
    """

    workers: Sequence[Sequence[Any]]
    kind: Kind
    num_blocks: int
    draft_layers: int = 0
    skips_hooks: Callable[[int], bool] = lambda num_tokens: False
    drafter: Drafter | None = None
    num_drafts: int = 0
    layers: Sequence[int] = ()
    hooks: Callable[[Any, dict[str, Any]], Hooks] = FirstRunner
    steps: int = 0
    computed: int = 0  # tokens
    drafts: DraftTokenIds | None = None  # for the next step
    drafted: int = 0  # tokens
    accepted: int = 0
    weights: int = 0
    adapters: dict[int, int] = field(default_factory=dict)  # that are loaded, by vLLM's number
    _encoded: dict[str, int] = field(default_factory=dict)  # pictures, by what vLLM calls them
    states: dict[str, _State] = field(default_factory=dict)
    _proposed: dict[str, list[int]] = field(default_factory=dict)  # last, of each request
    _slots: dict[str, int] = field(default_factory=dict)  # in which those that run have their state

    def __post_init__(self) -> None:
        self._mixers = self.kind.mixers
        self.stages: list[Stage] = []
        for workers, count in zip(self.workers, self.layers or [len(self._mixers)], strict=True):
            start = self.stages[-1].layers.stop if self.stages else 0
            layers, pages = range(start, start + count), Pages(self.kind, self.num_blocks, len(workers))
            names = [layer_name(at) for at in layers]
            tensors = [{name: of_rank[name] for name in names} for of_rank in pages.tensors]
            self.stages.append(Stage(list(map(self.hooks, workers, tensors)), layers, pages))
        self.pages = self.stages[0].pages
        self._aggregator = KVOutputAggregator(sum(len(stage.ranks) for stage in self.stages))

    def execute(self, step: Any) -> ModelRunnerOutput:
        """One step of `SchedulerOutput`, to its end."""
        return self.start(step)()

    def start(self, step: Any) -> Callable[[], ModelRunnerOutput]:
        """One step of `SchedulerOutput`, as far as the first stage of a pipeline; what is returned does the others."""
        self._preempt(self.stages[0], step)
        self._update(step)
        self.steps += bool(step.total_num_scheduled_tokens)
        self.computed += step.total_num_scheduled_tokens
        self._encode(step)
        work = self._work_of(step)  # loads adapters, as vLLM does before this:
        moves = self._moves_of(work)
        stage, is_drafting = self.stages[0], bool(self.draft_layers and work)
        if len(self.stages) > 1:
            return partial(self._end, step, work, moves, self._run(stage, step, work, moves))
        self._prepare(stage, step, moves)
        layers = iter(self._forward(stage, work, has_hooks=self._has_hooks(step)))
        for _ in range(len(self._mixers) - self.draft_layers if work else 0):
            next(layers)
        sampled = {name: self._sample(one) for name, one in work.items()}
        is_late = is_drafting and stage.ranks[0].ends_late
        outputs = [each.end(step, is_late=True) for each in stage.ranks if is_late]
        for _ in layers if is_drafting else ():
            pass
        for each in stage.ranks if is_late else ():
            each.finish()
        outputs += [each.end(step, is_late=False) for each in stage.ranks if not is_late]
        self._propose(sampled)
        told = self._output(step, sampled, outputs)
        return lambda: told

    def _end(
        self, step: Any, work: dict[str, _Work], moves: Sequence[_Move], outputs: list[KVConnectorOutput]
    ) -> ModelRunnerOutput:
        """The later stages of a step, which the first one may have left behind."""
        for stage in self.stages[1:]:
            outputs += self._run(stage, step, work, moves)
        sampled = {name: self._sample(one) for name, one in work.items()}
        return self._output(step, sampled, outputs)

    def _run(self, stage: Stage, step: Any, work: dict[str, _Work], moves: Sequence[_Move]) -> list[KVConnectorOutput]:
        """A stage of a pipeline, in its own time."""
        if stage is not self.stages[0]:
            self._preempt(stage, step)
        self._prepare(stage, step, moves)
        for _ in self._forward(stage, work, has_hooks=self._has_hooks(step)) if work else ():
            pass
        return [each.end(step, is_late=False) for each in stage.ranks]

    def _output(
        self, step: Any, sampled: dict[str, list[int]], outputs: Sequence[KVConnectorOutput]
    ) -> ModelRunnerOutput:
        """What the step has come to, of which vLLM puts together what several ranks tell."""
        told = [_output(step, sampled, each) for each in outputs]
        return self._aggregator.aggregate(told, len(told) - 1) if len(told) > 1 else told[0]

    def _has_hooks(self, step: Any) -> bool:
        return not self.skips_hooks(step.total_num_scheduled_tokens)

    def _preempt(self, stage: Stage, step: Any) -> None:
        for each in stage.ranks:
            each.worker.handle_preemptions(step.kv_connector_metadata)

    def _prepare(self, stage: Stage, step: Any, moves: Sequence[_Move]) -> None:
        """Its blocks, before anything is computed, and what is called then."""
        if zeroed := getattr(step, "new_block_ids_to_zero", None):
            stage.pages.zero(zeroed)
        if copies := getattr(step, "kv_cache_block_copies", None):
            stage.pages.copy(copies)
        for move in moves:
            stage.pages.move_states(*move)
        for each in stage.ranks:
            each.begin(step)

    # ---- requests ---------------------------------------------------------------------------

    def _update(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self.states.pop(name, None)
        for new in step.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self.states[new.req_id] = _State(
                list(tokens), _tables(new.block_ids), len(new.prompt_token_ids), new.mm_features, new.lora_request
            )
        cached = step.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            state, is_resumed = self.states[name], name in cached.resumed_req_ids
            if is_resumed and name in cached.all_token_ids:
                state.tokens = list(cached.all_token_ids[name])
            # What the scheduler has not taken of the tokens that were sampled is void.
            del state.tokens[state.num_prompt + cached.num_output_tokens[index] :]
            blocks = cached.new_block_ids[index]
            if is_resumed:
                state.blocks = _tables(blocks)
            elif blocks is not None:
                for table, more in zip(state.blocks, blocks, strict=True):
                    table += more
        for name in (*step.finished_req_ids, *(step.preempted_req_ids or ()), *cached.resumed_req_ids):
            self._slots.pop(name, None)

    def _work_of(self, step: Any) -> dict[str, _Work]:
        cached = step.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        work = {}
        for name, count in step.num_scheduled_tokens.items():
            state = self.states[name]
            # A step planned before it was known how many drafts were right takes all for right, and has none itself.
            start = min(starts[name], len(state.tokens) - 1)
            drafts = step.scheduled_spec_decode_tokens.get(name, [])
            if -1 in drafts:  # it leaves them to the runner; before the first ones a step has none to check
                drafts = self._proposed.get(name, drafts)[: len(drafts)]
            tokens = state.tokens + drafts
            tokens += [0] * (start + count - len(tokens))  # of a step planned before its tokens were known
            beside = self._beside(state, start, start + count)
            work[name] = _Work(state, start, count, drafts, embed(tokens[start : start + count], start, beside))
        return work

    def _moves_of(self, work: dict[str, _Work]) -> list[_Move]:
        """Of states, to the slots that these tokens end in."""
        moves: list[_Move] = []
        if (block := self.kind.state_block) == 0:
            return moves
        for name, one in work.items():
            slot = self._slots.get(name, (one.start - 1) // block)
            self._slots[name] = to = (one.start + one.count - 1) // block
            if slot not in (-1, to):
                moves.append(([list(table) for table in one.state.blocks], slot, to))
        return moves

    def _encode(self, step: Any) -> None:
        for name in step.free_encoder_mm_hashes:
            self._encoded.pop(name, None)
        for name, numbers in step.scheduled_encoder_inputs.items():
            for feature in (self.states[name].features[number] for number in numbers):
                self._encoded[feature.identifier] = int(feature.data["pixels"].data)

    def _beside(self, state: _State, start: int, end: int) -> Beside:
        """What these tokens are computed with. An adapter is read when it is first needed."""
        lora = state.lora
        if lora is not None and lora.lora_int_id not in self.adapters:
            self.adapters[lora.lora_int_id] = WorkerLoRAManager._load_adapter(self, lora)
        seen = [(each.mm_position, each.identifier) for each in state.features]
        pictures = [
            Picture(place.offset, place.length, self._encoded[name])
            for place, name in seen
            if place.offset < end and place.offset + place.length > start
        ]
        return Beside(self.weights, self.adapters[lora.lora_int_id] if lora is not None else 0, tuple(pictures))

    # ---- computing --------------------------------------------------------------------------

    def _forward(self, stage: Stage, work: dict[str, _Work], *, has_hooks: bool) -> Iterator[int]:
        """Compute layer after layer, each when it is asked for."""
        workers, pages = [each.worker for each in stage.ranks], stage.pages
        for layer in stage.layers:
            mixer = self._mixers[layer]
            has_hooks_here = has_hooks and mixer.kind != "state"
            for worker in workers if has_hooks_here else ():
                worker.wait_for_layer_load(layer_name(layer))
            for one in work.values():
                if mixer.kind != "state":
                    pages.write(layer, one.state.blocks, one.start, keys_of(one.hidden, one.start, layer))
            torn = pages.torn
            for one in work.values():
                hidden = mixed(one.hidden, self._mix(pages, one, layer), layer)
                if layer < len(self._mixers) - self.draft_layers:
                    one.hidden = hidden
            if self.drafter is not None and layer >= len(self._mixers) - self.draft_layers:
                pages.torn = torn  # nobody needs what a draft model sees to be right
            for worker in workers if has_hooks_here else ():
                worker.save_kv_layer(layer_name(layer), None, None)
            yield layer

    def _mix(self, pages: Pages, one: _Work, layer: int) -> Words:
        """What the layer's tokens have looked at."""
        mixer, blocks, end = self._mixers[layer], one.state.blocks, one.start + one.count
        if mixer.kind == "state":  # the slot has what the tokens before have left
            before = pages.state(layer, blocks, end) if one.start else State()
            words, behind = advance(keys_of(one.hidden, one.start, layer), before)
            pages.put_state(layer, blocks, end, behind)
            return words
        first = mixer.first(one.start)
        return seen(sums_of(pages.read(layer, blocks, first, end), first), first, mixer, one.start)

    def _sample(self, one: _Work) -> list[int]:
        """The token that follows, and before it the drafts that were right."""
        tokens, end = one.state.tokens, one.start + one.count
        if end - len(one.drafts) < len(tokens):
            return []  # a piece of the prompt
        at = len(tokens) - 1 - one.start
        found = [sample(one.hidden[at])]
        for draft in one.drafts:
            if draft != found[-1]:
                break
            at += 1
            found.append(sample(one.hidden[at]))
        self.drafted += len(one.drafts)
        self.accepted += len(found) - 1
        tokens += found
        return found

    def _propose(self, sampled: dict[str, list[int]]) -> None:
        if self.drafter is None:
            return
        names = [name for name, tokens in sampled.items() if tokens]
        drafts = [self.drafter(name, self.states[name].tokens, self.num_drafts) for name in names]
        seen = [self._sees_all(self.states[name]) for name in names]
        drafts = [each if is_seen else [0] * len(each) for each, is_seen in zip(drafts, seen, strict=True)]
        self.drafts = DraftTokenIds(names, drafts)
        self._proposed |= zip(names, drafts, strict=True)

    def _sees_all(self, state: _State) -> bool:
        """Whether the pages of the draft model hold what it has made of all tokens but the last one."""
        layers = range(len(self._mixers) - self.draft_layers, len(self._mixers))
        right, torn = keys(state.tokens[:-1]) if layers else [], self.pages.torn
        found = all((self.pages.read(at, state.blocks, 0, len(right[at])) == right[at]).all() for at in layers)
        self.pages.torn = torn
        return found


def _output(step: Any, sampled: dict[str, list[int]], output: KVConnectorOutput) -> ModelRunnerOutput:
    names = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[sampled[name] for name in names],
        kv_connector_output=None if output.is_empty() else output,
    )


def _tables(blocks: Any) -> Tables:
    return [list(each) for each in blocks]
