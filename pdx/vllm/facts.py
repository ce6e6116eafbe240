"""What a vLLM server adds to every request by its own configuration: what the proxy must know before it may forward.

`--generation-config` and `--override-generation-config` give defaults to requests that say nothing (in vLLM
entrypoints/openai/completion/serving.py and protocol.py), since 0.31 for all three penalties. Of these,
`repetition_penalty` counts the tokens of the prompt like generated ones (model_executor/layers/utils.py); the other two
count generated tokens only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from pdx.vllm.releases import is_diffusion, is_watermarked
from pdx.wire.messages import EngineFacts

log = logging.getLogger("pdx")

_COUNT_GENERATED = ("presence_penalty", "frequency_penalty")
_PLUGINS = "vllm.logits_processors"  # the entry points of which every one is loaded


def facts_of(vllm_config: Any) -> EngineFacts:
    """The facts of the engine that is configured so."""
    model = vllm_config.model_config
    defaults = model.get_diff_sampling_param()
    backward = list(_looking_back(vllm_config, defaults))
    if backward:
        log.warning(
            "no first token of this engine's completions is forwarded: %s may look at the tokens generated before",
            ", ".join(backward),
        )
    # As vLLM's own servers find it: the model's own generation_config.json is only what a request gets by default.
    own = model.generation_config in ("auto", "vllm")
    cap = model.override_generation_config.get("max_new_tokens") if own else defaults.get("max_tokens")
    return EngineFacts(max_model_len=model.max_model_len, max_new_tokens=cap or 0, looks_back=bool(backward))


def _looking_back(vllm_config: Any, defaults: dict[str, Any]) -> Iterator[str]:
    model = vllm_config.model_config
    yield from (f"the default {name} {defaults[name]}" for name in _COUNT_GENERATED if defaults.get(name))
    yield from (f"logits processor {each}" for each in model.logits_processors or ())
    yield from (f"logits processor {each.value}" for each in entry_points(group=_PLUGINS))
    if is_watermarked(vllm_config):
        yield "watermarking"
    if is_diffusion(model):
        yield "the order in which a diffusion model generates"
