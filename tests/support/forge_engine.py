"""What `forge` forks: an engine of vLLM that takes orders from standard input and answers on standard output.

Both are lines of JSON. Imported by the process that forks, so that engines find vLLM imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

import vllm.entrypoints.llm  # noqa: E402
import vllm.model_executor.models.registry as registry  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_group_id  # noqa: E402
from vllm.v1.metrics.reader import Counter  # noqa: E402

import pdx.engine.drafts  # noqa: E402
import pdx.vllm.connector  # noqa: E402
from pdx.engine.pace import Pace  # noqa: E402
from pdx.engine.plan import LoadPlan  # noqa: E402

with contextlib.suppress(ImportError):
    import vllm.v1.attention.backends.cpu_attn  # noqa: F401

from families import FAMILIES, Group  # noqa: E402

pdx.engine.drafts.WAIT_S = 60.0  # the machine may be busy with other things

_PR_SET_PDEATHSIG = 1
_pages_of = LoadPlan.pages_of


class Host:
    """The engine of this process, and what is done with it: each public method is an order."""

    def __init__(
        self, family: str | None, folder: str, options: dict[str, Any], transfer: dict[str, Any] | None
    ) -> None:
        if family is not None:
            if (prepare := FAMILIES[family].prepare) is not None:
                prepare()
            _write_once(family, Path(folder))
        config = None if transfer is None else KVTransferConfig(**transfer)
        self._llm = LLM(model=folder, kv_transfer_config=config, disable_log_stats=False, **options)
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._cache = self._core.scheduler.kv_cache_config
        if transfer is not None:  # who asks before that is answered without PDX
            assert self._core.scheduler.connector.scheduler._half.link.wait_attached(60.0), "not attached"  # noqa: SLF001

    def describe(self) -> dict[str, Any]:
        return {
            "groups": [Group.of(group) for group in self._cache.kv_cache_groups],
            "num_blocks": self._cache.num_blocks,
        }

    def generate(self, prompts: list[list[int]], count: int, transfers: list[Any], salt: str) -> list[Any]:
        words = [{"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})} for tokens in prompts]
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if transfer is None else {"kv_transfer_params": transfer},
            )
            for transfer in transfers
        ]
        answers = self._llm.generate(words, sampling, use_tqdm=False)
        return [
            (list(answer.outputs[0].token_ids), answer.num_cached_tokens or 0, answer.kv_transfer_params)
            for answer in answers
        ]

    def drafted(self) -> list[int]:
        counts = {each.name: int(each.value) for each in self._llm.get_metrics() if isinstance(each, Counter)}
        return [counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")]

    def reset(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def storm(self, prompts: list[list[int]], count: int, aborts: dict[str, int], preempt_at: int) -> dict[str, Any]:
        engine, scheduler = self._llm.llm_engine, self._core.scheduler
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        answers: dict[str, list[int]] = {}
        preempted: dict[str, int] = {}
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        is_due = False
        for step in itertools.count():
            engine.abort_request([number for number, last in aborts.items() if last == step])
            is_due = is_due or step == preempt_at
            loading = [each for each in scheduler.requests.values() if each.status.name == "WAITING_FOR_REMOTE_KVS"]
            if is_due and scheduler.running and not loading:
                engine.reset_prefix_cache(reset_running_requests=True)
                is_due = False
            if not engine.has_unfinished_requests() and step > max(aborts.values()):
                break
            for done in engine.step():
                if done.finished:
                    answers[done.request_id] = list(done.outputs[0].token_ids)
            preempted |= {each.request_id: each.num_preemptions for each in scheduler.requests.values()}
        return {
            "answers": [None if str(number) in aborts else answers[str(number)] for number in range(len(prompts))],
            "preempted": sum(preempted.values()),
        }

    def clear(self, group: int) -> int:
        pool = self._core.scheduler.kv_cache_manager.block_pool
        blocks = [
            block.block_id for block in pool.blocks if block.block_hash and get_group_id(block.block_hash) == group
        ]
        self._zero(group, blocks)
        return len(blocks)

    def load_whatever_it_costs(self) -> None:
        Pace.chunk_s = property(lambda pace: 0.0)

    def spoil(self, group: int) -> None:
        def pages_of(load: LoadPlan, share: Any, groups: Any = None) -> list[Any]:
            found = []
            for pages in _pages_of(load, share, groups):
                if pages.group == group:
                    self._zero(group, pages.block_ids)
                else:
                    found.append(pages)
            return found

        LoadPlan.pages_of = pages_of

    def _zero(self, group: int, blocks: list[int]) -> None:
        context = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        for name in self._cache.kv_cache_groups[group].layer_names:
            cache = context[name].kv_cache
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                rows = tensor.shape[0] // self._cache.num_blocks
                for block in blocks:
                    tensor[block * rows : (block + 1) * rows] = 0

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _write_once(family: str, folder: Path) -> None:
    """Another engine may be about to write the same."""
    if folder.exists():
        return
    draft = folder.with_suffix(f".{os.getpid()}")
    FAMILIES[family].write(draft)
    try:
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    host: Host | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if host is None:
                host = Host(**order)
                result = host.describe()
            else:
                result = getattr(host, order.pop("do"))(**order)
            answer = {"result": result}
        except Exception:  # noqa: BLE001 - whatever it is, the test is told
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)
    if host is not None:
        host.close()


# An architecture is otherwise looked at in a process of its own.
registry._run_in_subprocess = lambda inspect: inspect()

if __name__ == "__main__":
    main()
