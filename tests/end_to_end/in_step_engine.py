"""An engine of vLLM in this process, with PDX or plain, that answers prompts with a common beginning, and says how
their loads were planned. `python in_step_engine.py MODEL ADDRESS|plain`; the last line is JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from cases import text

from pdx.client.api import connect
from pdx.engine.worker import WorkerHalf
from pdx.memory.arena import Arena
from pdx.testing.waiting import wait_until

HISTORY = text(900, 640)  # two chunks and a block
TURNS: dict[str, list[str]] = {
    "first": [HISTORY + text(901, 200)],
    "in step": [HISTORY + text(902, 200)],
    "failing": [HISTORY + text(903, 330)],
    "after it": [HISTORY + text(903, 330) + text(904, 100)],
    "together": [HISTORY + text(905, 200), text(906, 300), HISTORY + text(907, 150)],
}


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model, address = sys.argv[1:]
    connector = {
        "kv_connector": "PdxConnector",
        "kv_connector_module_path": "pdx.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": address, "arena": "256MiB", "lookup_s": 30.0},
    }
    settings: dict[str, Any] = {} if address == "plain" else {"kv_transfer_config": connector}
    engine = LLM(
        model=model,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        **settings,
    )
    planned: list[bool] = []
    failed: list[int] = []
    begin, finished_loads, is_current = WorkerHalf.begin, WorkerHalf.finished_loads, Arena.is_current
    gone: list[Any] = []

    def note_begin(self: WorkerHalf, plan: Any) -> None:
        planned.extend(load.in_step for load in plan.loads)
        if fails and plan.loads:
            gone.append(plan.loads[0].pages_of(0)[1].slots[0])
        begin(self, plan)

    def note_failed(self: WorkerHalf) -> Any:
        found = finished_loads(self)
        failed.extend(found[1])
        return found

    WorkerHalf.begin = note_begin  # type: ignore[method-assign]
    WorkerHalf.finished_loads = note_failed  # type: ignore[method-assign]
    Arena.is_current = lambda self, slot: slot not in gone and is_current(self, slot)  # type: ignore[method-assign]
    answers, told = {}, {}
    for name, prompts in TURNS.items():
        fails = name == "failing"
        planned.clear()
        failed.clear()
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        answers[name] = [list(each.outputs[0].token_ids) for each in outputs]
        told[name] = [list(planned), len(failed)]
        gone.clear()
        if address != "plain":
            with connect(address, timeout_s=30) as node:
                wait_until(lambda node=node: not (status := node.status()).leases and set(status.chunks) <= {"sealed"})
    if address != "plain":
        with connect(address, timeout_s=30) as node:  # faults are told with a heartbeat
            wait_until(lambda: node.status().counters.get("degraded_load_failed"), what="the node is told")
    sys.stdout.write(json.dumps({"answers": answers, "told": told}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what vLLM leaves to be ended is not tested here


if __name__ == "__main__":
    main()
