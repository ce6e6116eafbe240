"""`PdxConnector` whose keys are not turned: what answers look like then."""

from __future__ import annotations

from pdx.engine import turning
from pdx.kernels.turned import Turn
from pdx.vllm.connector import PdxConnector

turning.turn_of = lambda rope, shift: Turn.of(rope, 0)  # type: ignore[assignment]


class NaiveConnector(PdxConnector):
    """The same, but for its name."""
