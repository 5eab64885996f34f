"""Trainings on JAX or PyTorch, on two ranks: `KERAS_BACKEND=jax mpirun -n 2 python -m tests.backend_battery`.

Each check is printed with its name. N workers are one process, which a rank trains beside, without `Distribute`.
An import of TensorFlow fails, as where it is not installed. In the folder `CHECKPOINTS`, if there is one, JAX resumes
what PyTorch has left there, and both what TensorFlow has.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import operator
import os
import re
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import pytest

import hvdx
from hvdx import comm as world
from hvdx.comm import buckets
from hvdx.errors import ConfigError, ExchangeError, ReplicaError
from hvdx.keras import Distribute
from hvdx.keras.adapters import optimizer as optimizer_adapters
from hvdx.keras.backends import stepped
from hvdx.keras.fit import array_batches, replicas
from hvdx.keras.fit import data as fit_data
from hvdx.keras.fit.arrays import rows_at
from hvdx.keras.variables import view_of
from tests.launch import ROOT


class NoTensorFlow(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if keras.backend.backend() != "tensorflow":
    assert "tensorflow" not in sys.modules, "an import at the top of this file has imported TensorFlow"
    sys.meta_path.insert(0, NoTensorFlow())

ROWS, STEPS, WORDS, CLASSES = 24, 5, 11, 3
# Ends of the names of strategies under which a fast worker takes more steps.
APART = "=inf", "=colocated"
# Rows of a step of all ranks together.
WHOLE = 8
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


class Listed(keras.utils.PyDataset):
    def __init__(self, batches: Iterable[object]):
        super().__init__()
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> object:
        return self.batches[index]


def data(count: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return words with trailing zeros, a class of each row, a class of each word, and weights of the rows."""
    random = np.random.default_rng(5)
    words = random.integers(1, WORDS, (count, STEPS))
    for row in words:
        row[random.integers(1, STEPS + 1) :] = 0
    classes = words[:, 0] % CLASSES
    return words.astype("int32"), classes, words % CLASSES, random.uniform(0.1, 3, count).astype("float32")


def mlp(each_word: bool = False, mask: bool = False, dropout: float = 0.0, policy: str | None = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((STEPS,), dtype="int32")
    hidden = keras.layers.Embedding(WORDS, 6, mask_zero=mask)(x)
    hidden = hidden if each_word else keras.layers.Flatten()(hidden)
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer="l2", dtype=policy)(hidden)
    if dropout:
        hidden = keras.layers.Dropout(dropout)(hidden)
    return keras.Model(x, keras.layers.Dense(CLASSES)(hidden))


def cnn() -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((STEPS,), dtype="int32")
    hidden = keras.layers.Reshape((STEPS, 4, 1))(keras.layers.Embedding(WORDS, 4)(x))
    hidden = keras.layers.BatchNormalization()(keras.layers.Conv2D(3, 2, activation="relu")(hidden))
    return keras.Model(x, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(hidden)))


def transformer() -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((STEPS,), dtype="int32")
    hidden = keras.layers.Embedding(WORDS, 8)(x)
    hidden = keras.layers.LayerNormalization()(hidden + keras.layers.MultiHeadAttention(2, 4)(hidden, hidden))
    return keras.Model(x, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(hidden)))


def compiled(model: keras.Model, optimizer: str = "sgd", reduction: str | None = "sum_over_batch_size") -> keras.Model:
    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "plain": lambda: keras.optimizers.SGD(0.05),
        "adamw": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3),
        "clip": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.3),
        "accumulate": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        # The first steps overflow.
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(optimizers["adamw"](), initial_scale=2.0**24),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(optimizers[optimizer](), loss, metrics=["accuracy"])
    return model


def trained(
    make: Callable[[], keras.Model],
    strategy: str | None,
    count: int = ROWS,
    each_word: bool = False,
    weighted: bool = False,
    epochs: int = 2,
    more: Sequence[keras.callbacks.Callback] = (),
    **options: object,
) -> tuple[keras.Model, dict[str, list[float]]]:
    """Train on this rank's share, or without a strategy on all rows in steps of all ranks; return model and logs."""
    model = compiled(make(), **options)  # type: ignore[arg-type]
    words, classes, of_words, weights = data(count)
    arrays = (words, of_words if each_word else classes, *((weights,) if weighted else ()))
    if strategy is None:
        batches, callbacks = hvdx.shard(arrays, WHOLE, rank=0, size=1, drop_remainder=False), []
    else:
        batches = hvdx.shard(arrays, WHOLE // hvdx.size(), drop_remainder=False)
        batches = Listed(batches) if strategy.endswith("=inf") else batches
        every = "epoch" if strategy.endswith(APART) else 1
        callbacks = [*more, Distribute(strategy, check_every=every)]  # type: ignore[arg-type]
    logs = model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks).history
    assert str(strategy).endswith(APART) or fit_data.state()[0][-1] == epochs - 1, "the order of an epoch was skipped"
    return model, logs


def assert_close(model: keras.Model, weights: Iterable[np.ndarray]) -> None:
    """Assert that the trained weights of a model are those of one process."""
    for a, b in zip(model.trainable_variables, weights, strict=True):
        # The loss does not depend on some weights, such as the bias of an attention's keys.
        np.testing.assert_allclose(view_of(a), b, rtol=1e-5, atol=1e-6, err_msg=a.path)


def assert_one_process(*cases: dict[str, object]) -> None:
    """Assert that all ranks end with the weights and the logs of one process, which each rank is for some cases."""
    comm = world.start()
    mine: dict[int, tuple[list[np.ndarray], dict[str, list[float]]]] = {}
    for i in range(comm.rank, len(cases), comm.size):
        one, logs = trained(**cases[i] | {"strategy": None})  # type: ignore[arg-type]
        mine[i] = [view_of(v).copy() for v in one.trainable_variables], logs
    of_one_process = functools.reduce(operator.or_, comm.all_gather_object(mine, "trainings of one process"))
    for i, case in enumerate(cases):
        model, logs = trained(**{"strategy": "all_reduce"} | case)  # type: ignore[arg-type]
        weights, expected = of_one_process[i]
        assert replicas.differing(model.weights, comm) == {}
        assert_close(model, weights)
        for name, values in expected.items():
            np.testing.assert_allclose(logs[name], values, rtol=3e-5, err_msg=name)


@check
def all_reduce_is_one_process() -> None:
    assert_one_process(
        {"make": mlp},
        {"make": mlp, "optimizer": "clip"},
        {"make": mlp, "optimizer": "accumulate"},
        {"make": transformer, "optimizer": "adamw"},
    )


@check
def gradients_that_leave_during_the_backward_pass_have_the_same_bits() -> None:
    class Change(keras.optimizers.SGD):
        pairs: Callable[[list[object], list[object]], tuple[list[object], list[object]]]

        def apply(self, grads: list[object], trainable_variables: list[object] | None = None) -> None:
            given = grads, trainable_variables or []
            super().apply(*(self.pairs(*given) if self.iterations == 2 else given))

    class Freeze(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.model.layers[-1].trainable = batch % 3 != 1

    comm, in_torch = world.start(), keras.backend.backend() == "torch"
    cases: list[tuple[Callable[[], keras.Model], dict[str, object]]] = [
        (cnn, {"count": ROWS + 5, "weighted": True}),
        (transformer, {"optimizer": "adamw", "more": [Freeze()]}),
        (mlp, {"optimizer": "accumulate"}),
    ][0 if in_torch else 2 :]
    after = [trained(make, "all_reduce", **options)[0] for make, options in cases]  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        numbers: list[int] = []
        give = buckets.GivenSums.give
        patch.setattr(buckets.GivenSums, "give", lambda self, i, a: numbers.append(i) or give(self, i, a))  # type: ignore[func-returns-value]
        patch.setattr(buckets, "_LEAST_BYTES", 1)
        patch.setattr(comm, "hosts", ["a", "b"])
        patch.setattr(optimizer_adapters, "_array_comms", weakref.WeakKeyDictionary())
        for (make, options), plain in zip(cases, after, strict=True):
            numbers.clear()
            model, _ = trained(make, "all_reduce", **options)  # type: ignore[arg-type]
            # The first step of eight shows that the gradients are those of the pass; accumulated ones are not. Of six,
            # two are those of a model with a frozen layer.
            steps = 0 if not in_torch or make is mlp else 7 if make is cnn else 3
            assert len(numbers) == steps * len(model.trainable_variables), (make, numbers)
            for a, b in zip(model.weights, plain.weights, strict=True):
                np.testing.assert_array_equal(view_of(a), view_of(b), err_msg=a.path)
        if in_torch:
            words, classes, *_ = data()
            share = hvdx.shard((words, keras.ops.one_hot(classes, CLASSES)), 4)
            for pairs in (lambda g, v: ([2 * a for a in g], v)), (lambda g, v: (g[:-1], v[:-1])):
                patch.setattr(optimizer_adapters, "_array_comms", weakref.WeakKeyDictionary())
                model = mlp()
                model.compile(Change(0.05), "mse")
                model.optimizer.pairs = pairs
                with pytest.raises(ExchangeError, match=r"expected the gradients of the .* Do: AllReduce\(groups=2\)"):
                    model.fit(share, verbose=0, callbacks=[Distribute()])


@check
def last_batches_that_are_not_full_are_one_process() -> None:
    # In the last step of `ROWS + 1` one rank has no batch, and takes part with weight 0.
    assert_one_process(
        {"make": mlp, "count": ROWS + 5},
        {"make": mlp, "count": ROWS + 5, "weighted": True},
        {"make": mlp, "count": ROWS + 1, "optimizer": "accumulate"},
    )


def datasets_of_grain_that_each_rank_cuts_are_one_process() -> None:
    import grain

    words, classes, *_ = data(WHOLE + 3)
    samples = grain.MapDataset.source([*zip(words, classes, strict=True)])
    share = samples[hvdx.rank() :: hvdx.size()].batch(WHOLE // hvdx.size()).map(tuple)
    one, model = compiled(mlp()), compiled(mlp())
    expected = one.fit(words, classes, WHOLE, epochs=2, shuffle=False, verbose=0).history
    logs = model.fit(share, epochs=2, shuffle=False, verbose=0, callbacks=[Distribute()]).history
    assert_close(model, map(view_of, one.trainable_variables))
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=3e-5)
    with pytest.raises(ConfigError, match=re.escape("Do: give fit dataset[hvdx.rank() :: hvdx.size()].batch(n)")):
        hvdx.shard(samples, WHOLE)


if importlib.util.find_spec("grain"):
    check(datasets_of_grain_that_each_rank_cuts_are_one_process)


@check
def losses_of_words_with_masks_sums_and_weights_are_one_process() -> None:
    def masked() -> keras.Model:
        return mlp(each_word=True, mask=True)

    assert_one_process(
        {"make": masked, "each_word": True},
        {"make": masked, "each_word": True, "count": ROWS + 1},
        {"make": masked, "each_word": True, "reduction": "mean_with_sample_weight"},
        {"make": masked, "each_word": True, "reduction": "sum"},
        {"make": mlp, "reduction": "mean_with_sample_weight", "weighted": True, "count": ROWS + 5},
    )


@check
def averages_of_each_step_are_one_process() -> None:
    assert_one_process({"make": mlp, "strategy": "parameter_averaging:period=1", "optimizer": "plain"})


@check
def replicas_stay_equal_under_all_strategies() -> None:
    for strategy, make, optimizer in (
        ("all_reduce:compression=fp16", cnn, "sgd"),
        ("threshold:period=3", functools.partial(mlp, dropout=0.2, policy="mixed_float16"), "scaled"),
        ("threshold:placement=gradient", cnn, "sgd"),
        ("threshold:target_density=0.1,max_staleness=inf", mlp, "sgd"),
        ("parameter_averaging:period=3", functools.partial(mlp, dropout=0.2), "adamw"),
        ("parameter_server:servers=colocated", mlp, "adamw"),
        ("auto", mlp, "sgd"),
    ):
        # In the last step one rank has no batch, and the other one row, of which a normalisation has no variance.
        count = 16 * WHOLE + (make is not cnn)
        model, logs = trained(make, strategy, count=count, optimizer=optimizer, epochs=3)
        assert replicas.differing(model.weights, world.start()) == {}, strategy
        assert logs["loss"][-1] < 0.9 * logs["loss"][0], (strategy, optimizer, logs["loss"])


@check
def weights_that_one_rank_changes_are_found() -> None:
    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if hvdx.rank() == 1 and batch == 0:
                self.model.trainable_variables[0].assign(self.model.trainable_variables[0] + 1.0)

    model = compiled(mlp())
    words, classes, *_ = data()
    share = hvdx.shard((words, classes), WHOLE // 2)
    with pytest.raises(ReplicaError, match="the replicas differ after epoch 1"):
        model.fit(share, verbose=0, shuffle=False, callbacks=[Change(), Distribute("all_reduce")])


@check
def what_needs_tensorflow_is_refused_before_anything_starts() -> None:
    calls = (lambda: hvdx.keras.DistributedOptimizer(keras.optimizers.SGD()), lambda: hvdx.keras.allreduce(np.ones(2)))
    for call in calls:
        with pytest.raises(ConfigError, match="expected Keras on TensorFlow"):
            call()


def saved(epochs: int, where: str | None) -> keras.Model:
    """Train up to an epoch, from the checkpoints in a folder if there are any; without one, save nothing."""
    words, classes, *_ = data(16 * WHOLE)
    model = compiled(mlp(), "adamw")
    callbacks = [Distribute("threshold:target_density=0.1"), *([hvdx.keras.Checkpoint(where)] if where else [])]
    model.fit(hvdx.shard((words, classes), 4), epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
    return model


@check
def a_checkpoint_resumes() -> None:
    folder = os.environ.get("CHECKPOINTS") or world.start().all_gather_object(tempfile.mkdtemp(), "a folder")[0]
    mine, of_one_process, other = (os.path.join(folder, n) for n in (keras.backend.backend(), "tensorflow", "torch"))
    whole = saved(3, None)
    saved(1, mine)
    resumed = saved(3, mine)
    for a, b in zip(whole.weights, resumed.weights, strict=True):
        assert np.array_equal(view_of(a), view_of(b)), a.path
    if other != mine and os.path.exists(other):
        saved(4, other)
    if os.path.exists(of_one_process):
        # One process has taken the steps of two epochs in its first.
        assert int(view_of(saved(4, of_one_process).optimizer.iterations)) == (2 + 3) * 16


@check
def a_slow_worker_takes_fewer_rows_of_the_same_step() -> None:
    comm, rows = world.start(), 17
    sizes: list[int] = []

    def shared(words: np.ndarray, y: np.ndarray, strategy: str) -> object:
        if strategy == "all_reduce" or keras.config.backend() != "torch":
            return hvdx.shard((words, y), global_batch_size=rows)
        from torch.utils.data import DataLoader

        samples = [*zip(words, y, strict=True)]
        return DataLoader(samples, batch_sampler=hvdx.shard(range(len(words)), global_batch_size=rows))

    def slowly(arrays: object, at: np.ndarray) -> object:
        time.sleep(len(at) * (6e-3 if comm.rank == 1 else 6e-4))
        sizes.append(len(at))
        return rows_at(arrays, at)

    words, classes, of_words, _ = data(40 * rows)
    masked = functools.partial(mlp, each_word=True, mask=True)
    for make, y, strategy in (
        (mlp, classes, "all_reduce"),
        (masked, of_words, "all_reduce"),
        (mlp, classes, "threshold"),
    ):
        sizes.clear()
        one, made = compiled(make()), compiled(make())
        logs = one.fit(hvdx.shard((words, y), rows, rank=0, size=1), verbose=0).history
        share = shared(words, y, strategy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(array_batches, "rows_at", slowly)
            balanced = made.fit(share, verbose=0, callbacks=[Distribute(strategy, check_every=1)]).history
        last = comm.all_gather_object(sizes[-1], "rows of the last step")
        assert last[1] < rows // 2 - 1, last
        if strategy == "threshold":
            continue
        assert_close(made, map(view_of, one.trainable_variables))
        np.testing.assert_allclose(balanced["loss"], logs["loss"], rtol=3e-5)


@check
def the_memory_of_a_gpu_is_asked_for() -> None:
    assert stepped().memory() is None
    with pytest.MonkeyPatch.context() as patch:
        if keras.config.backend() == "jax":
            device = types.SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 30, "bytes_limit": 90})
            patch.setattr("jax.local_devices", lambda: [device])
        else:
            numbers = {
                "max_memory_reserved": 30,
                "memory_reserved": 20,
                "mem_get_info": (70, 99),
                "is_initialized": True,
            }
            for name, value in numbers.items():
                patch.setattr(f"torch.cuda.{name}", lambda found=value: found)
        assert stepped().memory() == (30, 90)


@check
def the_script_of_the_tutorial_trains() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    names: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(code, names)
    model = names["model"]
    assert isinstance(model, keras.Model)
    assert model.history.history["val_accuracy"][-1] > 0.9


def main(names: Sequence[str]) -> None:
    hvdx.init()
    for function in CHECKS:
        if not names or function.__name__ in names:
            function()
            if hvdx.rank() == 0:
                print(f"held: {function.__name__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
