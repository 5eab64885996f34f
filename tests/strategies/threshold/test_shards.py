import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdx.strategies.threshold.shards import Dealing


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(any),
    count=st.integers(1, 5),
    block=st.integers(1, 9),
)
def test_pieces_hold_every_element_once(sizes, count, block):
    n = sum(sizes)
    count = min(count, n)
    parts, vector = Dealing(sizes, count, block), np.arange(n)
    pieces, joined = parts.split(vector), np.full(n, -1)
    assert sorted(pieces) == list(range(n))
    assert np.diff(parts.bounds).min() > 0
    parts.join(pieces, joined)
    assert joined.tolist() == vector.tolist()
    owner = np.searchsorted(np.cumsum(sizes), vector, side="right")
    for position in range(count):
        piece = pieces[parts.bounds[position] : parts.bounds[position + 1]]
        assert (np.diff(piece) > 0).all()
        assert parts.sizes_in_piece(position) == np.bincount(owner[piece], minlength=len(sizes)).tolist()


def test_pieces_of_a_large_tensor_are_alike():
    """Each piece has elements of all parts of the tensor, in blocks that are quick to copy."""
    parts = Dealing([100_000, 10], 4)
    pieces = parts.split(np.append(np.arange(100_000), np.zeros(10)))
    for position in range(4):
        piece = pieces[parts.bounds[position] : parts.bounds[position + 1]]
        assert abs(piece.size - 25_000) < 300
        assert abs(np.mean(piece) - 50_000) < 500
        assert (np.diff(piece) == 1).mean() > 0.99
