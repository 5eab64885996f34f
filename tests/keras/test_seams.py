"""What hvdx/keras/seams relies on, in the installed versions of Keras and TensorFlow.

A function `check_NAME` here checks the function or class NAME of the seams. Its failure names the seam, what it relies
on, and the versions.
"""

# Tests: hvdx/keras/seams/callbacks.py, hvdx/keras/seams/frames.py, hvdx/keras/seams/graphs.py
# Tests: hvdx/keras/seams/iterators.py, hvdx/keras/seams/layers.py, hvdx/keras/seams/losses.py
# Tests: hvdx/keras/seams/models.py
# Tests: hvdx/keras/seams/optimizers.py, hvdx/keras/seams/pipelines.py, hvdx/keras/seams/replacing.py

import importlib
import inspect
import pkgutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.epoch_iterator import EpochIterator

from hvdx.keras import seams
from hvdx.keras.fit.array_batches import ArrayBatches
from hvdx.keras.fit.samples import Rows
from hvdx.keras.seams import callbacks, frames, graphs, iterators, layers, losses, models, optimizers, pipelines
from hvdx.keras.seams.layers import KerasVariable

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def public(module):
    """Yield the functions and classes that a module defines for others."""
    for name, thing in vars(module).items():
        if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__ and callable(thing):
            yield name, thing


# Those that only undo another, or set what another reads, are checked with it.
TOGETHER = {
    **{"read_from": "dataset_of", "number_of_batches": "batch_size_of", "set_initial_epoch": "initial_epoch"},
    **{
        "restore_result": "change_result",
        "restore_train_step": "wrap_train_step",
        "unwrap_optimizer": "wrap_optimizer",
    },
    **{"add_local_variables_method": "wrap_optimizer", "unmute_set_model": "mute_set_model"},
    **{"set_numbers": "numbers_of", "last_batch_of": "batch_size_of"},
    **{
        "ungroup_scalars": "group_scalars",
        "show_own_steps": "show_steps",
        "set_batch_size": "batch_size_of_dataset",
        "traces_of": "functions_in",
    },
    **{"wrap_generator": "generator_states", "closure_of": "functions_in", "count_batches": "wrap_steps"},
    **{"override": "wrap_optimizer", "restore": "wrap_optimizer"},
}
SEAMS = {
    name: thing
    for found in pkgutil.iter_modules(seams.__path__)
    for name, thing in public(importlib.import_module(f"{seams.__name__}.{found.name}"))
}


class Look(keras.callbacks.Callback):
    """Call a function in a hook of a fit, and keep its result."""

    def __init__(self, hook, function):
        super().__init__()
        setattr(self, hook, lambda *_, **named: setattr(self, "seen", function(self)))


def small(**compiled):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="inner")])
    model.compile(**({"optimizer": "sgd", "loss": "mse", "metrics": ["mae"], "run_eagerly": True} | compiled))
    return model


def in_fit(function, hook="on_train_begin", data=(X, Y), **options):
    """Return the result of function(callback) in a hook of a fit."""
    look = Look(hook, function)
    model = small()
    model.fit(*(data if isinstance(data, tuple) else (data,)), verbose=0, callbacks=[look], **options)
    return look.seen


def built(optimizer):
    variable = keras.Variable(np.ones(2, "float32"), name="weight")
    optimizer.build([variable])
    return optimizer, variable


# -- frames -----------------------------------------------------------------------------------------------------------


def check_calling_list():
    class Callback(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            self.found = frames.calling_list(self)

    callback = Callback()
    small().fit(X, Y, verbose=0, callbacks=[callback])
    assert isinstance(callback.found, keras.callbacks.CallbackList)


def check_epoch_iterator():
    for hook in ("on_train_begin", "on_train_batch_end"):
        assert in_fit(frames.epoch_iterator, hook) is not None
    look = Look("on_test_begin", frames.epoch_iterator)
    small().evaluate(X, Y, verbose=0, callbacks=[look])
    assert look.seen is not None


def check_validation_inputs():
    validation = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    assert in_fit(frames.validation_inputs, validation_data=validation) is validation
    assert in_fit(frames.validation_inputs, validation_data=(X, Y)) is X


def check_running_fits():
    assert in_fit(lambda callback: frames.running_fits(callback.model)) == 1
    assert frames.running_fits(small()) == 0


def check_loss_scale_calls():
    seen = []

    class Inner(keras.optimizers.SGD):
        def update_step(self, *args):
            seen.append(frames.loss_scale_calls())

    outer, variable = built(keras.optimizers.LossScaleOptimizer(Inner()))
    outer.apply([tf.ones(2)], [variable])
    assert seen
    assert all(seen)
    assert not frames.loss_scale_calls()


# -- iterators --------------------------------------------------------------------------------------------------------


def check_dataset_of():
    read = []

    def replace(callback):
        iterator = frames.epoch_iterator(callback)
        dataset = iterators.dataset_of(iterator)
        assert isinstance(dataset, tf.data.Dataset)
        iterators.read_from(iterator, dataset.map(lambda *batch: (tf.py_function(read.append, [1], []), batch)[1]))

    in_fit(replace)
    assert read


def check_take_steps():
    taken = []

    def extend(callback):
        iterator = frames.epoch_iterator(callback)
        iterators.take_steps(iterator, iterators.dataset_of(iterator).repeat(), 5)

    look = Look("on_train_batch_end", lambda callback: taken.append(1))
    small().fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[Look("on_train_begin", extend), look])
    assert len(taken) == 10, len(taken)


def check_epoch_is_one_pass():
    assert in_fit(lambda c: iterators.epoch_is_one_pass(frames.epoch_iterator(c)))
    assert not in_fit(lambda c: iterators.epoch_is_one_pass(frames.epoch_iterator(c)), steps_per_epoch=1)


def check_batch_size_of():
    assert in_fit(lambda c: iterators.batch_size_of(frames.epoch_iterator(c)), batch_size=4) == 4
    assert in_fit(lambda c: iterators.number_of_batches(frames.epoch_iterator(c)), batch_size=4) == 2
    for size, last in ((4, 4), (3, 2), (9, 8)):
        assert in_fit(lambda c: iterators.last_batch_of(frames.epoch_iterator(c)), batch_size=size) == last
    unknown = SimpleNamespace(batch_size=4, partial_batch_size=None, has_partial_batch=None)
    assert iterators.last_batch_of(SimpleNamespace(data_adapter=unknown)) is None


def check_count_map_dataset():
    grain = pytest.importorskip("grain")
    batches = grain.MapDataset.source([*zip(X, Y, strict=True)]).batch(3)

    def seen(data, **options):
        functions = iterators.count_map_dataset, iterators.batches_of_pass, iterators.last_batch_of
        return in_fit(lambda c: [f(frames.epoch_iterator(c)) for f in functions], data=data, **options)

    assert seen(batches) == [3, 3, None]
    assert seen(batches.repeat(), steps_per_epoch=1) == [None, None, None]
    assert seen(batches.to_iter_dataset(), steps_per_epoch=1) == [None, None, None]
    assert seen(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))[:2] == [None, 2]


def check_sampler_of():
    torch = pytest.importorskip("torch")
    sampler = ArrayBatches(Rows(np.arange(8)), lambda: iter(np.split(np.arange(8), 4)), 4, 2, 2)
    loader = torch.utils.data.DataLoader([*zip(X, Y, strict=True)], batch_sampler=sampler)
    assert in_fit(lambda c: iterators.sampler_of(frames.epoch_iterator(c)), data=loader) is sampler
    assert in_fit(lambda c: iterators.sampler_of(frames.epoch_iterator(c))) is None


def check_lengthen_epochs():
    model, steps = small(), []

    def lengthen(callback):
        iterators.lengthen_epochs(frames.epoch_iterator(callback), 5)
        before = callback.model.train_function
        callback.model.train_function = lambda data: before(data) if len(steps) % 5 < 2 else {"loss": 0.0}

    look = Look("on_train_batch_end", lambda callback: steps.append(1))
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[Look("on_train_begin", lengthen), look])
    assert len(steps) == 10, len(steps)


def check_batches_of_pass():
    """After an epoch that had too few batches, the next one begins a pass."""
    data, taken = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2), []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: taken.append(batch))
    numbers = keras.callbacks.LambdaCallback()
    numbers.on_train_begin = lambda logs=None: taken.append(iterators.batches_of_pass(frames.epoch_iterator(numbers)))
    small().fit(data, epochs=3, steps_per_epoch=3, verbose=0, callbacks=[numbers, count])
    assert taken == [4, 0, 1, 2, 0, 0, 1, 2]
    assert (
        in_fit(lambda c: iterators.batches_of_pass(frames.epoch_iterator(c)), data=data.repeat(), steps_per_epoch=3)
        is None
    )


def check_arrays_of():
    found = in_fit(lambda c: iterators.arrays_of(frames.epoch_iterator(c)))
    assert any(part is X or np.array_equal(part, X) for part in tf.nest.flatten(found))


def check_OwnBatches():  # noqa: N802
    class Own(iterators.OwnBatches):
        def __iter__(self):
            yield X, Y

    if [int(number) for number in keras.__version__.split(".")[:2]] >= [3, 7]:
        own = Own()
        assert importlib.import_module("keras.src.trainers.data_adapters").get_data_adapter(own, shuffle=True) is own


def check_class_weight():
    assert in_fit(lambda _: frames.class_weight(), class_weight={0: 2.0}) == {0: 2.0}
    evaluated = in_fit(lambda _: frames.class_weight(), "on_test_begin", validation_data=(X, Y), class_weight={0: 2.0})
    assert evaluated is None


def check_is_build():
    class Model(keras.Model):
        def _symbolic_build(self, *args, **named):
            return frames.is_build()

    assert callable(keras.Model._symbolic_build)
    assert Model()._symbolic_build()
    assert not frames.is_build()


def check_begin_passes():
    x = np.arange(4.0)[:, None]
    iterator = EpochIterator(x, x, batch_size=2, shuffle=False)
    begun = []
    iterators.begin_passes(iterator, 5, lambda: begun.append(1))
    # Two epochs of 5 steps are five passes of 2.
    steps = getattr(iterator, "_enumerate_iterator", None) or iterator.enumerate_epoch
    rows = [np.asarray(next(item[-1])[0]) for _ in range(2) for item in steps()]
    np.testing.assert_array_equal(np.concatenate(rows), np.tile(x, (5, 1)))
    assert len(begun) == 5


def check_pad_passes():
    x = np.arange(4.0)[:, None]
    iterator = EpochIterator(x, x, batch_size=2, shuffle=False)
    iterators.pad_passes(iterator, 3)
    steps = getattr(iterator, "_enumerate_iterator", None) or iterator.enumerate_epoch
    taken = [next(item[-1]) for _ in range(2) for item in steps()]
    assert [batch is None for batch in taken] == [False, False, True] * 2
    np.testing.assert_array_equal(taken[4][0], x[2:])


def check_wrap_steps():
    steps = []

    def rest(iterator, items):
        for item in items:
            if item[0] == 0:
                next(item[-1])
                iterators.count_batches(iterator, 0)
            if item[0] >= 1:
                yield item

    def wrap(callback):
        iterator = frames.epoch_iterator(callback)
        return iterators.wrap_steps(iterator, lambda items: rest(iterator, items))

    begin, end = Look("on_train_begin", wrap), Look("on_train_batch_end", lambda callback: steps.append(1))
    small().fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[begin, end])
    assert begin.seen
    assert len(steps) == 3 + 4, len(steps)


class Batches(keras.utils.PyDataset):
    def __init__(self, **options):
        super().__init__(**options)
        self.ended = 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[:4], Y[:4]

    def on_epoch_end(self):
        self.ended += 1


def adapter_in_fit(function, batches, **options):
    return in_fit(lambda c: function(iterators.py_dataset_adapter(frames.epoch_iterator(c))), data=batches, **options)


def check_py_dataset_adapter():
    assert adapter_in_fit(lambda adapter: adapter, Batches()) is not None
    assert in_fit(lambda c: iterators.py_dataset_adapter(frames.epoch_iterator(c))) is None


def check_take_epoch_hooks():
    batches = Batches()
    before, (_, end) = adapter_in_fit(lambda a: (batches.ended, iterators.take_epoch_hooks(a)), batches, epochs=2)
    assert batches.ended == before
    end()
    assert batches.ended == before + 1


def check_drop_read_ahead():
    queue = adapter_in_fit(lambda adapter: adapter.enqueuer.ready_queue, Batches(workers=2), hook="on_train_batch_end")
    queue.put(1)
    iterators.drop_read_ahead(SimpleNamespace(enqueuer=SimpleNamespace(ready_queue=queue)))
    assert queue.empty()
    adapter_in_fit(iterators.drop_read_ahead, Batches())


# -- models -----------------------------------------------------------------------------------------------------------


def check_on_assign():
    seen, variable = [], keras.Variable(np.ones(2, np.float32))
    layers.on_assign(variable, lambda: seen.append(variable.numpy().tolist()))
    for change in (variable.assign, variable.assign_add, variable.assign_sub):
        change([3.0, 4.0])
    assert seen == [[1, 1], [3, 4], [6, 8]]
    assert variable.numpy().tolist() == [3, 4]
    variable.constraint = keras.constraints.NonNeg()
    keras.optimizers.SGD(1.0).apply([tf.constant([4.0, 4.0])], [variable])
    assert (len(seen), variable.numpy().tolist()) == (4, [0, 0])
    layers.on_assign(tf.Variable(1.0), seen.clear)


def check_layers_of():
    outer = keras.Sequential([keras.Input((3,)), small()])
    assert {"inner", outer.name} <= {layer.name for layer in models.layers_of(outer)}


def check_direct_layers_of():
    outer = keras.Sequential([keras.Input((3,)), small()])
    found = {layer.name for layer in models.direct_layers_of(outer)}
    assert "inner" not in found
    assert outer.name not in found
    assert found


def check_seed_generators_of():
    (generator,) = models.seed_generators_of(keras.layers.Dropout(0.5, seed=7))
    before = generator.state.numpy().tolist()
    assert before == [7, 0]
    generator.next()
    assert generator.state.numpy().tolist() == [7, 1]


def check_common_generator():
    keras.utils.set_random_seed(1)
    generator = models.common_generator(make=True)
    assert models.common_generator() is generator
    # `fit/noise.py` undoes this step.
    before = generator.state.numpy().astype("int64")
    keras.random.uniform((1,))
    np.testing.assert_array_equal(generator.state.numpy(), (before + 1) * 5387 % 933_199)


def check_initial_epoch():
    epochs = []
    model = small()
    assert models.initial_epoch(model) is None
    begin = Look("on_train_begin", lambda callback: models.set_initial_epoch(callback.model, 2))
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[begin, Look("on_epoch_end", lambda callback: epochs.append(1))])
    assert epochs == [1]


def check_metric_variables():
    """The variables of a metric that `compile` was given are there before the first step, and those of others after."""
    model, mean = small(), keras.metrics.MeanSquaredError()
    model.compile("sgd", "mse", metrics=[mean, "mae"])
    before = {id(v) for v in models.metric_variables(model)}
    assert before >= {id(v) for v in mean.variables}
    model.fit(X, Y, verbose=0)
    after = [id(v) for v in models.metric_variables(model)]
    assert before < set(after) == {id(v) for v in model.metrics_variables}
    assert len(set(after)) == len(after)


def check_build_metrics():
    model = small()
    assert len(model.metrics_variables) < 4
    models.build_metrics(model, (X, Y))
    assert len(model.metrics_variables) == 4


def check_change_result():
    model = small()
    model.evaluate(X, Y, verbose=0)
    look = Look("on_test_begin", lambda c: models.change_result(c.model, lambda result: result.update(loss=-1.0)))
    assert model.evaluate(X, Y, verbose=0, callbacks=[look], return_dict=True)["loss"] == -1.0
    assert model.evaluate(X, Y, verbose=0, return_dict=True)["loss"] >= 0.0


def check_wrap_train_step():
    model, seen = small(), []

    def step(own_step, data):
        seen.append(data)
        return own_step(data)

    models.wrap_train_step(model, step)
    model.fit(X, Y, verbose=0)
    assert len(seen) == 1
    models.restore_train_step(model)
    assert "train_step" not in vars(model)


def check_use_train_function():
    model, seen = small(), []
    model.make_train_function()
    own = model.train_function
    models.use_train_function(model, lambda iterator: (seen.append(1), own(iterator))[1])
    model.fit(X, Y, verbose=0)
    assert seen == [1]


# -- optimizers -------------------------------------------------------------------------------------------------------


def check_trained_variables():
    assert optimizers.trained_variables(keras.optimizers.SGD()) == []
    optimizer, variable = built(keras.optimizers.SGD())
    assert (
        optimizers.trained_variables(optimizer) == [variable] or optimizers.trained_variables(optimizer)[0] is variable
    )


def check_step_counter():
    optimizer, variable = built(keras.optimizers.SGD(gradient_accumulation_steps=2))
    optimizer.apply([tf.ones(2)], [variable])
    assert int(optimizers.step_counter(optimizer)) == 1


def check_rate_of():
    assert isinstance(optimizers.rate_of(keras.optimizers.SGD()), KerasVariable)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    assert optimizers.rate_of(keras.optimizers.SGD(schedule)) is schedule


def check_accumulators_of():
    optimizer, variable = built(keras.optimizers.SGD(gradient_accumulation_steps=2))
    (found,) = optimizers.accumulators_of(optimizer)
    optimizer.apply([tf.ones(2)], [variable])
    assert found.numpy().tolist() == [1.0, 1.0]


def check_averages_of():
    assert optimizers.averages_of(built(keras.optimizers.SGD())[0]) == []
    (found,) = optimizers.averages_of(built(keras.optimizers.SGD(use_ema=True))[0])
    assert tuple(found.shape) == (2,)


def check_velocity_of():
    for kind in (keras.optimizers.Adam, keras.optimizers.Nadam, keras.optimizers.RMSprop):
        optimizer, variable = built(kind())
        optimizer.apply([tf.constant([1.0, 2.0])], [variable])
        first, second = optimizers.velocity_of(optimizer, variable).numpy()
        assert second == pytest.approx(4 * first)


def check_momenta_of():
    for kind in (keras.optimizers.SGD, keras.optimizers.RMSprop):
        (found,) = optimizers.momenta_of(built(kind(momentum=0.9))[0])
        assert tuple(found.shape) == (2,)


def check_slot_prefix():
    layer = keras.layers.Dense(1, name="under_score")
    layer.build((None, 3))
    optimizer = keras.optimizers.Adam()
    optimizer.build(layer.trainable_variables)
    for variable in layer.trainable_variables:
        prefix = optimizers.slot_prefix(variable)
        assert len([slot for slot in optimizer.variables if slot.name.startswith(prefix)]) == 2, optimizer.variables


def check_is_of_keras():
    assert optimizers.is_of_keras(keras.optimizers.Adam)
    assert optimizers.is_of_keras(keras.callbacks.ProgbarLogger)
    assert not optimizers.is_of_keras(Look)


def check_owner_of_update_step():
    assert optimizers.owner_of_update_step(keras.optimizers.AdamW()) is keras.optimizers.Adam


def check_has_parts_of_step():
    for kind in (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Lion):
        assert optimizers.has_parts_of_step(kind())


def check_wrap_optimizer():
    optimizer, variable = built(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, clipvalue=0.5))
    order = []

    def note(name):
        return lambda _, original, *args: (order.append(name), original(*args))[1]

    optimizers.wrap_optimizer(
        optimizer, begin=note("begin"), clip=note("clip"), update=note("update"), overwrite=note("overwrite")
    )
    optimizers.add_local_variables_method(optimizer, print)
    optimizer.apply([tf.ones(2)], [variable])
    before, order[:] = [name for name in order if name in ("overwrite", "begin")], []
    assert before == ["overwrite", "begin"]
    assert variable.numpy().tolist() == [1.0, 1.0]
    optimizer.apply([tf.ones(2)], [variable])
    assert order[:3] + order[-1:] == ["overwrite", "begin", "clip", "update"], order
    assert variable.numpy().tolist() == [0.5, 0.5]
    optimizers.unwrap_optimizer(optimizer)
    order.clear()
    optimizer.apply([tf.ones(2)], [variable])
    assert order == []
    assert "register_local_var" not in vars(optimizer)


def check_wrap_apply():
    seen = []
    model = small()
    optimizers.wrap_apply(model.optimizer, lambda _, original, *args: (seen.append(len(args[0])), original(*args))[1])
    model.fit(X, Y, verbose=0)
    assert seen == [2]


def check_wrap_overflow_check():
    optimizer, variable = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    optimizers.wrap_overflow_check(optimizer, lambda _, original, grads: tf.logical_not(original(grads)))
    optimizer.apply([tf.ones(2)], [variable])
    assert variable.numpy().tolist() == [1.0, 1.0]


def check_divert_assignments():
    for kind in (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Lion):
        optimizer, variable = built(kind(0.5))
        seen = []
        undo = optimizers.divert_assignments(optimizer, [variable], lambda *args, seen=seen: seen.append(args[:2]))
        optimizer.apply([tf.ones(2)], [variable])
        assert variable.numpy().tolist() == [1.0, 1.0], kind
        assert seen == [("assign_sub", 0)], seen
        undo()
        optimizer.apply([tf.ones(2)], [variable])
        assert variable.numpy()[0] < 1.0


# -- callbacks --------------------------------------------------------------------------------------------------------


def check_mute_set_model():
    class Other(keras.callbacks.Callback):
        models = 0

        def set_model(self, model):
            super().set_model(model)
            self.models += 1

    callback = Other()
    callbacks.mute_set_model(callback)
    small().fit(X, Y, verbose=0, callbacks=[callback])
    assert callback.models == 0
    callbacks.unmute_set_model(callback)
    small().fit(X, Y, verbose=0, callbacks=[callback])
    assert callback.models


def check_show_steps():
    bar = keras.callbacks.ProgbarLogger()
    shown = []
    bar.set_params({"epochs": 1, "steps": 3, "verbose": 1})
    bar.on_train_begin()
    callbacks.show_steps(bar, lambda: 7, 9)
    bar.on_epoch_begin(0)
    bar.progbar.update = lambda step, *args, **named: shown.append((step, bar.progbar.target))
    bar.on_train_batch_end(0, {})
    callbacks.show_own_steps(bar)
    bar.on_train_batch_end(0, {})
    assert shown == [(7, 9), (1, 9)]


def check_group_scalars(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path)
    callbacks.group_scalars(board, "ours", lambda: {"mae": 7.0})
    small().fit(X, Y, verbose=0, callbacks=[board])
    assert {"ours/mae", "epoch_loss"} <= scalars(tmp_path)
    assert "epoch_mae" not in scalars(tmp_path)
    callbacks.ungroup_scalars(board)
    small().fit(X, Y, verbose=0, callbacks=[board])
    assert "epoch_mae" in scalars(tmp_path)


def scalars(folder):
    """Return the tags of the scalars that a `TensorBoard` has written."""
    found = (tf.compat.v1.train.summary_iterator(str(path)) for path in folder.rglob("*.tfevents.*"))
    return {value.tag for events in found for event in events for value in event.summary.value}


def check_watch_applies():
    seen, original = [], keras.optimizers.Optimizer.apply
    model, scaled = small(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    try:
        optimizers.watch_applies(seen.append)
        model.fit(X, Y, verbose=0)
        scaled.apply([tf.zeros_like(v) for v in model.trainable_variables], model.trainable_variables)
    finally:
        keras.optimizers.Optimizer.apply = original
    assert seen == [model.optimizer, scaled.inner_optimizer]


def check_steps_since_saving(tmp_path):
    saver = keras.callbacks.ModelCheckpoint(tmp_path / "m.weights.h5", save_freq=3, save_weights_only=True)
    assert callbacks.steps_since_saving(saver) in ((0, -1), (0, 0))
    small().fit(X, Y, batch_size=2, verbose=0, callbacks=[saver])
    assert callbacks.steps_since_saving(saver) == (1, 3)


def check_GuardedModelCheckpoint(tmp_path):  # noqa: N802 - named after the class
    class Saver(callbacks.GuardedModelCheckpoint):
        here = False

        def saves_here(self):
            return self.here

    saver = Saver(tmp_path / "m.weights.h5", save_weights_only=True)
    small().fit(X, Y, verbose=0, callbacks=[saver])
    assert not list(tmp_path.iterdir())
    saver.here = True
    small().fit(X, Y, verbose=0, callbacks=[saver])
    assert list(tmp_path.iterdir())


def check_numbers_of():
    made = [keras.callbacks.EarlyStopping("loss", patience=9, mode="max", restore_best_weights=True) for _ in range(2)]
    lower = [keras.callbacks.ReduceLROnPlateau("loss", patience=9, mode="max") for _ in range(2)]
    model = small()
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[made[0], lower[0]])
    for one, other in (made, lower):
        callbacks.set_numbers(other, callbacks.numbers_of(one))
        assert (other.wait, other.best) == (one.wait, one.best)
    assert made[0].wait > 0
    assert all(np.array_equal(a, b) for a, b in zip(made[1].best_weights, made[0].best_weights, strict=True))


# -- layers -----------------------------------------------------------------------------------------------------------


def check_KerasVariable():  # noqa: N802 - named after the constant
    assert isinstance(keras.layers.Layer().add_weight(shape=()), KerasVariable)
    assert isinstance(built(keras.optimizers.SGD())[0].variables[0], KerasVariable)


def check_raw_variable():
    layer = keras.layers.Layer(dtype="mixed_float16")
    weight = layer.add_weight(shape=(2,))
    assert isinstance(layers.raw_variable(weight), tf.Variable)
    plain = tf.Variable(1.0)
    assert layers.raw_variable(plain) is plain


def check_CombinedBatchNormalization():  # noqa: N802 - named after the class
    class Layer(layers.CombinedBatchNormalization):
        def combine(self, inputs, mask, axes, mean, variance):
            assert list(axes) == [0]
            return mean + 1.0, variance

    result = Layer(epsilon=1e-9)(tf.constant([[1.0], [3.0]]), training=True).numpy()
    np.testing.assert_allclose(result, [[-2.0], [0.0]], atol=1e-3)


def check_set_mask():
    class Loss(keras.losses.Loss):
        def call(self, y_true, y_pred):
            losses = tf.constant([1.0, 0.0])
            layers.set_mask(losses, tf.constant([True, False]))
            return losses

    assert float(Loss()([0.0, 0.0], [0.0, 0.0])) == pytest.approx(1.0)


def check_reduced_by():
    seen = []

    def reduce(original, loss, values, **named):
        seen.append((loss.name, sorted(named)))
        return 2 * original(values, **named)

    # Arrays: the losses of Keras 3.6 take no lists.
    pair = np.ones((1, 1), "float32"), np.zeros((1, 1), "float32")
    for loss in (keras.losses.MeanSquaredError(name="a"), keras.losses.Huber(name="a")):
        plain = float(loss(*pair))
        with losses.reduced_by(reduce):
            assert float(loss(*pair)) == 2 * plain
        assert float(loss(*pair)) == plain
    assert seen == [("a", ["dtype", "mask", "reduction", "sample_weight"])] * 2


def check_is_builtin():
    def own(y_true, y_pred):
        return y_pred

    class Own(keras.losses.Loss):
        pass

    from_function = keras.losses.get("mse")
    assert losses.is_builtin(keras.losses.MeanSquaredError())
    assert losses.is_builtin(type(keras.losses.MeanSquaredError()).__mro__[1](from_function))
    assert not losses.is_builtin(Own())
    assert not losses.is_builtin(type(keras.losses.MeanSquaredError()).__mro__[1](own))


def check_weights_of():
    values = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    weight, mask = tf.constant([[0.5], [2.0]]), tf.constant([[True, False], [True, True]])
    for options in ({"sample_weight": weight}, {"mask": mask}, {"sample_weight": weight, "mask": mask}):
        given = {"sample_weight": None, "mask": None} | options
        same, weights = losses.weights_of(values, **given, reduction="sum")
        loss = keras.losses.Loss(reduction="sum")
        loss.call = lambda y_true, y_pred, m=given["mask"]: (
            layers.set_mask(values, m) if m is not None else None,
            values,
        )[1]
        np.testing.assert_allclose(
            float(loss(values, values, given["sample_weight"])), float(tf.reduce_sum(same * weights))
        )
    assert losses.weights_of(values, None, None, "sum")[1] is None


def check_set_metric_function():
    metric = keras.metrics.SparseCategoricalAccuracy()
    layers.set_metric_function(metric, lambda y_true, y_pred: tf.ones_like(y_true) * 5)
    metric.update_state(keras.ops.array([1.0]), keras.ops.array([[0.0, 1.0]]))
    assert float(metric.result()) == 5.0


def check_name_in_files():
    class Mine(keras.layers.Dense):
        pass

    layers.name_in_files(Mine, keras.layers.Dense)
    saved = keras.saving.serialize_keras_object(Mine(1))
    assert (saved["module"], saved["class_name"], saved["registered_name"]) == ("keras.layers", "Dense", None)


def check_guard_saving(tmp_path, monkeypatch):
    def refuse(model):
        raise RuntimeError("refused")

    for owner, name in layers._SAVING:
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, getattr(owner, name))
    layers.guard_saving(refuse)
    model = small()
    for save, file in (
        (model.save, "m.keras"),
        (model.save_weights, "m.weights.h5"),
        (model.export, "m"),
        (lambda path: keras.saving.save_model(model, path), "m.keras"),
        (lambda path: keras.models.save_model(model, path), "m.keras"),
    ):
        with pytest.raises(RuntimeError, match="refused"):
            save(tmp_path / file)
    assert not list(tmp_path.iterdir())


def check_change_loaded_state(tmp_path, monkeypatch):
    kind = keras.optimizers.Optimizer
    monkeypatch.setattr(kind, "load_own_variables", kind.load_own_variables)
    model = small()
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "m.keras")
    stores = []
    layers.change_loaded_state(lambda optimizer, store: (stores.append(list(store.keys())), store)[1])
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert sorted(map(int, stores[-1])) == list(range(len(loaded.optimizer.variables)))


# -- TensorFlow -------------------------------------------------------------------------------------------------------


def check_leave_to_python(monkeypatch):
    config = importlib.import_module("tensorflow.python.autograph.core.config")
    monkeypatch.setattr(config, "CONVERSION_RULES", config.CONVERSION_RULES)
    graphs.leave_to_python(__name__.partition(".")[0], convert=[])

    @tf.function
    def function(x):
        return x if x > 0 else -x

    assert inspect.isfunction(check_layers_of)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(lambda x: _sign(x))(tf.constant(1.0))


def _sign(x):
    return x if x > 0 else -x


def check_traces_for_xla():
    seen = []
    for compiled in (True, False):
        tf.function(lambda x: (seen.append(graphs.traces_for_xla()), x)[1], jit_compile=compiled).get_concrete_function(
            1.0
        )
        outer = tf.function(lambda x: tf.cond(x > 0, lambda: (seen.append(graphs.traces_for_xla()), x)[1], lambda: x))
        outer.get_concrete_function(tf.constant(1.0))
    model = small(run_eagerly=False, jit_compile=True)
    models.wrap_train_step(model, lambda step, data: (seen.append(graphs.traces_for_xla()), step(data))[1])
    model.fit(X, Y, verbose=0)
    assert seen[-1]
    assert not seen[1]
    assert not graphs.traces_for_xla()


def check_functions_in():
    model = small(run_eagerly=False)
    model.fit(X, Y, verbose=0)
    found = list(graphs.functions_in(model.train_function))
    assert any(graphs.traces_of(function) for function in found)
    assert len(list(graphs.functions_in(tf.function(abs)))) == 1


SOURCE = tf.data.Dataset.from_tensor_slices(np.arange(20))


def check_inputs_of():
    assert pipelines.inputs_of(SOURCE.batch(2))[0] is SOURCE
    assert pipelines.inputs_of(SOURCE) == []
    (inside,) = pipelines.inputs_of(tf.data.TextLineDataset(["a", "b"]))
    assert isinstance(inside, tf.data.Dataset)


def check_functions_of():
    (function,) = pipelines.functions_of(SOURCE.map(lambda x: x + 1))
    assert "AddV2" in [operation.type for operation in function.graph.get_operations()]
    assert pipelines.functions_of(SOURCE) == []


def check_determinism_of():
    mapped = [SOURCE.map(abs, 2, deterministic=value) for value in (True, False, None)]
    assert [pipelines.determinism_of(dataset) for dataset in mapped] == ["true", "false", "default"]


def check_seeds_of():
    tf.random.set_seed(1)
    assert pipelines.seeds_of(SOURCE.shuffle(3, seed=2)) == (1, 2)
    assert pipelines.seeds_of(SOURCE) == ()
    with tf.init_scope():
        importlib.import_module("tensorflow.python.eager.context").set_global_seed(None)
    assert pipelines.seeds_of(SOURCE.shuffle(3)) == (0, 0)


def check_unseeded_order():
    assert pipelines.unseeded_order(SOURCE.shuffle(3)) == pipelines.UNSEEDED_SHUFFLE
    assert "Dataset.random" in pipelines.unseeded_order(tf.data.Dataset.random())


def check_tensors_in():
    (found,) = pipelines.tensors_in(SOURCE)
    assert found.numpy().tolist() == list(range(20))
    assert [int(bound) for bound in pipelines.tensors_in(tf.data.Dataset.range(2, 9))][:2] == [2, 9]


def check_cache_file_of():
    assert pipelines.cache_file_of(SOURCE.cache("here")) == "here"
    assert pipelines.cache_file_of(SOURCE.cache()) == pipelines.cache_file_of(SOURCE) == ""


def check_copies_to_device():
    copied = SOURCE.apply(tf.data.experimental.copy_to_device("/cpu:0"))
    assert pipelines.copies_to_device(copied)
    assert not pipelines.copies_to_device(SOURCE)


def check_batch_size_of_dataset():
    batched = SOURCE.batch(8)
    assert pipelines.batch_size_of_dataset(batched) == 8
    pipelines.set_batch_size(batched, 5)
    assert pipelines.batch_size_of_dataset(batched) == 5
    assert pipelines.batch_size_of_dataset(SOURCE) is None


def check_dataset_before():
    assert pipelines.dataset_before(SOURCE.batch(2)) is SOURCE
    assert pipelines.dataset_before(SOURCE) is None


def check_keeps_steps():
    share = SOURCE.map(abs).map(abs, num_parallel_calls=2).prefetch(1).take(2).repeat().with_options(tf.data.Options())
    while share is not SOURCE:
        assert pipelines.keeps_steps(share), type(share)
        share = pipelines.dataset_before(share)
    for other in (SOURCE.batch(2), SOURCE.shuffle(2), SOURCE.filter(lambda _: True), SOURCE.batch(2).unbatch()):
        assert not pipelines.keeps_steps(other)


def check_generator_states():
    dataset = tf.data.Dataset.from_generator(lambda: iter([1, 2]), output_signature=tf.TensorSpec((), tf.int64))
    parts, waiting = [], [dataset]
    while waiting:
        parts.append(waiting.pop())
        waiting += pipelines.inputs_of(parts[-1])
    (state,) = pipelines.generator_states(parts)
    pipelines.wrap_generator(state, lambda generator: lambda *args: (10 * value for value in generator(*args)))
    assert [int(value) for value in dataset] == [10, 20]


# -- the test ---------------------------------------------------------------------------------------------------------


def relied_on(thing):
    return " ".join((inspect.getdoc(thing) or "").partition("Relies on: ")[2].partition("\n\n")[0].split())


@pytest.mark.parametrize("name", [*(name for name in SEAMS if name not in TOGETHER), "KerasVariable"])
def test_what_a_seam_relies_on_holds(name, request):
    check = globals().get(f"check_{name}")
    assert check, f"seams: {name}: expected check_{name} in this file, got none. Do: write one, or add it to TOGETHER."
    try:
        check(*(request.getfixturevalue(argument) for argument in inspect.signature(check).parameters))
    except Exception as error:
        relies = relied_on(SEAMS[name]) if name in SEAMS else "`keras.Variable.__mro__`."
        raise AssertionError(
            f"seam {name} (hvdx/keras/seams) no longer holds with Keras {keras.__version__} and TensorFlow "
            f"{tf.__version__}. It relies on: {relies} Got {type(error).__name__}: {error}"
        ) from error


def test_each_seam_says_what_it_relies_on():
    assert [name for name, thing in SEAMS.items() if name not in TOGETHER and not relied_on(thing)] == []
    assert set(TOGETHER) <= set(SEAMS)


def test_failure_names_the_seam_and_the_versions(request, monkeypatch):
    monkeypatch.delattr(keras.layers.Layer, "_flatten_layers")
    with pytest.raises(AssertionError) as caught:
        test_what_a_seam_relies_on_holds("layers_of", request)
    for part in ("seam layers_of", f"Keras {keras.__version__}", f"TensorFlow {tf.__version__}", "_flatten_layers"):
        assert part in str(caught.value)
