import pytest

from hvdx.report.table import quantity, render


def test_render_aligns_columns_under_a_header():
    assert render([["a", "1"], ["bcd", "20"]], ["x", "n"]).splitlines() == ["x     n", "---  --", "a     1", "bcd  20"]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (7_470_000, "7.47 MB"), (2.5e9, "2.5 GB")]
)
def test_quantity_picks_a_prefix(value, text):
    assert quantity(value, "B") == text
