"""Checkpoints, saved models and copies of models with split layers."""

# Tests: hvdx/keras/layers/split_layer.py, hvdx/keras/checkpoint/parts.py
# Tests: hvdx/keras/gathering.py

import contextlib
import json
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.comm import world as joining
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import checkpoint
from hvdx.keras.checkpoint import files
from hvdx.keras.checkpoint.folder import of_rank
from hvdx.keras.layers import SplitDense
from hvdx.keras.weight_parts import mark_state, part_of, whole_values
from tests.ranks import models
from tests.ranks.checkpoints import rewrite
from tests.ranks.split import assert_close, network, split, whole
from tests.ranks.test_split_dense import OPTIMIZERS, one, pair

MPI = "all_reduce:engine=mpi"


@pytest.fixture
def folder(tmp_path):
    """Return one folder for all ranks."""
    return hvd.broadcast_object(tmp_path, 0)


@contextlib.contextmanager
def first_ranks(count):
    """Let the first ranks be the world; the context of the others is None, and they wait at its end."""
    everyone = world.start()
    some = everyone.divide(int(everyone.rank >= count), everyone.rank, "a smaller world")
    graphs, joining._graphs = joining._graphs, {}
    joining._comm = some
    try:
        yield some if everyone.rank < count else None
    finally:
        joining._comm, joining._graphs = everyone, graphs
        everyone.all_gather_object(None, "the end of a smaller world")


def compiled(optimizer, seed=0):
    """Build a model with parts of 7 columns, and with a pair that is split by columns, then by rows."""
    return models.compiled(network(lambda units: [*one(units), *pair(units)], seed=seed), optimizer())


def train(model, epochs, *callbacks, batch=models.BATCH, count=None, strategy=MPI):
    """Train on this rank's share; return the losses of the epochs."""
    share = hvdx.shard(models.data(count), batch)
    callbacks = [hvd.Distribute(strategy), *callbacks]
    return model.fit(share, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False).history["loss"]


def everyone(value=None):
    """Return the values of all ranks, once all have come here."""
    return world.start().all_gather_object(value, "test")


def on_rank_0(work, *arguments):
    """Run work on rank 0, and wait for it on the others."""
    if hvdx.rank() == 0:
        work(*arguments)
    everyone()


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.sizes(4)
def test_checkpoint_resumes_with_another_number_of_ranks_and_parts(folder):
    make, count, straight = OPTIMIZERS["adam"], models.samples(), compiled(OPTIMIZERS["adam"])
    losses = train(straight, 2)
    state = [v.numpy() for v in (*straight.weights, *straight.optimizer.variables)]

    def resume(name, **options):
        model = compiled(make, seed=9)
        resumed = train(model, 2, hvd.Checkpoint(folder / name), **options)
        np.testing.assert_allclose(resumed, losses[1:], rtol=1e-5)
        assert_close(whole(model), state[: len(model.weights)], 1e-5)
        return model

    for ranks in (1, 2):
        with split(ranks):
            train(compiled(make), 1, hvd.Checkpoint(folder / f"parts of {ranks}"))
    on_rank_0(shutil.copytree, folder / "parts of 2", folder / "again")
    with split(4):
        resume("parts of 2")
    with split(2):
        resume("parts of 1")
    with first_ranks(2) as some:
        if some is not None:
            model = resume("again", batch=2 * models.BATCH, count=count)
            assert_close([v.numpy() for v in (*model.weights, *model.optimizer.variables)], state, 1e-4)


def accumulating():
    """Return an optimiser that has accumulated some gradients at the end of an epoch."""
    return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("strategy", [hvdx.Threshold(target_density=0.05), MPI], ids=["threshold", "all_reduce"])
def test_checkpoint_within_an_epoch_resumes_bit_for_bit(folder, strategy):
    with split(2):
        straight, resumed = compiled(accumulating), compiled(accumulating, seed=hvdx.rank())
        train(straight, 2, hvd.Checkpoint(folder, every="2 steps", keep=9), strategy=strategy)
        names = sorted(path.name for path in folder.glob("epoch-*"))
        assert names[0] == "epoch-0000-step-00000002"
        on_rank_0(lambda: [shutil.rmtree(folder / name) for name in names[1:]])
        train(resumed, 2, hvd.Checkpoint(folder), strategy=strategy)
    for a, b in zip(straight.weights, resumed.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    for a, b in zip(straight.optimizer.variables, resumed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


@pytest.mark.sizes(4)
def test_rank_local_state_of_other_parts_becomes_the_mean_of_its_holders(folder, capfd):
    with split(2) as mesh:
        model = compiled(accumulating)
        train(model, 1, hvd.Checkpoint(folder), strategy=hvdx.Threshold(target_density=0.05))
        state = [(part_of(v), v.numpy()) for v in (*model.weights, *model.optimizer.variables)]
        held = everyone(state)
        groups = mesh.groups
    expected = []
    for i, (shard, value) in enumerate(state):
        if shard is None:
            expected.append(np.mean([theirs[i][1] for theirs in held], axis=0))
        else:
            parts = [np.mean([held[group[p]][i][1] for group in groups], axis=0) for p in range(2)]
            expected.append(np.concatenate(parts, axis=shard.axis))
            assert value.shape == shard.part_shape
    assert sum(shard is not None for shard, _ in state) == 5 * 3, "weights, momenta and accumulated gradients"
    capfd.readouterr()
    plain = compiled(accumulating, seed=3)
    plain.optimizer = hvd.DistributedOptimizer(plain.optimizer, strategy=hvdx.Threshold(target_density=0.05))
    assert checkpoint.restore(folder, plain) == 1
    assert_close([v.numpy() for v in (*plain.weights, *plain.optimizer.variables)], expected, 1e-6)
    assert ("is dropped, since the model is split over other ranks" in capfd.readouterr().err) == (hvdx.rank() == 0)


@pytest.mark.sizes(2)
def test_loop_of_its_own_saves_and_restores_parts(folder):
    with split(2):
        model, other = compiled(OPTIMIZERS["adam"]), compiled(OPTIMIZERS["adam"], seed=4)
        checkpoint.save(folder, model, 1)
        manifest = json.loads((folder / "epoch-0001" / "manifest.json").read_text())
        assert manifest["split"]["groups"] == [[0, 1]]
        assert checkpoint.restore(folder, other) == 1
        assert_close(whole(other), whole(model), 0)
        # A part of another shape is from another checkpoint.
        arrays = dict(files.Arrays.of(folder / "epoch-0001" / of_rank(1)))
        name = next(name for name in arrays if name.startswith("part."))
        everyone()
        on_rank_0(rewrite, folder / "epoch-0001" / of_rank(1), arrays | {name: arrays[name][..., :1]})
        with pytest.raises(ReplicaError, match="all checkpoints are damaged"):
            checkpoint.restore(folder, other)


# -- files of Keras ---------------------------------------------------------------------------------------------------

# Loads models where hvdx is not imported, and compares them with the arrays that the ranks saved beside them.
READER = """
import pathlib, sys
import keras, numpy as np
folder = pathlib.Path(sys.argv[1])
x = np.load(folder / "x.npy")
for path in sorted(folder.glob("*.npz")):
    expected = np.load(path)
    model = keras.models.load_model(path.with_suffix(".keras"))
    found = [model.predict(x, verbose=0), *model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]
    assert len(found) == len(expected), (path, len(found), len(expected))
    for i, array in enumerate(found):
        np.testing.assert_allclose(array, expected[f"arr_{i}"], rtol=1e-6, atol=1e-6, err_msg=f"{path} {i}")
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense)]
    assert layers and {type(layer) for layer in layers} == {keras.layers.Dense}, path
    print(path.stem)
assert "hvdx" not in sys.modules
"""


def read_in_keras(folder):
    """Run `READER` in a process of its own; return the names of the models that it has read, or its error."""
    done = subprocess.run(
        [sys.executable, "-c", READER, str(folder)], timeout=200, capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else set(done.stdout.split())


def expect(path, model):
    """Save what a model of Keras must predict and hold. Collective."""
    x, _ = models.data(5)
    found = [model.predict_on_batch(x), *whole(model)]
    mark_state(model.optimizer)
    found += whole_values(model.optimizer.variables, world.start().mesh.group)
    on_rank_0(lambda: np.savez(path, *found))


def functional():
    """Build a nested functional model."""
    keras.utils.set_random_seed(0)
    inner_input = keras.Input((5,))
    inner = keras.Model(inner_input, SplitDense(4)(SplitDense(6, activation="tanh", name="inner")(inner_input)))
    x = keras.Input((models.FEATURES,))
    first = keras.layers.Dense(5)(x)
    return keras.Model(x, SplitDense(models.CLASSES)(keras.layers.Concatenate()([inner(first), first])))


class Subclassed(keras.Model):
    """Subclassed model, of which Keras cannot make a copy."""

    def __init__(self, dense):
        super().__init__()
        self.hidden, self.last = dense(7, activation="relu"), keras.layers.Dense(models.CLASSES)
        self.build((None, models.FEATURES))

    def build(self, shape):
        self.hidden.build(shape)
        self.last.build((None, 7))
        self.built = True

    def call(self, x):
        return self.last(self.hidden(x))


@pytest.mark.sizes(2)
def test_saved_models_load_without_hvdx(folder):
    on_rank_0(lambda: np.save(folder / "x.npy", models.data(5)[0]))
    with split(2):
        for name, make in (("sequential", lambda: network(pair)), ("functional", functional)):
            model = models.compiled(make(), keras.optimizers.Adam(0.01), metrics=["accuracy"])
            saver = keras.callbacks.ModelCheckpoint(folder / f"{name}-callback.keras")
            train(model, 1, saver)
            plain = hvd.gather(model)
            on_rank_0(plain.save, folder / f"{name}.keras")
            for file in (name, f"{name}-callback"):
                expect(folder / f"{file}.npz", model)
        model = models.compiled(Subclassed(SplitDense), keras.optimizers.Adam(0.01))
        train(model, 1)
        into = Subclassed(keras.layers.Dense)
        assert hvd.gather(model, into=into) is into
        x, _ = models.data(5)
        np.testing.assert_allclose(into.predict_on_batch(x), model.predict_on_batch(x), rtol=1e-6, atol=1e-6)
        with pytest.raises(ConfigError, match=r"cannot be copied.*into=plain") as caught:
            hvd.gather(model)
        assert caught.value.collective
        with pytest.raises(ConfigError, match="expected weights of the shapes"):
            hvd.gather(model, into=network(pair))
        alone = models.compiled(network(one), keras.optimizers.SGD(0.01))
        expect(folder / "alone.npz", alone)
    with split(1):
        # Layers that are not split are saved as plain layers, too.
        on_rank_0(models.compiled(network(one), keras.optimizers.SGD(0.01)).save, folder / "alone.keras")
    names = {"alone", "functional", "functional-callback", "sequential", "sequential-callback"}
    assert everyone(read_in_keras(folder) if hvdx.rank() == 0 else None)[0] == names


@pytest.mark.sizes(2)
def test_model_checkpoint_saves_whole_weights_of_its_step(folder):
    weights, losses = {}, []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights[len(weights) + 1] = whole(self.model)

        def on_epoch_end(self, epoch, logs=None):
            losses.append(logs["loss"])

    class Worse(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.1 if epoch == 0 else 30.0

    def saver(name, **options):
        return keras.callbacks.ModelCheckpoint(folder / name, **options)

    with split(2):
        model = compiled(lambda: keras.optimizers.SGD(0.1))
        steps = [saver("step-{batch}.keras", save_freq=3), saver("s-{epoch}.weights.h5", save_weights_only=True)]
        best = saver("best.keras", save_best_only=True, monitor="loss")
        train(model, 1, Record(), Worse(), *steps, best)
        # The callbacks go on counting in a second fit: the next step that is saved is number 6.
        train(model, 2, Record(), Worse(), *steps, best)
    assert np.argmin(losses) < 2
    if hvdx.rank() == 0:
        assert len(list(folder.iterdir())) == 7
        with split(1):
            plain = network(lambda units: [keras.layers.Dense(units), *(keras.layers.Dense(n) for n in (8, 6))])
            best_step = models.STEPS * (1 + np.argmin(losses))
            expected = {"step-3": 3, "step-2": 6, "step-1": 9, "step-4": 12, "best": best_step}
            for name, step in expected.items():
                plain.load_weights(folder / f"{name}.keras")
                assert_close(plain.get_weights(), weights[step], 0)
            plain.load_weights(folder / "s-2.weights.h5")
            assert_close(plain.get_weights(), weights[12], 0)
    everyone()


@pytest.mark.sizes(2)
def test_split_model_loads_its_parts_of_plain_files(folder):
    with split(1):
        plain = compiled(OPTIMIZERS["adam"])
        train(plain, 1)
        on_rank_0(plain.save, folder / "plain.keras")
        on_rank_0(plain.save_weights, folder / "plain.weights.h5")
    with split(2) as mesh:
        for name in ("plain.keras", "plain.weights.h5"):
            model = compiled(OPTIMIZERS["adam"], seed=5)
            model.load_weights(folder / name)
            assert_close(whole(model), plain.get_weights(), 0)
            state = whole_values(model.optimizer.variables, mesh.group)
            assert_close(state, [v.numpy() for v in plain.optimizer.variables], 0)


@pytest.mark.sizes(2)
def test_save_on_one_rank_is_refused_and_keeps_the_file(folder):
    with split(2):
        model = compiled(OPTIMIZERS["momentum"])
        if hvdx.rank() == 0:
            ways = {
                "a.keras": model.save,
                "a.h5": model.save,
                "a.weights.h5": model.save_weights,
                "b.keras": lambda path: keras.saving.save_model(model, path),
                "c.keras": lambda path: keras.models.save_model(model, path),
                "exported": model.export,
            }
            kept = []
            for name, save in ways.items():
                (folder / name).write_text("earlier")
                said = ""
                with contextlib.suppress(Exception):
                    try:
                        save(folder / name)
                    except ConfigError as error:
                        said = str(error)
                refused = "holds one part" in said and "gather(model) on all ranks" in said
                kept.append(refused and (folder / name).read_bytes() == b"earlier")
        # Compared on all ranks: a test that fails on one leaves the other waiting.
        assert all(everyone(kept if hvdx.rank() == 0 else None)[0])
        with pytest.raises(ConfigError, match=r"BackupAndRestore: .*hvdx\.keras\.Checkpoint") as caught:
            train(model, 1, keras.callbacks.BackupAndRestore(folder / "backup"))
        assert caught.value.collective
        subclassed = models.compiled(Subclassed(SplitDense), keras.optimizers.SGD(0.1))
        with pytest.raises(ConfigError, match="cannot be copied"):
            train(subclassed, 1, keras.callbacks.ModelCheckpoint(folder / "d.keras"))


@pytest.mark.sizes(2)
def test_early_stopping_restores_the_best_parts():
    best = []

    class Worse(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.1 if epoch == 0 else 30.0

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                best.extend(whole(self.model))

    with split(2):
        model = compiled(lambda: keras.optimizers.SGD(0.1))
        stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
        losses = train(model, 5, Worse(), stop)
        assert len(losses) == 2 + (losses[1] < losses[0])
        assert_close(whole(model), best, 0)
