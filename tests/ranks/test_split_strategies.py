"""Split layers under every strategy: the losses of whole layers where the mathematics are the same, and replicas."""

import contextlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx import comm as world
from hvdx.keras import Distribute
from hvdx.keras.adapters.optimizer import attach, detach
from hvdx.keras.fit import replicas
from hvdx.keras.layers import SplitDense
from hvdx.keras.weight_parts import by_ranks, part_of
from tests.ranks import models
from tests.ranks.split import assert_close, network, split, splits, whole


def layers(units):
    return [SplitDense(8, activation="relu", gather_output=False), SplitDense(units, input_is_split=True)]


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


class Seen(keras.callbacks.Callback):
    """Callback that records losses, and counts the steps of this rank in each epoch."""

    def __init__(self):
        super().__init__()
        self.losses, self.steps = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.steps.append(0)

    def on_train_batch_begin(self, batch, logs=None):
        self.steps[-1] += 1

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def train(strategy, epochs=3):
    """Train; return the callback and the model."""
    seen, model = Seen(), models.compiled(network(layers), sgd())
    models.fit(model, [Distribute(strategy), seen], epochs=epochs)
    return seen, model


def differing(model, optimizer):
    """Return the variables that differ between ranks that hold the same ones."""
    variables = list(model.weights)
    variables += [v for v in model.optimizer.variables if v.dtype == "float32"] if optimizer else []
    found = [replicas.differing(some, ranks) for ranks, some in by_ranks(variables, world.start())]
    assert len(found) == (1 if world.start().mesh.peers.size == 1 else 2)
    return [f for f in found if f]


# Strategies under which N ranks take the steps of one process with N times the batch.
SYNCHRONOUS = {
    "all_reduce": hvdx.AllReduce(engine="mpi"),
    "servers": "servers",
    "averaging": hvdx.ParameterAveraging(1, engine="mpi"),
    "weighted": hvdx.ParameterAveraging(1, weighted=True, engine="mpi"),
    "own momenta": hvdx.ParameterAveraging(1, average_optimizer=False, engine="mpi"),
    "threshold": hvdx.Threshold(tau=2.0**-24, lookahead=0),
    "gradient": hvdx.Threshold(tau=2.0**-24, placement="gradient"),
}


def synchronous(name):
    if name == "servers":
        return hvdx.ParameterServer("colocated", staleness="bound", max_staleness=0, aggregate=hvdx.size())
    return SYNCHRONOUS[name]


@pytest.mark.sizes(2, 4)
def test_threshold_samples_gradients_of_whole_weights_and_of_parts():
    for ranks in splits():
        with split(ranks):
            model = models.compiled(network(layers), keras.optimizers.Adam(0.01))
            models.fit(model, [Distribute(hvdx.Threshold(target_density=0.1))], epochs=1)
            assert differing(model, optimizer=False) == []


@pytest.mark.sizes(4)
@pytest.mark.parametrize("names", [("servers", "averaging", "gradient"), ("weighted", "own momenta", "threshold")])
def test_training_is_that_of_whole_layers(names):
    with split(1):
        expected, reference = train(synchronous("all_reduce"))
        weights = whole(reference)
    for ranks in splits():
        for name in names:
            with split(ranks):
                seen, model = train(synchronous(name))
                # Updates of servers and averages are sums in another order.
                np.testing.assert_allclose(seen.losses, expected.losses, rtol=1e-4)
                assert_close(whole(model), weights, 1e-4)
                assert differing(model, name not in ("servers", "own momenta", "threshold")) == []


OTHERS = {
    "update": lambda: hvdx.Threshold(target_density=0.2),
    "auto": lambda: hvdx.Threshold(),
    "averaging": lambda: hvdx.ParameterAveraging(3, engine="mpi"),
    "weighted": lambda: hvdx.ParameterAveraging(2, average_optimizer=False, weighted=True, engine="mpi"),
    "servers": lambda: hvdx.ParameterServer("colocated", staleness="bound", max_staleness=1, codec="bf16"),
    "two servers": lambda: hvdx.ParameterServer("colocated:2"),
}


def spoiled(bad):
    """Return data of this rank; with `bad`, the second batch of rank 1 holds infinity."""
    x, y = models.data()
    mine = slice(hvdx.rank(), None, hvdx.size())
    x, y = x[mine].copy(), y[mine]
    if bad and hvdx.rank() == 1:
        x[models.BATCH] = np.inf
    return x, y


def loss_of(model):
    """Return the loss of clean data. Collective in a group."""
    x, y = models.data(24)
    return float(np.mean(model.loss(y, model(x))))


@pytest.mark.sizes(4)
@pytest.mark.parametrize(
    ("names", "policy"),
    [(("auto", "servers", "averaging"), "float32"), (("update", "two servers", "weighted"), "mixed_float16")],
)
def test_infinity_on_one_rank_skips_a_step_of_the_ranks_that_take_it_together(names, policy):
    keras.config.set_dtype_policy(policy)
    scaled = policy == "mixed_float16"
    for ranks in splits():
        for name in names:
            asynchronous, averaging = "servers" in name, name in ("averaging", "weighted")
            # Without a loss scale, infinity stays in weights until an average leaves them out: those of all ranks here.
            bad = scaled or not (averaging and ranks == hvdx.size())
            with split(ranks) as mesh:
                model = models.compiled(network(layers), sgd())
                before, callback = loss_of(model), Distribute(OTHERS[name]())
                x, y = spoiled(bad)
                model.fit(x, y, batch_size=models.BATCH, epochs=3, verbose=0, shuffle=False, callbacks=[callback])
                assert loss_of(model) < before, name
                own = name in ("update", "auto", "weighted") or asynchronous
                assert differing(model, not own) == [], name
                counted = callback.cost().skipped
                if scaled:
                    counted = int(model.optimizer.inner_optimizer.iterations)
                    scales = mesh.group.all_gather_object(float(model.optimizer.dynamic_scale), "scales")
                    assert len(set(scales)) == 1
                everyone = world.start().all_gather_object(counted, "skipped")
            together = mesh.groups if asynchronous else [range(hvdx.size())]
            if scaled and averaging:
                continue
            for group in together:
                assert len({everyone[r] for r in group}) == 1, (name, everyone)
            if not scaled and not averaging:
                assert everyone == [
                    3 * (not asynchronous or 1 in mesh.groups[rank // ranks]) for rank in range(hvdx.size())
                ]


@contextlib.contextmanager
def attached(optimizer, strategy):
    """Build a network of split layers, and attach its optimiser; yield the adapter and the variables."""
    model = models.compiled(network(layers), optimizer)
    try:
        yield attach(model.optimizer, strategy, "test"), model.trainable_variables
    finally:
        detach(model.optimizer)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("spoiled", [False, True])
def test_ranks_of_a_group_count_alike_in_an_average_of_parts(spoiled):
    """A part has the weight of the samples of its group; a group with NaN on one rank is left out."""
    rank, counts = hvdx.rank(), [1, 2, 4, 9]
    optimizer = keras.optimizers.SGD(0.1)
    with split(2) as mesh, attached(optimizer, hvdx.ParameterAveraging(1, weighted=True, engine="mpi")) as found:
        adapter, variables = found
        for variable in variables:
            variable.assign(np.full(variable.shape, mesh.index if part_of(variable) is not None else rank, "float32"))
        if spoiled and rank == 1:
            variables[0].assign(np.full(variables[0].shape, np.nan, "float32"))
        adapter.count_samples(counts[rank])
        optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
        for variable in variables:
            expected = (4 * 2 + 9 * 3) / 13 if spoiled else np.dot(counts, range(4)) / 16
            if part_of(variable) is not None:
                expected = 1 if spoiled else 13 / 16
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("name", ["averaging", "servers"])
def test_overflow_of_one_rank_skips_the_step_of_its_group(name, monkeypatch):
    """The overflow is in the gradient of a whole weight, which the other ranks of the group do not see."""
    monkeypatch.setenv("HVDX_TIMEOUT", "20")
    for ranks in splits():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
        with split(ranks) as mesh, attached(optimizer, OTHERS[name]()) as (adapter, variables):
            for step in range(2):
                gradients = [tf.ones(v.shape) for v in variables]
                if step == 1 and hvdx.rank() == 1:
                    gradients[0] *= np.inf
                optimizer.apply(gradients, variables)
            skips = 1 in mesh.groups[mesh.index]
            assert int(optimizer.inner_optimizer.iterations) == 2 - skips
            assert float(optimizer.dynamic_scale) == (4.0 if skips else 8.0)
            if name == "servers":
                adapter.flush()


@pytest.mark.graph
@pytest.mark.sizes(4)
def test_sum_of_gradients_is_that_of_whole_layers():
    strategy = hvdx.AllReduce(op="sum", engine="mpi")
    with split(1):
        expected, reference = train(strategy, epochs=2)
        weights = whole(reference)
    for ranks in splits():
        with split(ranks):
            seen, model = train(strategy, epochs=2)
            np.testing.assert_allclose(seen.losses, expected.losses, rtol=1e-4)
            assert_close(whole(model), weights, 1e-4)


@pytest.mark.sizes(4)
def test_groups_share_the_steps_of_an_epoch():
    """One rank has fewer batches and is slow: its group takes fewer steps, the same on each rank of the group."""
    rank = hvdx.rank()
    for ranks in splits():
        with split(ranks) as mesh:
            slow = Seen()
            slow.on_train_batch_end = lambda batch, logs=None: time.sleep(0.05 * (rank == 0))
            model = models.compiled(network(layers), sgd())
            batches = 2 if rank == 0 else 4
            x, y = models.data(models.BATCH * batches)
            callback = Distribute(hvdx.ParameterServer("colocated"))
            model.fit(x, y, batch_size=models.BATCH, epochs=2, verbose=0, callbacks=[slow, callback])
            steps = world.start().all_gather_object(slow.steps, "steps")
            for group in mesh.groups:
                assert all(steps[r] == steps[group[0]] for r in group)
            total = sum(2 if 0 in group else 4 for group in mesh.groups) * ranks
            assert [sum(s[epoch] for s in steps) for epoch in range(2)] == [max(total, hvdx.size())] * 2
            assert differing(model, False) == []
            if len(mesh.groups) > 1:
                assert min(steps[0]) < max(steps[2])
