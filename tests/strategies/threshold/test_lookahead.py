"""The lookahead of a start: it rises by 1 in a step, and its limit falls."""

from hvdx.strategies.threshold.lookahead import Lookahead


def test_lookahead_of_a_start_rises_and_falls_to_the_usual_one():
    seen = [Lookahead(0.9).at(step, 0.01, 600) for step in range(700)]
    top = seen.index(max(seen))
    assert seen[:5] == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert 19 < seen[top] < 20
    assert all(b <= a for a, b in zip(seen[top:], seen[top + 1 :], strict=False))
    assert set(seen[600:]) == {3.0}


def test_start_is_longer_ahead_at_a_low_density_up_to_a_limit():
    def most(density):
        return max(Lookahead(0.9).at(step, density, 6000) for step in range(200))

    assert most(0.5) == 3.0 < most(0.1) < most(0.01) < most(0.001) < 60
    assert most(1e-4) < 60


def test_optimiser_without_momentum_has_no_start():
    assert {Lookahead(0.0).at(step, 0.01, 600) for step in range(50)} == {0.0}
