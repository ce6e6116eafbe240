"""Pictures of made-up results: which there are, how large they are, and that nothing in them is cut off or covered."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys

import msgspec
import pytest
from plot_samples import ALONE, LAYERS, WIRE, bandwidth, result, trace

from pdx.bench.breakdown import records
from pdx.bench.breakdown import report as plots
from pdx.bench.channels import bandwidth as bandwidth_plot
from pdx.bench.channels.measure import Row
from pdx.bench.harness import plot_style
from pdx.bench.harness.plot_style import DPI, WIDTH_IN, Sheet, spread
from pdx.bench.harness.report import RESULTS

pytestmark = pytest.mark.timeout(180)  # all of it is computing, which busy machines do slowly
ALWAYS = {"ttft-cdf.png", "itl-cdf.png", "concurrency.png"}


@pytest.fixture(autouse=True, scope="module")
def fonts():
    """Loaded before the first test, because matplotlib keeps their files open."""
    sheet = Sheet([1.0])
    sheet.axes(0).set_title("bold", weight="bold")
    sheet.figure.draw_without_rendering()


@pytest.fixture
def sheets(monkeypatch):
    """Every picture's figure, as it was saved."""
    figures = {}
    save = Sheet.save

    def kept(sheet, path):
        figures[path.name] = sheet.figure
        return save(sheet, path)

    monkeypatch.setattr(Sheet, "save", kept)
    return figures


def png_size(path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert head[12:16] == b"IHDR"
    return struct.unpack("!II", head[16:24])


def texts(figure):
    """(text, its left, lower, right and upper end in pixels, whether it is slanted) of everything that is written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    renderer = FigureCanvasAgg(figure).get_renderer()
    beyond = {id(label) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in undrawn(axis)}
    return [
        (text.get_text(), tuple(text.get_window_extent(renderer).extents.tolist()), bool(text.get_rotation() % 90))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in beyond
    ]


def undrawn(axis):
    """Labels of ticks beyond the ends of an axis."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [label for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)]


def check_readable(name, figure):
    width, height = figure.get_size_inches() * DPI
    found = texts(figure)
    for text, (left, low, right, high), _ in found:
        assert left >= 0, f"{name}: {text!r} begins outside"
        assert right <= width, f"{name}: {text!r} ends outside"
        assert low >= 0, f"{name}: {text!r} is below the picture"
        assert high <= height, f"{name}: {text!r} is above the picture"
    upright = [(text, box) for text, box, slanted in found if not slanted]  # the boxes of others are larger than they
    for (one, box), (other, other_box) in itertools.combinations(upright, 2):
        across = min(box[2], other_box[2]) - max(box[0], other_box[0])
        down = min(box[3], other_box[3]) - max(box[1], other_box[1])
        assert across <= 1 or down <= 2, f"{name}: {one!r} and {other!r} cover each other"


def check_all(drawn, sheets):
    assert {path.name for path in drawn} == sheets.keys()
    for path in drawn:
        width, height = png_size(path)
        assert width == WIDTH_IN * DPI == 1200
        assert height == pytest.approx(sheets[path.name].get_size_inches()[1] * DPI, abs=1)
        check_readable(path.name, sheets[path.name])
    assert not list(drawn[0].parent.glob("*.partial"))


def test_everything_of_a_complete_result_is_drawn_and_readable(tmp_path, sheets):
    complete = result(systems=("pdx", "pdx-tcp", "nixl"), lengths=(4000, 8000))
    complete = msgspec.structs.replace(complete, traces=[trace("pdx", 4000), trace("pdx-tcp", 8000)])
    drawn = plots.draw_all(complete, tmp_path, bandwidth())
    timelines = {"timeline-pdx-4000.png", "timeline-pdx-tcp-8000.png"}
    assert {path.name for path in drawn} == {*ALWAYS, *timelines, "breakdown.png", "bandwidth.png"}
    check_all(drawn, sheets)
    words = " ".join(text for text, _, _ in texts(sheets["breakdown.png"]))
    assert "97% of wire" in words
    assert "4,000 tokens (262 MB of KV)" in words
    assert "INTERRUPTED" not in words
    assert "2 × Intel(R) Xeon(R)" in words


def test_all_systems_at_many_loads_stay_readable(tmp_path, sheets):
    most = result(systems=(*WIRE, *ALONE), lengths=(8000,), loads=(1, 2, 4, 8), rounds=2)
    most = msgspec.structs.replace(most, traces=[])
    check_all(plots.draw_all(most, tmp_path, bandwidth(has_raw=False)), sheets)


def test_an_interrupted_result_is_drawn_as_far_as_it_goes_and_says_so(tmp_path, sheets):
    complete = result(rounds=1)
    stopped = msgspec.structs.replace(
        complete, requests=complete.requests[:7], copies=[], traces=complete.traces[:1], is_complete=False
    )
    drawn = plots.draw_all(stopped, tmp_path)
    assert {path.name for path in drawn} == {*ALWAYS, "breakdown.png", "timeline-pdx-1000.png"}
    check_all(drawn, sheets)
    for figure in sheets.values():
        assert any("INTERRUPTED" in text for text, _, _ in texts(figure))


def test_what_nobody_measured_is_not_drawn(tmp_path, sheets):
    nothing = records.Result(machine={}, model={}, settings={}, systems={}, not_run={})
    assert plots.draw_all(nothing, tmp_path / "none") == []
    plain = result(systems=("plain",), lengths=(600,), loads=(4,), rounds=1)
    one_token = [msgspec.structs.replace(each, itl_ms=[]) for each in plain.requests[:1]]
    little = records.Result(machine={}, model={}, settings={}, systems={}, not_run={}, requests=one_token)
    drawn = plots.draw_all(little, tmp_path, bandwidth()[:1])
    assert {path.name for path in drawn} == {"ttft-cdf.png", "concurrency.png", "bandwidth.png"}
    check_all(drawn, sheets)


def test_parts_that_took_no_time_at_all_are_drawn(tmp_path, sheets):
    complete = result(systems=("pdx",), lengths=(1000,), loads=(1,), rounds=1)
    nothing = records.Part(0.0, 0.0)
    idle = records.Parts(nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    requests = [msgspec.structs.replace(each, parts=idle, ttft_ms=0.0, itl_ms=[0.0]) for each in complete.requests]
    check_all(plots.draw_all(msgspec.structs.replace(complete, requests=requests), tmp_path), sheets)


def test_the_result_that_is_kept_in_the_repository_can_be_drawn(tmp_path, sheets):
    kept = json.loads((RESULTS / "channels.json").read_text())
    rows = [Row(**row) for row in kept["details"]["rows"]]
    check_all([bandwidth_plot.draw(rows, tmp_path / "channels.png", kept["machine"])], sheets)


@pytest.mark.parametrize(
    "changed",
    [
        {"marks": {}},
        {"marks": {"prefill_end": 12.0}},
        {"spans": [records.Span("wire", 0, LAYERS, 5.0, 9.0, 1)]},
        {"spans": [records.Span("prefill", 0, LAYERS, 5.0, 5.0, 0)], "marks": {}},
        {"spans": [records.Span("gather", 40, 24, 5.0, 9.0, 1)]},
    ],
    ids=["no marks", "one mark", "no prefill", "a moment", "many layers"],
)
def test_traces_of_all_kinds_are_drawn(tmp_path, sheets, changed):
    traces = [msgspec.structs.replace(trace("pdx", 4000), **changed)]
    drawn = plots.draw_all(msgspec.structs.replace(result(rounds=1), requests=[], traces=traces), tmp_path)
    assert [path.name for path in drawn] == ["timeline-pdx-4000.png"]
    check_all(drawn, sheets)


def test_a_trace_without_spans_is_no_picture_and_its_name_no_way_out_of_the_folder(tmp_path):
    traces = [records.Trace("pdx", 1, [], {}), msgspec.structs.replace(trace("pdx", 1000), system="../up")]
    only = msgspec.structs.replace(result(rounds=1), requests=[], traces=traces)
    assert plots.draw_all(only, tmp_path / "here") == [tmp_path / "here" / "timeline-..-up-1000.png"]


def test_medians_are_of_requests_that_were_alone():
    from pdx.bench.breakdown.bars import copy_ms, medians

    def request(concurrency, wire_ms, hidden_ms):
        base = result(systems=("pdx-tcp",), lengths=(1000,), loads=(1,), rounds=1).requests[0]
        parts = msgspec.structs.replace(base.parts, wire=records.Part(wire_ms, wire_ms - hidden_ms))
        return msgspec.structs.replace(base, concurrency=concurrency, parts=parts)

    found = medians([request(1, 10, 1), request(1, 30, 20), request(1, 20, 20), request(4, 1000, 0)])
    assert list(found) == [("pdx-tcp", 1000)]
    assert found["pdx-tcp", 1000]["wire"] == records.Part(20, 9)
    copies = [records.Copy(0, 1000, 5.0), records.Copy(1, 1050, 7.0), records.Copy(2, 4000, 90.0)]
    base = msgspec.structs.replace(result(rounds=1), copies=copies)
    assert copy_ms(base, 1000) == 6.0
    assert copy_ms(base, 2000) is None


def test_the_same_part_and_system_have_one_colour_everywhere():
    systems = [look.colour for look in plot_style.SYSTEMS.values()]
    assert len(set(systems)) == len(systems)
    assert len(set(plot_style.PART_COLOURS.values())) == len(plot_style.PART_TITLES)
    assert set(plot_style.PART_TITLES) <= set(records.Parts.__struct_fields__)
    assert plot_style.in_order({"plain", "new", "pdx", "nixl"}) == ["pdx", "nixl", "plain", "new"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([], []),
        ([5.0], [5.0]),
        ([99.0], [10.0]),
        ([1.0, 5.0, 9.0], [1.0, 5.0, 9.0]),
        ([5.0, 5.0], [4.5, 5.5]),
        ([6.0, 5.0, 5.5], [6.5, 4.5, 5.5]),
        ([0.0, 0.0, 0.0], [0.0, 1.0, 2.0]),
        ([10.0, 10.0], [9.0, 10.0]),
    ],
)
def test_labels_keep_apart_and_near(wanted, expected):
    assert spread(wanted, 1.0, 0.0, 10.0) == pytest.approx(expected)


def test_labels_without_room_stand_closer():
    assert spread([3.0] * 21, 1.0, 0.0, 10.0) == pytest.approx([index / 2 for index in range(21)])


def test_without_matplotlib_one_is_told_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pdx.bench.breakdown import records, report\n"
        "from pdx.errors import ConfigError\n"
        "try: report.draw_all(records.Result(machine={}, model={}, settings={}, systems={}, not_run={}), None)\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'matplotlib" in done.stdout
