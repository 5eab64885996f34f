"""Periods of the weights between two exchanges: their steps, and the shared weights.

On the host, Python code counts and holds them. On a GPU, and where rows of weights are written, operations of the graph
do.
"""

import ctypes
import itertools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import EllipsisType

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm import clock
from hvdx.comm.host_graph import on_host
from hvdx.comm.memory import aligned
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import device_of, values_of, with_values
from hvdx.keras.adapters.host import alive, own_zeros
from hvdx.keras.seams.layers import on_assign, raw_variable
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import view_of
from hvdx.strategies import HostExchange, StepInput

# Elements that are computed at a time; they stay in the caches.
_TILE = 1 << 16
#: Number of exchanges from which the weights are not the shared ones.
APART = 2


class Period(ABC):
    """Steps since the last exchange of some variables, and the shared weights.

    After an exchange the weights are the shared ones plus a share of the residual. This would overwrite weights that
    the script writes itself, as clipping in `train_step` and constraints do. Such a script trains on the shared
    weights. Its writes are found when they are traced, or when weights change between the first exchange after a flush
    and the next.

    Attributes:
        variables: variables of the weights.
        samples: number of elements of each array of a sample of gradients, see `StepInput`.
    """

    def __init__(self, variables: Sequence[Variable]):
        self.variables = list(variables)
        self.samples: list[int] = []
        self._in_step = False
        # Keras keeps a variable as long as its model, and so what the variable holds.
        method = weakref.WeakMethod(self.note_write)

        def note() -> None:
            noted = method()
            if noted is not None:
                noted()

        for variable in variables:
            on_assign(variable, note)

    def expect(self, sizes: Sequence[int]) -> None:
        """Record the number of elements of each array of a sample."""
        self.samples = list(sizes)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Enclose a step of the optimiser, whose assignments are its own."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def note_write(self) -> None:
        """Note that the script is about to write one of the weights."""
        if self._in_step:
            return
        if tf.executing_eagerly():
            self.settle()
        else:
            with tf.init_scope():
                self.stay()

    @property
    def is_apart(self) -> bool:
        """True if the weights of this rank are not the shared ones."""
        return bool(self.taken) or self.goes_ahead

    @property
    @abstractmethod
    def taken(self) -> int:
        """Number of steps since the last exchange. Not in a graph."""

    @property
    @abstractmethod
    def goes_ahead(self) -> bool:
        """True if the weights are the shared ones plus a share of the residual. Not in a graph."""

    @abstractmethod
    def enter(self) -> None:
        """Begin a step whose gradients have been computed: return to the shared weights."""

    @abstractmethod
    def settle(self) -> None:
        """Return to the shared weights, after an exchange. Not in a graph."""

    @abstractmethod
    def stay(self) -> None:
        """Keep to the shared weights from here on. Not in a graph."""

    @abstractmethod
    def renew(self, length: int | None = None) -> None:
        """Prepare for new weights, and set the length of the period unless it is None. Not in a graph."""


class HostPeriod(Period):
    """Period on the host. Python code counts its steps, and holds the shared weights.

    Attributes:
        length: number of steps of the period.
        steps: number of steps taken.
        first_bad: index of the first variable whose gradient was not finite; -1 if all were.
        exchanges: number of exchanges since the last flush, at most `APART`; the weights are the shared ones before
            `APART` of them.
        moves: False if the script writes weights itself.
        trusts: True if it has not written them between the first exchange after a flush and the next step.
        shared: shared weights after an exchange, arrays of the shapes and dtypes of the variables.
    """

    def __init__(self, variables: Sequence[Variable]):
        super().__init__(variables)
        self.length, self.steps, self.first_bad, self.exchanges = 1, 0, -1, 0
        self.moves, self.trusts = True, False
        self._now = clock.timer()
        # Whether `enter` has run since the last step.
        self._entered = False
        # In the memory of TensorFlow, which has often kept as much of it from the initial values of the weights.
        self._memory = [own_zeros(math.prod(v.shape), "CPU:0", v.dtype) for v in variables]
        self.shared = [_writable(m).reshape(v.shape) for m, v in zip(self._memory, variables, strict=True)]

    @property
    def taken(self) -> int:
        return self.steps

    @property
    def goes_ahead(self) -> bool:
        return self.exchanges == APART

    def settle(self) -> None:
        if self.goes_ahead:
            self._write(tf.raw_ops.DeepCopy(x=shared) for shared in self.shared_tensors())
        if self.goes_ahead or self.trusts:
            self.exchanges, self.trusts = 0, False

    def stay(self) -> None:
        self.settle()
        self.moves = False

    def shared_tensors(self) -> list[tf.Tensor]:
        """Return the shared weights as tensors, which have the same memory."""
        return [tf.reshape(m, v.shape) for m, v in zip(self._memory, self.variables, strict=True)]

    def renew(self, length: int | None = None) -> None:
        if self._entered:
            # An exception has ended a step, and the variables have the memory of the shared weights.
            self._write(tf.raw_ops.DeepCopy(x=raw_variable(v)) for v in self.variables)
            self._entered = False
        self.length, self.steps, self.first_bad, self.exchanges = length or self.length, 0, -1, 0
        self.trusts = False

    def resume(self, exchange: HostExchange) -> None:
        """Undo `settle`, if the script does not write weights. Not in a graph."""
        self._keep([view_of(raw_variable(v)) for v in self.variables])
        if self.moves:
            self.exchanges = APART
            unsent, share = self._unsent(exchange)
            self._write(self._ahead(unsent, share))

    def enter(self) -> None:
        # TensorFlow keeps the function until the process ends.
        period = weakref.ref(self)

        def work(*weights: np.ndarray) -> Sequence[npt.ArrayLike]:
            return alive(period)._entered_with(weights)

        with tf.device("CPU:0"):
            weights = [tf.convert_to_tensor(v) for v in self.variables]
            found = on_host(work, weights, [w.dtype for w in weights], copy_results=False)
        for variable, value in zip(self.variables, found, strict=True):
            value.set_shape(variable.shape)
            raw_variable(variable).assign(value, read_value=False)

    def _entered_with(self, weights: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return the weights that the optimiser's step begins from, given those of the gradients.

        The latter's memory may still be read for other gradients, and Keras decays weights where they are.
        """
        self._check(weights)
        self._entered = True
        if not self.steps:
            if not self.exchanges:
                self._keep(weights)
            return self.shared
        copies = [aligned(w.size, w.dtype).reshape(w.shape) for w in weights]
        for copy, own in zip(copies, weights, strict=True):
            copy[...] = own
        return copies

    def advance(
        self,
        updates: Sequence[np.ndarray],
        weights: Sequence[np.ndarray],
        bad: int,
        sample: list[np.ndarray],
        exchange: Callable[[int, StepInput], tuple[HostExchange, Sequence[npt.ArrayLike]]],
        ends: bool = False,
    ) -> None:
        """Take a step, and exchange at the end of the period. Collective then.

        Args:
            updates: updates of the optimiser, which are replaced by the weights after the step; arrays of the shapes
                and dtypes of the variables.
            weights: the weights before the step.
            bad: index of the first variable whose gradient is not finite; -1 for none.
            sample: see `StepInput`; empty for none.
            exchange: function of the index of the first bad gradient of the period and of the input of the exchange.
            ends: no step is taken, the period ends, and `updates` holds the weights.
        """
        if not (ends or self.steps):
            if not self._entered:
                self._check(weights)
            # Since `enter`, Keras may have decayed the weights.
            if self._entered or not self.exchanges:
                self._keep(weights)
        self._entered = False
        only, steps = not (ends or self.steps) and self.length == 1, self.steps
        first_bad = bad if self.first_bad < 0 else self.first_bad
        if not (ends or only):
            for update, own in zip(updates, weights, strict=True):
                np.add(own, update, out=update)
            steps += 1
            if steps < self.length:
                self.steps, self.first_bad, self.exchanges = steps, first_bad, 0
                return
        begin = self._now()
        if not only:
            self.exchanges = 0
            for update, base in zip(updates, self.shared, strict=True):
                np.subtract(update, base, out=update)
        changes = [u.astype(np.float32, copy=False) for u in updates]
        preparing = 0.0 if only else self._now() - begin
        taken = StepInput(changes, sample=sample or None, preparing=preparing, steps=max(steps, 1), into=self.shared)
        opened, _ = exchange(first_bad, taken)
        unsent, share = self._unsent(opened)
        for base, rest, update in itertools.zip_longest(self.shared, unsent, updates):
            _set_ahead(base, rest, share, update)
        # Writing of the weights is cost: without an exchange, the optimiser would have written them.
        if steps > 1:
            opened.applied()
        exchanges = min(self.exchanges + 1, APART) if self.moves else 0
        self.length, self.steps, self.first_bad, self.exchanges = opened.period, 0, -1, exchanges

    def end(
        self,
        sample: list[np.ndarray],
        exchange: Callable[[int, StepInput], tuple[HostExchange, Sequence[npt.ArrayLike]]],
    ) -> None:
        """End the period before its last step. Not in a graph; collective.

        Args:
            sample, exchange: see `advance`.
        """
        # An eager operation copies its inputs and its results.
        memory = [own_zeros(base.size, "CPU:0", base.dtype) for base in self.shared]
        weights = [_writable(m).reshape(base.shape) for m, base in zip(memory, self.shared, strict=True)]
        for own, variable in zip(weights, self.variables, strict=True):
            own[...] = view_of(raw_variable(variable))
        self.advance(weights, (), self.first_bad, sample, exchange, ends=True)
        self._write(tf.reshape(m, base.shape) for m, base in zip(memory, self.shared, strict=True))

    def _check(self, weights: Sequence[np.ndarray]) -> None:
        """Find out whether the script has written weights since the first exchange after a flush."""
        if self.exchanges == 1 and not self.trusts:
            self.trusts = are_equal(weights, self.shared)
            if not self.trusts:
                self.moves, self.exchanges = False, 0

    def _keep(self, weights: Sequence[np.ndarray]) -> None:
        for base, own in zip(self.shared, weights, strict=True):
            # After `enter`, the variables have the memory of the shared weights until somebody writes to them.
            if base.ctypes.data != own.ctypes.data:
                base[...] = own

    def _unsent(self, exchange: HostExchange) -> tuple[list[np.ndarray], np.float32]:
        """Return the residual, or nothing, and the share of it by which weights go ahead of the shared ones."""
        # A period of several steps begins from the shared weights, from which its changes are measured.
        ahead = self.moves and self.exchanges and exchange.period == 1
        share = np.float32(exchange.unsent_share if ahead else 0.0)
        return [np.asarray(rest) for rest in exchange.unsent()] if share else [], share

    def _ahead(self, unsent: Sequence[np.ndarray], share: np.float32) -> Iterator[tf.Tensor]:
        """Yield the weights ahead of the shared ones; see `_set_ahead`."""
        for base, rest in itertools.zip_longest(self.shared, unsent):
            memory = own_zeros(base.size, "CPU:0", base.dtype)
            _set_ahead(base, rest, share, _writable(memory).reshape(base.shape))
            yield tf.reshape(memory, base.shape)

    def _write(self, tensors: Iterable[tf.Tensor]) -> None:
        """Set the variables to tensors that nobody changes."""
        for variable, tensor in zip(self.variables, tensors, strict=True):
            raw_variable(variable).assign(tensor, read_value=False)


class GraphPeriod(Period):
    """Period in the graph, on the device of the weights; for the host see `HostPeriod`.

    Args:
        variables: variables of the weights.
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
        """Return `wanted`, the updates of the step, if it is the only one of the period, else `changes`."""
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
        """Set the weights to the shared ones plus a share of the residual; return tensors computed after that."""
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


def are_equal(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Return whether arrays have the same elements."""
    pairs = zip(some, others, strict=True)
    return all(np.array_equal(a[part], b[part]) for a, b in pairs for part in _parts(a))


def _writable(vector: tf.Tensor) -> np.ndarray:
    """Return an array with the memory of an eager tensor on the CPU, which nobody else may use."""
    view = np.asarray(vector)
    memory = (ctypes.c_char * view.nbytes).from_address(view.ctypes.data)
    # The array keeps the tensor, and so its memory.
    weakref.finalize(memory, id, vector)
    return np.ndarray(view.shape, view.dtype, memoryview(memory))


def _set_ahead(shared: np.ndarray, unsent: np.ndarray | None, share: np.float32, out: np.ndarray) -> None:
    """Set `out` to shared weights plus a share of the residual; without `unsent`, to the former alone."""
    if unsent is None:
        out[...] = shared
        return
    for part in _parts(shared):
        ahead = np.multiply(unsent[part], share, out=out[part] if out.dtype == unsent.dtype else None)
        np.add(shared[part], ahead.astype(shared.dtype, copy=False), out=out[part])


def _parts(array: np.ndarray) -> list[slice] | list[EllipsisType]:
    """Return indices of rows of an array that stay in the caches; of a small one the index of all."""
    if array.size <= _TILE:
        return [...]
    rows = max(1, len(array) * _TILE // array.size)
    return [slice(at, at + rows) for at in range(0, len(array), rows)]


def nothing() -> tf.Tensor:
    """Return a value for a branch in which nothing is done."""
    return tf.constant(True)


def _any_shape(variable: Variable) -> tf.Variable:
    """Return a variable of no element on the device of another, for values of any shape."""
    device = device_of(variable) or "CPU:0"
    with tf.device(device):
        return tf.Variable(own_zeros([0], device, variable.dtype), shape=tf.TensorShape(None), trainable=False)
