"""Rules by which a server applies updates and releases workers."""

import numpy as np
import pytest

from hvdx.strategies.serving.messages import SessionConfig, cut
from hvdx.strategies.serving.shard import Release, Shard


def shard(workers=2, **rule):
    return Shard(SessionConfig(workers, 1, "float64", **rule), np.zeros(1))


def adds(value):
    def add(out, factor):
        out += value * factor

    return add


def names(released):
    return [r.worker for r in released]


def test_an_update_is_applied_at_once_and_its_worker_continues():
    server = shard()
    assert server.push(1, 0, adds(5.0)) == [Release(1, staleness=1)]
    assert (server.weights[0], server.version, server.updates, server.applied) == (5.0, 1, 1, 1)


def test_staleness_counts_updates_applied_since_the_pull():
    server = shard(workers=4)
    ages = [server.push(w, 0, adds(1.0))[0].staleness for w in range(4)]
    assert ages == [1, 2, 3, 4]
    assert server.push(0, server.version, adds(1.0))[0].staleness == 1


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_an_update_of_staleness_s_counts_one_by_s_to_the_exponent(exponent):
    server = shard(workers=4, staleness_exponent=exponent)
    for age in range(1, 5):
        before = server.weights[0]
        server.push(age - 1, 0, adds(8.0))
        assert server.weights[0] - before == pytest.approx(8.0 / age**exponent)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_an_update_counts_its_share(share):
    server = shard(share=share, staleness_exponent=1.0)
    server.push(0, 0, adds(8.0))
    assert server.weights[0] == 8 * share
    server.push(1, 0, adds(4.0))
    assert server.weights[0] == 8 * share + 2 * share


def test_aggregation_waits_for_its_number_of_updates_from_any_workers():
    server = shard(workers=4, aggregate=3, share=0.5)
    for value in (1.0, 2.0):
        assert names(server.push(0, 0, adds(value))) == [0]
        assert server.weights[0] == server.version == server.applied == 0
    server.push(3, 0, adds(6.0))
    assert (server.weights[0], server.version, server.applied) == (4.5, 1, 3)


def test_refused_updates_are_aggregated_and_add_nothing():
    server = shard(workers=4, aggregate=3)
    server.push(0, 0, adds(2.0))
    server.push(1, 0, None)
    server.push(2, 0, adds(4.0))
    assert (server.weights[0], server.version, server.updates, server.refused) == (6.0, 1, 2, 1)


def test_one_accepted_update_among_refused_ones_counts_in_full():
    server = shard(workers=2, aggregate=2)
    server.push(0, 0, None)
    server.push(1, 0, adds(4.0))
    assert server.weights[0] == 4.0


def test_version_stays_if_all_updates_are_refused():
    server = shard(workers=2, aggregate=2)
    assert server.push(0, 0, None) == [Release(0, 1, accepted=False)]
    server.push(1, 0, None)
    assert (server.weights[0], server.version, server.refused) == (0.0, 0, 2)
    # Refused updates are aggregated too: the next two begin a new set.
    server.push(0, 0, adds(1.0))
    assert server.version == 0


def test_each_aggregated_update_is_scaled_by_its_own_staleness():
    server = shard(workers=2, aggregate=2, staleness_exponent=1.0)
    for version in (0, 1):
        for worker in (0, 1):
            server.push(worker, version, adds(0.0))
    server.push(0, 0, adds(12.0))  # of staleness 3
    server.push(1, 1, adds(2.0))  # of staleness 2
    assert server.weights[0] == 4.0 + 1.0


def test_the_order_of_aggregated_updates_makes_no_difference():
    values = {0: 1e16, 1: 1.0, 2: -1e16}
    results = set()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)):
        server = shard(workers=3, aggregate=3)
        for worker in order:
            server.push(worker, 0, adds(values[worker]))
        results.add(server.weights[0])
    assert len(results) == 1


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_worker_waits_when_it_is_more_than_the_bound_ahead(bound):
    server = shard(workers=3, max_staleness=bound)
    server.push(1, 0, adds(1.0))
    for _ in range(bound):
        assert 0 in names(server.push(0, 0, adds(1.0)))
    assert server.push(0, 0, adds(1.0)) == []
    assert server.awaited_by(0) == [2]
    # The update is in the weights although its worker waits.
    assert server.applied == bound + 2
    released = server.push(2, 0, adds(1.0))
    assert set(names(released)) == ({0, 1, 2} if bound == 0 else {0, 2})


def test_refused_updates_count_as_steps_for_waiting_workers():
    server = shard(max_staleness=0)
    assert server.push(0, 0, adds(1.0)) == []
    assert server.push(1, 0, None) == [Release(0, 1), Release(1, 2, accepted=False)]


def test_no_worker_waits_for_one_that_flushed_or_left():
    for gone in ("flush", "leave"):
        server = shard(workers=3, max_staleness=0)
        assert server.push(0, 0, adds(1.0)) == []
        assert getattr(server, gone)(1) == []
        assert server.awaited_by(0) == [2]
        assert names(getattr(server, gone)(2)) == [0]


def test_a_worker_that_leaves_while_it_waits_is_not_released():
    server = shard(workers=3, max_staleness=0)
    server.push(0, 0, adds(1.0))
    assert server.leave(0) == []
    assert server.push(1, 0, adds(1.0)) == []
    assert names(server.push(2, 0, adds(1.0))) == [1, 2]


def test_updates_pushed_before_a_worker_left_are_applied():
    server = shard(workers=2, aggregate=2)
    server.push(0, 0, adds(4.0))
    assert server.leave(0) == []
    # One worker is left, so a single update is applied.
    assert server.weights[0] == 4.0
    server.push(1, 0, adds(1.0))
    assert server.weights[0] == 5.0


def test_leaving_may_come_last_and_may_be_repeated():
    server = shard(workers=2)
    server.flush(0)
    assert server.leave(1) == [Release(0, final=True)]
    assert server.leave(1) == []
    assert server.leave(0) == []
    assert server.awaited_by(0) == []


def test_all_workers_are_released_when_the_last_has_flushed():
    server = shard(workers=3, aggregate=3)
    server.push(0, 0, adds(3.0))
    assert server.flush(2) == []
    assert server.awaited_by(2) == [0, 1]
    assert server.flush(0) == []
    assert server.flush(1) == [Release(w, final=True) for w in range(3)]
    assert (server.weights[0], server.updates, server.applied) == (3.0, 1, 1)


def test_steps_are_counted_from_zero_after_a_flush():
    server = shard(max_staleness=0)
    server.push(0, 0, adds(1.0))
    server.push(1, 0, adds(1.0))
    server.flush(0)
    assert server.push(1, 2, adds(1.0)) == [Release(1, 1)]
    server.flush(1)
    # Worker 1 took one more step before the flush, and does not start ahead after it.
    assert server.push(0, 3, adds(1.0)) == []
    assert server.awaited_by(0) == [1]
    assert names(server.push(1, 3, adds(1.0))) == [0, 1]


def test_released_workers_wait_for_no_other():
    server = shard()
    server.push(0, 0, adds(1.0))
    assert server.awaited_by(0) == server.awaited_by(1) == []


@pytest.mark.parametrize("elements", [0, 1, 2, 3, 4, 7, 1000, 1001])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_parts_are_consecutive_and_of_equal_size(elements, parts):
    bounds = cut(elements, parts)
    assert len(bounds) == max(1, min(parts, elements))
    assert [b for b, _ in bounds] == [0, *[e for _, e in bounds[:-1]]]
    assert bounds[-1][1] == elements
    sizes = {e - b for b, e in bounds}
    assert max(sizes) - min(sizes) <= 1
