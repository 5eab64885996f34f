"""The lookahead follows the lag, and rests without one."""

import math
from itertools import pairwise

import pytest

from hvdx.strategies.threshold.encoder import Lookahead


def test_lookahead_rises_with_the_lag_and_falls_where_updates_turn_round():
    lookahead, seen = Lookahead(), []
    for lag in [2.0] * 30 + [-1.0] * 20:
        lookahead.follow(lag)
        seen.append(lookahead.value)
    assert seen[0] == pytest.approx(0.4)
    assert seen[29] == pytest.approx(4.0, rel=0.1)
    assert all(a > b for a, b in pairwise(seen[29:]) if a > 0)
    assert seen[-1] == 0.0


def test_lookahead_stays_within_its_limits_and_ignores_what_says_nothing():
    lookahead = Lookahead()
    lookahead.follow(1e9)
    assert lookahead.value == 60.0
    for nothing in (math.nan, math.inf, -math.inf):
        lookahead.follow(nothing)
    assert lookahead.value == 60.0


def test_fixed_lookahead_stays():
    lookahead = Lookahead(2.0)
    lookahead.follow(5.0)
    lookahead.restore(7.0)
    assert lookahead.value == 2.0
