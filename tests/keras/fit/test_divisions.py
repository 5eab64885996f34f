"""Divisions of the rows of each step that change while virtual ranks draw ahead of each other."""

import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import hvdx
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.fit import data
from hvdx.keras.fit.divisions import Division

STEPS = 7


@given(st.integers(2, 4), st.lists(st.integers(0, 9), max_size=60), st.data())
def test_each_row_belongs_to_one_rank_in_whatever_order_ranks_draw_agree_and_die(size, events, drawing):
    even = [4] * size
    divisions, places, drawn = [Division(even, rank) for rank in range(size)], [0] * size, [{} for _ in range(size)]

    def draw(rank):
        place, places[rank] = places[rank], places[rank] + 1
        drawn[rank][place] = divisions[rank].bounds(*divmod(place, STEPS))

    living, dealt = list(range(size)), []
    for event in events:
        if event in living:
            draw(event)
        elif event == 8 and len(living) > 1:
            living.remove(drawing.draw(st.sampled_from(living)))
        if event >= 8:
            ends = st.lists(
                st.integers(1, 4 * size - 1), min_size=len(living) - 1, max_size=len(living) - 1, unique=True
            )
            rows = dict(zip(living, np.diff([0, *np.sort(drawing.draw(ends)), 4 * size]).tolist(), strict=True))
            at = max(divisions[rank].hold() for rank in living)
            for rank in living:
                divisions[rank].change(at, [rows.get(r, 0) for r in range(size)])
            dealt.append((at, list(living)))
    for rank in living:
        while places[rank] < max(places):
            draw(rank)
    for place in range(max(places)):
        # Those who are left draw all rows from the position on at which they dealt those of the dead.
        whole = next((who for at, who in reversed(dealt) if at <= divmod(place, STEPS)), range(size))
        ends = [drawn[rank][place] for rank in whole if place in drawn[rank]]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        if set(whole) <= set(living):
            assert sum(end - begin for begin, end in ends) == 4 * size
    assert len({tuple(divisions[rank].history) for rank in living}) == 1


def test_a_pipeline_waits_at_the_position_that_is_held_and_no_earlier():
    division, found = Division([4, 4], 0), []
    division.rows_at((0, 2))
    assert division.hold() == (0, 3)
    assert division.rows_at((0, 1)) == (4, 4)
    thread = threading.Thread(target=lambda: found.append(division.rows_at((0, 3))), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert not found
    division.change((0, 3), [7, 1])
    thread.join(5)
    assert found == [(7, 1)]


def _first(batch):
    return np.asarray(batch[0] if isinstance(batch, tuple) else batch)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("framework", ["tensorflow", "jax", "dataset"])
def test_any_division_is_the_step_of_one_process(framework, shuffle, monkeypatch):
    monkeypatch.setattr(backend, "name", lambda: "jax" if framework == "jax" else "tensorflow")
    samples = np.arange(53)
    if framework == "dataset":
        # Keras' data of inputs without labels.
        samples = tf.data.Dataset.range(53).map(lambda i: (i, None))
    changes = [((0, 2), [1, 5, 7]), ((1, 0), [4, 4, 5]), ((1, 1), [10, 1, 2])]
    shares = [
        hvdx.shard(samples, global_batch_size=13, shuffle=shuffle, balance=changes, rank=r, size=3) for r in range(3)
    ]
    whole = hvdx.shard(samples, 13, shuffle=shuffle, rank=0, size=1)
    # Keras makes an iterator of a dataset that it does not read, and the next one has another order.
    assert all(map(iter, [whole, *shares]))
    for sizes in ([[4, 4, 5]] * 2 + [[1, 5, 7]] * 2, [[4, 4, 5]] + [[10, 1, 2]] * 3):
        steps = list(zip(*([_first(b) for b in share] for share in shares), strict=True))
        assert [[len(b) for b in step] for step in steps] == sizes
        assert [np.concatenate(step).tolist() for step in steps] == [_first(b).tolist() for b in whole]


@pytest.mark.parametrize("framework", ["tensorflow", "jax"])
def test_a_batch_that_ranks_do_not_divide_keeps_every_sample(framework, monkeypatch):
    monkeypatch.setattr(backend, "name", lambda: framework)
    shares = [hvdx.shard(np.arange(23), global_batch_size=8, drop_remainder=False, rank=r, size=3) for r in range(3)]
    whole = [_first(b).tolist() for b in hvdx.shard(np.arange(23), 8, drop_remainder=False, rank=0, size=1)]
    steps = list(zip(*([_first(b) for b in share] for share in shares), strict=True))
    assert [[len(b) for b in step] for step in steps] == [[2, 3, 3], [2, 3, 3], [2, 2, 3]]
    assert [np.concatenate(step).tolist() for step in steps] == whole
    assert [data.batch_size(share) for share in shares] == [2, 3, 3]


def test_a_share_of_other_ranks_is_never_divided_anew():
    share = hvdx.shard(np.arange(16), global_batch_size=8, rank=2, size=3)
    division = data.division_in(share)
    assert division is not None
    data.deal(0, 1)
    assert (division.planned, division.rank, division.latest) == (True, 2, (2, 3, 3))


@pytest.mark.parametrize("balance", ["on", [((0, 0), [3, 3])], [((0, 0), [8, 0])], [(0, [4, 4])]])
def test_a_wrong_balance_is_an_error(balance):
    with pytest.raises(ConfigError, match="shard: balance: expected"):
        hvdx.shard(np.arange(16), global_batch_size=8, balance=balance, rank=0, size=2)


def test_changes_need_the_batch_of_all_ranks():
    with pytest.raises(ConfigError, match="global_batch_size= and full steps beside changes"):
        hvdx.shard(np.arange(16), 4, balance=[((0, 0), [5, 3])], rank=0, size=2)
    with pytest.raises(ConfigError, match="leave drop_remainder out"):
        hvdx.shard(np.arange(16), global_batch_size=8, drop_remainder=False, balance=[((0, 0), [5, 3])], rank=0, size=2)


def test_a_pipeline_that_divides_steps_anew_keeps_even_rows():
    share = hvdx.shard(np.arange(16), global_batch_size=8, balance=[((0, 1), [5, 3])], rank=0, size=2)
    assert data.division_in(share.map(lambda x: x).prefetch(1)) is data.division_in(share)
    assert data.division_in(share) is not None
    for other in (share.unbatch().batch(4), share.shuffle(2), share.filter(lambda _: True), np.arange(3), None):
        assert data.division_in(other) is None
