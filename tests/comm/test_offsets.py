"""Offsets between the clocks of virtual ranks."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from hvdx.comm import LocalComm
from hvdx.comm.offsets import measure
from tests.strategies.virtual import on_all


@pytest.mark.parametrize("size", [2, 4])
def test_offset_of_a_clock_is_found_within_its_error(size):
    begins = [3.0, -1e4, 2e5, 1e-3]

    def run(comm):
        time.sleep(0.01 * comm.rank)
        return measure(comm, lambda: time.perf_counter() + begins[comm.rank])

    for rank, found in enumerate(on_all(size, run)):
        # A header has nanoseconds, and a float of 2e5 s has 3e-11.
        assert abs(found.seconds - (begins[0] - begins[rank])) <= found.error + 2e-9
        assert found.error < 0.05


def test_world_of_one_has_no_offset():
    assert measure(LocalComm()).seconds == pytest.approx(0.0, abs=1e-3)


class Script:
    """Rank 1's view of all-gathers with rank 0; a rank enters and leaves late by some of the given microseconds.

    Its clock is 1 s ahead of rank 0's.
    """

    def __init__(self, late, seed=0):
        self._late, self._random, self._now, self.count, self._left = late, np.random.default_rng(seed), 0.0, 0, 0
        self.comm = SimpleNamespace(rank=1, channel=lambda what: self)

    def _delays(self):
        return 1e-6 * self._random.uniform(10, self._late(self.count), 2)

    def now(self):
        return self._now + 1.0

    def exchange(self, header):
        begin, entered = self._now, self._delays()
        self.count += 1
        both = self._now + max(entered) + 100e-6  # rank 1 reads its clock before it is late
        left = both + self._delays()
        headers = np.array([[1e9 * (begin + entered[0]), self._left], header]).astype(np.int64)
        self._left, self._now = 1e9 * left[0], left[1]
        return SimpleNamespace(headers=headers)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("late", "rounds"),
    [
        (lambda count: 20, (49, 49)),
        (lambda count: 2000 if count < 45 else 20, (50, 120)),
        (lambda count: 3000, (49, 192)),
    ],
    ids=["quiet", "busy at first", "busy"],
)
def test_busy_ranks_exchange_until_the_bounds_have_settled(late, rounds):
    script = Script(late)
    found = measure(script.comm, script.now)
    assert abs(found.seconds + 1.0) <= found.error
    assert rounds[0] <= script.count <= rounds[1]
    if late(100) == 20:
        assert abs(found.seconds + 1.0) < 20e-6
        assert found.error < 150e-6
