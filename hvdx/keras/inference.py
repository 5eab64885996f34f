"""Evaluation and prediction over all ranks, outside of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.errors import ConfigError, HvdxError, ReplicaError
from hvdx.keras import backend
from hvdx.keras.adapters.rank_local import declared
from hvdx.keras.backend import is_dataset, tf
from hvdx.keras.fit import arrays, metrics, replicas
from hvdx.keras.fit.agreement import pipeline, shares
from hvdx.keras.fit.array_batches import ArrayBatches
from hvdx.keras.fit.data import Share, untuned
from hvdx.keras.fit.divisions import even_part
from hvdx.keras.joining import join
from hvdx.keras.loops import flush_all
from hvdx.keras.types import Arrays, Logs, LogValues
from hvdx.keras.weight_parts import has_parts

T = TypeVar("T")

# As in Keras.
_BATCH_SIZE = 32


def predict(model: keras.Model, data: tf.data.Dataset | Arrays, batch_size: int | None = None) -> Any:
    """Predict on all ranks together: each rank takes a part of the data, and all receive all predictions. Collective.

    Args:
        model: built model with the same weights on all ranks.
        data: all of the data, the same on all ranks, as `hvdx.shard` takes them: arrays, or a `tf.data.Dataset` of
            known size. The first part of a tuple is the input, as in a dataset for `predict`. Every rank reads a
            dataset up to the end of its part.
        batch_size: samples a step on each rank. None is 32 for arrays; the elements of a dataset then are batches.

    Returns:
        What `model.predict` returns for all of the data: an array [samples, ...] in their order, or a structure of
        such arrays; the same on every rank.

    Raises:
        ConfigError: on all ranks, if the model has split layers or is not built, or if the data are a share of
            `hvdx.shard`, of unknown size, or of an order that differs from rank to rank.
        ReplicaError: on all ranks, if their weights or their numbers of samples differ.
        HvdxError: on all ranks, if the prediction fails on one; the message names it.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> predict(model, np.ones((3, 2), "float32")).shape
        (3, 1)
    """
    comm = join()
    flush_all(model)

    def unit() -> list[Any]:
        share, _ = _open("predict", model, data, batch_size, comm)
        return _together("predict", comm, lambda: None if share is None else model.predict(share, verbose=0))

    # Without a rank that dies, the others divide the data anew.
    parts = [part for part in comm.complete(unit) if part is not None]
    return keras.tree.map_structure(lambda *each: np.concatenate(each), *parts)


def evaluate(model: keras.Model, data: tf.data.Dataset | Arrays, batch_size: int | None = None) -> LogValues:
    """Evaluate on all ranks together: each rank takes a part of the data, and metrics cover all of it. Collective.

    Args:
        model: compiled model, else as for `predict`.
        data, batch_size: as for `predict`; at least one sample, or one batch of a dataset, for each rank.

    Returns:
        The values of `model.evaluate(..., return_dict=True)` over all samples, the same on every rank. Values of a
        custom `test_step` that are no metrics are means over the ranks.

    Raises:
        ConfigError, ReplicaError, HvdxError: as for `predict`; ConfigError also if there are fewer samples than ranks.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile("sgd", "mse")
        >>> evaluate(model, (np.ones((3, 2), "float32"), np.ones((3, 1), "float32")))
        {'loss': 1.0}
    """
    comm = join()
    flush_all(model)

    def unit() -> LogValues:
        share, count = _open("evaluate", model, data, batch_size, comm)
        if count < comm.size:
            raise ConfigError.on_all_ranks(
                f"evaluate: expected one element of the data for each of {comm.size} ranks or more, got {count}. Do: "
                "evaluate on fewer ranks, or make the batches of the dataset smaller."
            )
        beginning = _Beginning()

        def work() -> LogValues:
            return dict(model.evaluate(share, verbose=0, return_dict=True, callbacks=[beginning]))

        return metrics.over_all_ranks(model, _together("evaluate", comm, work)[comm.rank], beginning.states, comm)

    return comm.complete(unit)  # as in `predict`


class _Beginning(keras.callbacks.Callback):
    """Note the states of the metrics before the first batch, after Keras has reset them."""

    def __init__(self) -> None:
        super().__init__()
        self.states: metrics.States = {}

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if batch == 0:
            self.states = metrics.states(self.model)


def _open(
    what: str, model: keras.Model, data: tf.data.Dataset | Arrays, batch_size: int | None, comm: Comm
) -> tuple[Share | None, int]:
    """Return this rank's part of the data, None if it is empty, and the number of elements of all parts. Collective."""

    share: Share | None = None

    def work() -> int:
        nonlocal share
        if comm.size > 1:
            _check(what, model, data)
        share, count = _part(what, data, batch_size, comm.rank, comm.size)
        return count

    counts = _together(what, comm, work)
    if len(set(counts)) > 1:
        raise ReplicaError.on_all_ranks(
            f"{what}: expected the same data on all ranks, got {counts} elements on the ranks. Do: give every rank "
            "all of the data."
        )
    if comm.size > 1:
        own = {id(v) for some in declared(model) for v in some}
        weights = [v for v in model.weights if id(v) not in own]
        replicas.check_alike(weights, comm)
        if found := replicas.differing(weights, comm):
            first, ranks = next(iter(found.items()))
            raise ReplicaError.on_all_ranks(
                f"{what}: expected the same weights on all ranks, got others than those of rank 0 for {len(found)} "
                f"variables, such as {weights[first].path} on ranks {ranks}. Do: load the same file on every rank, or "
                "hvdx.keras.broadcast_variables(model.weights, 0)."
            )
    return share, counts[0]


def _check(what: str, model: keras.Model, data: tf.data.Dataset | Arrays) -> None:
    if not model.built:
        raise ConfigError(
            f"{what}: expected a built model, got one without weights. Do: build, train or load it first."
        )
    if has_parts(model):
        raise ConfigError(
            f"{what}: expected a model without split layers, got {model.name}. Do: give the plain copy, "
            "hvdx.keras.gather(model)."
        )
    if shares.shares_in(data):
        raise ConfigError(
            f"{what}: expected all of the data, got a share of hvdx.shard. Do: give what you gave hvdx.shard."
        )
    cause = pipeline.cause_of_other_order(data) if is_dataset(data) else None
    if cause is not None:
        raise ConfigError(
            f"{what}: expected a dataset whose order is the same on all ranks, got one with {cause}. Do: remove it."
        )


def _part(
    what: str, data: tf.data.Dataset | Arrays, batch_size: int | None, rank: int, size: int
) -> tuple[Share | None, int]:
    """Return a rank's part, consecutive elements of the data, and the number of all elements."""
    if is_dataset(data):
        count = int(data.cardinality())
        if count < 0:
            raise ConfigError(
                f"{what}: expected a dataset of known size, got an unknown or infinite one. Do: "
                "dataset.apply(tf.data.experimental.assert_cardinality(n))."
            )
        begin, end = even_part(count, rank, size)
        part = data.skip(begin).take(end - begin)
        part = part if batch_size is None else part.batch(batch_size)
    else:
        tensors = arrays.tensors_of(data)
        count = arrays.length_of(tensors)
        begin, end = even_part(count, rank, size)
        rows = batch_size or _BATCH_SIZE
        if backend.name() != "tensorflow":
            firsts = range(begin, end, rows)
            chunks = [np.arange(first, min(first + rows, end)) for first in firsts]
            share = ArrayBatches(tensors, lambda: iter(chunks), len(chunks), rows, len(chunks[-1])) if chunks else None
            return share, count
        part = tf.data.Dataset.range(begin, end).batch(rows)
        part = part.map(lambda positions: arrays.rows_at(tensors, positions))
    return (untuned(part.prefetch(2)) if end > begin else None), count


def _together(what: str, comm: Comm, work: Callable[[], T]) -> list[T]:
    """Do some work on each rank, and return the results of all ranks. Collective.

    Raises:
        HvdxError: on all ranks, if the work fails on one of them.
    """
    mine: tuple[type[HvdxError] | None, str, T | None]
    cause: Exception | None = None
    try:
        mine = None, "", work()
    except Exception as error:
        if comm.size == 1:
            raise
        cause = error
        if isinstance(error, HvdxError):
            mine = type(error), str(error), None
        else:
            mine = HvdxError, f"{what}: {type(error).__name__}: {error}", None
    everyone = comm.all_gather_object(mine, what)
    for rank, (kind, text, _) in enumerate(everyone):
        if kind is not None:
            raise kind.on_all_ranks(f"rank {rank} of {comm.size}: {text}") from cause
    return [result for _, _, result in everyone]  # type: ignore[misc]
