"""Which blocks PdxConnector takes for a request's: those that vLLM says, and never the null block, which
`Engine.leftovers` looks at."""

from __future__ import annotations

import pytest
from exact_engine import FOREIGN, PDX
from exact_kinds import MOVED_KINDS, with_pdx
from oracle_bed import OracleBed

from pdx.errors import ConfigError

SHAPE = {"budget": 256, "extra": {"chunk_tokens": 64}}
HISTORY = 512
each_kind = pytest.mark.parametrize("kind", with_pdx(*MOVED_KINDS))


@each_kind
@pytest.mark.parametrize("behind", [1, 2])
def test_of_a_prompt_that_ends_with_a_chunk_all_is_loaded_in_one_load(bed: OracleBed, kind: str, behind: int) -> None:
    """vLLM gives no blocks to what a length looks back to no more: its tables have the null block there."""
    writer, reader = (bed.engine(name, kind=kind, **SHAPE) for name in ("writer", "reader"))
    history = bed.tokens(HISTORY)
    writer.ask("w", history + bed.tokens(50, "w"), 2)
    bed.settled()
    reader.ask("r", history + bed.tokens(behind, "r"), 2)
    assert reader.faults.loads == 1


@each_kind
def test_of_a_transfer_too_whose_last_token_the_prefiller_has_generated(bed: OracleBed, kind: str) -> None:
    prefiller, decoder = (bed.engine(name, kind=kind, **SHAPE) for name in ("prefiller", "decoder"))
    prompt, transfer = bed.tokens(HISTORY), f"ends-with-a-chunk-{kind}"
    prefiller.ask("p", prompt, 1, params={"do_remote_decode": True, "transfer_id": transfer})
    params = {"do_remote_prefill": True, "transfer_id": transfer, "prefill_tokens": HISTORY}
    decoder.ask("d", prompt + prefiller.outputs["p"], 4, params=params)
    assert decoder.faults.loads == 1


@each_kind
def test_tables_are_vllms_own(bed: OracleBed, kind: str) -> None:
    """What vLLM has given back must not be saved: somebody else may have filled it anew."""
    engine = bed.engine("engine", kind=kind, **SHAPE)
    engine.add("r", bed.tokens(1024), 1)

    def check(step: int) -> None:
        if "r" in engine.requests:
            blocks = engine.scheduler.kv_cache_manager.get_block_ids("r")
            assert engine.half.track(engine.requests["r"]).tables == list(blocks)

    engine.run("r", each=check)


@pytest.mark.parametrize("kind", ["window", "state"])
def test_only_models_of_one_full_group_go_inside_another_connector(bed: OracleBed, kind: str) -> None:
    """It would have to tell vLLM which of both connectors' loads have failed, by request."""
    with pytest.raises(ConfigError, match="inside another connector"):
        bed.engine("inside", kind=kind, beside=(FOREIGN, PDX), **SHAPE)
