"""Data, vocabularies, models and constants that differ between ranks, or are the same where they must differ."""

# Tests: hvdx/keras/fit/comparison.py, hvdx/keras/fit/agreement/shares.py

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import hvdx
import hvdx.keras as hvd
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.fit import comparison
from tests.ranks import models


@pytest.fixture(autouse=True)
def seed():
    """Seed all ranks alike, in place of the fixture of this folder: `hvdx.shard` compares seeds of datasets."""
    keras.utils.set_random_seed(0)


@pytest.fixture
def warnings(capfd):
    """Return a function that returns hvdx' warnings on this rank since its last call."""

    def read():
        comparison.print_once.cache_clear()
        return [line for line in capfd.readouterr().err.splitlines() if "hvdx: WARNING" in line]

    read()
    return read


def _fit(batches, model=None, **options):
    model = model or models.compiled(models.network(seed=0), "sgd")
    options = {"epochs": 1, "verbose": 0, "shuffle": False, "callbacks": [hvd.Distribute()]} | options
    model.fit(batches, **options)
    return model


def _shuffled():
    """Return the data in another order on each rank, as an unseeded `train_test_split` does."""
    x, y = models.data()
    order = np.random.default_rng(hvdx.rank()).permutation(len(x))
    return x[order], y[order]


def _datasets(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y))


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize(
    ("share", "named"),
    [
        (lambda: hvdx.shard(_shuffled(), 4), r"training data overlap.*order, in the arrays \(ranks 1"),
        (lambda: hvdx.shard(models.data(), 4, seed=hvdx.rank()), "seed=1 where rank 0 has 0"),
        (lambda: hvdx.shard(models.data(), 4 - hvdx.rank() % 2), "batch_size=3"),
        (lambda: hvdx.shard(_datasets(*_shuffled()), 4), "other sources of the dataset"),
        (lambda: hvdx.shard(_datasets(*models.data()).shuffle(9, seed=5 + hvdx.rank()), 4), "other seeds"),
    ],
)
def test_shares_of_different_data_are_refused(share, named):
    with pytest.raises(ReplicaError, match=named):
        _fit(share())


def test_validation_shares_of_different_data_are_refused_before_the_first_step(monkeypatch, warnings):
    share, other = hvdx.shard(models.data(), 4), hvdx.shard(_shuffled(), 4)
    model = models.compiled(models.network(seed=0), "sgd")
    with pytest.raises(ReplicaError, match="validation data overlap"):
        _fit(share, model, validation_data=other)
    assert int(model.optimizer.iterations) == 0
    _fit(share, model)  # a share that is not used
    assert warnings() == []
    monkeypatch.setenv("HVDX_ALLOW_DIFFERENT", "1")
    _fit(share, model, validation_data=other)
    assert len(warnings()) == (hvdx.rank() == 0)


def test_shuffle_without_a_seed_is_refused_before_the_data_is_divided(monkeypatch):
    monkeypatch.setattr(context.context(), "_seed", None)  # as in a process that has set no seed
    dataset = _datasets(*models.data())
    with pytest.raises(ConfigError, match=r"Dataset\.shuffle without a seed"):
        hvdx.shard(dataset.shuffle(100), 4)
    with pytest.raises(ConfigError, match="deterministic=False"):
        hvdx.shard(dataset.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False), 4)
    hvdx.shard(dataset.shuffle(100), 4, rank=0, size=1)
    hvdx.shard(dataset, 4).shuffle(2)
    monkeypatch.setenv("HVDX_ALLOW_DIFFERENT", "1")
    hvdx.shard(dataset.shuffle(100), 4)


def test_generators_that_yield_another_order_are_reported(warnings):
    x, y = models.data()

    def samples(seed, noise):
        def generator():
            for i in np.random.default_rng(seed).permutation(len(x)):
                yield x[i] + np.float32(noise), y[i]

        signature = tf.TensorSpec((models.FEATURES,), tf.float32), tf.TensorSpec((), tf.int64)
        return tf.data.Dataset.from_generator(generator, output_signature=signature).batch(2).unbatch()

    for seed, noise in ((0, 0.1 * hvdx.rank()), (hvdx.rank(), 0)):
        _fit(hvdx.shard(samples(seed, noise), 4, shuffle=False, steps=models.STEPS))
    said = warnings()
    assert len(said) == (hvdx.rank() == 0)
    assert all("generator that yields other elements on ranks [1]" in line for line in said)


class _Batches(keras.utils.PyDataset):
    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def __len__(self):
        return 2

    def __getitem__(self, index):
        random = np.random.default_rng([self.seed, index])
        return random.normal(size=(4, models.FEATURES)), random.integers(0, models.CLASSES, 4)


def _generator(seed):
    for i in range(2):
        yield _Batches(seed)[i]


@pytest.mark.sizes(2, 4)
def test_the_same_data_on_all_ranks_is_reported(warnings):
    """The four kinds of data that `fit` takes, the same on all ranks and then another on each."""
    x, y = models.data(8)
    for seed in (0, 1 + hvdx.rank()):
        random = np.random.default_rng(seed)
        mine = x + random.normal(size=x.shape).astype("float32")
        for batches, options in (
            (mine, {"y": y, "batch_size": 4, "shuffle": True}),
            (_datasets(mine, y).batch(4).repeat(), {"steps_per_epoch": 2}),
            (_Batches(seed), {}),
            (_generator(seed), {"steps_per_epoch": 2}),
        ):
            _fit(batches, **options)
            said = warnings()
            assert len(said) == (seed == 0 and hvdx.rank() == 0), (type(batches), seed, said)
            assert all(f"all {hvdx.size()} ranks train on the same data" in line for line in said)


@pytest.mark.sizes(2, 4)
def test_the_same_samples_in_another_order_or_with_other_augmentation_are_reported(warnings):
    x, y = models.data(32)
    own = np.random.default_rng(hvdx.rank())

    def augmented(x, y):
        return x + tf.random.uniform(tf.shape(x), seed=hvdx.rank()), y

    whole = _datasets(x, y)
    numbered = tf.data.Dataset.range(32)
    mine = numbered.map(lambda i: (tf.gather(x, i), tf.gather(y, i)))
    other = _datasets(x, own.permutation(y))
    for data, text in (
        (whole.shuffle(32, seed=hvdx.rank()).batch(16), f"all {hvdx.size()} ranks train on the same data"),
        (mine.map(augmented, num_parallel_calls=2).batch(32), "a part of the first batch, such as its labels"),
        (other.map(augmented).batch(16), ""),
        (_datasets(x, np.arange(32) % 2).map(augmented).batch(4).take(2), ""),
    ):
        _fit(data)
        said = warnings()
        assert len(said) == (bool(text) and hvdx.rank() == 0), (text, said)
        assert all(text in line for line in said)


@pytest.mark.sizes(2, 4)
def test_a_file_in_which_two_ranks_cache_is_refused(tmp_path, warnings):
    file = hvd.broadcast_object(str(tmp_path / "cached"), 0)
    data = _datasets(*models.data())
    share = hvdx.shard(data, 4)
    for batches in (share.cache(file), hvdx.shard(data.cache(file), 4)):
        with pytest.raises(
            ReplicaError, match=r"expected a file of its own for each rank, got .*cached on ranks \[0, 1"
        ):
            _fit(batches)
    if hvdx.rank() == 0:
        list(data.cache(file))
    hvd.broadcast_object(None, 0)
    # All ranks may read the whole data that an earlier pass has cached.
    _fit(hvdx.shard(data.cache(file), 4))
    with pytest.raises(ReplicaError, match="expected a file of its own for each rank"):
        _fit(share.cache(file))
    _fit(share.cache(f"{file}-{hvdx.rank()}"))
    _fit(share.cache())
    assert warnings() == []


@pytest.mark.sizes(2, 4)
def test_batch_normalisation_that_keras_does_not_synchronise_is_reported(warnings):
    for layer, number in (
        (lambda: keras.layers.BatchNormalization(synchronized=True, name="norm"), 1),
        (lambda: hvd.SyncBatchNormalization(synchronized=True), 0),
    ):
        _fit(hvdx.shard(models.data(), 4), models.compiled(models.network(layer, seed=0), "sgd"))
        said = warnings()
        assert len(said) == number * (hvdx.rank() == 0)
        assert all("synchronized=True) takes the statistics of each rank's own batch in layers norm" in s for s in said)


def test_each_rank_with_an_order_of_its_own_and_a_part_of_the_steps_is_not_reported(warnings):
    """The recipe of Horovod's examples."""
    x, y = models.data(16)
    _fit(_datasets(x, y).shuffle(16, seed=hvdx.rank()).batch(4).repeat(), steps_per_epoch=2)
    order = np.random.default_rng(hvdx.rank()).permutation(16)
    _fit(x[order], y=y[order], batch_size=4, steps_per_epoch=2)
    assert warnings() == []


@pytest.mark.parametrize("strategy", ["parameter_server:servers=colocated", "threshold:max_staleness=inf"])
def test_workers_that_do_not_wait_for_each_other_report_the_same_data(strategy, warnings):
    x, y = models.data(16)
    _fit(_datasets(x, y).batch(4), callbacks=[hvd.Distribute(strategy)])
    assert len(warnings()) == (hvdx.rank() == 0)


def _words(rank):
    return ["sea", "sun"] if rank == 0 else ["sun", "sea"]


def _classifier(*layers):
    """Return a compiled model that begins with preprocessing layers; an input of one number."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,), dtype=layers[0].compute_dtype or "float32"), *layers])
    model.add(keras.layers.Dense(models.CLASSES))
    return models.compiled(model, "sgd")


def _adapted(rank):
    layer = keras.layers.Normalization(axis=None)
    layer.adapt(np.arange(8.0) + rank)
    return layer


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        (
            lambda rank: [
                keras.layers.IntegerLookup(vocabulary=[7, 8] if rank == 0 else [8, 7]),
                keras.layers.Embedding(4, 3),
                keras.layers.Flatten(),
            ],
            "IntegerLookup",
        ),
        (lambda rank: [_adapted(rank)], "Normalization"),
        (lambda rank: [keras.layers.Dense(4, activation="relu" if rank == 0 else "tanh")], "'relu' on rank 0, 'tanh'"),
    ],
)
def test_layers_with_another_state_or_configuration_are_refused(layers, named):
    with pytest.raises(ReplicaError, match=named):
        _fit(hvdx.shard((np.full((16, 1), 7), np.zeros(16, "int64")), 4), _classifier(*layers(hvdx.rank())))


def test_vocabularies_of_a_dataset_are_compared():
    """The table is in a function of `Dataset.map`, and not in the model."""
    lookup = keras.layers.StringLookup(vocabulary=_words(hvdx.rank()), output_mode="one_hot")
    words = _datasets(np.array(["sea", "sun"] * 8), np.zeros(16, "int64"))
    with pytest.raises(ReplicaError, match="a lookup table of the dataset"):
        _fit(hvdx.shard(words, 4).map(lambda x, y: (lookup(x), y)), _classifier(keras.layers.Flatten()))


class _Mask(keras.layers.Layer):
    """Layer with a random mask that is not a weight."""

    def __init__(self, seed):
        super().__init__()
        self.mask = np.random.default_rng(seed).integers(0, 2, (4, models.FEATURES)).astype("float32")

    def call(self, x):
        return tf.reshape(x[:, None] * self.mask, (-1, self.mask.size)) * (1.0 + 0.1 * hvdx.rank())


@pytest.mark.graph(every=True)
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("strategy", ["all_reduce", "threshold:tau=0.01", "parameter_averaging:period=2"])
def test_random_constants_of_the_training_function_are_reported(strategy, warnings):
    """Names with other counters and small constants that depend on the rank are not."""
    if hvdx.rank() == 1:
        models.network()
    for seed in (0, hvdx.rank()):
        layers = [lambda seed=seed: _Mask(seed), lambda: keras.layers.Dropout(0.1)]
        model = models.compiled(models.network(*layers), "sgd")
        for fit in ("first", "second, which is not traced"):
            _fit(hvdx.shard(models.data(), 4), model, callbacks=[hvd.Distribute(strategy)])
            said = warnings()
            expected = fit == "first" and seed != 0 if hvdx.rank() else False
            everyone = hvd.allgather_object((len(said), expected))
            assert everyone[0][0] == any(wanted for _, wanted in everyone), (fit, seed, said)


@pytest.mark.graph(every=True)
@pytest.mark.sizes(2)
def test_constants_are_compared_although_the_first_execution_ends_a_trial(warnings):
    """`Auto` replaces the traced function after its trial, here right after the first execution."""
    model = models.compiled(models.network(lambda: _Mask(hvdx.rank())), "sgd")
    model.steps_per_execution = 10
    _fit(hvdx.shard(models.data(), 4).repeat(), model, callbacks=[hvd.Distribute("auto")], steps_per_epoch=10)
    assert ["holds constants" in line for line in warnings()] == [True] * (hvdx.rank() == 0)
