"""Arithmetic of averaging."""

# Tests: hvdx/averaging/api.py, hvdx/averaging/network.py, hvdx/averaging/formats.py

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvdx.averaging import mean as mean_module
from hvdx.averaging.mean import Mean, resolve_weights
from hvdx.errors import AverageError, ConfigError
from tests.averaging.arrays import Arrays, mean_of

FLOATS = ["<f2", "<f4", "<f8", ">f2", ">f4", ">f8", "bfloat16", "float8_e4m3fn", "float8_e5m2", "<c8", "<c16", ">c8"]
OTHERS = ["?", "i1", "u1", "<i2", "<u4", "<i8", ">i8", "<u8"]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def drawn(name, shape, seed):
    """Return random values of any dtype, negative and positive."""
    dtype = dtype_of(name)
    values = np.random.default_rng(seed).normal(size=shape) * 3
    if dtype.kind == "c":
        return (values + 1j * values[::-1]).astype(dtype)
    return values.astype("i8").astype(dtype) if dtype.kind in "iub" else values.astype(dtype)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that tensors of a few elements cross their borders and are computed by threads."""
    monkeypatch.setattr(mean_module, "_BLOCK", 7)
    monkeypatch.setattr(mean_module, "_THREADS", 3)


@pytest.mark.parametrize("name", FLOATS)
def test_mean_is_the_float64_mean_rounded_once(name, small_blocks):
    arrays = [drawn(name, (10, 11), seed) for seed in range(3)]
    wide = "c16" if dtype_of(name).kind == "c" else "f8"
    result, _ = mean_of(arrays)
    expected = ((arrays[0].astype(wide) + arrays[1].astype(wide) + arrays[2].astype(wide)) / 3).astype(dtype_of(name))
    assert result.dtype == dtype_of(name)
    assert result.tobytes() == expected.tobytes()
    assert result.tobytes() not in [a.tobytes() for a in arrays]


@pytest.mark.parametrize("name", FLOATS + OTHERS)
@pytest.mark.parametrize("weights", [None, (0.5, 0.3, 0.2), (1e-3, 7, 2), (0, 1, 0)])
def test_mean_of_identical_inputs_is_that_input_bit_for_bit(name, weights, small_blocks):
    array = drawn(name, (6, 9), 0)
    result, _ = mean_of([array] * 3, weights)
    assert result.tobytes() == array.tobytes()
    assert result.shape == array.shape


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(st.sampled_from(["<f4", "<f8", "<f2"]), st.integers(0, 40), elements={"allow_nan": False}),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=5).filter(lambda w: sum(w) > 1e-3),
)
def test_mean_of_identical_inputs_of_any_value_is_that_input(array, weights):
    result, mean = mean_of([array] * len(weights), weights)
    assert result.tobytes() == array.tobytes()
    assert not mean.not_a_number


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(-1e3, 1e3)), min_size=1, max_size=6))
def test_mean_lies_between_its_inputs(pairs):
    result, _ = mean_of([np.array([x]) for _, x in pairs], [w for w, _ in pairs])
    values = [x for _, x in pairs]
    slack = 1e-12 * max(map(abs, values))
    assert min(values) - slack <= result[0] <= max(values) + slack


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (8,), (2, 3, 5)])
@pytest.mark.parametrize("dtype", ["f4", "i8", "?"])
def test_shapes(shape, dtype, small_blocks):
    result, _ = mean_of([np.ones(shape, dtype)] * 2)
    assert result.shape == shape
    assert (result == 1).all()


def test_weights_count_by_their_ratios():
    arrays = [np.array([x], "f4") for x in (1.0, 4.0)]
    assert mean_of(arrays, [2, 1])[0] == mean_of(arrays, [0.5, 0.25])[0] == 2.0


def test_weight_of_zero_leaves_a_network_out():
    result, mean = mean_of([np.array([np.inf, np.nan]), np.array([1.0, 2.0])], [0, 2])
    assert result.tolist() == [1.0, 2.0]
    assert not mean.not_a_number


@pytest.mark.parametrize("decay", [0.01, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_ema_is_the_recurrence(decay, count):
    values = np.random.default_rng(0).normal(size=count)
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    weights = resolve_weights(count, ema=decay)
    assert sum(weights) == pytest.approx(1)
    assert np.dot(weights, values) == pytest.approx(average)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": [1]}, "expected 2 numbers, one per network, got 1"),
        ({"weights": [1, -1]}, "not negative"),
        ({"weights": [0, 0]}, "one above zero"),
        ({"weights": [1, float("nan")]}, "not negative"),
        ({"weights": [1, float("inf")]}, "not negative"),
        ({"ema": 0}, "between 0 and 1"),
        ({"ema": 1}, "between 0 and 1"),
        ({"ema": float("nan")}, "between 0 and 1"),
        ({"ema": 0.5, "swa": True}, "one of them"),
        ({"weights": [1, 1], "ema": 0.5}, "one of them"),
    ],
)
def test_invalid_weights_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        resolve_weights(2, **options)


@pytest.mark.parametrize("name", OTHERS)
def test_unequal_integers_are_named(name, small_blocks):
    first = np.ones((4, 6), dtype_of(name))
    other = first.copy()
    other[2, 3] = 0
    with pytest.raises(AverageError) as caught:
        mean_of([first, first, other])
    for words in ("2.arrays: w: expected", "as in 0.arrays", "at [2, 3]", "--integers first"):
        assert words in str(caught.value)
    assert mean_of([first, other], integers="first")[0].tobytes() == first.tobytes()
    assert mean_of([first, other], integers="last")[0].tobytes() == other.tobytes()


def test_integers_of_weight_zero_have_to_be_equal_too():
    with pytest.raises(AverageError, match=r"1\.arrays: w"):
        mean_of([np.array([1]), np.array([2])], [1, 0])


@pytest.mark.parametrize("integers", ["equal", "first", "last"])
def test_byte_orders_mix(integers):
    for kind in ("f4", "i4"):
        little, big = np.array([1, 2, 3], f"<{kind}"), np.array([1, 2, 3], f">{kind}")
        for arrays in ([little, big], [big, little]):
            result, _ = mean_of(arrays, integers=integers)
            assert result.dtype == arrays[0].dtype
            assert result.tolist() == [1, 2, 3]


def test_widest_floats_do_not_overflow_where_they_are_equal():
    assert mean_of([np.array([1e308, 1.0]), np.array([1e308, 2.0])])[0].tolist() == [1e308, 1.5]


def test_nan_is_reported_and_infinity_is_not_nan():
    assert mean_of([np.array([1.0, np.nan], "f4"), np.ones(2, "f4")])[1].not_a_number == ["w"]
    assert mean_of([np.array([np.inf, -np.inf], "f4"), np.ones(2, "f4")])[1].not_a_number == []
    assert mean_of([np.array([np.inf], "f4"), np.array([-np.inf], "f4")])[1].not_a_number == ["w"]
    assert mean_of([np.array([np.nan + 0j], "c8"), np.ones(1, "c8")])[1].not_a_number == ["w"]


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinity_is_reported(value):
    result, mean = mean_of([np.array([value, 1.0], "f4"), np.ones(2, "f4")])
    assert result.tolist() == [value, 1.0]
    assert (mean.infinite, mean.not_a_number) == (["w"], [])
    assert mean_of([np.ones(2, "f4")] * 2)[1].infinite == []


def test_sums_may_overflow_where_means_do_not():
    result, mean = mean_of([np.array([1.5e308, -1.6e308, np.inf]), np.array([1.7e308, -1.0e308, 1.0])])
    np.testing.assert_allclose(result, [1.6e308, -1.3e308, np.inf], rtol=1e-15)
    assert mean.infinite == ["w"]
    result, mean = mean_of([np.array([1.5e308]), np.array([1.7e308])])
    assert mean.infinite == []


@pytest.mark.parametrize("scale", [1.7e308, 1e-300])
def test_only_ratios_of_weights_matter_however_large(scale):
    arrays = [np.array([1.0, 5.0], "f4"), np.array([3.0, 6.0], "f4")]
    assert mean_of(arrays, (scale, scale / 2))[0].tobytes() == mean_of(arrays, (2.0, 1.0))[0].tobytes()


def test_progress_adds_up_to_all_that_was_read(small_blocks):
    counts = []
    mean_of([np.ones(100, "f4")] * 3, progress=counts.append)
    assert len(counts) > 1
    assert sum(counts) == 3 * 400


def test_tensor_without_a_mean_is_named():
    with pytest.raises(AverageError, match=r"0\.arrays: w: .*cannot be averaged"):
        mean_of([np.array(["a"]), np.array(["b"])])


def test_threads_end_when_the_reader_stops(small_blocks):
    """No thread is left running after a generator is closed early."""
    from hvdx.averaging.mean import Mean
    from tests.averaging.arrays import Arrays

    networks = [Arrays(w=np.ones(1000)) for _ in range(2)]
    mean = Mean(networks, [1, 1])
    values = mean.values(networks[0].tensors["w"])
    next(values)
    values.close()
    mean.close()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("optimizer.state.0.step", "f4"), ("optimizer/vars/0", "i8"), ("optimizer/_iterations", "i8")],
)
def test_steps_of_optimisers_that_differ_are_reported(name, dtype):
    networks = [Arrays(f"{i}.arrays", **{name: np.array(steps, dtype)}) for i, steps in enumerate((100, 200))]
    message = r"1\.arrays: .*: expected 100.*, as in 0\.arrays, got 200.*\. The optimisers made different numbers"
    with pytest.raises(AverageError, match=message):
        list(Mean(networks, [1.0, 1.0]).values(networks[0].tensors[name]))
    (last,) = Mean(networks, [1.0, 1.0], "last").values(networks[0].tensors[name])
    assert last.tolist() == [200]
    assert last.dtype == dtype


def test_parameters_that_are_called_step_have_a_mean():
    networks = [Arrays(f"{i}.arrays", **{"layer.step": np.array(float(i))}) for i in range(2)]
    (mean,) = Mean(networks, [1.0, 1.0]).values(networks[0].tensors["layer.step"])
    assert mean.tolist() == [0.5]
