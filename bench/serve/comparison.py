"""Two services under the same workload: how many times better the first one did. Arithmetic only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdx.bench.serve.run import Tally

KIND = "pdx-bench-serve-comparison"
_MORE_IS_BETTER = ("request_throughput", "output_throughput", "goodput")
_HOW = "latencies: second / first; throughput and goodput: first / second; above 1 the first is better"

Result = dict[str, Any]


def compare(
    first: Tally, second: Tally, *, figures: Callable[[Tally], Mapping[str, Any]], keys: Sequence[str]
) -> Result:
    """The ratios of `keys` in each block that both got through, and over all of these. `figures` makes them of tallies.

    The blocks are what tells how much of a ratio is chance: both did each of them within the same minutes.
    """
    both = [
        (one, other) for one, other in zip(first.blocks, second.blocks, strict=False) if one.is_over and other.is_over
    ]
    blocks = [(figures(Tally(first.server, [one])), figures(Tally(second.server, [other]))) for one, other in both]
    ours, others = (Tally(tally.server, [pair[place] for pair in both]) for place, tally in enumerate((first, second)))
    whole = (figures(ours), figures(others)) if both else None
    ratios = {}
    for key in keys:
        each = [found for pair in blocks if (found := ratio(key, *pair)) is not None]
        middle = statistics.median(each) if each else None
        ratios[key] = {"all": ratio(key, *whole) if whole else None, "median_of_blocks": middle, "blocks": each}
    return {
        "kind": KIND,
        "first": first.server.label,
        "second": second.server.label,
        "how": _HOW,
        "ratios": ratios,
        "answers": _agreement(first, second),
    }


def ratio(key: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> float | None:
    """How many times better the first is; None where that cannot be said."""
    above, below = (first[key], second[key]) if key in _MORE_IS_BETTER else (second[key], first[key])
    return above / below if above and below else None


def verdict(comparison: Result) -> list[str]:
    """How steady the difference was, and whether both said the same."""
    answers = comparison["answers"]
    lines = [f"the same text in {answers['same']} of {answers['both_answered']} answers"]
    for key, name in (("mean_ttft_ms", "mean TTFT"), ("mean_itl_ms", "mean ITL")):
        each = comparison["ratios"][key]["blocks"]
        if each:
            middle = comparison["ratios"][key]["median_of_blocks"]
            lines.append(f"{name}, times lower, block by block: {middle:.2f} x ({min(each):.2f} to {max(each):.2f})")
    return lines


def _agreement(first: Tally, second: Tally) -> dict[str, int]:
    """Of the requests that both answered, how many have the same text. Greedy, but batches may change roundings."""
    ours, others = _texts(first), _texts(second)
    both = ours.keys() & others.keys()
    return {"both_answered": len(both), "same": sum(ours[key] == others[key] for key in both)}


def _texts(tally: Tally) -> dict[tuple[int, int], str]:
    done = [answer for answer in tally.answers if answer.output.success]
    return {(answer.session, answer.round): answer.output.generated_text for answer in done}
