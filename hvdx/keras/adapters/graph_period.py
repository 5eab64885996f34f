"""Periods of the weights between two exchanges whose steps are operations of the graph: on a GPU, and of rows."""

import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdx.comm.host_graph import on_host
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import device_of, values_of, with_values
from hvdx.keras.adapters.host import own_zeros
from hvdx.keras.adapters.period import APART, HostPeriod, Period, are_equal
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import view_of


class GraphPeriod(Period):
    """Period in the graph, on the device of the weights; for the host see `HostPeriod`.

    Args:
        variables: the variables.
        before: period of the same variables on the host, from which this one goes on.

    Attributes:
        length: int64 variable, number of steps of the period.
        since: int64 variable, number of steps taken.
        first_bad: int32 variable, index of the first variable whose gradient was not finite; -1 if all were.
    """

    def __init__(self, variables: Sequence[Variable], before: HostPeriod | None = None):
        super().__init__(variables)
        earlier = before or HostPeriod([])
        with tf.device("CPU:0"):
            self.length = tf.Variable(earlier.length, dtype=tf.int64, trainable=False)
            self.since = tf.Variable(earlier.steps, dtype=tf.int64, trainable=False)
            self.first_bad = tf.Variable(earlier.first_bad, dtype=tf.int32, trainable=False)
            # See `HostPeriod`.
            self._exchanges = tf.Variable(earlier.exchanges, dtype=tf.int32, trainable=False)
            self._moves = tf.Variable(earlier.moves, trainable=False)
        # Shared weights. They take no memory before the first exchange.
        self._base = [_any_shape(v) for v in variables]
        for base, shared in zip(self._base, earlier.shared_tensors(), strict=False):
            base.assign(shared, read_value=False)

    def stay(self) -> None:
        self.settle()
        self._moves.assign(False)

    @property
    def taken(self) -> int:
        return int(self.since.numpy())

    @property
    def goes_ahead(self) -> bool:
        return bool(self._exchanges.numpy() == APART)

    def settle(self) -> None:
        if self.goes_ahead:
            self._return()
            self._exchanges.assign(0)

    def resume(self, share: tf.Tensor, unsent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Undo `settle`, if the script does not write weights; see `leave`. Not in a graph."""
        self.keep()
        self._exchanges.assign(APART)
        return self.leave(share, unsent)

    def keep(self) -> tf.Tensor:
        """Keep the weights as the shared ones."""
        for base, variable in zip(self._base, self.variables, strict=True):
            # On a GPU the variables share one array until the weights move to another.
            base.assign(tf.convert_to_tensor(variable), read_value=False)
        return tf.constant(True)

    def _return(self) -> tf.Tensor:
        for variable, shared in zip(self.variables, self.shared(), strict=True):
            raw_variable(variable).assign(shared, read_value=False)
        return tf.constant(True)

    def shared(self) -> list[tf.Tensor]:
        """Return the shared weights, after an exchange."""
        shared = [tf.convert_to_tensor(base) for base in self._base]
        for tensor, variable in zip(shared, self.variables, strict=True):
            tensor.set_shape(variable.shape)
        return shared

    def renew(self, length: int | None = None) -> None:
        self.restart(length or self.length)
        self._exchanges.assign(0)

    def enter(self) -> None:
        # TensorFlow keeps the function until the process ends.
        period = weakref.ref(self)

        def unwritten() -> list[np.bool_]:
            # Once after a flush, so Python reads the weights, and the graph is smaller.
            there = period()
            return [np.bool_(there is not None and there.is_unwritten)]

        def check() -> tf.Tensor:
            (alike,) = on_host(unwritten, [], [tf.bool])
            with tf.device("CPU:0"):
                alike = tf.reshape(alike, [])
                self._moves.assign(tf.logical_and(self._moves, alike))
                self._exchanges.assign(tf.cast(alike, tf.int32))
            return tf.constant(True)

        with tf.device("CPU:0"):
            first = tf.equal(self._exchanges, 1)
        tf.cond(first, check, nothing)
        with tf.device("CPU:0"):
            exchanged = self._exchanges > 0
        tf.cond(exchanged, self._return, nothing)

    @property
    def is_unwritten(self) -> bool:
        """True if the weights are the shared ones. Not in a graph."""
        return are_equal([view_of(raw_variable(v)) for v in self.variables], [view_of(b) for b in self._base])

    def go_alone(self, changes: Sequence[Gradient], first_bad: int | tf.Tensor) -> None:
        """Count a step, and add its updates to the weights of this rank."""
        with tf.device("CPU:0"):
            self._exchanges.assign(0)
            self.since.assign_add(1)
            self.first_bad.assign(tf.where(self.first_bad < 0, tf.cast(first_bad, tf.int32), self.first_bad))
        updates.add(self.variables, changes)

    def changes(self) -> list[tf.Tensor]:
        """Return what this rank has added to each weight."""
        pairs = zip(self.variables, self.shared(), strict=True)
        return [tf.convert_to_tensor(v) - shared for v, shared in pairs]

    def changes_or(self, only: tf.Tensor, wanted: Sequence[Gradient]) -> list[tf.Tensor]:
        """Return the updates of the step if it is the only one of the period, else `changes`.

        Args:
            only: bool scalar, whether it is.
            wanted: updates of the step, one for each variable.
        """
        if tf.executing_eagerly():
            return [tf.convert_to_tensor(u) for u in wanted] if only else self.changes()
        changes = []
        for update, variable, shared in zip(wanted, self.variables, self.shared(), strict=True):
            # A conditional would make a function, see `HostAdapter`. What is not chosen is not computed.
            weights, _ = tf.raw_ops.Switch(data=tf.convert_to_tensor(variable), pred=only)
            _, values = tf.raw_ops.Switch(data=values_of(update), pred=only)
            alone = tf.convert_to_tensor(with_values(update, values))
            changes.append(tf.raw_ops.Merge(inputs=[alone, weights - shared])[0])
        return changes

    def add(self, combined: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add a change to the shared weights, and return tensors that are computed after that."""
        # In place, since the weights from before are in use nowhere else.
        return updates.add(self._base, combined)

    def leave(self, share: tf.Tensor, unsent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Set the weights to the shared ones plus a share of the residual; return tensors computed after that.

        Args:
            share: factor of the residual, a scalar.
            unsent: the residual, see `HostExchange.unsent`.
        """
        with tf.device("CPU:0"):
            before = self._exchanges.read_value()
            share = share * tf.cast(tf.logical_and(self._moves, before > 0), share.dtype)
            self._exchanges.assign(tf.where(self._moves, tf.minimum(before + 1, APART), 0))
        moved = []
        for variable, shared, rest in zip(self.variables, self.shared(), unsent, strict=True):
            ahead = shared + tf.cast(share * rest, shared.dtype)
            moved.append(raw_variable(variable).assign(ahead, read_value=False))
        return moved

    def restart(self, length: int | tf.Tensor) -> None:
        """Begin another period of some steps."""
        with tf.device("CPU:0"):
            self.length.assign(length)
            self.since.assign(0)
            self.first_bad.assign(-1)


def nothing() -> tf.Tensor:
    """Return a value for a branch in which nothing is done."""
    return tf.constant(True)


def _any_shape(variable: Variable) -> tf.Variable:
    """Return a variable of no element on the device of another, for values of any shape."""
    device = device_of(variable) or "CPU:0"
    with tf.device(device):
        return tf.Variable(own_zeros([0], device, variable.dtype), shape=tf.TensorShape(None), trainable=False)
