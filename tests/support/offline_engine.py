"""A family's engine with several ranks, which no `Forge` forks: `offline_engine.py FOLDER FAMILY RANKS NODE PROMPTS`.

PROMPTS is JSON, [[token, …], …]. For each one it prints a line of JSON: [tokens that were not computed, [token, …]].
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from families import FAMILIES, OPTIONS


def main(folder: str, name: str, ranks: int, node: str, prompts: list[list[int]]) -> None:
    from vllm import LLM, SamplingParams

    family = FAMILIES[name]
    family.write(Path(folder))
    connector = {
        "kv_connector": "PdxConnector",
        "kv_connector_module_path": "pdx.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": node, "start_node": False, "lookup_s": 30.0, "load": "always"},
    }
    options = {**OPTIONS, **family.options, "kv_transfer_config": connector, "tensor_parallel_size": ranks}
    engine = LLM(folder, **options)
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    for prompt in prompts:
        [done] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answer = json.dumps([done.num_cached_tokens, list(done.outputs[0].token_ids)])
        os.write(1, f"ANSWER {answer}\n".encode())


if __name__ == "__main__":
    folder, name, ranks, node, prompts = sys.argv[1:]
    main(folder, name, int(ranks), node, json.loads(prompts))
