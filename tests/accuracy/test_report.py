"""The page: whole by itself, safe whatever the texts hold, and with everything that was compared."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from cardan.accuracy.comparison import Comparison, compare
from cardan.accuracy.divergence import Flip
from cardan.accuracy.plots import Axis, bars, dots, log_axis
from cardan.accuracy.report import render

VOID = {"meta", "line", "circle", "rect"}


class Balance(HTMLParser):
    """Checks that elements close in order, and gathers what a page shows and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        names = {name for name, _ in attrs}
        assert not names & {"src", "href", "onclick", "onload"}, "a page loads and runs nothing"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        children = {"circle", "rect"}
        assert tag in VOID - children | {"line"}

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def compared(recorded) -> Comparison:
    found = compare(recorded(), recorded("mlx", "bfloat16"))
    named = replace(
        found.cases[0],
        text="<script>alert(1)</script> & more",
        our_text="one",
        their_text="two",
        flip=Flip(3, 0.5, 0.25),
    )
    return replace(found, cases=(named, *found.cases[1:]))


def test_the_page_holds_everything_and_loads_nothing(compared: Comparison) -> None:
    page = render(compared)
    read = Balance()
    read.feed(page)
    assert read.open == []
    text = " ".join(read.text)
    assert "http" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert "script" not in read.counts
    assert "<script>alert(1)</script> & more" in text
    assert "&lt;script&gt;" in page
    for wanted in ("same within noise", "dtype", "bfloat16", "parts at 3; margins 0.5 and 0.25", "a lower bound"):
        assert wanted in text, wanted
    assert text.index("Fingerprints") < text.index("same within noise")
    assert read.counts["svg"] == 3
    assert read.counts["circle"] == compared.all_positions.positions
    assert read.counts["details"] == len(compared.cases)
    assert "prefers-color-scheme:dark" in page


def test_a_page_without_layers_and_differences(recorded) -> None:
    same = compare(recorded(), recorded())
    page = render(replace(same, layer_errors={}))
    assert "The fingerprints are equal." in page
    assert page.count("<svg") == 2


def test_wide_tables_scroll_by_themselves_on_narrow_screens(compared: Comparison) -> None:
    assert re.search(r"@media\(max-width:\d+rem\)\{table\{display:block;overflow-x:auto\}\}", render(compared))


def test_axes_put_values_where_they_belong() -> None:
    line = Axis(low=0, high=10)
    assert [line.share(value) for value in (0, 5, 10, 20, -3)] == [0, 0.5, 1, 1, 0]
    powers = log_axis([1e-9, 3e-4, 0.0], "x", 1e-13)
    assert (powers.low, powers.high) == (pytest.approx(1e-9), pytest.approx(1e-3))
    assert powers.share(1e-6) == pytest.approx(0.5)
    assert powers.share(0.0) == 0
    assert powers.ticks()[0] == pytest.approx(1e-9)
    assert log_axis([0.0], "x", 1e-13).high > 1e-13
    assert Axis(low=3, high=3).share(3) == 0


def test_plots_name_their_values() -> None:
    axis = Axis(low=0, high=1, label="y & z")
    plot = dots([(0.5, 0.5, "a < b")], Axis(low=0, high=1, label="x"), axis, level=0.25)
    assert "a &lt; b" in plot
    assert "y &amp; z" in plot
    assert 'class="level"' in plot
    few = bars([("one", 0.5, "half"), ("two", 1.0, "all")], axis, "names")
    assert len(re.findall("<rect", few)) == 2
    assert ">one</text>" in few
    assert "one: half" in few
    many = bars([(f"n{i}", 0.5, "") for i in range(30)], axis, "names")
    assert ">n3</text>" not in many
