"""`PdxConnector` whose keys are not turned: what answers look like then."""

from __future__ import annotations

from pdx.engine import turning
from pdx.kernels.turned import Turn
from pdx.vllm.connector import PdxConnector

turning.turn_of = lambda elements, rope, shift, *, is_half: Turn.of(elements, rope, 0, is_half=is_half)  # type: ignore


class NaiveConnector(PdxConnector):
    """The same, but for its name."""
