"""Offsets between the clocks of virtual ranks."""

import time

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
