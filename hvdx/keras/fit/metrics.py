"""Metrics over all ranks.

A Keras metric is a handful of variables that add up what it saw (a total and a count, a confusion matrix, counts at
each threshold). Adding those over the ranks and asking for the result again gives the metric over all samples: a
mean weighted by sample counts, and an AUC that no average of AUCs would give.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.comm import Comm


def are_of(model: Any, logs: dict[str, Any]) -> bool:
    """Whether `logs` are the values of the model's metrics, by Keras' own rule: the names are the same.

    A custom `train_step` may return what it likes, under names that metrics have as well.
    """
    return set(logs) == set(model.get_metrics_result())


def over_all_samples(model: Any, comm: Comm) -> dict[str, Any]:
    """The values of the model's metrics over the samples of all ranks.

    Args:
        model: compiled; its metrics' variables are left holding the combined counts.
        comm: the ranks.
    """
    _combine_states(model, comm)
    return {k: _plain(v) for k, v in model.get_metrics_result().items()}


def mean_over_ranks(logs: dict[str, Any], comm: Comm) -> dict[str, Any]:
    """The mean over ranks of whatever is a number on all of them; the rest stays as it is.

    Args:
        logs: this rank's values.
        comm: the ranks.
    """
    numbers = {k: number for k, v in logs.items() if (number := _number(v)) is not None}
    everyone = comm.all_gather_object(numbers, "logs")
    return logs | {k: float(np.mean([r[k] for r in everyone])) for k in numbers if all(k in r for r in everyone)}


def over_all_ranks(model: Any, logs: dict[str, Any], comm: Comm) -> dict[str, Any]:
    """The values of `logs` over all ranks: over all samples for metrics, else the mean over ranks.

    Args:
        model: compiled.
        logs: this rank's values.
        comm: the ranks.
    """
    return over_all_samples(model, comm) if are_of(model, logs) else mean_over_ranks(logs, comm)


class EpochLogs:
    """The logs of one epoch after another over all ranks, fed by a callback's hooks.

    Validation overwrites the state of the training metrics, so they are combined before it; a custom `train_step`'s
    values, which have no state, at the end of the epoch.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        self._step: dict[str, Any] = {}
        self._train: dict[str, Any] | None = None
        self._test: dict[str, Any] = {}

    @property
    def validated(self) -> bool:
        """True once this epoch's validation is over."""
        return bool(self._test)

    def begin(self) -> None:
        """Nothing of this epoch is combined yet."""
        self._train, self._test = None, {}

    def see_step(self, logs: dict[str, Any] | None) -> None:
        """Remember what the training step returns."""
        self._step = dict(logs or {})

    def before_validation(self, model: Any) -> None:
        """Combine the training metrics, if the step's logs are theirs."""
        if self._step and are_of(model, self._step):
            self._train = over_all_samples(model, self._comm)

    def after_validation(self, model: Any, logs: dict[str, Any]) -> None:
        """Replace this rank's validation metrics, in place."""
        self._test = over_all_ranks(model, logs, self._comm)
        logs.update(self._test)

    def finish(self, model: Any, logs: dict[str, Any]) -> None:
        """Replace what this rank saw in the epoch by what all ranks saw, in place."""
        if self._train is None:
            own = {k: v for k, v in logs.items() if k in self._step}
            self._train = mean_over_ranks(own, self._comm) if self._test else over_all_ranks(model, own, self._comm)
        # Keras copies the logs of a validation before it shows them to callbacks, so they are mended here again.
        combined = self._train | {f"val_{k}": v for k, v in self._test.items()}
        logs.update({k: v for k, v in combined.items() if k in logs})


def _combine_states(model: Any, comm: Comm) -> None:
    variables = [v for metric in model.metrics for v in metric.variables]
    if not variables:
        return
    local = [np.asarray(tf.convert_to_tensor(v).numpy(), dtype=np.float64) for v in variables]
    mine = [_share(v)(x, comm) for v, x in zip(variables, local, strict=True)]
    total = comm.all_reduce_sum(np.concatenate([np.ravel(x) for x in mine]), "metrics")
    pieces = np.split(total, np.cumsum([x.size for x in mine])[:-1])
    for variable, piece in zip(variables, pieces, strict=True):
        dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
        variable.assign(piece.reshape(variable.shape).astype(dtype))


def _share(variable: Any) -> Callable[[np.ndarray, Comm], np.ndarray]:
    """What this rank adds to the sum, by the aggregation that the metric declared for its variable."""
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "sum":
        return lambda x, comm: x
    if aggregation == "only_first_replica":
        return lambda x, comm: x if comm.rank == 0 else np.zeros_like(x)
    return lambda x, comm: x / comm.size


def _plain(value: Any) -> Any:
    """A float, or an array for a metric of several values."""
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
