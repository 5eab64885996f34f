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


def over_all_ranks(model: Any, logs: dict[str, Any], comm: Comm) -> dict[str, Any]:
    """The values of `logs` over all ranks.

    Args:
        model: a compiled model; its metrics' variables are left holding the combined counts.
        logs: this rank's values.
        comm: the ranks.

    Returns:
        The same keys. What is no metric of the model (a custom `train_step` returns what it likes) becomes the plain
        mean over ranks where it is a number on all of them, and stays as it is where not.
    """
    _combine_states(model, comm)
    results = {k: _plain(v) for k, v in model.get_metrics_result().items()}
    rest = {k: number for k, v in logs.items() if k not in results and (number := _number(v)) is not None}
    everyone = comm.all_gather_object(rest, "logs")
    means = {k: float(np.mean([r[k] for r in everyone])) for k in rest if all(k in r for r in everyone)}
    return {k: results.get(k, means.get(k, v)) for k, v in logs.items()}


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
