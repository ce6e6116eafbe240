"""All pictures of one result of `pdx bench breakdown`. What was not measured is not drawn, and is no error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdx.bench.breakdown import bars as breakdown_plot
from pdx.bench.breakdown import gantt
from pdx.bench.breakdown import latencies as latency_plots
from pdx.bench.breakdown.records import Result
from pdx.bench.channels import bandwidth as bandwidth_plot
from pdx.bench.harness.plot_style import require_matplotlib

if TYPE_CHECKING:
    from pdx.bench.channels.measure import Row


def draw_all(result: Result, folder: Path, bandwidth: Sequence[Row] | None = None) -> list[Path]:
    """The pictures that `result` has data for, as PNG files in `folder`; those there with the same names are replaced.

    :raises ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    drawn = [
        breakdown_plot.draw(result, folder / "breakdown.png"),
        latency_plots.draw_ttft(result, folder / "ttft-cdf.png"),
        latency_plots.draw_itl(result, folder / "itl-cdf.png"),
        latency_plots.draw_load(result, folder / "concurrency.png"),
    ]
    for trace in result.traces:
        system = re.sub(r"[^A-Za-z0-9_.-]", "-", trace.system)
        drawn.append(gantt.draw(result, trace, folder / f"timeline-{system}-{trace.prompt_tokens}.png"))
    drawn.append(bandwidth_plot.draw(bandwidth or (), folder / "bandwidth.png", result.machine))
    return [path for path in drawn if path is not None]
