"""Averages of HDF5 weights, compared with means of what Keras and h5py read."""

# Tests: hvdx/averaging/extents.py, hvdx/averaging/formats.py

import json
import resource
import sys

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest

from hvdx.averaging import average
from hvdx.averaging.formats import open_network
from hvdx.errors import AverageError
from tests.averaging.keras_models import MODELS, assert_same, exact_mean, listing, mlp, trained

pytestmark = pytest.mark.filterwarnings("ignore:the networks have batch normalisation")


def write(path, content, **options):
    """Write a file with the given datasets; return its path."""
    with h5py.File(path, "w", **options) as h5:
        for name, value in content.items():
            h5[name] = value
    return path


@pytest.mark.parametrize("kind", list(MODELS))
def test_average_is_what_keras_computes(tmp_path, kind):
    models = [trained(kind, seed) for seed in range(3)]
    paths = [tmp_path / f"{i}.weights.h5" for i in range(3)]
    for model, path in zip(models, paths, strict=True):
        model.save_weights(path)
    # The step counters of Adam are equal, since each model was trained for the same number of steps.
    average(paths, tmp_path / "mean.weights.h5", [0.5, 0.3, 0.2])
    result = trained(kind, 7)
    result.load_weights(tmp_path / "mean.weights.h5")
    for variables in zip(result.weights, *(m.weights for m in models), strict=True):
        expected = exact_mean([v.numpy() for v in variables[1:]], [0.5, 0.3, 0.2])
        assert_same(variables[0].numpy(), expected, variables[0].path)


def test_whole_model_of_keras_2(tmp_path):
    paths, models = [], []
    for seed in range(2):
        keras.backend.clear_session()
        models.append(trained("cnn", seed))
        paths.append(tmp_path / f"{seed}.h5")
        models[-1].save(paths[-1])
    average(paths, tmp_path / "mean.h5")
    result = keras.saving.load_model(tmp_path / "mean.h5", compile=False)
    for variables in zip(result.weights, *(m.weights for m in models), strict=True):
        assert_same(variables[0].numpy(), exact_mean([v.numpy() for v in variables[1:]]))


def test_whole_models_that_compute_different_things_are_refused(tmp_path):
    for activation in ("relu", "tanh"):
        keras.backend.clear_session()
        mlp(activation).save(tmp_path / f"{activation}.h5")
    with pytest.raises(
        AverageError, match=r"tanh\.h5: config\.layers\[1\]\.config\.activation: expected 'relu', as in"
    ):
        average([tmp_path / "relu.h5", tmp_path / "tanh.h5"], tmp_path / "mean.h5")


CONTENTS = {
    "plain": lambda v: {"data": v},
    "chunked": lambda v: {"data": v, "chunks": (2, 3)},
    "gzip": lambda v: {"data": v, "compression": "gzip", "shuffle": True, "fletcher32": True},
    "growing": lambda v: {"data": v, "maxshape": (None, 3)},
}


@pytest.mark.parametrize("layout", list(CONTENTS))
@pytest.mark.parametrize("dtype", [">f4", "<f8", "<f2", "complex64", "bfloat16"])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_layouts_and_dtypes(tmp_path, layout, dtype, libver):
    rng, arrays, paths = np.random.default_rng(0), [], []
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    for i in range(3):
        arrays.append(rng.standard_normal((5, 3)).astype(kind))
        paths.append(tmp_path / f"{i}.h5")
        with h5py.File(paths[-1], "w", libver=libver) as h5:
            value = arrays[-1].view("V2") if dtype == "bfloat16" else arrays[-1]
            h5.create_dataset("a/first", **CONTENTS[layout](value[::-1]))
            h5.create_dataset("a/w", **CONTENTS[layout](value)).attrs["dtype"] = dtype
            h5["z"] = np.arange(3)
            h5["z"].attrs["note"] = f"file {i}"
            h5["text"] = f"text {i}"
            h5["texts"] = np.array([b"ab", b"cd"])
            h5["same"] = h5["a/w"]
            h5["soft"] = h5py.SoftLink("/a/w")
    average(paths, tmp_path / "mean.h5")
    wide = [a.astype(np.complex128 if kind.kind == "c" else np.float64) for a in arrays]
    expected = (sum(wide) / 3).astype(kind)
    with h5py.File(tmp_path / "mean.h5") as h5, h5py.File(paths[0]) as first:
        for name in ("a/first", "a/w", "same", "soft"):
            assert h5[name].dtype == first[name].dtype
            assert_same(h5[name][()].view(kind), expected[::-1] if name == "a/first" else expected, name)
        assert h5["a/w"].chunks == first["a/w"].chunks
        assert h5["a/w"].compression == first["a/w"].compression
        assert h5["z"].attrs["note"] == "file 0"
        assert h5["text"][()] == b"text 0"
        assert h5["z"][()].tolist() == [0, 1, 2]


def test_sizes_of_all_kinds(tmp_path):
    content = {"scalar": 3.0, "none": np.empty((0, 4)), "one": np.ones((1, 1, 1)), "large": np.arange(300_000.0)}
    for i in range(2):
        write(tmp_path / f"{i}.h5", {name: np.asarray(value) * (i + 1) for name, value in content.items()})
    average([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "mean.h5")
    with h5py.File(tmp_path / "mean.h5") as h5:
        for name, value in content.items():
            assert_same(h5[name][()], np.asarray(value) * 1.5, name)


def test_dataset_without_elements_in_the_file_is_read_as_its_fill_value(tmp_path):
    for i in range(2):
        with h5py.File(tmp_path / f"{i}.h5", "w") as h5:
            h5.create_dataset("w", (4,), "f4", fillvalue=2.0 * i)
    average([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "mean.h5")
    with h5py.File(tmp_path / "mean.h5") as h5:
        assert h5["w"][()].tolist() == [1.0] * 4


def test_type_that_hdf5_converts_is_not_read_in_place(tmp_path):
    """h5py reads a 32-bit float with another exponent bias as float32, but its bits in the file differ."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_ebias(100)
    for i in range(2):
        with h5py.File(tmp_path / f"{i}.h5", "w") as h5:
            space = h5py.h5s.create_simple((3,))
            made = h5py.h5d.create(h5.id, b"w", kind, space)
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.full(3, 1.5 + i, np.float32))
    average([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "mean.h5")
    with h5py.File(tmp_path / "mean.h5") as h5:
        assert h5["w"][()].tolist() == [2.0] * 3


def test_user_block_before_the_file(tmp_path):
    for i in range(2):
        write(tmp_path / f"{i}.h5", {"w": np.full(5, float(i))}, userblock_size=512)
    average([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "mean.h5")
    with h5py.File(tmp_path / "mean.h5") as h5:
        assert h5["w"][()].tolist() == [0.5] * 5


def test_unequal_integers_and_booleans_are_named(tmp_path):
    for i in range(3):
        write(tmp_path / f"{i}.h5", {"count": np.array([1, 2 + (i == 2)]), "mask": np.array([True, False])})
    average([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "mean.h5")
    with h5py.File(tmp_path / "mean.h5") as h5:
        assert_same(h5["count"][()], np.array([1, 2]))
        assert_same(h5["mask"][()], np.array([True, False]))
    with pytest.raises(AverageError, match=r"2\.h5: count: expected 2, as in .*0\.h5, got 3 at \[1\]"):
        average([tmp_path / "0.h5", tmp_path / "2.h5"], tmp_path / "other.h5")


def test_state_of_random_generators_is_the_first_networks(tmp_path):
    for i in range(2):
        seeds = {"layers/dropout/seed_generator/vars/0": np.array([i, 7], np.uint32), "w": np.full(2, float(i))}
        write(tmp_path / f"{i}.weights.h5", seeds)
    average([tmp_path / "0.weights.h5", tmp_path / "1.weights.h5"], tmp_path / "mean.weights.h5")
    with h5py.File(tmp_path / "mean.weights.h5") as h5:
        assert h5["layers/dropout/seed_generator/vars/0"][()].tolist() == [0, 7]
        assert h5["w"][()].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": np.ones((2, 3)), "b": np.ones(3)}, r"w: expected the shape \[3, 2\], as in .*a\.h5, got \[2, 3\]"),
        ({"w": np.ones((3, 2), np.float32), "b": np.ones(3)}, "w: expected float64, as in .*a.h5, got float32"),
        ({"w": np.ones((3, 2))}, "b: is in .*a.h5, and missing here"),
        ({"w": np.ones((3, 2)), "b": np.ones(3), "c": np.ones(3)}, "c: is in .*b.h5, and missing here"),
        ({"w": np.ones((3, 2)), "b": np.ones(3, [("x", "f4"), ("y", "f4")])}, "b: expected numbers, got"),
        ({"w": np.ones((3, 2)), "b": np.ones(3, "V1")}, r"b: expected numbers, got \|V1"),
    ],
)
def test_files_that_differ_are_refused(tmp_path, other, message):
    a = write(tmp_path / "a.h5", {"w": np.ones((3, 2)), "b": np.ones(3)})
    b = write(tmp_path / "b.h5", other)
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=rf"[ab]\.h5: {message}"):
        average([a, b], tmp_path / "mean.h5")
    assert listing(tmp_path) == before


def test_tensors_in_other_files_are_refused(tmp_path):
    a = write(tmp_path / "a.h5", {"w": np.ones(3)})
    with h5py.File(tmp_path / "b.h5", "w") as h5:
        h5.create_dataset("w", (3,), "f8", external=[(str(tmp_path / "raw"), 0, 24)])
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(a, "w", (3,))
    with h5py.File(tmp_path / "c.h5", "w") as h5:
        h5.create_virtual_dataset("w", layout)
    for name in ("b.h5", "c.h5"):
        with pytest.raises(AverageError, match=rf"{name}: w: expected its elements in this file"):
            average([a, tmp_path / name], tmp_path / "mean.h5")


@pytest.mark.parametrize("cut", [0, 4, 100, 700, 3000, 20_000, -8, -1])
def test_truncated_file_is_refused(tmp_path, cut):
    a = write(tmp_path / "a.weights.h5", {f"layers/{i}/vars/0": np.ones(500) for i in range(10)})
    (tmp_path / "cut.weights.h5").write_bytes(a.read_bytes()[:cut])
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=r"cut\.weights\.h5: expected an HDF5 file, .*(cut short|damaged)"):
        average([a, tmp_path / "cut.weights.h5"], tmp_path / "mean.weights.h5")
    assert listing(tmp_path) == before


def test_damaged_chunk_is_named(tmp_path):
    for name in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / name, "w") as h5:
            h5.create_dataset("layer/w", data=np.random.default_rng(0).random(1000), compression="gzip")
            place = h5["layer/w"].id.get_chunk_info(0).byte_offset
    content = bytearray((tmp_path / "b.h5").read_bytes())
    content[place + 100 : place + 200] = bytes(100)
    (tmp_path / "b.h5").write_bytes(content)
    with pytest.raises(AverageError, match=r"b\.h5: layer/w: it cannot be read"):
        average([tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "mean.h5")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.h5", "b.h5"]


def test_damage_anywhere_raises_no_other_error(tmp_path):
    """A changed byte raises an AverageError or goes unnoticed."""
    a = write(tmp_path / "a.h5", {"layers/dense/vars/0": np.ones(4), "layers/dense/vars/1": np.ones(2)})
    content, messages = a.read_bytes(), []
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(content), 200):
        damaged = bytearray(content)
        damaged[place] ^= int(rng.integers(1, 256))
        (tmp_path / "b.h5").write_bytes(damaged)
        try:
            average([a, tmp_path / "b.h5"], tmp_path / "mean.h5", force=True)
        except AverageError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert all("b.h5" in message or "layers" in message for message in messages)


def test_index_of_several_files_is_refused_with_the_remedy(tmp_path):
    model = mlp()
    model.save_weights(tmp_path / "m.weights.json", max_shard_size=1e-6)
    with pytest.raises(AverageError, match=r"m\.weights\.json: expected weights in one file"):
        average([tmp_path / "m.weights.json"] * 2, tmp_path / "mean.weights.json")


def test_overlapping_tensors_are_refused(tmp_path):
    a = write(tmp_path / "a.h5", {"u": np.full(64, 1.0), "w": np.full(64, 2.0)})
    with h5py.File(a) as h5:
        places = [h5[name].id.get_offset().to_bytes(8, "little") for name in ("u", "w")]
    content = a.read_bytes()
    assert content.count(places[1]) == 1
    (tmp_path / "b.h5").write_bytes(content.replace(places[1], places[0]))
    with pytest.raises(AverageError, match=r"b\.h5: [uw]: expected 512 bytes of its own"):
        average([a, tmp_path / "b.h5"], tmp_path / "mean.h5")


def test_missing_h5py_is_reported_with_the_remedy(tmp_path, monkeypatch):
    a = write(tmp_path / "a.h5", {"w": np.ones(3)})
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(AverageError, match=r"a\.h5: .*h5py.*pip install h5py"):
        open_network(a)


@pytest.mark.parametrize("layout", ["plain", "gzip"])
def test_full_disk_leaves_nothing(tmp_path, layout):
    for i in range(2):
        with h5py.File(tmp_path / f"{i}.h5", "w") as h5:
            h5.create_dataset("w", **CONTENTS[layout](np.random.default_rng(i).random((100_000, 3))))
    before = listing(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        with pytest.raises(AverageError, match=r"mean\.h5: .*It was not written; make room"):
            average([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "mean.h5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert listing(tmp_path) == before


def test_keras_2_configuration_that_is_no_json(tmp_path):
    a = write(tmp_path / "a.h5", {"w": np.ones(3)})
    with h5py.File(a, "r+") as h5:
        h5.attrs["model_config"] = json.dumps({"class_name": "Sequential"})[:-1]
    with pytest.raises(AverageError, match=r"a\.h5: model_config: expected JSON"):
        open_network(a)
