"""Pictures are drawn in these tests."""

import pytest

from pdx.bench.harness.plot_style import Sheet


@pytest.fixture(autouse=True, scope="session")
def fonts():
    """Loaded before the first test, because matplotlib keeps their files open."""
    sheet = Sheet([1.0])
    axes = sheet.axes(0)
    axes.set_title("bold", weight="bold")
    axes.set_yscale("log")
    sheet.figure.draw_without_rendering()
