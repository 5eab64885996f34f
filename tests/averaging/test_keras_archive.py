"""Averages of Keras archives, compared with means of what Keras loads."""

# Tests: hvdx/averaging/keras_config.py

import io
import json
import resource
import shutil
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import layers

from hvdx.averaging import average
from hvdx.averaging.formats import open_network
from hvdx.averaging.keras_archive import KerasArchive
from hvdx.averaging.keras_config import comparable
from hvdx.errors import AverageError, ConfigError
from tests.averaging.keras_models import (
    MODELS,
    OwnClass,
    assert_same,
    data_for,
    exact_mean,
    listing,
    mlp,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:the networks have batch normalisation")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Function that returns three archives of a kind of model, trained separately."""
    folder, made = tmp_path_factory.mktemp("archives"), {}

    def save(kind):
        if kind not in made:
            made[kind] = [folder / f"{kind}{i}.keras" for i in range(3)]
            for i, path in enumerate(made[kind]):
                trained(kind, i).save(path)
        return made[kind]

    return save


def rewritten(path, target, change, compression=zipfile.ZIP_STORED):
    """Write a changed copy of an archive: `change(name, content)` returns the new content, or None to omit it."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def edited_h5(edit):
    """Return a change for `rewritten` that edits the weights with h5py."""

    def change(name, content):
        if name != "model.weights.h5":
            return content
        buffer = io.BytesIO(content)
        with h5py.File(buffer, "r+") as h5:
            edit(h5)
        return buffer.getvalue()

    return change


def all_variables(model):
    """Return weights and optimiser state; the state of random number generators is not saved."""
    return [*model.weights, *model.optimizer.variables]


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.2]])
def test_average_is_what_keras_computes(saved, tmp_path, kind, weights):
    out = tmp_path / "mean.keras"
    average(saved(kind), out, weights)
    result = keras.saving.load_model(out)
    models = [keras.saving.load_model(path) for path in saved(kind)]
    assert len(all_variables(result)) > len(result.weights)
    for variables in zip(all_variables(result), *(all_variables(m) for m in models), strict=True):
        assert_same(variables[0].numpy(), exact_mean([v.numpy() for v in variables[1:]], weights), variables[0].path)
    x = data_for(kind)
    assert np.isfinite(np.asarray(result(x), np.float64)).all()
    assert np.abs(np.asarray(result(x), np.float64) - np.asarray(models[0](x), np.float64)).max() > 0
    result.fit(x, np.zeros((len(x[0] if isinstance(x, list) else x), 2)), verbose=0)


def test_archive_of_the_average_is_sound_and_keeps_the_rest(saved, tmp_path):
    out = tmp_path / "mean.keras"
    average(saved("mlp"), out)
    with zipfile.ZipFile(out) as new, zipfile.ZipFile(saved("mlp")[0]) as first:
        assert new.testzip() is None
        assert new.namelist() == first.namelist()
        for name in ("config.json", "metadata.json"):
            assert new.read(name) == first.read(name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mean.keras"]


def test_bfloat16_is_averaged_as_bfloat16(saved):
    with_names = open_network(saved("mixed")[0])
    kinds = {tensor.dtype.name for tensor in with_names.tensors.values()}
    with_names.close()
    assert {"bfloat16", "float16", "float32", "float64", "int64"} <= kinds


def test_compressed_archive(saved, tmp_path):
    packed = [rewritten(p, tmp_path / p.name, lambda n, c: c, zipfile.ZIP_DEFLATED) for p in saved("cnn")]
    average(packed, tmp_path / "mean.keras")
    with zipfile.ZipFile(tmp_path / "mean.keras") as archive:
        assert archive.testzip() is None
        assert archive.getinfo("config.json").compress_type == zipfile.ZIP_DEFLATED
        assert archive.getinfo("model.weights.h5").compress_type == zipfile.ZIP_STORED
    average(saved("cnn"), tmp_path / "plain.keras")
    a, b = (keras.saving.load_model(tmp_path / name) for name in ("mean.keras", "plain.keras"))
    for x, y in zip(all_variables(a), all_variables(b), strict=True):
        assert_same(x.numpy(), y.numpy())


def test_archive_with_extra_fields_and_other_entries_in_front(saved, tmp_path):
    paths = []
    for path in saved("mlp"):
        paths.append(tmp_path / path.name)
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(paths[-1], "w") as new:
            new.writestr("extra/note.txt", "x" * len(paths))
            for name in old.namelist():
                info = zipfile.ZipInfo(name)
                info.extra = b"\x99\x99\x04\x00abcd"
                new.writestr(info, old.read(name))
    average(paths, tmp_path / "mean.keras")
    average(saved("mlp"), tmp_path / "plain.keras")
    a, b = (keras.saving.load_model(tmp_path / name) for name in ("mean.keras", "plain.keras"))
    for x, y in zip(all_variables(a), all_variables(b), strict=True):
        assert_same(x.numpy(), y.numpy())
    with zipfile.ZipFile(tmp_path / "mean.keras") as archive:
        assert archive.read("extra/note.txt") == b"x"


def test_tensors_in_chunks_within_an_archive(saved, tmp_path):
    def compress(h5):
        for name in ("layers/dense/vars/0", "layers/dense/vars/1"):
            value = h5[name][()]
            del h5[name]
            h5.create_dataset(name, data=value, compression="gzip", chunks=value.shape)

    scattered = [rewritten(p, tmp_path / p.name, edited_h5(compress)) for p in saved("mlp")]
    average(scattered, tmp_path / "mean.keras")
    assert sorted(p.name for p in tmp_path.glob("*mean*")) == ["mean.keras"]
    average(saved("mlp"), tmp_path / "plain.keras")
    a, b = (keras.saving.load_model(tmp_path / name) for name in ("mean.keras", "plain.keras"))
    for x, y in zip(all_variables(a), all_variables(b), strict=True):
        assert_same(x.numpy(), y.numpy())


def test_assets_are_the_first_networks(tmp_path):
    paths = []
    for i in range(2):
        text = layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=2)
        model = keras.Sequential([keras.Input((1,), dtype="string"), text, layers.Embedding(5, 2)])
        paths.append(tmp_path / f"{i}.keras")
        model.save(paths[-1])
    average(paths, tmp_path / "mean.keras")
    result = keras.saving.load_model(tmp_path / "mean.keras")
    assert result.layers[0].get_vocabulary() == text.get_vocabulary()


def test_snapshots_of_one_run_with_swa_keep_the_last_counter(tmp_path):
    keras.utils.set_random_seed(0)
    model, paths = mlp(), []
    model.compile("adam", "mse", run_eagerly=True)
    for i in range(2):
        model.fit(data_for("mlp"), np.zeros((24, 2)), verbose=0)
        paths.append(tmp_path / f"{i}.keras")
        model.save(paths[-1])
    with pytest.raises(AverageError, match=r"1\.keras: optimizer/vars/0: expected 1, as in .*0\.keras, got 2"):
        average(paths, tmp_path / "mean.keras")
    average(paths, tmp_path / "mean.keras", swa=True)
    assert int(keras.saving.load_model(tmp_path / "mean.keras").optimizer.iterations) == 2


def test_archive_of_any_name_is_recognised_by_its_content(saved, tmp_path):
    paths = [shutil.copy(p, tmp_path / f"net{i}.bin") for i, p in enumerate(saved("mlp"))]
    average(paths, tmp_path / "mean.bin")
    network = open_network(tmp_path / "mean.bin")
    assert isinstance(network, KerasArchive)
    assert network.normalises
    network.close()


def test_warns_of_batch_normalisation(saved, tmp_path):
    for kind in ("mlp", "cnn", "own_class"):
        with pytest.warns(UserWarning, match="batch normalisation"):
            average(saved(kind), tmp_path / f"{kind}.keras")


@pytest.mark.parametrize("ending", ["keras", "weights.h5"])
def test_warns_of_layers_that_were_adapted_to_different_data(tmp_path, ending):
    def save(name, scales):
        scaled = [layers.Normalization() for _ in scales]
        for layer, scale in zip(scaled, scales, strict=True):
            layer.adapt(scale * np.arange(12.0).reshape(4, 3))
        path = tmp_path / f"{name}.{ending}"
        model = keras.Sequential([keras.Input((3,)), *scaled, layers.Dense(2)])
        model.save(path) if ending == "keras" else model.save_weights(path)
        return path

    first, same, other = save("a", [1, 2]), save("b", [1, 2]), save("c", [1, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        average([first, same], tmp_path / f"same.{ending}")
    with pytest.warns(UserWarning, match="^normalization_1: expected Normalization layers that were adapted to the"):
        average([first, other], tmp_path / f"mean.{ending}")


@pytest.mark.parametrize("name", ["left", "renamed"])
def test_layers_names_do_not_matter(tmp_path, name):
    paths = []
    for i in range(2):
        keras.utils.set_random_seed(i)
        inputs = keras.Input((4,), name=f"{name}{i}")
        x = layers.Dense(3, name=f"{name}_first{i}")(inputs)
        x = layers.Dropout(0.1 * (i + 1), seed=i)(x)
        x = keras.Sequential([layers.Dense(3)], name=f"{name}_inner{i}")(x)
        model = keras.Model(inputs, layers.Bidirectional(layers.GRU(2))(layers.Reshape((1, 3))(x)))
        paths.append(tmp_path / f"{i}.keras")
        model.save(paths[-1])
    average(paths, tmp_path / "mean.keras")
    keras.saving.load_model(tmp_path / "mean.keras")


def branches(swap):
    a, b = keras.Input((3,)), keras.Input((3,))
    x, y = layers.Dense(3)(a), layers.Dense(3)(b)
    return keras.Model([a, b], layers.Subtract()([y, x] if swap else [x, y]))


def rnn(backwards):
    return keras.Sequential([keras.Input((5, 3)), layers.LSTM(2, go_backwards=backwards)])


DIFFERENT = {
    "activation": (
        mlp,
        lambda: mlp("tanh"),
        r"config\.layers\[1\]\.config\.activation: expected 'relu', as in .*a\.keras, got 'tanh'",
    ),
    "shape": (mlp, lambda: mlp(units=7), r"layers/\S+: expected the shape \[.*6.*\], as in .*a\.keras, got \[.*7.*\]"),
    "dtype": (mlp, lambda: mlp(dtype="float16"), r"layers/dense/vars/\d: expected float32, as in .*, got float16"),
    "missing": (mlp, lambda: keras.Sequential([keras.Input((4,)), layers.Dense(6)]), r"layers/\S+: is in .*a\.keras"),
    "connections": (lambda: branches(False), lambda: branches(True), r"config\.\S+: expected"),
    "option": (lambda: rnn(False), lambda: rnn(True), r"config\.layers\[1\]\.config\.go_backwards: expected None"),
    "class": (OwnClass, lambda: renamed_class(), r"class_name: expected 'OwnClass', as in .*a\.keras, got 'Another'"),
}


def renamed_class():
    @keras.saving.register_keras_serializable("hvdx-tests")
    class Another(OwnClass):
        pass

    return Another()


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_different_architectures_are_refused(tmp_path, what):
    first, second, message = DIFFERENT[what]
    for name, make in (("a", first), ("b", second)):
        model = make()
        if not model.built:
            model(np.zeros((1, 4)))
        model.save(tmp_path / f"{name}.keras")
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=rf"[ab]\.keras: {message}"):
        average([tmp_path / "a.keras", tmp_path / "b.keras"], tmp_path / "mean.keras")
    assert listing(tmp_path) == before


def test_missing_tensor_is_named(saved, tmp_path):
    def remove(h5):
        del h5["layers/dense/vars/1"]

    a, b = saved("mlp")[0], rewritten(saved("mlp")[1], tmp_path / "b.keras", edited_h5(remove))
    with pytest.raises(AverageError, match=r"b\.keras: layers/dense/vars/1: is in .*mlp0\.keras, and missing here"):
        average([a, b], tmp_path / "mean.keras")
    with pytest.raises(AverageError, match=r"b\.keras: layers/dense/vars/1: is in .*mlp0\.keras, and missing here"):
        average([b, a], tmp_path / "mean.keras")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_truncated_archive_is_refused(saved, tmp_path, share):
    content = saved("mlp")[1].read_bytes()
    (tmp_path / "cut.keras").write_bytes(content[: int(share * len(content))])
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=r"cut\.keras: expected a zip archive.*(cut short|damaged)"):
        average([saved("mlp")[0], tmp_path / "cut.keras"], tmp_path / "mean.keras")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["model.weights.h5", "config.json"])
def test_archive_without_an_entry_is_refused(saved, tmp_path, name):
    bad = rewritten(saved("mlp")[1], tmp_path / "bad.keras", lambda n, c: None if n == name else c)
    with pytest.raises(AverageError, match=rf"bad\.keras: {name}: is missing"):
        average([saved("mlp")[0], bad], tmp_path / "mean.keras")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda content: content[:100]),
        ("config.json", lambda content: b"\xff\xfe" + content),
        ("model.weights.h5", lambda content: content[: len(content) // 2]),
        ("model.weights.h5", lambda content: bytes(len(content))),
        ("model.weights.h5", lambda content: content[:600] + bytes(600) + content[1200:]),
        ("model.weights.h5", lambda content: b""),
    ],
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archive_with_a_damaged_entry_is_refused(saved, tmp_path, name, change, compression):
    def damage(entry, content):
        return change(content) if entry == name else content

    bad = rewritten(saved("mlp")[1], tmp_path / "bad.keras", damage, compression)
    with pytest.raises(AverageError, match=rf"bad\.keras: {name}: .*(damaged|unpacked)"):
        average([saved("mlp")[0], bad], tmp_path / "mean.keras")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.keras"]


def test_flipped_byte_is_refused(saved, tmp_path):
    paths = saved("mlp")
    content = bytearray(paths[1].read_bytes())
    with zipfile.ZipFile(paths[1]) as archive:
        entry = archive.getinfo("model.weights.h5")
        # This byte is in the last tensor, whose bytes HDF5 does not check.
        content[entry.header_offset + entry.file_size - 100] ^= 1
    damaged = tmp_path / "damaged.keras"
    damaged.write_bytes(content)
    with pytest.raises(AverageError, match=r"damaged\.keras: model\.weights\.h5: its checksum differs from the one"):
        average([paths[0], damaged], tmp_path / "mean.keras")
    assert not (tmp_path / "mean.keras").exists()


def test_other_vocabularies_are_refused(tmp_path):
    paths = []
    for words in (["a", "b"], ["a", "c"]):
        lookup = layers.StringLookup(vocabulary=words)
        paths.append(tmp_path / f"{words[1]}.keras")
        keras.utils.set_random_seed(0)
        text = keras.Input((), dtype="string")
        keras.Model(text, layers.Embedding(3, 2)(lookup(text))).save(paths[-1])
    with pytest.raises(AverageError, match=r"c\.keras: .*(assets|vocabulary)"):
        average(paths, tmp_path / "mean.keras")
    average([paths[0], paths[0]], tmp_path / "mean.keras")


def test_full_disk_leaves_nothing(saved, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(AverageError, match=r"mean\.keras: .*It was not written; make room"):
            average(saved("mlp"), tmp_path / "mean.keras")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not listing(tmp_path)


def test_output_that_exists_is_kept_unless_forced(saved, tmp_path):
    out = tmp_path / "mean.keras"
    out.write_bytes(b"mine")
    with pytest.raises(AverageError, match="exists, and is kept"):
        average(saved("mlp"), out)
    assert out.read_bytes() == b"mine"
    average(saved("mlp"), out, force=True)
    keras.saving.load_model(out)


def test_recalibrate_is_for_archives(saved, tmp_path):
    for i, path in enumerate(saved("mlp")[:2]):
        keras.saving.load_model(path).save_weights(tmp_path / f"{i}.weights.h5")
    with pytest.raises(ConfigError, match=r"recalibrate: expected \.keras models"):
        average(
            [tmp_path / "0.weights.h5", tmp_path / "1.weights.h5"], tmp_path / "m.weights.h5", recalibrate="data.npz"
        )


def test_configuration_is_comparable_across_models():
    def config(i):
        keras.utils.set_random_seed(i)
        model = MODELS["two_inputs"]()
        return comparable(json.loads(model.to_json()))

    assert config(0) == config(1)
    assert "dense" not in json.dumps(config(0)).replace('"Dense"', "")
