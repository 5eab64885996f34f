"""Sharded exchange of `Threshold`: bookkeeping of both residuals, traffic, shards, and choice of the exchange."""

# Tests: hvdx/strategies/threshold/shards.py, hvdx/strategies/threshold/states.py

from dataclasses import replace

import numpy as np
import pytest

from hvdx.costs.model import Situation
from hvdx.costs.types import Link
from hvdx.errors import ConfigError, UpdateError, WireError
from hvdx.strategies import StepInput, TensorSpec, Threshold
from hvdx.strategies.threshold.shards import Shards
from tests.strategies.threshold.test_strategy import flat, steps_of, update
from tests.strategies.virtual import ELEMENTS, SPECS, on_all

_LARGE = [TensorSpec("table", (300, 200), 4), TensorSpec("w", (40_000,), 4)]


def large_update(rank, step):
    """Heavy tails, and a table of which a few rows that stand together change."""
    random = np.random.default_rng([rank, step])
    table = np.zeros((300, 200), np.float32)
    table[:20] = random.standard_t(3, size=(20, 200))
    return [table, random.standard_t(3, size=40_000).astype(np.float32)]


def test_rank_moves_five_messages():
    size = 8
    strategy, names = Threshold(target_density=0.01, exchange="sharded", lookahead=0), ("messages", "sent", "received")

    def run(comm):
        exchange, counts = strategy.open(comm, _LARGE), []
        updates = [large_update(comm.rank, t) for t in range(10)]
        for t in range(160):
            exchange.step(updates[t % 10])
            counts.append([getattr(exchange.telemetry, name) for name in names])
        return np.subtract(counts[-1], counts[-21]) / 20  # when densities have settled

    everyone = np.array(on_all(size, run))
    message, sent, received = everyone.mean(axis=0)
    assert sent == pytest.approx(received)
    # Frames and headers: some 80 bytes for each other rank.
    assert 2 * message < sent < 5.5 * message + 80 * size
    assert everyone[:, 1:].max() < 1.3 * sent


def test_owner_with_few_entries_keeps_its_tau():
    """A tau far below the entries would send no more of them, only larger multiples."""
    specs = [TensorSpec("w", (100_000,), 4)]

    def run(comm):
        exchange = Threshold(target_density=0.01, exchange="sharded", lookahead=0, warmup="none").open(comm, specs)
        for t in range(20):
            sparse = np.zeros(100_000, np.float32)
            # The same elements on all ranks: more than a rank may send, and fewer than an owner may.
            sparse[::50] = np.random.default_rng([comm.rank, t]).normal(size=2000)
            exchange.step([sparse])
        return exchange.telemetry

    counts = on_all(4, run)
    messages = np.mean([c.messages for c in counts])
    assert np.mean([c.sent for c in counts]) < 4 * messages


def test_work_of_owners_is_alike_if_updates_cluster():
    shards = Shards([s.elements for s in _LARGE], 8)
    changed = np.concatenate([np.ravel(a) for a in large_update(0, 0)]) != 0
    counts = [int(shards.of_rank(changed, rank).sum()) for rank in range(8)]
    assert max(counts) < 1.4 * np.mean(counts)


@pytest.mark.parametrize("seed", range(20))
def test_shards_are_a_permutation_with_padding(seed):
    random = np.random.default_rng(seed)
    sizes = random.integers(0, [3, 50, 3000][seed % 3], size=random.integers(1, 9)).tolist()
    ranks = int(random.integers(1, 12))
    shards = Shards(sizes, ranks)
    vector = random.normal(size=sum(sizes)).astype(np.float32)
    arrays = np.split(vector, np.cumsum(sizes)[:-1])
    pieces = shards.views(arrays, np.zeros(shards.shard_size, np.float32))
    assert [p.size for p in pieces] == shards.sizes
    np.testing.assert_array_equal(np.concatenate(pieces), shards.from_vector(vector))
    np.testing.assert_array_equal(shards.to_vector(shards.from_vector(vector)), vector)
    assert shards.shard_size % 64 == 0
    assert shards.elements == ranks * shards.shard_size
    total = sum(shards.embed(shards.of_rank(vector, r), r) for r in range(ranks))
    np.testing.assert_array_equal(total, vector)
    piece = int(np.argmax(np.abs([p.max(initial=0) for p in pieces])))
    if pieces[piece].any():
        array, element = shards.origin(piece, 0)
        assert arrays[array][element] == pieces[piece][0]


def conserved(everyone, steps, size):
    """Return where applied results and residuals add up to the updates of some steps."""
    applied = np.sum(everyone[0][0], axis=0, dtype=np.float64) * size
    residuals = np.sum([flat(exchange.residuals) for _, exchange in everyone], axis=0, dtype=np.float64)
    wanted = np.sum([flat(update(r, t)) for r in range(size) for t in steps], axis=0, dtype=np.float64)
    return np.abs(applied + residuals - wanted) < 1e-5


def test_step_is_skipped_by_all_if_one_owner_cannot_encode():
    strategy = Threshold(target_density=0.05, exchange="sharded")

    def run(comm):
        exchange = strategy.open(comm, SPECS)
        encode, calls = exchange.route._encode_sum, []

        def refuse_once(*arguments):
            calls.append(1)
            if comm.rank == 2 and len(calls) == 4:
                raise UpdateError("is infinite.", 0, 0)
            return encode(*arguments)

        exchange.route._encode_sum = refuse_once
        got = [flat(exchange.step(update(comm.rank, t))).copy() for t in range(7)]
        return got, exchange

    everyone = on_all(3, run)
    assert all(exchange.telemetry.skipped == 1 for _, exchange in everyone)
    assert conserved(everyone, [0, 1, 2, 4, 5, 6], 3).all()
    first = [step.tobytes() for step in everyone[0][0]]
    assert all([step.tobytes() for step in got] == first for got, _ in everyone[1:])


def test_infinite_sum_skips_the_step(capfd):
    """Each rank's update can be sent, but the sum of eight is infinite."""

    def huge(rank, step):
        arrays = update(rank, step)
        if step == 3:
            arrays[0][5, 6] = 2.0**126
        return arrays

    strategy = Threshold(target_density=0.05, exchange="sharded", lookahead=0)
    everyone = on_all(8, steps_of(strategy, 7, huge))
    assert all(exchange.telemetry.skipped == 1 for _, exchange in everyone)
    # Where the huge element was added and taken back, its rounding remains.
    assert conserved(everyone, [0, 1, 2, 4, 5, 6], 8).sum() >= ELEMENTS - 1
    assert "NaN or infinity on rank" in capfd.readouterr().err


_KINDS = {"gathered": "all_gather", "sharded": "sharded"}


@pytest.mark.parametrize("kinds", [("sharded", "sharded"), ("sharded", "gathered"), ("gathered", "sharded")])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 3), (4, 1), (1, 3)])
def test_residuals_keep_their_sum_for_another_number_of_ranks_and_another_exchange(kinds, before, after):
    old, new = (Threshold(target_density=0.05, exchange=_KINDS[k]) for k in kinds)
    ended = [exchange for _, exchange in on_all(before, steps_of(old, 5))]
    saved = [exchange.state_dict() for exchange in ended]

    def restored(comm):
        exchange = new.open(comm, SPECS)
        mine = saved[comm.rank] if before == after else old.merge(saved, comm.rank, comm.size)
        exchange.load_state_dict(mine)
        residuals = flat(exchange.residuals).astype(np.float64)
        exchange.step(update(comm.rank, 9))
        return residuals

    total = np.sum([flat(exchange.residuals) for exchange in ended], axis=0, dtype=np.float64)
    assert np.abs(total).max() > 1e-3
    np.testing.assert_allclose(np.sum(on_all(after, restored), axis=0), total, atol=1e-7)


def test_moved_residuals_keep_their_sum():
    def run(comm):
        exchange = Threshold(target_density=0.05, exchange="sharded").open(comm, SPECS)
        for t in range(4):
            exchange.step(update(comm.rank, t))
        before = flat(exchange.residuals).copy()
        exchange.add_to_residual(update(comm.rank, 8))
        return flat(exchange.residuals) - before - flat(update(comm.rank, 8))

    assert np.abs(on_all(2, run)).max() < 1e-7


def test_restore_refuses_shards_of_another_number_of_ranks():
    strategy = Threshold(target_density=0.05, exchange="sharded")
    (_, exchange), *_ = everyone = on_all(2, steps_of(strategy, 3))
    saved = [e.state_dict() for _, e in everyone]
    with pytest.raises(ConfigError, match="one of 2 shards, got one of 4"):
        exchange.load_state_dict(strategy.merge([*saved, *saved], 1, 2) | {"owner.ranks": np.array(4)})
    with pytest.raises(ConfigError, match="another model"):
        exchange.load_state_dict(saved[0] | {"codec.residual": np.zeros(3, np.float32)})


def test_damaged_message_of_an_owner_is_named():
    def run(comm):
        exchange = Threshold(target_density=0.05, exchange="sharded").open(comm, SPECS)
        exchange.step(update(comm.rank, 0))
        send = exchange.route.send

        def damage(outgoing):
            arrived = send(outgoing)
            messages = [m.copy() for m in arrived.messages]
            messages[2][-1] ^= 1
            return replace(arrived, messages=messages)

        exchange.route.send = damage
        with pytest.raises(WireError, match="rank 2") as error:
            exchange.step(update(comm.rank, 1))
        return error.value.rank

    assert on_all(3, run) == [2, 2, 2]


@pytest.mark.parametrize(
    ("workers", "density", "latency", "bandwidth", "kind"),
    [
        (3, "auto", 1e-4, 1e6, "all_gather"),
        (5, "auto", 1e-4, 1e6, "all_gather"),
        (8, "auto", 1e-4, 1e6, "sharded"),
        (8, "auto", 1e-1, 1e8, "all_gather"),
        (64, "auto", 1e-4, 12e6, "sharded"),
        (64, "auto", 1e-2, 1e11, "all_gather"),
        # A fixed density does not depend on the link.
        (4, 0.01, 1e-4, 1e6, "all_gather"),
        (8, 0.01, 1e-1, 1e11, "sharded"),
        (8, 0.001, 1e-4, 1e6, "all_gather"),
    ],
)
def test_auto_takes_what_costs_less(workers, density, latency, bandwidth, kind, monkeypatch):
    strategy = Threshold(target_density=density)
    prediction = strategy.predict(Situation(workers, (5_000_000,), 0.05, Link(latency, bandwidth)))
    assert ("sharded" in prediction.note) == (kind == "sharded")
    if workers > 8:
        return
    monkeypatch.setattr("hvdx.strategies.threshold.routes.probe", lambda channel: Link(latency, bandwidth))
    specs = [TensorSpec("w", (5_000_000,), 4)]
    opened = on_all(workers, lambda comm: type(strategy.open(comm, specs).route).__name__)
    assert set(opened) == {"ShardedRoute" if kind == "sharded" else "AllGatherRoute"}


def test_predicted_bytes_are_flat():
    def sent(workers, exchange):
        situation = Situation(workers, (25_000_000,), 0.1, Link(1e-4, 1e8))
        return Threshold(target_density=0.01, exchange=exchange).predict(situation).sent

    assert sent(1024, "sharded") < 1.4 * sent(8, "sharded")
    assert sent(1024, "all_gather") > 100 * sent(8, "all_gather")


def test_noise_of_gradients_is_that_of_the_gathered_exchange():
    """Both exchanges estimate the same factor from the same samples."""
    factors = {}
    for exchange in ("all_gather", "sharded"):

        def run(comm, exchange=exchange):
            opened = Threshold(target_density=0.05, exchange=exchange).open(comm, SPECS, 0.0)
            for t in range(40):
                random = np.random.default_rng([comm.rank, t])
                sample = [np.float32(0.2 + random.normal(size=64)).astype(np.float16)]
                opened.take(StepInput(update(comm.rank, t), sample=sample))
            return opened.encoder.correction(comm.size)

        first, *others = on_all(4, run)
        assert others == [first] * 3
        factors[exchange] = first
    assert factors["sharded"] == pytest.approx(factors["all_gather"], rel=0.1)
    assert 1.5 < factors["sharded"] <= 2.0


@pytest.mark.parametrize("lookahead", [None, 0.0])
def test_owners_follow_the_lag_of_their_messages(lookahead):
    """The lookahead of an owner is saved, and stays if that of the ranks is given."""

    def run(comm):
        strategy = Threshold(target_density=0.01, exchange="sharded", lookahead=lookahead, warmup="none")
        first, second = (strategy.open(comm, SPECS) for _ in range(2))
        for _ in range(9):
            first.take(StepInput(update(comm.rank, 0)))
        saved = first.state_dict()
        second.load_state_dict(saved)
        return float(saved["owner.lookahead"]), float(second.state_dict()["owner.lookahead"])

    for before, after in on_all(2, run):
        assert before == after
        assert (before > 0) is (lookahead is None)
