"""NaN and infinity in gradients and weights: the rank, step and gradient where they first occurred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdx.comm import Comm
from hvdx.errors import ReplicaError
from hvdx.keras import backend
from hvdx.keras.adapters.base import values_of, with_values
from hvdx.keras.backend import tf
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import view_of
from hvdx.log import Log

_log = Log(__name__)

# The cheapest tensor summary of tfdbg, in one pass without a copy: [an id, whether the tensor holds NaN or infinity].
_HEALTH = 2
_FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


class FirstBad:
    """Record of the first step in which a gradient of this rank held NaN or infinity; part of the training function.

    Attributes:
        found: int64[2] variable: number of the step, counted from 1, and index of the gradient; [0, 0] if none.

    Example:
        >>> first = FirstBad()
        >>> seen = first.look([tf.constant([1.0]), tf.constant([float("nan")])], tf.constant(7, tf.int64))
        >>> first.found.numpy().tolist()
        [7, 1]
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self.found = tf.Variable([0, 0], dtype=tf.int64, trainable=False)

    def reset(self) -> None:
        """Clear the record."""
        self.found.assign([0, 0])

    def look(self, gradients: Sequence[Gradient], step: tf.Tensor) -> list[Gradient]:
        """Record the step if one of its gradients is the first to hold NaN or infinity.

        Args:
            gradients: those that are not floating-point count as finite.
            step: int64 scalar, number of the step.

        Returns:
            The gradients after they have been read: the all-reduce can then write to their memory.
        """
        if not gradients:
            return []
        read = [_health(values_of(g)) for g in gradients]
        bad = tf.stack(read)[:, 1]
        with tf.device("CPU:0"):
            now = tf.stack([step, tf.argmax(bad, output_type=tf.int64)])
            first = tf.logical_and(tf.reduce_any(bad > 0), self.found[0] == 0)
            self.found.assign(tf.where(first, now, self.found))
        return [with_values(g, _after(r, values_of(g))) for g, r in zip(gradients, read, strict=True)]


def bad_flags(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return float32[n]: 1 for each tensor that holds NaN or infinity, 0 for the others."""
    return tf.stack([_health(value) for value in values])[:, 1]


def are_bad(weights: Sequence[Variable]) -> list[bool]:
    """Return for each of some weights whether it holds NaN or infinity."""
    if backend.name() != "tensorflow":
        return [holds_bad(view_of(v)) for v in weights]
    flags = bad_flags([tf.convert_to_tensor(v) for v in weights]).numpy() if weights else []
    return [bool(flag) for flag in flags]


def holds_bad(array: np.ndarray) -> bool:
    """Return whether an array holds NaN or infinity.

    Example:
        >>> holds_bad(np.ones(2)), holds_bad(np.array([0.0, np.nan]))
        (False, True)
    """
    # One pass over the array; a sum of finite numbers may overflow.
    return bool(not np.isfinite(array.sum()) and not np.isfinite(array).all())


def check(
    weights: Sequence[Variable], firsts: Sequence[tuple[int, str]], comm: Comm, when: str, terminates: bool = False
) -> bool:
    """Stop if weights hold NaN or infinity; print a warning if only a gradient held them. Collective.

    Args:
        firsts: for each optimiser, the step in which a gradient of this rank first held NaN or infinity (0 if none),
            and the name of the gradient's variable.
        when: time of the check for the message, such as "after epoch 3".
        terminates: only print a warning, because a `TerminateOnNaN` of the script stops the fit.

    Returns:
        Whether weights hold NaN or infinity, on any rank.

    Raises:
        ReplicaError: on every rank, if weights of a rank hold NaN or infinity.
    """
    bad_here = are_bad(weights)
    mine = (
        next((v.path for v, bad in zip(weights, bad_here, strict=True) if bad), ""),
        min((first for first in firsts if first[0]), default=(0, "")),
    )
    everyone = comm.all_gather_object(mine, "NaN in the weights")
    began = sorted((step, rank, name) for rank, (_, (step, name)) in enumerate(everyone) if step)
    source = ""
    if began:
        first = [(rank, name) for step, rank, name in began if step == began[0][0]]
        ranks = ", ".join(str(rank) for rank, _ in first)
        source = (
            f"It began in step {began[0][0]} of this fit on rank{'s' * (len(first) > 1)} {ranks}, in the gradient of "
            f"{first[0][1]}"
        )
    bad = [rank for rank, (name, _) in enumerate(everyone) if name]
    if bad:
        which = "all ranks" if len(bad) == comm.size else f"rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
        text = (
            f"the weights hold NaN or infinity {when}: {everyone[bad[0]][0]} on {which}. "
            + (f"{source}: check the input of that rank. " if source else "")
            + "If no input holds NaN or infinity, lower the learning rate or clip the gradients. "
        )
        if not terminates:
            raise ReplicaError(f"{text}Training was stopped; no checkpoint of these weights should be used.")
        if comm.rank == 0:
            _log.warning(f"{text}No checkpoint of these weights should be used.", head="hvdx: warning: ")
        return True
    if source and comm.rank == 0:
        _log.warning(
            f"a gradient held NaN or infinity. {source}; the weights are finite {when}.", head="hvdx: warning: "
        )
    return False


def _after(read: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([read]):
        return tf.identity(value)


def _health(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.name not in _FLOAT_DTYPES:
        return tf.zeros(2)
    return tf.raw_ops.DebugNumericSummaryV2(
        input=value, output_dtype=tf.float32, tensor_debug_mode=_HEALTH, tensor_id=0
    )
