"""Metrics over all ranks.

A Keras metric sums its samples in a few variables (a total and a count, a confusion matrix, counts at each threshold).
If these variables are summed over the ranks, the metric's result is that over all samples: a mean weighted by sample
counts, or the AUC of all samples, which differs from the mean of the ranks' AUCs. What is summed is what each rank has
counted since the last sum: a metric that is not reset between two sums starts from the state of all ranks.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.keras.fit.part import Part
from hvdx.keras.seams.models import metric_variables
from hvdx.keras.types import Logs, LogValues, Variable
from hvdx.keras.variables import dtype_of, view_of
from hvdx.log import Log

_log = Log(__name__)

#: Values of the variables of metrics, by the `id` of the variable.
States: TypeAlias = dict[int, np.ndarray]


def are_metrics_of(model: keras.Model, logs: LogValues) -> bool:
    """Return whether `logs` are the values of the model's metrics. Like Keras, compare the names.

    A custom `train_step` may return other values, even under some of the metrics' names.
    """
    return set(_flat(logs)) == set(_flat(model.get_metrics_result()))


def states(model: keras.Model) -> States:
    """Return the states of a model's metrics, before this rank counts samples.

    Args:
        model: compiled model; variables that its metrics make later start from 0.
    """
    return {id(v): _value(v) for v in metric_variables(model)}


def over_all_samples(model: keras.Model, starts: States, comm: Comm) -> LogValues:
    """Return the values of the model's metrics over the samples of all ranks. Collective.

    Args:
        model: compiled model; its metrics' variables hold the combined counts afterwards.
        starts: their `states` from which the ranks have counted.
        comm: the ranks.
    """
    combine_states(metric_variables(model), starts, comm)
    return {k: plain(v) for k, v in _flat(model.get_metrics_result()).items()}


def mean_over_ranks(logs: LogValues, comm: Comm) -> LogValues:
    """Replace each value that is a number or an array on all ranks by its mean over the ranks. Collective.

    Arrays are averaged element by element. Arrays of different shapes, such as values of each sample in batches of
    different sizes, become those of rank 0, which prints a line.

    Args:
        logs: values of this rank.
        comm: the ranks.

    Returns:
        The means, and the other values of this rank unchanged. A rank without batches has no logs, and does not count.
    """
    logs = _flat(logs)
    numbers = {k: array for k, v in logs.items() if (array := as_numbers(v)) is not None}
    everyone = comm.all_gather_object(numbers if logs else None, "logs")
    present = [r for r in everyone if r is not None]
    common = [k for k in (present[0] if present else ()) if all(k in r for r in present)]
    return logs | {k: _mean(k, [r[k] for r in present], comm) for k in common}


def over_all_ranks(model: keras.Model, logs: LogValues, starts: States, comm: Comm) -> LogValues:
    """Combine the values of `logs` over all ranks: metrics over all samples, else the mean over ranks. Collective.

    Args:
        model: compiled model.
        logs: values of this rank.
        starts: `states` of the metrics from which the ranks have counted.
        comm: the ranks.
    """
    return over_all_samples(model, starts, comm) if are_metrics_of(model, logs) else mean_over_ranks(logs, comm)


class EpochLogs(Part):
    """Logs of an epoch over all ranks.

    Validation overwrites the state of the training metrics, so they are combined before validation. The values of a
    custom `train_step` have no such state; they are combined at the end of the epoch.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Comm):
        super().__init__()
        self._comm = comm
        self._step: LogValues = {}
        self._train: LogValues | None = None
        self._test: LogValues = {}
        # States of the metrics after their last reset, or sum; None until a validation has reset them.
        self._starts: States | None = {}
        # True on a rank that had no batch in the validation.
        self._idle = False

    @property
    def validated(self) -> bool:
        """True after validation has run in this epoch."""
        return bool(self._test)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Discard the combined values of the last epoch."""
        self._train, self._test, self._idle = None, {}, False
        self.begin_steps()

    def begin_steps(self) -> None:
        """Note the states of the metrics; callbacks may have reset them."""
        self._starts = states(self.model)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Store the values that the training step returned."""
        self._step = _flat(logs or {})

    def on_test_begin(self, logs: Logs = None) -> None:
        """Combine the training metrics before validation overwrites them. Collective."""
        if self._step and are_metrics_of(self.model, self._step):
            self._train = over_all_samples(self.model, self._starts or {}, self._comm)
        self._starts = None

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Note the states of the metrics, which Keras has reset by now."""
        if self._starts is None:
            self._starts = states(self.model)

    def on_test_end(self, logs: Logs = None) -> None:
        """Replace the validation metrics of this rank by those of all ranks, in place. Collective.

        A rank without validation batches has no logs, and takes part all the same.
        """
        logs = {} if logs is None else logs
        self._idle, model = not logs, self.model
        self.on_test_batch_begin(0)
        everyone = self._comm.all_gather_object(are_metrics_of(model, logs) if logs else None, "kinds of logs")
        kinds = [kind for kind in everyone if kind is not None]
        if kinds:
            starts = self._starts or {}
            self._test = (
                over_all_samples(model, starts, self._comm) if all(kinds) else mean_over_ranks(logs, self._comm)
            )
            logs.clear()
            logs.update(self._test)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Replace the values of this rank by those of all ranks, in place. Collective."""
        logs, model = {} if logs is None else logs, self.model
        if self._train is None:
            own = {k: v for k, v in logs.items() if k in self._step}
            self._train = (
                mean_over_ranks(own, self._comm)
                if self._test
                else over_all_ranks(model, own, self._starts or {}, self._comm)
            )
        # Keras copies the logs of a validation before it passes them to callbacks, so they are replaced here again.
        combined = self._train | {f"val_{k}": v for k, v in self._test.items()}
        logs.update({k: v for k, v in combined.items() if k in logs or (self._idle and k.startswith("val_"))})

    def on_train_end(self, logs: Logs = None) -> None:
        """Forget the last step, so that an `evaluate` after the fit has no training metrics to combine."""
        self._step = {}


def combine_states(variables: Sequence[Variable], starts: States, comm: Comm) -> None:
    """Make the variables of metrics hold the combined counts of all ranks. Collective.

    Args:
        variables: variables of the metrics.
        starts: their states from which the ranks have counted; from 0 for those that are not in it.
        comm: the ranks.
    """
    if not variables:
        return
    values = [_value(v) for v in variables]
    begun = [starts.get(id(v), np.zeros_like(value)) for v, value in zip(variables, values, strict=True)]
    # The states from which the ranks counted are those of rank 0: a rank that has joined since begins with others.
    mine = [
        (value - start) * _weight(v, comm) + (start if comm.rank == 0 else 0)
        for v, value, start in zip(variables, values, begun, strict=True)
    ]
    total = comm.all_reduce_sum(np.concatenate([np.ravel(x) for x in mine]), "metrics")
    pieces = np.split(total, np.cumsum([x.size for x in mine])[:-1])
    for variable, piece in zip(variables, pieces, strict=True):
        variable.assign(piece.reshape(variable.shape).astype(dtype_of(variable.dtype)))


def _value(variable: Variable) -> np.ndarray:
    return view_of(variable).astype(np.float64)


def _weight(variable: Variable, comm: Comm) -> float:
    """Return the weight of this rank's counts in the sum, by the aggregation that the metric declared."""
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "sum":
        return 1
    if aggregation == "only_first_replica":
        return float(comm.rank == 0)
    return 1 / comm.size


def _flat(logs: Mapping[str, object]) -> LogValues:
    """Return values by their names, as Keras passes them to callbacks: a metric's result may be a dictionary."""
    flat: LogValues = {}
    for name, value in logs.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def plain(value: object) -> float | np.ndarray:
    """Convert a metric's result to a float, or to an array if it has several values or is no number."""
    array = np.asarray(value)
    return float(array) if array.ndim == 0 and array.dtype.kind not in "OSU" else array


def as_numbers(value: object) -> np.ndarray | None:
    """Return a number or the numbers in an array, a tensor or a list as float64; None for anything else."""
    try:
        array = np.asarray(value)
        return None if array.dtype.kind in "OSU" else array.astype(np.float64)
    except (NotImplementedError, TypeError, ValueError):  # the first is that of a tensor in a graph
        return None


def _mean(name: str, arrays: list[np.ndarray], comm: Comm) -> float | np.ndarray:
    """Return the mean of the ranks' arrays, or rank 0's array if their shapes differ."""
    if all(array.shape == arrays[0].shape for array in arrays):
        return plain(np.mean(arrays, axis=0))
    if comm.rank == 0:
        _tell_of_shapes(name)
    return plain(arrays[0])


@functools.cache
def _tell_of_shapes(name: str) -> None:
    _log.warning(
        f"train_step or test_step returns {name!r}, of different shapes on the ranks, so the logs hold only rank "
        "0's value. Return its mean over the samples, or use a metric."
    )
