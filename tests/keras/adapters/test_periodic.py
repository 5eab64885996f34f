"""Periods of several steps between two exchanges, on virtual ranks: threads of this process, without a launcher."""

# Tests: hvdx/keras/adapters/periodic.py, hvdx/keras/adapters/period.py

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx.comm.local import virtual_world
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.adapters import period, updates
from hvdx.keras.adapters.host import own_zeros
from hvdx.keras.adapters.optimizer import attach
from hvdx.keras.adapters.periodic import PeriodicAdapter
from tests.ranks.test_contract import Mean, MeanExchange
from tests.strategies.virtual import on_all


class EveryThird(Mean):
    """Mean of the changes of three steps."""

    may_wait = True

    def __init__(self):
        super().__init__("update")

    def open(self, comm, specs, name=""):
        exchange = MeanExchange(comm, specs)
        exchange.period = 3
        return exchange


def steps_of(comm, strategy, gradients, optimizer=None, flush=True):
    """Take a step with each gradient of this rank; return the weights after each step and after a flush."""
    weight = keras.Variable(np.zeros(40, np.float32), name="w")
    optimizer = optimizer or keras.optimizers.SGD(1.0)
    adapter = attach(optimizer, strategy, "adapters", comm=comm)
    assert isinstance(adapter, PeriodicAdapter) is not optimizer.use_ema
    weights = []
    for gradient in gradients[comm.rank]:
        optimizer.apply([tf.constant(gradient, tf.float32)], [weight])
        weights.append(weight.numpy())
    if flush:
        adapter.flush()
        weights.append(weight.numpy())
    return np.array(weights), adapter


def constant(*sizes):
    return [[np.full(40, size) for size in mine] for mine in sizes]


def test_weights_are_the_mean_after_the_first_step_and_after_each_period():
    gradients = constant([1.0] * 6, [3.0] * 6)
    (first, _), (second, _) = on_all(2, lambda comm: steps_of(comm, EveryThird(), gradients))
    # The first period has one step, in which the exchange is opened.
    assert first[:, 0].tolist() == [-2, -3, -4, -8, -9, -10, -12]
    assert second[:, 0].tolist() == [-2, -5, -8, -8, -11, -14, -12]


def test_writing_of_the_weights_is_cost_at_the_end_of_a_period_of_several_steps_only():
    class Counts(EveryThird):
        def open(self, comm, specs, name=""):
            exchange = super().open(comm, specs)
            exchange.applied = lambda: written.append((comm.rank, exchange.telemetry.steps))
            return exchange

    written = []
    on_all(2, lambda comm: steps_of(comm, Counts(), constant([1.0] * 7, [3.0] * 7), flush=False))
    # The first period has one step.
    assert sorted(written) == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_nan_in_a_period_drops_the_period_on_all_ranks():
    class Skips(EveryThird):
        def open(self, comm, specs, name=""):
            exchange = super().open(comm, specs)
            combine = exchange.combine

            def checked(step_input):
                bad = comm.any_true(not step_input.finite)
                found.append((comm.rank, step_input.steps, step_input.blamed))
                return [0 * r if bad else r for r in combine(step_input)]

            exchange.combine = checked
            return exchange

    found = []
    gradients = constant([1.0] * 7, [3.0] * 7)
    gradients[1][2] = np.full(40, np.nan)
    for weights, _ in on_all(2, lambda comm: steps_of(comm, Skips(), gradients, flush=False)):
        assert weights[[0, 3, 6], 0].tolist() == [-2, -2, -8]
        assert np.isfinite(weights).all()
    assert [(steps, blamed) for rank, steps, blamed in found if rank == 1] == [(1, ""), (3, "w"), (3, "")]


@pytest.mark.parametrize("period", ["auto", 2])
def test_averages_of_the_weights_need_equal_weights_in_each_step(period):
    gradients = np.random.default_rng(2).normal(size=(2, 5, 40))

    def run(comm):
        optimizer = keras.optimizers.SGD(0.1, use_ema=True)
        if period == 2:
            with pytest.raises(ConfigError, match="use_ema averages the weights of all steps"):
                attach(optimizer, hvdx.Threshold(period=2), "adapters", comm=comm)
            return np.zeros(1)
        weights, adapter = steps_of(comm, hvdx.Threshold(), gradients, optimizer)
        # The exchange does not choose a period that the adapter would not follow.
        assert adapter.strategy.options.period == 1
        return weights

    first, second = on_all(2, run)
    np.testing.assert_array_equal(first, second)


def test_constraints_hold_after_a_flush():
    def run(comm):
        weight = keras.Variable(np.ones(40, np.float32))
        weight.constraint = keras.constraints.MaxNorm(1.0, axis=0)
        optimizer = keras.optimizers.SGD(0.1)
        adapter = attach(optimizer, EveryThird(), "adapters", comm=comm)
        for _ in range(3):
            optimizer.apply([tf.fill([40], -1.0 - comm.rank)], [weight])
        adapter.flush()
        return np.linalg.norm(weight.numpy())

    for norm in on_all(2, run):
        assert norm <= 1.0 + 1e-6


def test_adapter_is_freed_with_its_optimizer():
    def run(comm):
        _, adapter = steps_of(comm, hvdx.Threshold(target_density=0.1, period=2), constant([1.0] * 4, [2.0] * 4))
        return weakref.ref(adapter)

    refs = on_all(2, run)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_different_numbers_of_steps_are_an_error_on_all_ranks():
    def run(comm):
        with pytest.raises(ReplicaError, match=r"\[2, 1\] steps since the last exchange"):
            steps_of(comm, EveryThird(), constant([1.0] * 3, [1.0] * 2))

    on_all(2, run)


def test_only_the_sample_of_the_last_step_of_a_period_is_exchanged_and_a_flush_has_one_of_zeros():
    def run(comm):
        strategy, samples = hvdx.Threshold(target_density=0.1, period=3), []
        open_, adam = strategy.open, keras.optimizers.Adam(0.1)

        def open_recorded(*args, **kwargs):
            exchange = open_(*args, **kwargs)
            take = exchange.take

            def recorded(step_input):
                samples.append(np.concatenate(step_input.sample))
                return take(step_input)

            exchange.take = recorded
            return exchange

        strategy.open = open_recorded
        steps_of(comm, strategy, constant([1.0] * 6, [3.0] * 6), adam)
        return samples

    for first, end, flushed in on_all(2, run):
        assert len(first) == len(end) == len(flushed) == 40
        assert np.all([first, end])
        assert not np.any(flushed)


def test_only_the_rows_of_a_sparse_update_are_written_in_mid_period(monkeypatch):
    """Plain SGD on an embedding reads the rows of a batch, in place of the table."""

    def counted(value):
        dense.append(value)
        return original(value)

    def run(comm):
        table, optimizer = keras.Variable(np.zeros((5, 2), np.float32)), keras.optimizers.SGD(1.0)
        adapter = attach(optimizer, EveryThird(), "adapters", comm=comm)
        tables = []
        for _ in range(3):
            rows = tf.IndexedSlices(tf.ones((2, 2)) * (1.0 + comm.rank), tf.constant([1, 1]), tf.constant([5, 2]))
            optimizer.apply([rows], [table])
            tables.append(table.numpy()[:, 0].tolist())
        adapter.flush()
        return [*tables, table.numpy()[:, 0].tolist()]

    dense, original = [], updates._dense
    monkeypatch.setattr(updates, "_dense", counted)
    (first, second) = on_all(2, run)
    assert dense == []
    assert first == [[0, -3, 0, 0, 0], [0, -5, 0, 0, 0], [0, -7, 0, 0, 0], [0, -9, 0, 0, 0]]
    assert second[1:] == [[0, -7, 0, 0, 0], [0, -11, 0, 0, 0], [0, -9, 0, 0, 0]]


def test_the_shared_weights_have_memory_as_long_as_an_array_of_them():
    """A variable has it, too, when `enter` was not followed by a step."""
    kept = weakref.ref(tensor := own_zeros(1000, "CPU:0"))
    array = period._writable(tensor).reshape(10, 100)[3]
    del tensor
    gc.collect()
    assert kept() is not None
    array[:] = 2.0
    assert kept().numpy().sum() == 200
    del array
    gc.collect()
    assert kept() is None


def test_a_step_has_few_operations_for_each_variable():
    """TensorFlow's time before the first step grows with them, and with the inputs of conditionals."""

    def operations(count):
        variables = [keras.Variable(np.zeros(4, np.float32)) for _ in range(count)]
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(variables)
        adapter = attach(optimizer, hvdx.Threshold(target_density=0.1), "adapters", comm=virtual_world(1)[0])
        step = tf.function(lambda *gradients: optimizer.apply(gradients, variables))
        traced = step.get_concrete_function(*[tf.TensorSpec([4])] * count).graph.as_graph_def()
        assert isinstance(adapter, PeriodicAdapter)
        return len(traced.node) + sum(len(function.node_def) for function in traced.library.function)

    tf.config.run_functions_eagerly(False)
    # With conditionals there were 34, to which TensorFlow added a copy of each of their inputs.
    assert (operations(12) - operations(2)) / 10 < 24


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("period", [2, 5])
@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.AdamW])
def test_nothing_is_lost_and_shared_weights_have_equal_bits(size, period, optimizer):
    """The sum of what all ranks would have added alone is in the weights and in the residuals."""
    rng = np.random.default_rng(period)
    gradients = rng.normal(size=(size, 11, 40))

    def run(comm):
        exact = hvdx.Threshold(target_density=0.1, period=period, second_moments="own", warmup="none")
        return steps_of(comm, exact, gradients, optimizer(0.1))

    ranks = on_all(size, run)
    shared = [weights[[0, *range(period, 11, period), -1]] for weights, _ in ranks]
    for other in shared[1:]:
        np.testing.assert_array_equal(other, shared[0])
    assert not np.array_equal(ranks[0][0][1], ranks[1][0][1])
    if optimizer is keras.optimizers.SGD:
        residuals = sum(adapter.exchange.residuals[0] for _, adapter in ranks)
        wanted = -0.1 * gradients.sum(axis=(0, 1))
        np.testing.assert_allclose(size * shared[0][-1] + residuals, wanted, atol=1e-4)


# -- the share of the residual ----------------------------------------------------------------------------------------


def test_each_rank_goes_on_from_the_shared_weights_and_its_share_of_what_is_unsent():
    gradients = np.random.default_rng(4).normal(size=(2, 9, 40))

    def run(comm):
        weights, adapter = steps_of(comm, hvdx.Threshold(target_density=0.1), gradients, flush=False)
        owed = adapter.exchange.unsent_share * adapter.exchange.unsent()[0]
        assert adapter.rank_local_variables()
        adapter.flush()
        assert not adapter.rank_local_variables()
        return weights, owed, adapter.variables[0].numpy()

    (first, mine, shared), (second, others, again) = on_all(2, run)
    np.testing.assert_array_equal(shared, again)
    # The first step after a flush shows whether the script writes weights itself.
    np.testing.assert_array_equal(first[0], second[0])
    assert not np.array_equal(first[1], second[1])
    np.testing.assert_array_equal(first[-1], shared + mine.astype(np.float32))
    # All updates of a rank are in its own weights, and half of them is in the mean.
    np.testing.assert_allclose(shared + mine + others, -gradients.sum(axis=(0, 1)) / 2, atol=1e-4)


def clip(weight):
    weight.assign(keras.ops.clip(weight, -0.1, 0.1))


@pytest.mark.parametrize(
    ("where", "length"),
    [("eagerly", 1), ("in a graph", 1), ("before the step", 1), ("a constraint", 1), ("once", 1), ("once", 3)],
)
def test_weights_that_the_script_writes_stay_written_and_the_same_on_all_ranks(where, length):
    gradients = np.random.default_rng(5).normal(size=(2, 12, 40)).astype(np.float32)

    def run(comm):
        weight, optimizer = keras.Variable(np.full(40, 0.5, np.float32)), keras.optimizers.SGD(0.1)
        optimizer.build([weight])
        strategy = hvdx.Threshold(target_density=0.1, warmup="none", period=length)
        adapter = attach(optimizer, strategy, "adapters", comm=comm)
        if where == "a constraint":
            weight.constraint = lambda w: keras.ops.clip(w, -0.1, 0.1)

        def step(gradient):
            if where == "before the step":
                clip(weight)
            optimizer.apply([gradient], [weight])
            if where in ("eagerly", "in a graph"):
                clip(weight)

        taken = step if where in ("eagerly", "once") else tf.function(step)
        for number, gradient in enumerate(gradients[comm.rank]):
            taken(tf.constant(gradient))
            # The second period of three steps is over.
            if where == "once" and number == 6:
                weight.assign(np.full(40, 500.0))
        adapter.flush()
        return weight.numpy()

    first, second = on_all(2, run)
    np.testing.assert_array_equal(first, second)
    if where == "once":
        assert np.abs(first - 500).max() < 24
    else:
        # The last update comes after "before the step".
        assert np.abs(first).max() <= (0.1 if where != "before the step" else 0.4)


def test_weights_are_compared_with_the_shared_ones_once_after_a_flush(monkeypatch):
    compared = []
    monkeypatch.setattr(period, "are_equal", lambda *weights: compared.append(weights) or True)

    def run(comm):
        _, adapter = steps_of(comm, EveryThird(), constant([1.0] * 10, [3.0] * 10), flush=False)
        return adapter

    on_all(2, run)
    assert len(compared) == 2


@pytest.mark.parametrize("graph", [False, True])
def test_weights_decay_as_on_one_rank(graph):
    """Keras decays the weights outside the optimiser's own step, which must not look like a write of the script."""
    gradients = np.random.default_rng(8).normal(size=(2, 30, 40)).astype(np.float32)

    def run(comm):
        weight, optimizer = keras.Variable(np.full(40, 9.0, np.float32)), keras.optimizers.SGD(0.1, weight_decay=0.2)
        optimizer.build([weight])
        adapter = attach(optimizer, hvdx.Threshold(target_density=0.5), "adapters", comm=comm)
        taken = (tf.function if graph else lambda step: step)(lambda g: optimizer.apply([g], [weight]))
        for gradient in gradients[comm.rank]:
            taken(tf.constant(gradient))
        assert adapter.rank_local_variables()
        adapter.flush()
        return weight.numpy()

    first, second = on_all(2, run)
    np.testing.assert_array_equal(first, second)
    whole, optimizer = keras.Variable(np.full(40, 9.0, np.float32)), keras.optimizers.SGD(0.1, weight_decay=0.2)
    for gradient in gradients.mean(axis=0):
        optimizer.apply([tf.constant(gradient)], [whole])
    np.testing.assert_allclose(first, whole.numpy(), atol=0.3)


def test_no_update_of_a_variable_in_two_lists_is_lost():
    gradients = np.random.default_rng(6).normal(size=(2, 12, 40)).astype(np.float32)

    def run(comm):
        shared, other = (keras.Variable(np.zeros(40, np.float32)) for _ in range(2))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([shared, other])
        adapter = attach(optimizer, hvdx.Threshold(target_density=0.1, warmup="none"), "adapters", comm=comm)
        for number, gradient in enumerate(map(tf.constant, gradients[comm.rank])):
            both = number > 3 and number % 2
            optimizer.apply([gradient] * (1 + both), [shared, other][: 1 + both])
        adapter.flush()
        return shared.numpy(), sum(exchange.unsent()[0] for exchange, _ in adapter._open.values())

    (first, mine), (second, others) = on_all(2, run)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(2 * first + mine + others, -0.1 * gradients.sum(axis=(0, 1)), atol=1e-5)


@pytest.mark.parametrize("period", [1, 4])
def test_training_goes_on_from_a_checkpoint_in_mid_epoch_with_the_same_bits(period):
    gradients = np.random.default_rng(1).normal(size=(2, 12, 40)).astype(np.float32)

    def run(comm):
        strategy, adapters, pairs = hvdx.Threshold(target_density=0.1, period=period), [], []

        def new(start):
            weight, optimizer = keras.Variable(start), keras.optimizers.SGD(0.1)
            adapters.append(attach(optimizer, strategy, "adapters", comm=comm))
            pairs.append((weight, optimizer))
            return weight, adapters[-1]

        for _ in range(2):
            weight, saved = new(np.zeros(40, np.float32))
        for step, gradient in enumerate(gradients[comm.rank]):
            for w, o in pairs:
                o.apply([gradient + 0.5 * tf.convert_to_tensor(w)], [w])
            if step == 6:  # two steps after an exchange
                saved.drain()
                copy, resumed = new(weight.numpy())
                resumed.reopen([copy])
                resumed.load_state_dict(saved.state_dict())
                saved.go_on()
                resumed.prepare_broadcast()
                resumed.begin_epoch()
        return [w.numpy() for w, _ in pairs]

    for straight, whole, resumed in on_all(2, run):
        np.testing.assert_array_equal(whole, resumed)
        # The checkpoint ends a longer period.
        assert np.array_equal(straight, whole) is (period == 1)
