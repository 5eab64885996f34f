"""What the parameter server and the ordered route share."""

import gc
import time

from hvdx.comm.local import LocalComm
from hvdx.strategies.sessions import PerComm, Polling, Series
from tests.strategies.virtual import on_all


def test_ranks_agree_on_a_series_that_none_has_used():
    """An exception may have ended an opening on one rank."""

    def run(comm):
        series = Series()
        if comm.rank == 1:
            series.agree(LocalComm())
        return [series.agree(comm) >> 32 for _ in range(2)]

    assert on_all(3, run) == [[2, 3]] * 3


def test_exchanges_of_different_ranks_get_series_of_their_own():
    def run(comm):
        series = Series()
        mine = tuple(range(comm.rank % 2, 4, 2))
        return series.agree(comm, mine) >> 32, series.agree(comm, (0, 1, 2, 3)) >> 32

    assert on_all(4, run) == [(1, 3), (2, 3)] * 2


def test_an_object_belongs_to_a_communicator_and_ends_with_it():
    made = PerComm(lambda comm: [comm.rank])
    first, second = LocalComm(), LocalComm()
    assert made.of(first) is made.of(first) is not made.of(second)
    del first
    gc.collect()
    assert made.take_all() == [[0]]
    assert made.take_all() == []


def test_polls_become_rare_after_half_a_second_without_messages(monkeypatch):
    now, slept = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)

    def longest(**how):
        slept.clear()
        for _ in range(200):
            polling.sleep(**how)
        return max(slept)

    polling = Polling()
    assert longest(receiving=False) <= 1e-3
    assert longest(receiving=True) <= 1e-4
    now[0] = 0.6
    assert polling.idle == 0.6
    assert longest(receiving=False) == 0.02
    assert longest(receiving=True) <= 1e-4
    assert longest(receiving=False, naps=False) <= 1e-3
    polling.found()
    assert polling.idle == 0
    slept.clear()
    polling.sleep(receiving=False)
    assert slept == []  # the back-off begins anew
