"""Charts: text of their data, colours as variables, the same file each time."""

import math
import re
from itertools import pairwise

import pytest

pytest.importorskip("matplotlib", reason="needs the extra: pip install 'hvdx[report]'")

from hvdx.report.charts import HATCHES, Bar, Line, _apart, bars, lines, patterns


def line(name, y, style=None, letter=""):
    return Line(name, list(range(1, len(y) + 1)), y, y, y, style, letter)


def texts(svg):
    return re.findall(r"<text[^>]*>(.*?)</text>", svg)


def test_a_chart_of_lines_refers_to_nothing_outside_and_has_variables_for_colours():
    found = [line("A", [0.1, 0.5], 1, "A"), line("one worker", [0.2, 0.3], 0, "1"), line("other", [0.2, 0.2])]
    svg = lines(found, ("epoch", "val_accuracy"), 'val_accuracy "quoted"', target=0.4)
    assert "http" not in svg
    assert "xlink" not in svg
    assert set(re.findall(r"url\((.)", svg)) <= {"#"}
    assert re.findall(r"#[0-9a-f]{6}\b(?!\d)", re.sub(r"(url\(#|href=\"#|id=\")[^\")]*", "", svg)) == []
    assert {"var(--s1)", "var(--ink)", "var(--rest)", "var(--grid)"} <= set(re.findall(r"var\([^)]*\)", svg))
    assert {"A", "1", "epoch", "val_accuracy"} <= set(texts(svg))
    assert "&quot;quoted&quot;" in svg


def test_a_chart_is_the_same_each_time_and_identifiers_differ_between_charts():
    found = [line("A", [0.1, 0.5], 1, "A")]
    first, again, other = (lines(found, ("epoch", "loss"), summary) for summary in ("one", "one", "two"))
    identifiers = [set(re.findall(r'id="([^"]*)"', svg)) for svg in (first, other)]
    assert first == again
    assert identifiers[0]
    assert not identifiers[0] & identifiers[1]


@pytest.mark.parametrize("y", [[math.nan, math.nan], [0.5], [0.1, math.nan, 0.3], []])
def test_nan_and_short_lines_are_drawn(y):
    assert "<svg" in lines([line("A", y, 1, "A"), line("B", y)], ("epoch", "loss"), "summary")


def test_bars_state_their_lengths_and_cut_long_names():
    rows = [Bar("a" * 80, dict.fromkeys(HATCHES, 0.01), "60 ms"), Bar("$x$ <b>", {"computing": 0.02}, "20 ms")]
    svg = bars(rows, "steps", hatched=True)
    assert texts(svg)[:4] == [texts(svg)[0], "60 ms", "$x$ &lt;b&gt;", "20 ms"]
    assert texts(svg)[0].endswith("a…")
    assert set(re.findall(r"url\(#part-(\w+)\)", svg)) == set(HATCHES) == set(re.findall(r'"part-(\w+)"', patterns()))
    assert svg.count("<svg") == 1


def test_bars_of_zeros_and_no_bars_are_drawn():
    assert "0 B" in bars([Bar("a", {"sent": 0.0}, "0 B")], "bytes")
    assert "<svg" in bars([], "nothing")


def test_a_prediction_is_a_mark():
    rows = [Bar("a", {"step": 0.02}, "20 ms", mark=0.03)]
    assert "var(--s2)" in bars(rows, "marked")
    assert "var(--s2)" not in bars([Bar("a", {"step": 0.02}, "20 ms")], "plain")


def test_letters_at_one_place_are_moved_apart_within_the_chart():
    found = _apart([5.0] * 7, [95.0 + i / 10 for i in range(7)], 0.0, 100.0)
    assert all(b - a >= 12.9 for a, b in pairwise(found))
    assert found[-1] <= 100.0
