"""Exchange of whole weights over all ranks, and of parts of split layers over the ranks that hold the same ones."""

# Tests: hvdx/strategies/parameter_server.py, hvdx/strategies/serving/client.py

import random
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdx.comm import mesh
from hvdx.errors import ConfigError
from hvdx.strategies import AllReduce, Auto, ParameterServer, TensorSpec, Threshold
from hvdx.strategies.serving.client import StepClient
from hvdx.strategies.split import SplitGraphExchange, Subset, open_split
from tests.strategies.serving.ranks import all_fine, run
from tests.strategies.virtual import on_all

# Whether each tensor is a part of a split layer.
MIXED = (False, True, True, False, True)


def shapes(is_part, position, scale=1):
    """Return shapes in which the sizes of parts depend on their position."""
    return [(3 + i, scale * (4 + position) if part else 5 * scale) for i, part in enumerate(is_part)]


def specs_of(comm, is_part, scale=1):
    return [TensorSpec(f"{i}", s, 4) for i, s in enumerate(shapes(is_part, comm.mesh.position, scale))]


def opened(strategy, comm, split, is_part=MIXED, scale=1):
    comm.mesh = mesh.make(comm, split)
    specs = specs_of(comm, is_part, scale)
    return open_split(strategy, comm, comm.mesh.peers, specs, is_part), specs


def update(comm, step, specs):
    random = np.random.default_rng([comm.rank, step])
    return [random.normal(size=s.shape, scale=0.01).astype(np.float32) for s in specs]


def holders(comm, part):
    """Return the ranks that hold the same tensor."""
    return comm.mesh.peer_ranks[comm.mesh.position] if part else list(range(comm.size))


def copied(arrays):
    return [np.array(a) for a in arrays]


# -- Threshold --------------------------------------------------------------------------------------------------------

THRESHOLD = {
    "fixed tau": {"tau": 0.01},
    "auto": {},
    "gradient": {"target_density": 0.1, "placement": "gradient"},
    "falling": {"target_density": 0.1, "warmup": "density:3"},
}


@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(THRESHOLD)),
    split=st.sampled_from([2, 4]),
    is_part=st.lists(st.booleans(), min_size=1, max_size=5).filter(any),
    bad=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 4)),
)
def test_results_and_residuals_keep_the_sum_of_the_updates(name, split, is_part, bad):
    """Every rank skips the step in which one has NaN; a state that was saved and loaded goes on with the same bits."""

    def work(comm):
        exchange, specs = opened(Threshold(**THRESHOLD[name], lookahead=0), comm, split, is_part)
        total, wanted = ([np.zeros(s.shape, np.float64) for s in specs] for _ in range(2))

        def add(results):
            for out, result in zip(total, results or [], strict=bool(results)):
                np.add(out, 0 if result is None else result, out=out)

        for step in range(5):
            mine = update(comm, step, specs)
            if bad == (comm.rank, step):
                mine[-1][0, 0] = np.nan
            elif bad is None or bad[1] != step:
                for out, one in zip(wanted, mine, strict=True):
                    np.add(out, one, out=out)
            add(exchange.step(mine))
        add(exchange.flush())
        skipped, residuals = exchange.telemetry.skipped, copied(exchange.residuals)
        # A second exchange with the saved state takes the step that the first one takes.
        other = open_split(Threshold(**THRESHOLD[name], lookahead=0), comm, comm.mesh.peers, specs, is_part)
        state = {key: np.array(value) for key, value in exchange.state_dict().items()}
        other.load_state_dict(state)
        kept = copied(other.residuals)
        after = [copied(e.step(update(comm, 9, specs))) for e in (exchange, other)]
        return total, wanted, residuals, kept, after, skipped, comm

    results = on_all(4, work)
    for total, _, residuals, kept, after, skipped, comm in results:
        assert skipped == (bad is not None)
        for i, part in enumerate(is_part):
            ranks = holders(comm, part)
            applied = total[i] * len(ranks)
            owed = np.sum([results[r][2][i] for r in ranks], axis=0, dtype=np.float64)
            expected = np.sum([results[r][1][i] for r in ranks], axis=0)
            np.testing.assert_allclose(applied + owed, expected, atol=2e-6)
            assert all(results[r][0][i].tobytes() == total[i].tobytes() for r in ranks)
            assert kept[i].tobytes() == residuals[i].tobytes()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*after, strict=True)) or name == "auto"


def test_values_that_one_exchange_cannot_send_skip_the_step_in_both(capfd):
    """2e7 is more than 2**30 times tau, so only the exchange of these parts refuses it."""

    def work(comm):
        exchange, specs = opened(Threshold(tau=0.01, lookahead=0), comm, 2, (False, True))
        mine = update(comm, 0, specs)
        if comm.rank == 2:
            mine[1][0, 0] = 2e7
        got = copied(exchange.step(mine))
        return [float(np.abs(a).max()) for a in (*got, *exchange.residuals)], exchange.telemetry.skipped

    assert on_all(4, work) == [([0.0] * 4, 1)] * 4
    said = capfd.readouterr().err
    assert said.count("NaN or infinity on rank 2; all ranks skipped the step") == 1
    assert "rank 2, step 1: 1: element 0 is 20000000.0" in said


def test_both_exchanges_share_the_overhead():
    strategy = Threshold(overhead=0.2)
    shares = on_all(
        4, lambda comm: [s.exchange.encoder.options.overhead for s in opened(strategy, comm, 2)[0]._subsets]
    )
    assert shares == [[0.1, 0.1]] * 4
    assert strategy.overhead == 0.2
    alone = on_all(2, lambda comm: opened(strategy, comm, 2)[0]._subsets[0].exchange.encoder.options.overhead)
    assert alone == [0.2] * 2


def test_telemetry_counts_steps_once_and_bytes_of_both_exchanges():
    def work(comm):
        exchange, specs = opened(Threshold(tau=0.01), comm, 2)
        for step in range(3):
            exchange.step(update(comm, step, specs))
        total, each = exchange.telemetry, [subset.exchange.telemetry for subset in exchange._subsets]
        assert (total.steps, total.elements) == (3, sum(s.elements for s in specs))
        assert total.sent == sum(t.sent for t in each) > each[0].sent > 0
        assert total.computing == each[0].computing > 0
        exchange.reset_telemetry()
        return exchange.telemetry.steps

    assert on_all(4, work) == [0] * 4


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Threshold(max_staleness="inf"), "it is asynchronous.*split_exchange"),
        (Auto(), "measures whole gradients"),
        (AllReduce(groups=((0,), (1, 2))), "groups: expected a number .* Give groups=1"),
        (Threshold(period=4), "period=4: expected 1 or 'auto' for a model with split layers"),
        (Threshold(device="cuda"), "device: expected 'auto' or 'cpu' for a model with split layers"),
    ],
)
def test_options_that_need_whole_weights_are_refused_on_all_ranks(strategy, said):
    def work(comm):
        with pytest.raises(ConfigError, match=said) as caught:
            opened(strategy, comm, 2)
        return caught.value.collective

    assert on_all(2, work) == [True] * 2


def test_updates_of_split_layers_on_a_gpu_are_combined_on_the_host(monkeypatch):
    def refused(index=None):
        raise AssertionError("a GPU")

    monkeypatch.setattr("hvdx.codec.devices.gpu", refused)

    def work(comm):
        comm.mesh = mesh.make(comm, 2)
        specs = [replace(s, device="GPU:0") for s in specs_of(comm, MIXED)]
        exchange = open_split(Threshold(tau=0.01), comm, comm.mesh.peers, specs, MIXED)
        return [a.shape for a in exchange.step(update(comm, 0, specs))] == [s.shape for s in specs]

    assert on_all(2, work) == [True] * 2


def test_link_is_that_of_whole_weights():
    """The record of a training shows it."""

    def work(comm):
        automatic, fixed = (opened(Threshold(**options), comm, 2)[0] for options in ({}, {"tau": 0.01}))
        return automatic.network is automatic._subsets[0].exchange.network is not None, fixed.network

    assert on_all(4, work) == [(True, None)] * 4


def test_factor_of_parts_also_applies_to_gathered_rows():
    class Same:
        sent = 0

        def step(self, tensors, finite):
            return list(tensors)

    shares = [Subset(Same(), [1], False), Subset(Same(), [0, 2], True)]
    exchange = SplitGraphExchange([TensorSpec(str(i), (4, 2), 4) for i in range(3)], shares, 3.0)
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]), tf.constant([4, 2]))
    dense, whole, gathered = exchange.step([tf.ones([4, 2]), tf.ones([4, 2]), rows])
    assert np.unique(dense).tolist() == np.unique(gathered.values).tolist() == [3.0]
    assert np.unique(whole).tolist() == [1.0]
    assert gathered.indices.numpy().tolist() == [3]


# -- ParameterServer --------------------------------------------------------------------------------------------------

SERVERS = {"dedicated": (1, 1), "two": (2, 2), "one worker": ("colocated:1", 0), "all": ("colocated", 0)}


def served(servers="colocated", **options):
    return ParameterServer(servers, **options)


def ones(specs, value=1.0):
    return [np.full(s.shape, value, np.float32) for s in specs]


@pytest.mark.parametrize(("servers", "split"), [(s, 2) for s in SERVERS] + [("all", 4), ("dedicated", 4)])
def test_synchronous_servers_return_the_mean_over_the_ranks_that_hold_a_tensor(servers, split):
    strategy = served(SERVERS[servers][0], staleness="bound", max_staleness=0, aggregate=4)

    def work(comm):
        exchange, specs = opened(strategy, comm, split)
        before, seen = ones(specs, 3.0), []
        exchange.begin(before)
        weights = before
        for step in range(6):
            weights = exchange.step([w + np.float32(8 * comm.rank + step) for w in weights])
            seen.append([float(np.unique(w).item()) for w in weights])
        final = exchange.flush()
        return seen, [None if w is None else np.unique(w).tolist() for w in final], comm.mesh, exchange.is_open

    for rank, (seen, final, where, is_open) in enumerate(all_fine(run(4, work, SERVERS[servers][1]))):
        for i, part in enumerate(MIXED):
            ranks = where.peer_ranks[where.position] if part else range(4)
            wanted = 3.0 + np.cumsum([8 * np.mean(ranks) + step for step in range(6)])
            assert [s[i] for s in seen] == wanted.tolist(), rank
            alone = part and split == 4
            assert final[i] == (None if alone else [wanted[-1]])
        assert not is_open


@pytest.mark.parametrize(
    "rule", [{}, {"staleness": "bound", "max_staleness": 1}, {"staleness": "scale+bound"}], ids=str
)
@pytest.mark.parametrize("servers", ["two", "one worker", "all"])
def test_groups_may_take_different_numbers_of_steps(servers, rule):
    """The ranks of a group meet in every step, and no group waits for one that has flushed."""
    steps = [5, 60]

    def work(comm):
        exchange, specs = opened(served(SERVERS[servers][0], **rule, codec="threshold:0.3"), comm, 2, scale=4)
        chance, weights = random.Random(comm.rank), ones(specs, 0.0)
        exchange.begin(weights)
        total = ones(specs, 0.0)
        for _ in range(steps[comm.mesh.index]):
            comm.mesh.group.all_gather_object(None, "a split layer")
            updates = [np.float32(chance.randint(-3, 3)) for _ in specs]
            total = [t + u for t, u in zip(total, updates, strict=True)]
            weights = exchange.step([w + u for w, u in zip(weights, updates, strict=True)])
        return exchange.flush(), copied(exchange.residuals), total, comm, exchange.telemetry

    results = all_fine(run(4, work, SERVERS[servers][1]))
    for final, *_, comm, telemetry in results:
        assert telemetry.steps == steps[comm.mesh.index]
        for i, part in enumerate(MIXED):
            ranks = holders(comm, part)
            assert all(results[r][0][i].tobytes() == final[i].tobytes() for r in ranks)
            if "scale" not in rule.get("staleness", ""):
                owed, total = (np.sum([results[r][k][i] for r in ranks], axis=0) for k in (1, 2))
                np.testing.assert_allclose(final[i] * len(ranks) + owed, total, atol=1e-4)


@pytest.mark.parametrize("split", [2, 4])
def test_group_skips_the_step_of_a_rank_with_nan(split, capfd):
    def work(comm):
        exchange, specs = opened(served(), comm, split)
        exchange.begin(ones(specs))
        bad = comm.rank == 1
        weights = exchange.step([w + 1 for w in ones(specs, np.nan if bad else 1.0)], True)
        return exchange.telemetry.skipped, copied(exchange.flush() if split == 2 else weights)

    results = all_fine(run(4, work))
    assert [skipped for skipped, _ in results] == ([1, 1, 0, 0] if split == 2 else [1] * 4)
    for _, weights in results:
        # Of two groups, one has taken its step: half of the ranks, and of the peers, added 1.
        assert [np.unique(w).tolist() for w in weights] == [[1.5] if split == 2 else [1.0]] * len(MIXED)
    assert "its update was refused" in capfd.readouterr().err


def test_exchanges_of_peers_have_sessions_of_their_own():
    """The servers of all peers are one process here, and several exchanges are open."""

    def work(comm):
        made = [opened(served("colocated:1"), comm, 2)[0] for _ in range(2)]
        for k, exchange in enumerate(made):
            exchange.begin(ones(exchange.specs, float(10 * k + comm.mesh.position)))
        sessions = {p.session for e in made for s in e._subsets for p in s.exchange._shards}
        found = [[np.unique(w).tolist() for w in exchange.flush()] for exchange in made]
        made[0].renew()
        return sessions, found, made[0]._subsets[1].exchange._sessions.next_session, comm.mesh.position

    results = all_fine(run(4, work))
    for _, found, _, position in results:
        for k, weights in enumerate(found):
            assert weights == [[float(10 * k + position * part)] for part in MIXED]
    of_positions = {position: sessions for sessions, *_, position in results}
    assert len(of_positions[0] & of_positions[1]) == len(of_positions[0]) / 2, "only whole weights are shared"
    assert results[0][2] == results[2][2] != results[1][2] == results[3][2]


def test_aggregate_counts_groups_for_parts():
    assert ParameterServer(aggregate=4).config(2, 10, "float32", group=2, ranks=(1, 3)).aggregate == 2
    assert ParameterServer(aggregate=3).config(2, 10, "float32", group=2).aggregate == 2
    assert ParameterServer(aggregate=1).config(1, 10, "float32", group=4).aggregate == 1
    # Two groups, and a mean staleness of 1 for aggregated updates of both.
    assert ParameterServer(aggregate=4, staleness="scale").config(2, 1, "float32", group=2).share == 0.5


@pytest.mark.parametrize(("steps", "begun", "stop_at"), [(40, 0, None), (40, 8, None), (8, 0, None), (40, 0, 3)])
def test_ranks_of_a_group_are_given_the_same_steps(steps, begun, stop_at):
    def work(comm):
        comm.mesh = mesh.make(comm, 2)
        client, chance, taken = StepClient(comm, 0, steps, begun), random.Random(comm.rank), 1
        client.begin()
        # Rank 3 is not the first of its group, and asks to stop.
        while client.request_step(stop=comm.rank == 3 and taken == stop_at):
            taken += 1
            if comm.mesh.group.any_true(chance.random() < 0.1):
                comm.mesh.group.all_gather_object(None, "a pause")
        return taken, client.taken, client.over, client.stopped, client.steps

    results = all_fine(run(4, work))
    assert results[0] == results[1]
    assert results[2] == results[3]
    total = sum(taken for taken, *_ in results)
    assert all(over for _, _, over, _, _ in results)
    assert {s for *_, s in results} == {steps}
    if stop_at is None:
        assert total == max(steps - begun, 4)
        assert [counted for _, counted, *_ in results] == [begun + total] * 4
    else:
        assert total < steps
        assert all(stopped for *_, stopped, _ in results)
