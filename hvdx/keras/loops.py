"""Training loops of a script's own, without `fit`: `prepare`, `flush` and `combine`."""

import atexit
import functools
import weakref

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.adapters.optimizer import adapter_of
from hvdx.keras.adapters.optimizer import flush as flush_exchange
from hvdx.keras.fit import metrics, replicas, state
from hvdx.keras.horovod.distributed_optimizer import DistributedOptimizer
from hvdx.keras.joining import join
from hvdx.keras.optimizer_state import accumulated_gradients, innermost
from hvdx.keras.seams.frames import running_fits
from hvdx.keras.seams.layers import guard_saving
from hvdx.keras.types import Structure
from hvdx.keras.variables import view_of
from hvdx.keras.weight_parts import mark_state
from hvdx.log import Log
from hvdx.strategies import Strategy, resolve

_log = Log(__name__)

# Prepared optimisers of each model; of a loss-scale optimiser, the inner one.
_prepared: weakref.WeakKeyDictionary[keras.Model, weakref.WeakSet[keras.optimizers.Optimizer]] = (
    weakref.WeakKeyDictionary()
)


def prepare(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, strategy: Strategy | str | None = None
) -> keras.optimizers.Optimizer:
    """Make the ranks train a model together in a loop of the script's own, without `fit`. Collective.

    All ranks receive rank 0's weights and optimiser state. From then on `optimizer.apply` combines the work of all
    ranks, in a `tf.function` or not. Call `flush` on all ranks before weights are read; `model.save`, `save_weights`
    and `export` refuse weights that are not flushed.

    Args:
        model: built model.
        optimizer: Keras 3 optimiser that trains it; prepare each of several.
        strategy: strategy or its one-line spelling; by default, that of `init` or `HVDX_STRATEGY`.

    Returns:
        The same optimiser; under the policy "mixed_float16", a loss-scale optimiser around it.

    Raises:
        ConfigError: if the model is not built, or the strategy cannot train in such a loop.
        ReplicaError: on all ranks, if their models differ.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> type(prepare(model, keras.optimizers.SGD(0.1))).__name__
        'SGD'
    """
    if not model.built or not model.weights:
        raise ConfigError.on_all_ranks(
            f"prepare: expected a built model, got {model.name} without weights. Do: give it an Input, or call it on a "
            "batch before."
        )
    chosen = resolve(strategy)
    comm = join(chosen)
    prepared = DistributedOptimizer(optimizer, strategy=chosen)
    if comm.size > 1:
        _start_alike(model, prepared, comm)
        state.begin(model)
        _watch()
        _prepared.setdefault(model, weakref.WeakSet()).add(innermost(prepared))
    return prepared


def flush(optimizer: keras.optimizers.Optimizer) -> None:
    """Apply the updates in flight, or average weights that ranks have trained separately. Collective.

    In a training loop of your own, call it on all ranks before you read the weights, and at the end. `Distribute` does
    this for you. After `prepare`, weights that no gradient reaches (batch normalisation's statistics) become the mean
    over the ranks too.

    Args:
        optimizer: distributed optimiser; nothing is done for a plain one.

    Raises:
        ReplicaError: on all ranks, if they have taken different numbers of steps.

    Example:
        >>> flush(keras.optimizers.SGD(0.1))
    """
    flush_exchange(optimizer)
    for model, optimizers in _prepared.items():
        if innermost(optimizer) in optimizers:
            state.combine(model, join())


def flush_all(model: keras.Model) -> None:
    """Flush the prepared optimisers of a model. Collective."""
    for optimizer in _prepared.get(model, ()):
        flush_exchange(optimizer)
    if model in _prepared:
        state.combine(model, join())


def combine(value: Structure) -> Structure:
    """Combine a metric, a number or an array over the ranks, outside of a `tf.function`. Collective.

    Args:
        value: a Keras metric, a number or an array, or a list, tuple or dictionary of them.

    Returns:
        For a metric its result over the samples of all ranks, while its own state does not change; for a number or an
        array of one shape on all ranks the mean over the ranks; the same on every rank.

    Raises:
        ConfigError: if the value is anything else.
        ReplicaError: on all ranks, if shapes differ.

    Example:
        >>> loss = keras.metrics.Mean()
        >>> _ = loss.update_state([1.0, 2.0])
        >>> combine({"loss": loss, "seconds": 3})
        {'loss': 1.5, 'seconds': 3.0}
    """
    if isinstance(value, dict):
        return {key: combine(value[key]) for key in value}
    if isinstance(value, list | tuple):
        return type(value)(map(combine, value))
    comm = join()
    return _over_all_samples(value, comm) if isinstance(value, keras.Metric) else _mean(value, comm)


def _start_alike(model: keras.Model, optimizer: keras.optimizers.Optimizer, comm: Comm) -> None:
    """Overwrite the weights and the optimiser's state with those of rank 0. Collective."""
    if any(comm.all_gather_object(optimizer.built, "optimizers")) and not optimizer.built:
        optimizer.build(model.trainable_variables)
    mark_state(optimizer)
    local = {id(v) for v in accumulated_gradients(optimizer)}
    replicas.broadcast_alike([v for v in (*model.weights, *optimizer.variables) if id(v) not in local], 0, comm)


@functools.cache
def _watch() -> None:
    guard_saving(_check_flushed)
    atexit.register(_tell_unflushed)


def _tell_unflushed() -> None:
    """Say at the end of the script that the last weights, which it may have read, were not the same on all ranks."""
    for optimizer in [o for optimizers in _prepared.values() for o in optimizers]:
        adapter = adapter_of(optimizer)
        if adapter is None or adapter.comm.rank > 0 or adapter.strategy.placement == "gradient":
            continue  # combined gradients change the weights alike on all ranks
        if adapter.unflushed:
            _log.warning(
                f"the script ended {adapter.unflushed} steps after the last flush of optimizer {optimizer.name}, with "
                "other weights on each rank. Call hvdx.keras.flush(optimizer) on all ranks after the last step."
            )


def _check_flushed(model: keras.Model) -> None:
    for optimizer in _prepared.get(model, ()):
        adapter = adapter_of(optimizer)
        # Within a fit, `Distribute` flushes.
        if adapter is not None and adapter.unflushed and not running_fits(model):
            raise ConfigError(
                f"saving of {model.name}: expected weights that all ranks share, got those of this rank, "
                f"{adapter.unflushed} steps after the last flush of optimizer {optimizer.name}. Do: "
                "hvdx.keras.flush(optimizer) on all ranks first, outside of `if hvdx.rank() == 0`."
            )


def _over_all_samples(metric: keras.Metric, comm: Comm) -> Structure:
    own = [np.array(view_of(v)) for v in metric.variables]
    metrics.combine_states(metric.variables, {}, comm)
    result = keras.tree.map_structure(metrics.plain, metric.result())
    for variable, value in zip(metric.variables, own, strict=True):
        variable.assign(value)
    return result


def _mean(value: object, comm: Comm) -> float | np.ndarray:
    mine = metrics.as_numbers(value)
    everyone = comm.all_gather_object(mine, "combine")
    arrays = [array for array in everyone if array is not None]
    if len(arrays) < comm.size:
        raise ConfigError.on_all_ranks(
            f"combine: expected a metric of Keras, a number or an array on all ranks, got {type(value).__name__} on "
            f"rank {comm.rank}. Do: call it outside of a tf.function, or hvdx.keras.allgather_object."
        )
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) > 1:
        raise ReplicaError.on_all_ranks(
            f"combine: expected one shape on all ranks, got {shapes}. Do: combine means, or a keras.metrics.Mean."
        )
    return metrics.plain(np.mean(arrays, axis=0))
