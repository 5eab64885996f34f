# Tests: kernels/table.py

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdx.kernels import reference
from hvdx.kernels.table import ENTRIES, FIRST, LAST, LENGTH, MULTIPLE, START, table
from hvdx.kernels.tiles import LAYOUT, TILE_MAX, plan
from tests.kernels.strategies import LAYOUTS, cases, fixed


@fixed
@given(st.sampled_from(LAYOUTS), st.data())
def test_plan_puts_every_entry_into_a_tile(layout, data):
    """No tile is empty or too large, and a region fills as many tiles of the largest size as it can."""
    most = st.integers(0, min(layout.region, 3 * layout.tile_max))
    few = st.integers(0, layout.tile_min)
    counts = np.array(data.draw(st.lists(st.one_of(few, most, st.just(0)), max_size=30)), np.int64)
    tiles = plan(counts, layout)
    assert tiles.sum() == counts.sum()
    assert (tiles >= 1).all()
    assert (tiles <= max(layout.tile_max, layout.group + layout.tile_min - 1)).all()
    own = sum(count // layout.tile_max for count in counts.tolist())
    assert np.count_nonzero(tiles == layout.tile_max) >= own


def test_layouts_keep_their_own_rules():
    for layout in LAYOUTS:
        assert layout.region % 64 == 0
        assert layout.tile_max <= TILE_MAX
        assert layout.group + layout.tile_min <= TILE_MAX
        assert layout.region * layout.group_regions <= 2**31
    assert LAYOUT in LAYOUTS


@fixed
@given(cases())
def test_table_lists_the_tiles(case):
    """Payloads are separated by headers only, and the entries are those that the specification reads."""
    tiles = reference.encode(case.update, case.residual.copy(), case.runs, case.rice, case.layout).tiles
    index, _, m = reference.read(tiles, case.n, case.rice)
    rows = table(tiles, case.n)
    ends = np.cumsum(rows[:, ENTRIES])
    np.testing.assert_array_equal(index[ends - 1], rows[:, LAST])
    np.testing.assert_array_equal(index[ends - rows[:, ENTRIES]], rows[:, FIRST])
    for end, row in zip(ends, rows, strict=True):
        assert row[MULTIPLE] == (m[end - row[ENTRIES] : end] > 1).any()
    stops = rows[:, START] + rows[:, LENGTH]
    assert (rows[1:, START] > stops[:-1]).all()
    assert tiles.size == (stops[-1] if len(rows) else 0)
