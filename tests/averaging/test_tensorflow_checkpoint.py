"""Averages of TensorFlow checkpoints and SavedModels, compared with means of what TensorFlow reads."""

# Tests: hvdx/averaging/saved_model.py

import resource
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvdx.averaging import average, compare, tensorflow_checkpoint
from hvdx.averaging.formats import open_network
from hvdx.averaging.saved_model import SavedModel
from hvdx.averaging.tensorflow_checkpoint import TensorFlowCheckpoint
from hvdx.errors import AverageError
from tests.averaging.keras_models import MODELS, assert_same, data_for, exact_mean, listing, mlp, trained

pytestmark = pytest.mark.filterwarnings("ignore:the networks have batch normalisation")
DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


class Everything(tf.Module):
    """Module with variables of all dtypes and sizes, a counter, text, and a random number generator."""

    def __init__(self, seed, count=3):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.variables_of = {d: tf.Variable(tf.cast(rng.standard_normal((3, 2)), d)) for d in DTYPES}
        self.scalar = tf.Variable(rng.random())
        self.empty = tf.Variable(np.empty((0, 3), np.float32))
        self.large = tf.Variable(rng.standard_normal((300, 500)).astype(np.float32))
        self.count = tf.Variable(count, dtype=tf.int32)
        self.mask = tf.Variable([True, False])
        self.text = tf.Variable(f"text {seed}")
        self.generator = tf.random.Generator.from_seed(seed)


def saved(folder, seed, **options):
    """Save a checkpoint; return its prefix, and the module in it."""
    module = Everything(seed, **options)
    return Path(tf.train.Checkpoint(module=module).save(str(folder / f"c{seed}"))), module


def test_checkpoint_average_is_what_tensorflow_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorflow_checkpoint, "_SHARD_BYTES", 200)
    prefixes, modules = zip(*(saved(tmp_path, seed) for seed in range(3)), strict=True)
    average(prefixes, tmp_path / "mean", [0.5, 0.3, 0.2])
    result = Everything(9)
    tf.train.Checkpoint(module=result).restore(str(tmp_path / "mean")).assert_consumed()
    for dtype in DTYPES:
        values = [m.variables_of[dtype].numpy() for m in modules]
        if dtype.startswith("complex"):
            wide = sum(w * v.astype(np.complex128) for w, v in zip([0.5, 0.3, 0.2], values, strict=True))
            assert_same(result.variables_of[dtype].numpy(), wide.astype(dtype))
        else:
            assert_same(result.variables_of[dtype].numpy(), exact_mean(values, [0.5, 0.3, 0.2]))
    for name in ("scalar", "empty", "large"):
        expected = exact_mean([getattr(m, name).numpy() for m in modules], [0.5, 0.3, 0.2])
        assert_same(getattr(result, name).numpy(), expected, name)
    assert result.text.numpy() == b"text 0"
    assert int(result.count) == 3
    assert result.mask.numpy().tolist() == [True, False]
    assert_same(result.generator.state.numpy(), modules[0].generator.state.numpy())


@pytest.mark.parametrize("kind", list(MODELS))
def test_checkpoint_of_a_keras_model(tmp_path, kind):
    models = [trained(kind, seed) for seed in range(2)]
    prefixes = [tf.train.Checkpoint(model=m).write(str(tmp_path / f"c{i}")) for i, m in enumerate(models)]
    average(prefixes, tmp_path / "mean")
    result = trained(kind, 7)
    tf.train.Checkpoint(model=result).read(str(tmp_path / "mean")).assert_consumed()
    for variables in zip(result.weights, *(m.weights for m in models), strict=True):
        assert_same(variables[0].numpy(), exact_mean([v.numpy() for v in variables[1:]]), variables[0].path)
    x = data_for(kind)
    assert np.isfinite(np.asarray(result(x), np.float64)).all()


@pytest.mark.parametrize("ending", ["", ".index", ".data-00000-of-00001"])
def test_checkpoint_is_found_by_any_of_its_files(tmp_path, ending):
    prefixes = [Path(f"{saved(tmp_path, seed)[0]}{ending}") for seed in range(2)]
    average(prefixes, tmp_path / "mean")
    network = open_network(tmp_path / f"mean{ending}" if ending != ".data-00000-of-00001" else tmp_path / "mean.index")
    assert isinstance(network, TensorFlowCheckpoint)
    network.close()


def test_checkpoint_in_several_files_and_a_variable_in_parts(tmp_path):
    for i in range(2):
        for part in range(2):
            tf.raw_ops.SaveV2(
                prefix=str(tmp_path / f"part{part}"),
                tensor_names=["w"],
                shape_and_slices=[f"4 3 {2 * part},2:-"],
                tensors=[np.full((2, 3), 10.0 * part + i)],
            )
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[str(tmp_path / "part0"), str(tmp_path / "part1")],
            destination_prefix=str(tmp_path / f"c{i}"),
        )
    average([tmp_path / "c0", tmp_path / "c1"], tmp_path / "mean")
    got = tf.train.load_checkpoint(str(tmp_path / "mean")).get_tensor("w")
    assert_same(got, np.repeat([[0.5], [0.5], [10.5], [10.5]], 3, axis=1))


def test_checkpoint_leaves_only_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorflow_checkpoint, "_SHARD_BYTES", 100)
    prefixes = [saved(tmp_path, seed)[0] for seed in range(2)]
    before = set(listing(tmp_path))
    average(prefixes, tmp_path / "mean")
    new = sorted(set(listing(tmp_path)) - before)
    assert new[-1] == "mean.index"
    assert all(name.startswith("mean.data-") for name in new[:-1])
    assert len(new) > 3
    average(prefixes[::-1], tmp_path / "mean", force=True)
    assert sorted(set(listing(tmp_path)) - before) == new


def test_checkpoint_that_exists_is_kept_unless_forced(tmp_path):
    prefixes = [saved(tmp_path, seed)[0] for seed in range(2)]
    before = listing(tmp_path)
    with pytest.raises(AverageError, match="exists, and is kept"):
        average(prefixes, prefixes[1])
    assert listing(tmp_path) == before


def test_folder_of_checkpoints_names_the_prefixes(tmp_path):
    prefixes = [saved(tmp_path, seed)[0] for seed in range(2)]
    with pytest.raises(AverageError, match=rf"expected a checkpoint's prefix, .*: {prefixes[0]}, {prefixes[1]}\."):
        average([tmp_path, tmp_path], tmp_path / "mean")


def test_counters_of_checkpoints_must_be_equal(tmp_path):
    prefixes = [saved(tmp_path, 0)[0], saved(tmp_path, 1, count=4)[0]]
    with pytest.raises(AverageError, match=r"c1-1: module/count: expected 3, as in .*c0-1, got 4"):
        average(prefixes, tmp_path / "mean")
    average(prefixes, tmp_path / "mean", integers="last")
    assert tf.train.load_checkpoint(str(tmp_path / "mean")).get_tensor("module/count/.ATTRIBUTES/VARIABLE_VALUE") == 4


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": np.ones((3, 2)), "b": np.ones(4)}, r"d-1: a: expected the shape \[2, 3\], as in .*c-1, got \[3, 2\]"),
        ({"a": np.ones((2, 3), np.float32), "b": np.ones(4)}, "d-1: a: expected float64, as in .*c-1, got float32"),
        ({"a": np.ones((2, 3))}, "d-1: b: is in .*c-1, and missing here"),
        ({"a": np.ones((2, 3)), "b": np.ones(4), "c": np.ones(1)}, "c-1: c: is in .*d-1, and missing here"),
    ],
)
def test_checkpoints_that_differ_are_refused(tmp_path, other, message):
    def save(name, content):
        values = {key: tf.Variable(value) for key, value in content.items()}
        return tf.train.Checkpoint(**values).save(str(tmp_path / name))

    prefixes = [save("c", {"a": np.ones((2, 3)), "b": np.ones(4)}), save("d", other)]
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=message):
        average(prefixes, tmp_path / "mean")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("ending", ["index", "data-00000-of-00001"])
def test_truncated_checkpoint_is_refused(tmp_path, share, ending):
    prefixes = [saved(tmp_path, seed)[0] for seed in range(2)]
    path = Path(f"{prefixes[1]}.{ending}")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=r"c1-1: .*(damaged|cut short)"):
        average(prefixes, tmp_path / "mean")
    assert listing(tmp_path) == before


def test_damaged_tensor_is_named(tmp_path):
    prefixes = [saved(tmp_path, seed)[0] for seed in range(2)]
    path = Path(f"{prefixes[1]}.data-00000-of-00001")
    content = bytearray(path.read_bytes())
    place = bytes(content).find(saved(tmp_path, 1)[1].large.numpy().tobytes()[:64])
    content[place + 1000] ^= 1
    path.write_bytes(content)
    before = set(listing(tmp_path))
    with pytest.raises(AverageError, match=r"c1-1: module/large: it cannot be read"):
        average(prefixes, tmp_path / "mean")
    assert set(listing(tmp_path)) == before


def test_checkpoint_without_its_data_is_refused(tmp_path):
    prefixes = [saved(tmp_path, seed)[0] for seed in range(2)]
    Path(f"{prefixes[1]}.data-00000-of-00001").unlink()
    with pytest.raises(AverageError, match=r"c1-1: "):
        average(prefixes, tmp_path / "mean")


def test_full_disk_leaves_nothing(tmp_path):
    prefixes = [saved(tmp_path, seed)[0] for seed in range(2)]
    before = listing(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(AverageError, match=r"mean: .*It was not written; make room"):
            average(prefixes, tmp_path / "mean")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert listing(tmp_path) == before


def test_missing_tensorflow_is_reported_with_the_remedy(tmp_path, monkeypatch):
    prefix = saved(tmp_path, 0)[0]
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(AverageError, match=r"c0-1: .*TensorFlow.*pip install tensorflow"):
        open_network(prefix)


def exported(folder, seed, activation="relu", units=6):
    keras.utils.set_random_seed(seed)
    model = mlp(activation, units)
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(data_for("mlp", seed), np.random.default_rng(seed).random((24, 2)), verbose=0)
    model.export(folder, verbose=False)
    return model


def test_export_of_keras_models(tmp_path):
    models = [exported(tmp_path / f"m{seed}", seed) for seed in range(3)]
    paths = [tmp_path / f"m{seed}" for seed in range(3)]
    with pytest.warns(UserWarning, match="batch normalisation"):
        average(paths, tmp_path / "mean")
    result = tf.saved_model.load(str(tmp_path / "mean"))
    means = [exact_mean([v.numpy() for v in vs]) for vs in zip(*(m.weights for m in models), strict=True)]
    by_name = {w.path: mean for w, mean in zip(models[0].weights, means, strict=True)}
    # Keras lists variables twice; the order of the second list varies.
    assert {v.name.split(":")[0] for v in result.variables} > set(by_name)
    assert {v.name.split(":")[0] for v in result._all_variables} == set(by_name)
    for variable in [*result.variables, *result._all_variables]:
        if "seed" not in variable.name:
            assert_same(variable.numpy(), by_name[variable.name.split(":")[0]], variable.name)
    reference = mlp()
    reference.set_weights(means)
    x = data_for("mlp")
    np.testing.assert_allclose(result.serve(x), reference(x), rtol=1e-5, atol=1e-6)
    layer = layers.TFSMLayer(tmp_path / "mean", call_endpoint="serve")
    np.testing.assert_allclose(layer(x), reference(x), rtol=1e-5, atol=1e-6)
    served = result.signatures["serving_default"](tf.constant(x))
    np.testing.assert_allclose(next(iter(served.values())), reference(x), rtol=1e-5, atol=1e-6)


class Scale(tf.Module):
    """Module with an asset and a random number generator."""

    def __init__(self, seed, vocabulary):
        super().__init__()
        self.w = tf.Variable(np.random.default_rng(seed).standard_normal(3))
        self.steps = tf.Variable(4)
        self.generator = tf.random.Generator.from_seed(seed)
        self.vocabulary = tf.saved_model.Asset(str(vocabulary))

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)])
    def __call__(self, x):
        return self.w * x


def test_saved_model_of_a_module(tmp_path):
    (tmp_path / "words.txt").write_text("a b c")
    modules = [Scale(seed, tmp_path / "words.txt") for seed in range(2)]
    for seed, module in enumerate(modules):
        tf.saved_model.save(module, str(tmp_path / f"m{seed}"))
    average([tmp_path / "m0", tmp_path / "m1"], tmp_path / "mean")
    result = tf.saved_model.load(str(tmp_path / "mean"))
    assert_same(result.w.numpy(), exact_mean([m.w.numpy() for m in modules]))
    assert_same(result(np.ones((1, 3))).numpy()[0], result.w.numpy())
    assert Path(result.vocabulary.asset_path.numpy().decode()).read_text() == "a b c"
    assert isinstance(open_network(tmp_path / "mean"), SavedModel)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m0", "m1", "mean", "words.txt"]
    assert all(row.pairs[0, 1] > 0 for row in compare([tmp_path / "m0", tmp_path / "mean"]) if row.name == "w")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "tanh"}, r"b: serve\.operations\.(Relu|Tanh): expected"),
        ({"units": 7}, r"b/variables/variables: \S+: expected the shape|b: \S+: expected the shape"),
    ],
)
def test_saved_models_of_different_architectures_are_refused(tmp_path, options, message):
    exported(tmp_path / "a", 0)
    exported(tmp_path / "b", 1, **options)
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=message):
        average([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"]
)
def test_damaged_saved_model_is_refused(tmp_path, name):
    exported(tmp_path / "a", 0)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    content = (tmp_path / "b" / name).read_bytes()
    (tmp_path / "b" / name).write_bytes(content[: len(content) // 2])
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=r"/b\S*: .*(damaged|cut short|cannot be read)"):
        average([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert listing(tmp_path) == before


def test_saved_model_without_variables_is_refused(tmp_path):
    tf.saved_model.save(tf.Module(), str(tmp_path / "m"))
    shutil.rmtree(tmp_path / "m" / "variables")
    with pytest.raises(AverageError, match=r"m: .*variables\.index: is missing"):
        average([tmp_path / "m", tmp_path / "m"], tmp_path / "mean")


def test_saved_model_that_exists_is_kept_unless_forced(tmp_path):
    for i in range(2):
        exported(tmp_path / f"m{i}", i)
    exported(tmp_path / "mean", 2)
    (tmp_path / "mean" / "mine").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(AverageError, match="exists, and is kept"):
        average([tmp_path / "m0", tmp_path / "m1"], tmp_path / "mean")
    assert listing(tmp_path) == before
    average([tmp_path / "m0", tmp_path / "m1"], tmp_path / "mean", force=True)
    assert not (tmp_path / "mean" / "mine").exists()
    tf.saved_model.load(str(tmp_path / "mean"))
