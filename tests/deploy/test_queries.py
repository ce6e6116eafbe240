"""Dashboard and alerts ask for metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pdx.telemetry.names import METRICS

promql = pytest.importorskip("promql_parser", reason="reads queries: pip install promql-parser")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "pdx.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "pdx.json").read_text())
TARGET = {"instance", "job"}  # labels that Prometheus adds
OF_EVERY_CLIENT = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ASKED = [(panel["title"], each["expr"], each["legendFormat"]) for panel in PANELS for each in panel["targets"]]
ASKED += [(rule["alert"], rule["expr"], rule["annotations"]["summary"]) for rule in ALERTS]


def labels_of(series: str) -> set[str] | None:
    """What a series of this name is told by; None: nobody tells it."""
    for ending, kind in ("_total", "counter"), ("_bucket", "histogram"), ("", "gauge"):
        about = METRICS.get(series.removesuffix(ending))
        if about is not None and about.kind == kind and series.endswith(ending):
            return {*about.labels, *TARGET, *(["le"] if kind == "histogram" else [])}
    return TARGET if series in OF_EVERY_CLIENT else None


def check(expression) -> set[str]:
    """The labels that the result may have, or an assertion: it asks for what nobody tells."""
    match expression:
        case promql.VectorSelector():
            labels = labels_of(expression.name)
            assert labels is not None, expression.name
            assert {each.name for each in expression.matchers.matchers} <= labels, expression.prettify()
            return labels
        case promql.MatrixSelector():
            return check(expression.vector_selector)
        case promql.Call():
            found = [check(each) for each in expression.args]
            labels = set().union(*found)
            assert expression.func.name != "histogram_quantile" or "le" in labels, expression.prettify()
            return labels
        case promql.AggregateExpr():
            labels, kept = check(expression.expr), set(expression.modifier.labels if expression.modifier else ())
            assert kept <= labels, expression.prettify()
            return kept
        case promql.BinaryExpr():
            sides = [check(each) for each in (expression.lhs, expression.rhs)]
            return set().union(*sides)
        case promql.ParenExpr():
            return check(expression.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            return set()
    raise AssertionError(f"{expression!r}: teach this test what it is")


def test_what_is_asked_for_is_told():
    assert len(ASKED) > 50
    for title, query, text in ASKED:
        labels = check(promql.parse(query.replace("$__rate_interval", "5m")))
        assert {*re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text)} <= labels, title


def test_the_dashboard_has_a_place_for_each_panel():
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len({*cells})
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len({*ids}) > 25


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian: prometheus)")
def test_prometheus_takes_the_rules():
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True)
