"""Adapter for strategies on the host in which each rank may take several steps alone between two exchanges."""

import weakref
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.comm.host_graph import on_host, wait_for
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import apply_constraints, device_of
from hvdx.keras.adapters.host import HostAdapter
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.weight_parts import part_of
from hvdx.strategies import Strategy
from hvdx.strategies.base import agree_on_steps


class PeriodicAdapter(HostAdapter):
    """Adapter that exchanges what a rank has added to its weights in a period, whose length the exchange chooses.

    In a period of one step the update of the step is exchanged, as by `HostAdapter`. In a longer one each rank's
    optimiser changes its own weights. At the end all ranks continue with the weights from before the period and the
    combined change, so their weights are the same after each exchange.

    Split layers have periods of one step.

    Args:
        strategy, comm, optimizer, name, gain: see `HostAdapter`.
    """

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(strategy, comm, optimizer, name, gain)
        # Periods by the `id` of each variable, as open exchanges.
        self._periods: dict[tuple[int, ...], _Period] = {}

    def apply(
        self, optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
    ) -> None:
        """Take the optimiser's step; exchange its updates, or at the end of a longer period the sum of them."""
        if any(part_of(v) is not None for v in variables):
            super().apply(optimizer, step, variables)
            return
        period, gradients, first_bad = self._period_of(variables), self._gradients, self._first_bad
        self._gradients = []
        wanted = self._weighed(updates.updates_of(optimizer, step, variables))
        period.expect(self._sample_sizes(optimizer, gradients, variables))

        def sample() -> Sequence[tf.Tensor]:
            # It costs some operations for each variable, and only that of the last step is exchanged.
            return self._sample(optimizer, gradients, variables)

        def only() -> tf.Tensor:
            self._exchange_updates(wanted, first_bad, variables, sample())
            period.restart(self._wanted(variables))
            return tf.constant(True)

        def first() -> tf.Tensor:
            period.begin(wanted)
            period.count(first_bad)
            return tf.constant(True)

        def between() -> tf.Tensor:
            updates.add(variables, wanted)
            period.count(first_bad)
            return tf.constant(True)

        def last() -> tf.Tensor:
            between()
            return self._end(period, sample())

        # One conditional, since each tensor that enters one costs an operation in every step.
        tf.switch_case(period.place, [only, first, between, last])

    def _end(self, period: "_Period", sample: Sequence[tf.Tensor]) -> tf.Tensor:
        """Exchange the changes of a period, and begin another one."""
        changes, variables = period.changes(), period.variables
        combined = self._call(
            changes, period.first_bad, variables, copy_results=False, sample=sample, steps=period.since
        )
        # The next step of the exchange overwrites the arrays of these tensors.
        wait_for(period.advance(combined))
        period.restart(self._wanted(variables, written=True))
        return tf.constant(True)

    def _wanted(self, variables: Sequence[Variable], written: bool = False) -> tf.Tensor:
        """Return the length of the next period, which the last exchange has chosen; see `chosen_period`."""
        # TensorFlow keeps `ask` until the process ends; see `HostAdapter._call`.
        key, adapter_ref = tuple(id(v) for v in variables), weakref.ref(self)

        def ask() -> list[np.int64]:
            adapter = adapter_ref()
            return [np.int64(1 if adapter is None else adapter.chosen_period(key, written))]

        (length,) = on_host(ask, [], [tf.int64])
        length.set_shape(())
        return length

    def chosen_period(self, key: tuple[int, ...], written: bool) -> int:
        """Return the length of the next period of some variables.

        Args:
            key: the `id` of each variable.
            written: whether the last exchange has cost passes over the weights, besides an addition as in each step.
        """
        exchange, _ = self._open[key]
        if written:
            exchange.applied()
        return exchange.period

    def _period_of(self, variables: Sequence[Variable]) -> "_Period":
        key = tuple(id(v) for v in variables)
        if key not in self._periods:
            with tf.init_scope():
                self._periods[key] = _Period(variables)
        return self._periods[key]

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return the optimiser's state, and in mid-period the weights."""
        apart = [v for p in self._periods.values() if int(p.since.numpy()) for v in p.variables] if now else []
        return super().rank_local_variables(now) + apart

    def flush(self) -> None:
        """End the periods of all lists of variables.

        Raises:
            ReplicaError: on all ranks, if they have taken different numbers of steps.
        """
        for period in self._periods.values():
            if agree_on_steps(int(period.since.numpy()), "the last exchange", self.comm):
                # A sample of zeros does not change the estimate of the noise.
                self._end(period, [tf.zeros(size) for size in period.samples])
                apply_constraints(period.variables)

    def drain(self) -> None:
        """End the periods: a checkpoint holds the weights of all ranks."""
        self.flush()

    def renew(self) -> None:
        for period in self._periods.values():
            period.restart(period.length)

    def reopen(self, variables: Sequence[Variable]) -> None:
        self.renew()
        super().reopen(variables)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        exchange, variables = self._latest()
        assert exchange is not None
        self._period_of(variables).length.assign(exchange.period)


class _Period:
    """Steps since the last exchange of some variables.

    Args:
        variables: the variables.

    Attributes:
        length: int64 variable, number of steps of the period.
        since: int64 variable, number of steps taken.
        first_bad: int32 variable, index of the first variable whose gradient was not finite; -1 if all were.
        samples: number of elements of each array of a sample of gradients, see `StepInput`.
    """

    def __init__(self, variables: Sequence[Variable]):
        self.variables = list(variables)
        with tf.device("CPU:0"):
            self.length = tf.Variable(1, dtype=tf.int64, trainable=False)
            self.since = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.first_bad = tf.Variable(-1, dtype=tf.int32, trainable=False)
        self.samples: list[int] = []
        # Weights at the begin of the period. They take no memory before the first period of several steps.
        self._base = [_empty(v) for v in variables]

    def expect(self, sizes: Sequence[int]) -> None:
        """Record the number of elements of each array of a sample."""
        self.samples = list(sizes)

    def begin(self, changes: Sequence[Gradient]) -> None:
        """Keep the weights, and add the updates of the first step of the period to them."""
        for base, variable, change in zip(self._base, self.variables, changes, strict=True):
            before = tf.convert_to_tensor(variable)
            # The variables share one array until the weights move to another, so nothing is copied.
            base.assign(before)
            if isinstance(change, tf.IndexedSlices):
                updates.add([variable], [change])
            else:
                raw_variable(variable).assign(before + tf.cast(change, before.dtype))

    def count(self, first_bad: int | tf.Tensor) -> None:
        """Count a step."""
        with tf.device("CPU:0"):
            self.since.assign_add(1)
            self.first_bad.assign(tf.where(self.first_bad < 0, tf.cast(first_bad, tf.int32), self.first_bad))

    @property
    def place(self) -> tf.Tensor:
        """int32, place of the next step in the period: 0 if it is the only one, 1 the first, 2 between, 3 the last."""
        with tf.device("CPU:0"):
            begins, ends = tf.equal(self.since, 0), self.since + 1 >= self.length
            return tf.where(ends, tf.where(begins, 0, 3), tf.where(begins, 1, 2))

    def changes(self) -> list[tf.Tensor]:
        """Return what this rank has added to each weight."""
        return [
            tf.convert_to_tensor(v) - tf.ensure_shape(tf.convert_to_tensor(base), v.shape)
            for v, base in zip(self.variables, self._base, strict=True)
        ]

    def advance(self, combined: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Set the weights to those at the begin plus a change, and return tensors that are computed after that."""
        # In place, since the weights from before are in use nowhere else.
        moved = updates.add(self._base, combined)
        return [
            raw_variable(v).assign(tf.ensure_shape(base, v.shape))
            for v, base in zip(self.variables, moved, strict=True)
        ]

    def restart(self, length: tf.Tensor) -> None:
        """Begin another period of some steps."""
        with tf.device("CPU:0"):
            self.length.assign(length)
            self.since.assign(0)
            self.first_bad.assign(-1)


def _empty(variable: Variable) -> tf.Variable:
    with tf.device(device_of(variable) or "CPU:0"):
        return tf.Variable(tf.zeros([0], variable.dtype), shape=tf.TensorShape(None), trainable=False)
