"""vLLM's `SchedulerOutput` as a `StepRecord`, and the limits of its steps.

See vllm/v1/core/sched/output.py, which is the same in all releases.

Blocks are passed on per cache group. With several groups all of a request's blocks are passed on, as vLLM has them now:
a window's blocks are freed and reused while the request runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdx.engine.scheduler import SchedulerHalf
from pdx.engine.step import StepLimits, StepRecord, StepRequest


def limits_of(scheduler_config: Any) -> StepLimits:
    return StepLimits(
        scheduler_config.max_num_batched_tokens,
        scheduler_config.max_num_seqs,
        scheduler_config.long_prefill_token_threshold,
    )


def step_record(output: Any, half: SchedulerHalf) -> StepRecord:
    """The step that `output` describes, with the requests that `half` may have something to do for.

    Of running requests that get no new blocks only the due ones are looked at: there may be a thousand others.
    """
    told: list[StepRequest] = []
    are_moving = not half.is_single

    def tell(request_id: str, computed: int, blocks: Sequence[Sequence[int]], *, has_all_blocks: bool) -> None:
        request = half.request_of(request_id)
        if request is not None:
            scheduled = output.num_scheduled_tokens[request_id]
            known = request.num_tokens
            if are_moving:  # blocks in the middle of a table come and go
                blocks, has_all_blocks = output.kv_connector_block_state.get_block_ids(request_id) or (), True
            told.append(StepRequest(request_id, computed, scheduled, known, blocks, has_all_blocks))

    for new in output.scheduled_new_reqs:
        tell(new.req_id, new.num_computed_tokens, new.block_ids, has_all_blocks=True)
    cached, due = output.scheduled_cached_reqs, half.due
    for index, request_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        if blocks is not None or request_id in due:
            is_resumed = request_id in cached.resumed_req_ids
            tell(request_id, cached.num_computed_tokens[index], blocks or (), has_all_blocks=is_resumed)
    return StepRecord(told, output.total_num_scheduled_tokens, is_busy=bool(cached.req_ids))
