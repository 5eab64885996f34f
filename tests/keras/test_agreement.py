"""Parts of the comparison of ranks: samples, pipelines, configurations, constants, first batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from hvdx.errors import ConfigError
from hvdx.keras.fit.agreement import constants, generators, model_state, pipeline, shares
from hvdx.keras.fit.agreement.first_batch import FirstBatch
from hvdx.keras.fit.agreement.sample import alike, sample


@pytest.fixture(autouse=True)
def unseeded(monkeypatch):
    """Forget the seed that an earlier test has set for the whole process."""
    monkeypatch.setattr(context.context(), "_seed", None)


def _rows(dtype, count=200):
    numbers = np.random.default_rng(3).integers(0, 100, (count, 7))
    return numbers.astype("U3").astype(object) if dtype == "string" else tf.cast(numbers, dtype).numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex64", "string"])
def test_sample_sees_another_order_of_rows_or_of_columns(dtype):
    rows = _rows(dtype)
    assert alike(sample(rows), sample(tf.constant(rows)))
    order = np.random.default_rng(1).permutation(len(rows))
    assert not alike(sample(rows), sample(rows[order]))
    if dtype != "bool":  # with few bits a row may be equal to its reverse; all sampled rows are not
        assert not alike(sample(rows), sample(rows[:, ::-1]))


def test_sample_ignores_rounding_and_sees_types_shapes_and_the_last_row():
    rows = _rows("float32")
    assert alike(sample(rows), sample(rows * np.float32(1 + 1e-7)))
    assert not alike(sample(rows), sample(rows.astype("float64")))
    assert not alike(sample(rows), sample(rows[:-1]))
    last = rows.copy()
    last[-1, 2] += 1
    assert not alike(sample(rows), sample(last))
    nan = rows.copy()
    nan[0] = np.nan
    assert alike(sample(nan), sample(nan))
    assert not alike(sample(rows), sample(nan))


def test_sample_takes_scalars_empty_ragged_and_missing_arrays():
    batch = {"a": np.float32(3), "b": np.zeros((0, 4)), "c": tf.ragged.constant([[1, 2], [3]]), "d": None}
    assert alike(sample(batch), sample(batch))
    assert not alike(sample(batch), sample(batch | {"c": tf.ragged.constant([[1], [2, 3]])}))


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (lambda d: d.shuffle(9), "shuffle"),
        (lambda d: d.shuffle(9).map(lambda i: i + 1).cache().batch(2).prefetch(1), "shuffle"),
        (lambda d: d.batch(3).flat_map(lambda b: tf.data.Dataset.from_tensor_slices(b).shuffle(3)), "shuffle"),
        (lambda d: tf.data.Dataset.zip((d, d.shuffle(9))), "shuffle"),
        (lambda d: tf.data.Dataset.list_files(__file__), "shuffle"),
        (lambda d: tf.data.Dataset.sample_from_datasets([d, d]), "sample_from_datasets"),
        (lambda d: d.map(lambda i: i, num_parallel_calls=2, deterministic=False), "deterministic"),
        (lambda d: d.map(lambda i: i, num_parallel_calls=2).with_options(_free()), "deterministic"),
        (lambda d: d.shuffle(9, seed=1), None),
        (lambda d: tf.data.Dataset.list_files(__file__, shuffle=False), None),
        (lambda d: tf.data.Dataset.list_files(__file__, seed=4), None),
        (lambda d: d.map(lambda i: i).batch(2).with_options(_free()), None),
        (lambda d: d.map(lambda i: i + tf.random.uniform((), 0, 9, tf.int64)), None),
    ],
)
def test_order_that_differs_between_processes_is_found(made, cause):
    dataset = made(tf.data.Dataset.range(9))
    found = pipeline.cause_of_other_order(dataset)
    assert found is None if cause is None else cause in found
    if cause is None:
        shares.check_order(dataset)
    else:
        with pytest.raises(ConfigError, match=cause):
            shares.check_order(dataset)


def _free():
    options = tf.data.Options()
    options.deterministic = False
    return options


def test_global_seed_makes_the_order_the_same():
    tf.random.set_seed(4)
    assert pipeline.cause_of_other_order(tf.data.Dataset.range(9).shuffle(9)) is None


def test_sources_of_pipelines_are_compared():
    def order(names, seed=1):
        return pipeline.order_of(tf.data.TextLineDataset(names).shuffle(9, seed=seed).batch(2))

    first = order(["/disk-1/a", "/disk-1/b"])
    assert pipeline.same_order(first, order(["/disk-2/a", "/disk-2/b"])) is None
    assert pipeline.same_order(first, order(["/disk-1/b", "/disk-1/a"])) == "sources"
    assert pipeline.same_order(first, order(["/disk-1/a", "/disk-1/b"], 2)) == "seeds"
    assert pipeline.same_order(first, pipeline.order_of(tf.data.Dataset.range(3))) == "sources"


def test_names_seeds_and_counters_of_a_configuration_may_differ():
    def model(rate=0.1, seed=1, activation="relu"):
        x = keras.Input((4,))
        y = keras.layers.Dropout(rate, seed=seed)(keras.layers.Dense(4, activation=activation)(x))
        return keras.Model(x, keras.layers.Add()([x, keras.layers.Dense(4)(y)]))

    first = model_state.configuration(model())
    second = model_state.configuration(model(seed=2))
    assert model_state.differing_values(first, second, 1) == []
    assert model_state.digest(first) == model_state.digest(second)
    (found,) = model_state.differing_values(first, model_state.configuration(model(activation="tanh")), 2)
    assert found == "Functional.layers.1.config.activation is 'relu' on rank 0, 'tanh' on rank 2"
    x = keras.Input((4,))
    other = keras.Model(x, keras.layers.Add()([x, keras.layers.Dropout(0.1)(keras.layers.Dense(4)(x))]))
    assert model_state.digest(first) != model_state.digest(model_state.configuration(other))


class _Own(keras.Model):
    """Model without a configuration of its own, with layers in a list and in an attribute."""

    def __init__(self, units, thing):
        super().__init__()
        self.thing = thing
        self.blocks = [keras.Sequential([keras.layers.Dense(units)]), keras.layers.Dense(2)]

    def call(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_configuration_of_a_subclassed_model_has_its_layers():
    first, same = _Own(3, object()), _Own(3, object())
    assert model_state.configuration(first) == model_state.configuration(same)
    found = model_state.differing_values(*(model_state.configuration(m) for m in (first, _Own(5, object()))), 1)
    assert any("units is 3 on rank 0, 5 on rank 1" in line for line in found)


@pytest.mark.parametrize("values", [[3, 1, 2], [0.5, 1.5, -2.0], ["x", "y", "z"]])
def test_digest_of_a_table_does_not_depend_on_the_order_of_its_entries(values):
    def digest(keys, values):
        initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(keys), tf.constant(values))
        table = tf.lookup.StaticHashTable(initializer, tf.constant(values[0]))
        return model_state.table_digest(table.resource_handle, table.key_dtype, table.value_dtype)

    first = digest(["a", "b", "c"], values)
    assert first == digest(["c", "a", "b"], [values[2], values[0], values[1]])
    assert first != digest(["b", "a", "c"], values)
    assert first != digest(["a", "b"], values[:2])


def test_vocabulary_is_compared_by_its_entries():
    def state(*words):
        return model_state.adapted(keras.Sequential([keras.layers.TextVectorization(vocabulary=words)]))

    first, same, other = state("sea", "sun"), state("sea", "sun"), state("sun", "sea")
    assert len(first) == 1
    (found,) = model_state.differing([first, same, other])
    assert found.endswith("(ranks 2)")
    assert model_state.differing([first, []]) == []


def test_first_batch_is_that_of_the_first_pass_in_any_structure():
    batches = tf.data.Dataset.from_tensor_slices(
        ({"a": tf.ragged.constant([[1, 2], [3], [4]]), "b": ["x", "y", "z"]}, np.arange(3))
    ).batch(2)
    first, same, other = FirstBatch(batches), FirstBatch(batches), FirstBatch(batches.skip(1))
    assert first.digest is None
    assert first.dataset.element_spec == batches.element_spec
    for _ in range(2):
        assert [y.numpy().tolist() for _, y in first.dataset] == [[0, 1], [2]]
    list(same.dataset), list(other.dataset)
    assert first.digest == same.digest != other.digest
    single = tf.data.Dataset.from_tensor_slices((np.arange(3),)).batch(2)
    assert FirstBatch(single).dataset.element_spec == single.element_spec


def test_first_elements_of_a_generator_are_recorded_while_they_pass():
    read = []

    def yielding(order, noise=0.0):
        def generator():
            for i in order:
                read.append(i)
                yield np.float32(i + noise), i

        return generator

    def elements(order, noise=0.0):
        signature = (tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int64))
        dataset = tf.data.Dataset.from_generator(yielding(order, noise), output_signature=signature)
        generators.record(dataset)
        generators.record(dataset)
        whole = dataset.take(30).map(lambda x, i: i).batch(5)
        read.clear()
        assert generators.recorded(whole) == [[]]
        for _ in range(2):
            assert [i for batch in whole for i in batch.numpy()] == list(order)
        assert read == [*order, *order]
        return generators.recorded(whole)

    first, other = elements(range(20)), elements(range(19, -1, -1))
    assert len(first[0]) == 16
    assert generators.differing([first, first, other, elements(range(20), 0.5)]) == [2]
    assert generators.differing([first, [first[0][:3]], [[]]]) == []


def test_generators_may_yield_lists_of_different_lengths():
    words = [([3, 17, 9], 0), ([4, 4, 8, 1, 2], 1), ([5], 0)]
    spec = tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)

    def elements(order):
        dataset = tf.data.Dataset.from_generator(lambda: (words[i] for i in order), output_signature=spec)
        generators.record(dataset)
        assert len(list(dataset)) == 3
        return generators.recorded(dataset)

    assert generators.differing([elements([0, 1, 2]), elements([0, 1, 2]), elements([1, 2, 0])]) == [2]


class _Constant(keras.layers.Layer):
    def __init__(self, values, captured):
        super().__init__()
        self.values = tf.constant(values) if captured else values

    def call(self, x):
        return x + self.values


@pytest.mark.parametrize("captured", [False, True])
def test_constants_of_a_traced_training_are_found(captured):
    def found(value, size=200):
        tf.config.run_functions_eagerly(False)
        inputs = keras.Input((size,))
        model = keras.Model(inputs, keras.layers.Dense(1)(_Constant(np.full(size, value, "float32"), captured)(inputs)))
        model.compile("sgd", "mse")
        model.fit(np.zeros((4, size)), np.zeros((4, 1)), verbose=0)
        return constants.constants_of(model.train_function)

    first = found(1.0)
    (difference,) = constants.differing([first, first, found(2.0)])
    assert "float32[200] (ranks 2)" in difference
    assert constants.differing([found(1.0, 8), found(2.0, 8)]) == []  # small
    assert constants.differing([first, found(2.0, 300)]) == []  # another shape
