"""Checkpoints: an interrupted training resumes as the uninterrupted one."""

# Tests: hvdx/keras/checkpoint/restoring.py, hvdx/keras/checkpoint/writer.py

import shutil
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.costs.speeds import Balancer
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import checkpoint
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.adapters.rows import taken
from hvdx.keras.checkpoint import files
from hvdx.keras.checkpoint.folder import SHARED, Folder, of_rank
from hvdx.keras.fit import data as shards
from hvdx.keras.fit import noise
from tests.ranks import models
from tests.ranks.checkpoints import of_other_ranks, rewrite

MOMENTUM = {"sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "adam": lambda: keras.optimizers.Adam(0.01)}
STRATEGIES = {
    "all_reduce": hvdx.AllReduce(),
    "threshold": hvdx.Threshold(target_density=0.05),
    "gradient": hvdx.Threshold(target_density=0.05, placement="gradient"),
}
SPARSE = STRATEGIES["threshold"]


@pytest.fixture
def folder(tmp_path):
    """Return one folder for all ranks."""
    return hvd.broadcast_object(tmp_path, 0) / "ckpt"


def names(folder):
    """Return the names in a folder, read by one rank while no other writes."""
    return _everyone(sorted(p.name for p in folder.iterdir()) if hvdx.rank() == 0 else None)[0]


def _everyone(value):
    return world.start().all_gather_object(value, "test")


def built(make=MOMENTUM["sgd"], seed=0, units=8, **options):
    """Build a model with every kind of state: dropout, batch normalisation, momenta."""
    body = [
        lambda: keras.layers.Dense(units),
        keras.layers.BatchNormalization,
        lambda: keras.layers.Dropout(0.3),
    ]
    return models.compiled(models.network(*body, seed=seed), make(), **options)


def saved(folder, *epochs, make=MOMENTUM["sgd"]):
    """Build a model and save checkpoints of it without training."""
    model = built(lambda: hvd.DistributedOptimizer(make(), strategy=SPARSE))
    model.optimizer.build(model.trainable_variables)
    for epoch in epochs:
        checkpoint.save(folder, model, epoch)
    return model


class Keep(keras.callbacks.Callback):
    """Callback that keeps the state of the exchanges, which `fit` discards."""

    def on_train_begin(self, logs=None):
        self.generators = [v.numpy().tolist() for v in noise.generators(self.model)]

    def on_epoch_end(self, epoch, logs=None):
        adapters = [a for a in map(adapter_of, optimizers_of(self.model)) if a is not None]
        self.exchanges = [e for e in (getattr(a, "exchange", None) for a in adapters) if e is not None]
        self.remembered = [{k: v.copy() for k, v in e.state_dict().items()} for e in self.exchanges]


def train(model, epochs, strategy, *callbacks):
    """Fit; return the history and the final state of the exchanges."""
    keep = Keep()
    history = models.fit(model, [hvd.Distribute(strategy), *callbacks, keep], epochs=epochs).history
    return history, getattr(keep, "remembered", [])


def killed_after(folder, epoch):
    """Remove later checkpoints, as if the training had been killed after `epoch`."""
    if hvdx.rank() == 0:
        for path in folder.iterdir():
            if int(path.name.removeprefix("epoch-")) > epoch:
                shutil.rmtree(path)
    _everyone("they are gone")
    assert names(folder)[-1] == f"epoch-{epoch:04d}"


def assert_same(model, other):
    """Assert that two models have the same bits, rank-local variables included."""
    for a, b in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    for a, b in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    for a, b in zip(noise.generators(model), noise.generators(other), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.graph
@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize(
    ("strategy", "optimizer", "room"),
    [
        ("all_reduce", "adam", True),
        ("threshold", "adam", True),
        ("gradient", "sgd", True),
        # The training waits for the disk.
        ("threshold", "sgd", False),
    ],
)
def test_resumed_training_equals_the_uninterrupted_one_bit_for_bit(
    folder, strategy, optimizer, room, monkeypatch, capfd
):
    if not room:
        monkeypatch.setattr("hvdx.keras.checkpoint.writer.free_memory", lambda: 0)
        monkeypatch.setattr("hvdx.keras.checkpoint.writer.Writer._copy", None)
    make, chosen = MOMENTUM[optimizer], STRATEGIES[strategy]
    straight = built(make)
    history, remembered = train(straight, 2, chosen, hvd.Checkpoint(folder))
    killed_after(folder, 1)
    resumed = built(make, seed=100 + hvdx.rank())
    later, again = train(resumed, 2, chosen, hvd.Checkpoint(folder))

    assert later["loss"] == history["loss"][1:]
    assert_same(resumed, straight)
    assert len(again) == len(remembered) == int(strategy != "all_reduce" and hvdx.size() > 1)
    for mine, expected in zip(again, remembered, strict=True):
        for name, array in expected.items():
            np.testing.assert_array_equal(mine[name], array, err_msg=name)
    assert names(folder) == ["epoch-0001", "epoch-0002"]
    assert room or "GB of memory that are free on this host, so the training waits" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("shuffle", "of"), [(True, tuple), (False, tuple), (False, tf.data.Dataset.from_tensor_slices)]
)
def test_a_division_of_rows_is_resumed_in_mid_epoch(folder, shuffle, of, monkeypatch):
    monkeypatch.setattr(Balancer, "is_due", False)
    rows, uneven = 4 * hvdx.size(), [1] * (hvdx.size() - 1) + [3 * hvdx.size() + 1]
    x = np.random.default_rng(1).normal(size=(10 * rows, 8)).astype("float32")

    def trained(divided, epochs, *callbacks):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(MOMENTUM["sgd"](), "mse")
        share = hvdx.shard(of((x, x[:, :1])), global_batch_size=rows, shuffle=shuffle)
        if hvdx.rank() == 0 and not shuffle:
            next(iter(share))  # the numbers of its orders are then ahead
        if divided:
            shards.divisions()[-1].resume([((-1, -1), [4] * hvdx.size()), ((0, 3), uneven)])
        before = taken.value()
        model.fit(share, epochs=epochs, verbose=0, callbacks=[*callbacks, hvd.Distribute()])
        return model, taken.value() - before

    keras.utils.set_random_seed(1)
    whole, _ = trained(True, 2)
    keras.utils.set_random_seed(1)
    trained(True, 1, hvd.Checkpoint(folder, every="7 steps", keep=9))
    first, *later = names(folder)
    if hvdx.rank() == 0:
        for name in later:
            shutil.rmtree(folder / name)
    _everyone("they are gone")
    resumed, counted = trained(False, 2, hvd.Checkpoint(folder))
    assert (first[-1], counted) == ("7", 13 * uneven[hvdx.rank()])
    assert_same(whole, resumed)


def test_half_accumulated_gradients_are_resumed(folder):
    def make():
        return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=7)

    straight = built(make)
    train(straight, 2, SPARSE, hvd.Checkpoint(folder))
    killed_after(folder, 1)
    resumed = built(make, seed=1)
    train(resumed, 2, SPARSE, hvd.Checkpoint(folder))
    assert_same(resumed, straight)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_variable_without_gradient_and_common_generator_are_resumed(folder):
    class Noise(keras.layers.Layer):
        def build(self, shape):
            self.idle = self.add_weight(shape=(3,), name="idle")

        def call(self, x, training=False):
            return x + 0.1 * keras.random.normal(tf.shape(x)) if training else x

    def make(seed):
        return models.compiled(models.network(Noise, lambda: keras.layers.Dense(5), seed=seed), MOMENTUM["sgd"]())

    straight = make(0)
    train(straight, 2, SPARSE, hvd.Checkpoint(folder))
    killed_after(folder, 1)
    resumed = make(1)
    train(resumed, 2, SPARSE, hvd.Checkpoint(folder))
    assert_same(resumed, straight)


class BuiltPlayers(models.TwoPlayers):
    """`TwoPlayers` with all weights built beforehand."""

    def __init__(self):
        super().__init__()
        self.build((None, models.FEATURES))

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 4))
        self.built = True


def test_two_optimizers_are_resumed(folder):
    def make(seed):
        keras.utils.set_random_seed(seed)
        model = BuiltPlayers()
        model.compile(momentum=0.9)
        return model

    straight = make(0)
    _, remembered = train(straight, 2, SPARSE, hvd.Checkpoint(folder))
    killed_after(folder, 1)
    resumed = make(1)
    _, again = train(resumed, 2, SPARSE, hvd.Checkpoint(folder))
    assert_same(resumed, straight)
    for mine, expected in zip(again, remembered, strict=True):
        np.testing.assert_array_equal(mine["codec.residual"], expected["codec.residual"])


def test_mixed_float16_is_resumed(folder):
    keras.config.set_dtype_policy("mixed_float16")
    straight = built()
    train(straight, 2, SPARSE, hvd.Checkpoint(folder))
    killed_after(folder, 1)
    resumed = built(seed=1)
    train(resumed, 2, SPARSE, hvd.Checkpoint(folder))
    assert_same(resumed, straight)


# -- another number of ranks ------------------------------------------------------------------------------------------


def scaled(rank, arrays):
    """Return rank-local arrays scaled by the rank; taus stay the same on all ranks."""
    found = {k: v * np.float32(1 + rank) if v.dtype == np.float32 else v for k, v in arrays.items()}
    if "strategy.0.codec.taus" in arrays:
        found["strategy.0.codec.taus"] = arrays["strategy.0.codec.taus"]
    return found | {"generators.0": np.array([rank, 7], arrays["generators.0"].dtype)}


class Look(keras.callbacks.Callback):
    """Callback that records the state before the first step."""

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "epoch"):
            self.epoch = epoch
            adapter = adapter_of(self.model.optimizer)
            exchange = getattr(adapter, "exchange", None)
            self.residuals = [] if exchange is None else [a.astype("float64") for a in exchange.residuals]
            self.generators = [v.numpy().tolist() for v in noise.generators(self.model)]
            self.state = [v.numpy() for v in self.model.optimizer.variables]


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_another_number_of_ranks_distributes_the_residual(folder, ranks):
    train(built(), 1, SPARSE, hvd.Checkpoint(folder))
    manifest, held = of_other_ranks(folder / names(folder)[-1], ranks, scaled)
    look = Look()
    model = built(seed=5)
    train(model, 2, SPARSE, hvd.Checkpoint(folder), look)
    models.assert_identical(model, optimizer=False)
    assert look.epoch == 1
    state = np.array([hvdx.rank() % ranks, 7])
    assert look.generators == [noise.of_rank(state, hvdx.rank()).tolist()]
    if hvdx.size() == 1:
        return
    mine = np.concatenate([a.ravel() for a in look.residuals])
    expected = sum(f["strategy.0.codec.residual"].astype("float64") for f in held)
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(sum(_everyone(mine)), expected, rtol=1e-5, atol=1e-7)
    if ranks != hvdx.size():
        for i in manifest["own"]["optimizer"]:
            mean = np.mean([f[f"optimizer.{i}"].astype("float64") for f in held], axis=0)
            np.testing.assert_allclose(look.state[i], mean, rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "after"), [("threshold", "all_reduce"), ("all_reduce", "threshold"), ("threshold", "gradient")]
)
def test_another_strategy_takes_the_shared_part(folder, before, after, capfd):
    train(built(), 1, STRATEGIES[before], hvd.Checkpoint(folder))
    capfd.readouterr()
    look, model = Look(), built(seed=5)
    history, _ = train(model, 2, STRATEGIES[after], hvd.Checkpoint(folder), look)
    assert look.epoch == 1
    assert all(not a.any() for a in look.residuals)
    assert len(history["loss"]) == 1
    models.assert_identical(model, optimizer=after != "threshold")
    said = capfd.readouterr().err
    assert ("is dropped" in said) == (before == "threshold" and hvdx.rank() == 0 and hvdx.size() > 1)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.sizes(1, 2)
def test_every_and_keep_choose_the_checkpoints_that_stay(folder):
    train(built(), 3, None, hvd.Checkpoint(folder, every=2, keep=1))
    # Training also saves at its end, so nothing is trained twice.
    assert names(folder) == ["epoch-0003"]
    assert names(folder / "epoch-0003") == [
        "manifest.json",
        *sorted(of_rank(r) for r in range(hvdx.size())),
        "shared.safetensors",
    ]
    for bad in ({"every": 0}, {"keep": 0}, {"every": True}, {"keep": 1.5}, {"every": "3 days"}, {"every": "0 steps"}):
        with pytest.raises(ConfigError, match="expected 1 or more"):
            hvd.Checkpoint(folder, **bad)


@pytest.mark.sizes(1, 2)
def test_training_that_is_complete_is_restored_and_not_trained(folder):
    done = built()
    train(done, 2, SPARSE, hvd.Checkpoint(folder))
    again = built(seed=3)
    history, _ = train(again, 2, SPARSE, hvd.Checkpoint(folder))
    assert history == {}
    assert_same(again, done)
    assert again._initial_epoch is None
    history, _ = train(again, 3, SPARSE, hvd.Checkpoint(folder))
    assert len(history["loss"]) == 1


def test_changes_by_callbacks_at_the_end_of_an_epoch_are_saved(folder):
    class Slow(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (epoch + 2)

    train(built(), 2, None, hvd.Checkpoint(folder), Slow())
    model = built()
    models.fit(model, [hvd.Checkpoint(folder), hvd.Distribute()], epochs=2)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 / 3)


def test_leftovers_of_a_killed_job_are_removed(folder):
    saved(folder, 1)
    if hvdx.rank() == 0:
        for name in ("saving-0a1b", "removed-2c3d", "probe-4e5f", "replaced-epoch-0001"):
            (folder / f".hvdx-{name}").mkdir()
        # As if the job was killed while it saved epoch 3 again.
        (folder / ".hvdx-replaced-epoch-0003").mkdir()
    _everyone("it is there")
    again = Folder(folder, world.start())
    again.check()
    again.release()
    assert names(folder) == ["epoch-0001", "epoch-0003"]


@pytest.mark.sizes(1, 2)
def test_rank_that_cannot_write_stops_all_and_leaves_the_last_checkpoint(folder, monkeypatch):
    last, model = hvdx.size() - 1, saved(folder, 1, 2)

    def write(contents):
        raise OSError(28, "No space left on device")

    if hvdx.rank() == last:
        monkeypatch.setattr(files, "write", write)
    with pytest.raises(ReplicaError, match=rf"epoch 3.*rank {last}: OSError.*No space.*are unchanged") as caught:
        checkpoint.save(folder, model, 3)
    assert "rank 0: OSError" not in str(caught.value) or last == 0
    monkeypatch.undo()
    assert names(folder) == ["epoch-0001", "epoch-0002"]
    assert checkpoint.restore(folder, model) == 2


def test_older_checkpoints_are_removed_after_the_new_one_is_published(folder, monkeypatch):
    model = saved(folder, 1)

    def publish(self, partial, position, keep):
        raise OSError("killed")

    monkeypatch.setattr(Folder, "publish", publish)
    with pytest.raises(ReplicaError, match="rank 0: OSError"):
        checkpoint.save(folder, model, 2, keep=1)
    assert names(folder) == ["epoch-0001"]


def test_directory_that_ranks_do_not_share_is_refused(tmp_path):
    mine = tmp_path / f"of-{hvdx.rank()}" / "ckpt"
    begin, model = time.monotonic(), built()
    if hvdx.size() == 1:
        assert checkpoint.restore(mine, model) is None
        return
    with pytest.raises(ReplicaError, match=r"is not the directory of rank 0.*all hosts share"):
        checkpoint.restore(mine, model)
    with pytest.raises(ReplicaError, match="all hosts share"):
        checkpoint.save(mine, model, 1)
    assert time.monotonic() - begin < 10
    assert list(mine.glob("*")) == []


def test_directory_that_cannot_be_made_is_refused(folder):
    if hvdx.rank() == 0:
        folder.write_text("a file")
    _everyone("it is there")
    with pytest.raises(ReplicaError, match=r"rank 0.*can be written to"):
        checkpoint.restore(folder, built())


def _cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path):
    """Flip one bit in the middle of an array."""
    content = bytearray(path.read_bytes())
    content[(8 + int.from_bytes(content[:8], "little") + len(content)) // 2] ^= 1
    path.write_bytes(content)


def _empty(path):
    path.write_bytes(b"")


def _skip_more(path):
    path.write_text(path.read_text().replace('"skip": 0', '"skip": 8'))


@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (_cut, "shared.safetensors"),
        (_cut, "rank-last.safetensors"),
        (_flip, "shared.safetensors"),
        (_flip, "rank-last.safetensors"),
        (_empty, "manifest.json"),
        (_skip_more, "manifest.json"),
        (lambda path: path.unlink(), "rank-last.safetensors"),
    ],
)
def test_damaged_checkpoint_is_replaced_by_the_previous_one(folder, damage, name, capfd):
    last, model = hvdx.size() - 1, saved(folder, 1, 2)
    _damage(folder / "epoch-0002" / name.replace("last", str(last)), damage)
    assert checkpoint.restore(folder, model) == 1
    said = capfd.readouterr().err
    assert ("epoch-0002: rank" in said and f"rank {last}: " in said) == (hvdx.rank() == 0)
    assert ("is set aside" in said) == (hvdx.rank() == 0)
    checkpoint.save(folder, model, 2)
    assert names(folder) == ["damaged-epoch-0002", "epoch-0001", "epoch-0002"]


def _damage(path, how):
    if hvdx.rank() == 0:
        how(path)
    _everyone("it is damaged")


def test_only_damaged_checkpoints_are_an_error_and_not_a_new_start(folder):
    model = saved(folder, 1, 2)
    for name in names(folder):
        _damage(folder / name / "shared.safetensors", _cut)
    with pytest.raises(ReplicaError, match=r"all checkpoints are damaged: epoch 1, epoch 2.*set aside"):
        checkpoint.restore(folder, model)
    assert names(folder) == ["damaged-epoch-0001", "damaged-epoch-0002"]


def test_files_of_different_shapes_are_refused(folder):
    last, model = hvdx.size() - 1, saved(folder, 1)
    if hvdx.rank() == 0:
        path = folder / "epoch-0001" / (of_rank(last) if last else SHARED)
        arrays = files.Arrays.of(path)
        rewrite(path, {k: v[..., :-1] if k.startswith("optimizer") and v.ndim else v for k, v in arrays.items()})
    _everyone("it is damaged")
    with pytest.raises(ReplicaError, match="all checkpoints are damaged"):
        checkpoint.restore(folder, model)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: built(units=9), r"weights: expected float32\[6x8\].*got float32\[6x9\].*another model"),
        (lambda: built(MOMENTUM["adam"]), r"expected optimizers \['SGD'\], got \['Adam'\]"),
        (lambda: models.compiled(models.network(), "sgd"), "another model"),
        (lambda: built(lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)), "optimizer: expected"),
        (lambda: models.compiled(keras.Sequential([keras.layers.Dense(3)]), "sgd"), "a model that is built"),
        (
            lambda: built(lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)),
            "gradient_accumulation_steps",
        ),
    ],
)
def test_checkpoint_of_another_model_is_refused(folder, other, match):
    saved(folder, 1)
    with pytest.raises(ConfigError, match=match) as caught:
        checkpoint.restore(folder, other())
    assert caught.value.collective


def test_state_of_other_options_is_refused(folder):
    if hvdx.size() == 1:
        return
    train(built(), 1, hvdx.Threshold(tau=0.001), hvd.Checkpoint(folder))
    with pytest.raises(ConfigError, match=r"tau=0.001.*tau=0.01"):
        train(built(), 2, hvdx.Threshold(tau=0.01), hvd.Checkpoint(folder))


def test_checkpoint_of_another_format_is_refused(folder):
    model = saved(folder, 1)
    if hvdx.rank() == 0:
        (folder / "epoch-0001" / "manifest.json").write_text('{"format": 2}')
    _everyone("it is changed")
    with pytest.raises(ConfigError, match="expected format 4, got 2"):
        checkpoint.restore(folder, model)


def test_resume_false_refuses_a_directory_with_checkpoints(folder):
    saved(folder, 1)
    with pytest.raises(ConfigError, match="without checkpoints"):
        train(built(), 1, None, hvd.Checkpoint(folder, resume=False))


def test_callback_on_one_rank_only_is_refused(folder):
    if hvdx.size() == 1:
        return
    with pytest.raises(ReplicaError, match="different places"):
        train(built(), 1, None, *([hvd.Checkpoint(folder)] if hvdx.rank() == 0 else []))


def test_two_callbacks_are_refused(folder):
    with pytest.raises(ConfigError, match="twice"):
        train(built(), 1, None, hvd.Checkpoint(folder), hvd.Checkpoint(folder))


# -- custom loops -----------------------------------------------------------------------------------------------------


@pytest.mark.sizes(1, 2)
def test_save_and_restore_in_a_loop(folder):
    def loop(model, epochs, batches):
        first = checkpoint.restore(folder, model) or 0
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)

        for epoch in range(first, epochs):
            for x, y in batches:
                step(x, y)
            checkpoint.save(folder, model, epoch + 1)
        return first

    def make(seed):
        optimizer = hvd.DistributedOptimizer(MOMENTUM["sgd"](), strategy=SPARSE)
        model = models.network(lambda: keras.layers.Dense(8), lambda: keras.layers.Dropout(0.3), seed=seed)
        model.optimizer = optimizer
        return model

    straight = make(0)
    assert loop(straight, 2, hvdx.shard(models.data(), models.BATCH)) == 0
    with pytest.raises(ConfigError, match=r"expected to save after epoch 2.*got epoch 1"):
        checkpoint.save(folder, straight, 1)
    checkpoint.save(folder, straight, 2)
    assert names(folder) == ["epoch-0001", "epoch-0002"]

    if hvdx.rank() == 0:
        shutil.rmtree(folder)
    _everyone("it is gone")
    assert loop(make(0), 1, hvdx.shard(models.data(), models.BATCH)) == 0
    resumed = make(1)
    assert loop(resumed, 2, hvdx.shard(models.data(), models.BATCH)) == 1
    assert_same(resumed, straight)


def test_bfloat16_weights_are_saved(folder):
    keras.config.set_dtype_policy("bfloat16")
    model, other = built(), built(seed=1)
    checkpoint.save(folder, model, 1)
    assert checkpoint.restore(folder, other) == 1
    for a, b in zip(model.weights, other.weights, strict=True):
        assert (tf.cast(a, "float32").numpy() == tf.cast(b, "float32").numpy()).all()


def test_orders_are_restored_to_the_newest_shares():
    old = hvdx.shard(models.data(), models.BATCH)
    new = hvdx.shard(models.data(), models.BATCH)
    list(new)
    list(new)
    drawn = shards.state()[0]
    assert drawn[-2:] == [-1, 1]
    third = [y.numpy().tolist() for _, y in new]
    shards.set_orders(drawn[-1:])
    assert [y.numpy().tolist() for _, y in new] == third
    assert shards.state()[0][-2:] == [-1, 2]
    del old
