"""`plan.png`: how much of a transfer hides, and when loading KV beats computing it (LMCache paper, figure 12)."""

from __future__ import annotations

from pathlib import Path

from pdx.bench.harness.plot_style import Sheet, powers_of_two
from pdx.bench.plan.model import Plan
from pdx.bench.plan.tables import crossover_text


def draw(plan: Plan, path: Path) -> Path:
    """Draw the picture and save it at `path`.

    :raises ConfigError: matplotlib is not installed.
    """
    sheet = Sheet(plan.verdict.headline, [3.6], columns=3)
    hiding = sheet.ax(0, 0, "What hides behind prefill, layer by layer", "prompt tokens", "% of KV there at its end")
    times = sheet.ax(0, 1, "Load a prompt's KV, or compute it?", "prompt tokens", "ms")
    shares = sheet.ax(0, 2, "Loading over computing; below 1: load", "prompt tokens")
    hiding.plot([row.tokens for row in plan.hiding], [row.share * 100 for row in plan.hiding], marker="o")
    hiding.set_ylim(0, 105)
    tokens = [row.tokens for row in plan.loading]
    times.plot(tokens, [row.prefill_s * 1e3 for row in plan.loading], color="k", linewidth=3, label="compute")
    for number, found in enumerate(plan.crossovers):
        gbps = f"{found.bytes_s * 8 / 1e9:g} Gbps"
        label = f"load at {gbps}, faster: {crossover_text(found.load_from)}"
        times.plot(tokens, [row.load_s[number] * 1e3 for row in plan.loading], label=label)
        shares.plot(tokens, [row.load_s[number] / row.prefill_s for row in plan.loading], label=gbps)
    times.set_yscale("log")
    shares.axhline(1, color="k")
    for axes in (hiding, times, shares):
        powers_of_two(
            axes, {row.tokens for row in plan.loading}, lambda count: f"{count // 1024}k" if count > 512 else count
        )
    return sheet.save(path, f"{plan.hardware}. A model, not a measurement: docs/plan.md")
