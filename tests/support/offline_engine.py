"""A family's engine with several workers, which no `Forge` forks:

    offline_engine.py FOLDER FAMILY OPTIONS SETTINGS PROMPTS

All but the first two are JSON: vLLM's options beside the family's, those of the connector, and [[token, …], …]. For
each prompt, one after the other, it prints a line of JSON: [tokens that were not computed, [token, …]].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from families import FAMILIES, OPTIONS
from forge import attached_to

from pdx.client.api import connect
from pdx.testing.waiting import wait_until


def answers(
    folder: Path, family: str, options: dict[str, Any], settings: dict[str, Any], prompts: Sequence[list[int]]
) -> list[Any]:
    """Of an engine in processes of its own, of which each worker has a core."""
    told = [json.dumps(each) for each in (options, settings, prompts)]
    workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    env = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(workers))),
        "VLLM_CPU_CI_ENV": str(int(options.get("enforce_eager", True))),  # nothing is compiled or tried out first
    }
    command = [sys.executable, __file__, str(folder), family, *told]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400, check=False)
    found = [json.loads(line.removeprefix("ANSWER ")) for line in done.stdout.splitlines() if "ANSWER" in line]
    assert len(found) == len(prompts), done.stdout[-3000:] + done.stderr[-9000:]
    return found


def main(folder: str, name: str, more: dict[str, Any], settings: dict[str, Any], prompts: list[list[int]]) -> None:
    from vllm import LLM, SamplingParams

    family = FAMILIES[name]
    family.write(Path(folder))
    connector = attached_to(**{"load": "always", **settings})
    engine = LLM(folder, **{**OPTIONS, **family.options, "kv_transfer_config": connector, **more})
    with connect(settings["node"]) as node:  # who asks before that is answered without it
        wait_until(lambda: any(one.kind == "scheduler" for one in node.status().attached), what="it is attached")
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    for prompt in prompts:
        [done] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answer = json.dumps([done.num_cached_tokens, list(done.outputs[0].token_ids)])
        os.write(1, f"ANSWER {answer}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(json.loads, sys.argv[3:]))
