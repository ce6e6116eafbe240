"""Inside MultiConnector: what another connector promises, loads or fails to load, each token against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from exact_engine import FOREIGN, PDX
from foreign_connector import CLAIMS, Claim
from oracle_bed import CHUNKS, HISTORY, OracleBed, both, read_by_another, reader_of

from pdx.engine.step import LeftOut
from pdx.vllm.content import Content
from pdx.vllm.releases import RELEASE

BESIDE = {"beside": (FOREIGN, PDX)}
PROMISED = 768  # tokens: three chunks


@pytest.fixture
def claims() -> Any:
    """What the connector beside PDX promises. A storm leaves what its requests did not come to."""
    if RELEASE == (0, 28):
        pytest.skip("PdxConnector refuses to be inside another one there")
    CLAIMS.clear()
    yield CLAIMS
    CLAIMS.clear()


@pytest.mark.parametrize("is_left_out", [False, True], ids=["of a request", "of one that is left out"])
@pytest.mark.parametrize("kept", [0, 256, 400])
def test_what_another_connector_failed_to_load_is_not_saved(
    bed: OracleBed, claims: dict[str, Claim], monkeypatch: pytest.MonkeyPatch, kept: int, is_left_out: bool
) -> None:
    """Nor what was computed from it, by this request or by one that comes in the same step."""
    reader = reader_of(bed, **BESIDE)
    if is_left_out:  # as for a picture without a name
        left_out = {"0": LeftOut("unnamed_media", "%s")}
        monkeypatch.setattr(Content, "name_inputs", lambda self, request, is_new: left_out.get(request.request_id))
    prompts = [bed.tokens(HISTORY) + bed.tokens(count, count) for count in (100, 120)]
    for number, prompt in enumerate(prompts):
        claims[str(number)] = Claim(PROMISED, kept)  # "1" comes first where the node's answer for "0" takes longer
        reader.add(str(number), prompt, 12)
    reader.run()
    reader.check(next(str(number) for number in range(2) if str(number) not in claims))
    read_by_another(bed, *prompts, bed.tokens(HISTORY), **BESIDE)


@pytest.mark.parametrize("aborted", [False, True], ids=["it goes on", "it is aborted"])
@pytest.mark.parametrize("steps", [0, 2])
def test_nor_what_others_compute_from_it_while_it_is_computed_again(
    bed: OracleBed, claims: dict[str, Claim], steps: int, aborted: bool
) -> None:
    """The blocks stay in vLLM's cache meanwhile, and those who find them there are wrong by vLLM's own fault."""
    reader = reader_of(bed, **BESIDE, budget=128, threshold=64)
    prompts = [bed.tokens(HISTORY) + bed.tokens(count, count) for count in (100, 300, 500)]
    claims["0"] = Claim(PROMISED, 128)
    reader.add("0", prompts[0], 30)
    for _ in range(1 + steps):
        reader.step()
    reader.add("1", prompts[1], 30)
    reader.step()
    if aborted:
        reader.abort("0")
    reader.add("2", prompts[2], 300)
    reader.run()
    read_by_another(bed, *prompts, bed.tokens(HISTORY), **BESIDE)


@both
@pytest.mark.parametrize("aborted", [False, True], ids=["it goes on", "it is aborted"])
def test_what_another_connector_failed_to_load_is_not_found_in_vllms_own_cache(
    bed: OracleBed, claims: dict[str, Claim], asynchronous: bool, aborted: bool
) -> None:
    """By one who comes when that is known: vLLM would leave it there until it is computed again, if ever."""
    reader = reader_of(bed, **BESIDE, asynchronous=asynchronous, budget=128, threshold=64)
    history = bed.tokens(HISTORY)
    claims["0"] = Claim(PROMISED, 128)
    reader.add("0", history + bed.tokens(100, "0"), 30)
    while claims:
        reader.step()
    for _ in range(asynchronous):
        reader.step()  # tells what came of the one before
    if aborted:
        reader.abort("0")
    reader.ask("1", history + bed.tokens(300, "1"), 12)
    reader.run()
    if not aborted:
        reader.check("0")


@both
def test_what_another_connector_has_loaded_is_saved_when_that_is_known(
    bed: OracleBed, claims: dict[str, Claim], asynchronous: bool
) -> None:
    reader = reader_of(bed, **BESIDE, asynchronous=asynchronous)
    before = bed.counted("sealed")
    claims["a"] = Claim(PROMISED, PROMISED)
    reader.ask("a", bed.tokens(HISTORY) + bed.tokens(100, "a"), 12)
    bed.stored(before + CHUNKS)
    read_by_another(bed, bed.tokens(HISTORY), **BESIDE)
