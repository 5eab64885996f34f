"""Adapter for strategies on the host in which each rank may take several steps alone between two exchanges."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import EllipsisType
from typing import NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.comm.host_graph import change, copied_ones, on_host, wait_for
from hvdx.errors import HvdxError
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import apply_constraints, device_of, values_of, with_values
from hvdx.keras.adapters.host import DELETED, HostAdapter, own_zeros, unsent_on_gpu
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.layers import on_assign, raw_variable
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import view_of
from hvdx.keras.weight_parts import part_of
from hvdx.strategies import HostExchange, StepInput, Strategy
from hvdx.strategies.base import agree_on_steps


class PeriodicAdapter(HostAdapter):
    """Adapter that exchanges what a rank has added to its weights in a period, whose length the exchange chooses.

    Between two exchanges, each rank's optimiser changes its own weights. After an exchange all ranks have the same
    shared weights, to which the combined changes were added. In periods of one step, a rank goes on from the shared
    weights plus a share of its residual, so its optimiser sees the effect of all its updates. `flush` returns to the
    shared weights.

    Split layers are exchanged in each step.

    Args:
        strategy, comm, optimizer, name, gain: see `HostAdapter`.

    Source: step-ahead error feedback, Xu et al. 2021 (arXiv:2008.05823).
    """

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(strategy, comm, optimizer, name, gain)
        # Periods by the `id` of each variable, as open exchanges.
        self._periods: dict[tuple[int, ...], _Period] = {}
        self._reads_weights = updates.reads_weights(innermost(optimizer))
        # Whether the step that is being traced has called `_Period.enter`.
        self._entered = False
        # Periods to which `go_on` is to return.
        self._drained: list[_Period] = []

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        if not _are_split(self.variables):
            # Keras decays the weights next, and an update may depend on them: those are the shared weights.
            self._entered = self._reads_weights or any(isinstance(g, tf.IndexedSlices) for g in gradients)
            period = self._period_of(self.variables)
            if self._entered or not period.on_host:
                period.enter()
        return super().gradients(gradients)

    def apply(
        self, optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
    ) -> None:
        """Take the optimiser's step; exchange its updates, or at the end of a longer period the sum of them."""
        if _are_split(variables):
            super().apply(optimizer, step, variables)
            return
        period, gradients, first_bad = self._period_of(variables), self._gradients, self._first_bad
        self._gradients = []
        with period.in_step():
            wanted = self._weighed(updates.updates_of(optimizer, step, variables))
        # Only that of the last step is exchanged, but a gradient that waits for it would keep its memory.
        sample = self._sample(optimizer, gradients, variables)
        period.expect(self._sample_sizes(optimizer, gradients, variables), wanted)
        if period.on_host:
            self._advance(period, wanted, first_bad, sample)
        else:
            self._advance_in_graph(period, wanted, first_bad, sample)

    def _advance(
        self,
        period: "_Period",
        wanted: Sequence[Gradient],
        first_bad: int | tf.Tensor,
        sample: Sequence[tf.Tensor],
        ends: bool = False,
    ) -> None:
        """Take a step of a period on the host, in one operation of the graph.

        Args:
            period: the period.
            wanted: updates of the step, one for each variable.
            first_bad, sample: see `HostAdapter._call`.
            ends: no step is taken, the period ends, and `wanted` holds the weights.
        """
        variables = period.variables
        with tf.device("CPU:0"):
            updates = [tf.cast(tf.convert_to_tensor(u), v.dtype) for u, v in zip(wanted, variables, strict=True)]
            weights, shared = [tf.convert_to_tensor(v) for v in variables], period.shared()
            others = [tf.cast(first_bad, tf.int64), period.state(), *weights, *shared]
            others += [tf.cast(s, tf.float32) for s in sample]
            copied = copied_ones(shared)
            dtypes = [tf.int64, *(shared[i].dtype for i in copied)]
            work = self._work_of(variables, copied, self._entered, ends)
            (state, *found), after = change(work, updates, others, dtypes)
            state.set_shape([len(_State._fields)])
            written = period.set(state, after, dict(zip(copied, found, strict=True)))
        wait_for(written)

    def _work_of(
        self, variables: Sequence[Variable], copied: Sequence[int], entered: bool, ends: bool
    ) -> Callable[..., Sequence[npt.ArrayLike]]:
        """Return the Python code of `_advance`, which changes the shared weights in place.

        Its arguments are the updates, which it replaces by the weights; the index of the first variable whose gradient
        is not finite; the numbers of a `_State`; of each variable the weights, and the shared weights; then the sample.
        It returns the state, and the shared weights that are `copied`.
        """
        count, step = len(variables), self._step_of(variables)

        def work(
            updates: Sequence[np.ndarray], bad: int, numbers: np.ndarray, *arrays: np.ndarray
        ) -> Sequence[npt.ArrayLike]:
            state = _State(*map(int, numbers))
            weights, shared, sample = arrays[:count], arrays[count : 2 * count], list(arrays[2 * count :])
            kept = [shared[i] for i in copied]
            if not (ends or state.since):
                state = state.begun(weights, shared, entered)
            only = not (ends or state.since) and state.length == 1
            if not (ends or only):
                _each(np.add, weights, updates, updates)
                state = state.alone(int(bad))
                if state.since < state.length:
                    return [np.array(state), *kept]
            if not only:
                _each(np.subtract, updates, shared, updates)
            changes = [u.astype(np.float32, copy=False) for u in updates]
            taken = StepInput(changes, sample=sample or None, steps=max(state.since, 1), into=shared)
            exchange, _ = step(int(bad) if only else state.first_bad, taken)
            # A period of several steps begins from the shared weights, from which its changes are measured.
            share = exchange.unsent_share if state.moves and state.exchanges and exchange.period == 1 else 0.0
            unsent = [np.asarray(rest) for rest in exchange.unsent()] if share else []
            _set_ahead(shared, unsent, np.float32(share), updates)
            # Writing of the weights is cost: without an exchange, the optimiser would have written them.
            if state.since > 1:
                exchange.applied()
            return [np.array(state.exchanged(exchange.period)), *kept]

        return work

    def _advance_in_graph(
        self,
        period: "_Period",
        wanted: Sequence[Gradient],
        first_bad: int | tf.Tensor,
        sample: Sequence[tf.Tensor],
    ) -> None:
        """Take a step of a period whose weights are on a GPU, or have sparse updates; see `_advance`."""
        with tf.device("CPU:0"):
            begins, ends = tf.equal(period.since, 0), period.since + 1 >= period.length
            only = tf.logical_and(begins, ends)

        def go_alone() -> tf.Tensor:
            period.go_alone(wanted, first_bad)
            return tf.constant(True)

        def exchange() -> tf.Tensor:
            with tf.device("CPU:0"):
                steps = tf.where(only, tf.ones_like(period.since), period.since)
                bad = tf.where(only, tf.cast(first_bad, tf.int32), period.first_bad)
            return self._exchange_in_graph(period, period.changes_or(only, wanted), bad, sample, steps)

        # The first step of a run is slower for each operation that is traced, so each is in one branch only.
        tf.cond(begins, period.keep, _nothing)
        tf.cond(only, _nothing, go_alone)
        tf.cond(ends, exchange, _nothing)

    def _exchange_in_graph(
        self,
        period: "_Period",
        changes: Sequence[tf.Tensor],
        first_bad: int | tf.Tensor,
        sample: Sequence[tf.Tensor],
        steps: tf.Tensor,
    ) -> tf.Tensor:
        """Exchange changes of the weights, set the weights to the result, and begin another period."""
        variables = period.variables
        combined = self._call(list(changes), first_bad, variables, copy_results=False, sample=sample, steps=steps)
        # The next step of the exchange overwrites the arrays of these tensors.
        wait_for(period.add(combined))
        share, unsent = self._unsent(variables)
        wait_for(period.leave(share, unsent))
        period.restart(self._wanted(variables, steps))
        return tf.constant(True)

    def _exchange_of(self, variables: Sequence[Variable]) -> Callable[[], HostExchange]:
        """Return a function that returns the open exchange of some variables, for an operation of the graph."""
        # TensorFlow keeps the function until the process ends; see `HostAdapter._call`.
        key, adapter_ref = tuple(id(v) for v in variables), weakref.ref(self)

        def exchange() -> HostExchange:
            adapter = adapter_ref()
            if adapter is None:
                raise HvdxError(DELETED)
            return adapter.open_for(key)

        return exchange

    def open_for(self, key: tuple[int, ...]) -> HostExchange:
        """Return the open exchange of some variables, given the `id` of each."""
        return self._open[key][0]

    def _unsent(self, variables: Sequence[Variable]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return `unsent_share` and `unsent` of the exchange of some variables."""
        exchange, there = self._exchange_of(variables), self._on_device(variables)

        def ask() -> list[npt.ArrayLike]:
            opened = exchange()
            # A period of several steps begins from the shared weights, from which its changes are measured.
            share = opened.unsent_share if opened.period == 1 else 0.0
            return [np.float32(share), *([] if there else opened.unsent())]

        share, *unsent = on_host(ask, [], [tf.float32] * (1 if there else 1 + len(variables)), copy_results=False)
        share.set_shape(())
        for tensor, variable in zip(unsent, () if there else variables, strict=True):
            tensor.set_shape(variable.shape)
        return share, unsent_on_gpu(exchange, variables) if there else unsent

    def _wanted(self, variables: Sequence[Variable], steps: int | tf.Tensor) -> tf.Tensor:
        """Return the length of the next period, which the last exchange has chosen."""
        exchange = self._exchange_of(variables)

        def ask(steps: np.ndarray) -> list[np.int64]:
            # Writing of the weights is cost: without an exchange, the optimiser would have written them.
            if steps > 1:
                exchange().applied()
            return [np.int64(exchange().period)]

        (length,) = on_host(ask, [tf.cast(steps, tf.int64)], [tf.int64])
        length.set_shape(())
        return length

    def _period_of(self, variables: Sequence[Variable]) -> "_Period":
        key = tuple(id(v) for v in variables)
        if key not in self._periods:
            # Variables that are made in `tf.init_scope` count as made by the function that is being traced, which
            # TensorFlow then traces once more. Another thread has no graph.
            with ThreadPoolExecutor(1) as thread:
                self._periods[key] = thread.submit(self._make_period, variables).result()
        return self._periods[key]

    def _make_period(self, variables: Sequence[Variable]) -> "_Period":
        made, mine = _Period(variables, not self._on_device(variables)), {id(v) for v in variables}
        # Each of two lists would restore its own weights of a variable that is in both.
        for other in (p for p in self._periods.values() if mine & {id(v) for v in p.variables}):
            for period in (other, made):
                period.stay()
        return made

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return the optimiser's state, and in mid-period the weights."""
        apart = [v for p in self._periods.values() if p.is_apart for v in p.variables] if now else []
        return super().rank_local_variables(now) + apart

    def flush(self) -> None:
        """End the periods of all lists of variables, and return to the shared weights.

        Raises:
            ReplicaError: on all ranks, if they have taken different numbers of steps.
        """
        for period in self._periods.values():
            if agree_on_steps(int(period.since.numpy()), "the last exchange", self.comm):
                # A sample of zeros does not change the estimate of the noise.
                sample = [tf.zeros(size) for size in period.samples]
                if period.on_host:
                    weights = [tf.convert_to_tensor(v) for v in period.variables]
                    self._advance(period, weights, period.first_bad, sample, ends=True)
                else:
                    self._exchange_in_graph(period, period.changes(), period.first_bad, sample, period.since)
                apply_constraints(period.variables)
            period.settle()

    def drain(self) -> None:
        """End the periods: a checkpoint holds the weights of all ranks."""
        apart = [period for period in self._periods.values() if period.goes_ahead]
        self.flush()
        self._drained = apart

    def go_on(self) -> None:
        for period in self._drained:
            wait_for(period.resume(*self._unsent(period.variables)))
        self._drained = []

    def begin_epoch(self) -> None:
        self.go_on()

    def renew(self) -> None:
        for period in self._periods.values():
            period.renew()

    def reopen(self, variables: Sequence[Variable]) -> None:
        self.renew()
        super().reopen(variables)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state of the exchange, with an entry "ahead" if `go_on` leaves the shared weights."""
        return super().state_dict() | ({"ahead": np.ones((), np.int8)} if self._drained else {})

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        exchange, variables = self._latest()
        assert exchange is not None
        period = self._period_of(variables)
        period.length.assign(exchange.period)
        self._drained = [period] if "ahead" in state else []


# Elements that are computed at a time; they stay in the caches.
_TILE = 1 << 16
# Number of exchanges from which the weights are not the shared ones.
_APART = 2


def _are_split(variables: Sequence[Variable]) -> bool:
    return any(part_of(v) is not None for v in variables)


class _State(NamedTuple):
    """Numbers of a period, as the Python code of a step has them; see `_Period`."""

    since: int
    length: int
    first_bad: int
    exchanges: int
    moves: int

    def begun(self, weights: Sequence[np.ndarray], shared: Sequence[np.ndarray], entered: bool) -> "_State":
        """Return the state when a period begins, and keep the weights as the shared ones where they are those.

        Args:
            weights, shared: arrays of each variable; the latter are changed.
            entered: see `_Period.enter`.
        """
        state = self
        if not entered and state.exchanges == 1:
            alike = _are_equal(weights, shared)
            state = state._replace(moves=int(state.moves and alike), exchanges=int(alike))
        if entered or not state.exchanges:
            for own, base in zip(weights, shared, strict=True):
                # After `enter` they are the same array.
                if own.__array_interface__["data"] != base.__array_interface__["data"]:
                    base[...] = own
        return state

    def alone(self, bad: int) -> "_State":
        """Return the state after a step whose updates were added to this rank's own weights."""
        first_bad = bad if self.first_bad < 0 else self.first_bad
        return self._replace(since=self.since + 1, first_bad=first_bad, exchanges=0)

    def exchanged(self, length: int) -> "_State":
        """Return the state after an exchange, before a period of some length."""
        exchanges = min(self.exchanges + 1, _APART) if self.moves else 0
        return self._replace(since=0, length=length, first_bad=-1, exchanges=exchanges)


class _Period:
    """Steps since the last exchange of some variables, and the shared weights.

    After an exchange the weights are the shared ones plus a share of the residual. This would overwrite weights that
    the script writes itself, as clipping in `train_step` and constraints do. Such a script trains on the shared
    weights. Its writes are found when they are traced, or when weights change between the first exchange after a flush
    and the next.

    Args:
        variables: the variables.
        on_host: whether Python code changes the shared weights in place. They then share memory with the weights only
            from `enter` to the end of the step.

    Attributes:
        variables, on_host: see above.
        length: int64 variable, number of steps of the period.
        since: int64 variable, number of steps taken.
        first_bad: int32 variable, index of the first variable whose gradient was not finite; -1 if all were.
        samples: number of elements of each array of a sample of gradients, see `StepInput`.
    """

    def __init__(self, variables: Sequence[Variable], on_host: bool):
        self.variables, self.on_host = list(variables), on_host
        with tf.device("CPU:0"):
            self.length = tf.Variable(1, dtype=tf.int64, trainable=False)
            self.since = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.first_bad = tf.Variable(-1, dtype=tf.int32, trainable=False)
            # Exchanges since the last flush, at most _APART; the weights are the shared ones before _APART of them.
            self._exchanges = tf.Variable(0, dtype=tf.int32, trainable=False)
            self._moves = tf.Variable(True, trainable=False)
        self.samples: list[int] = []
        # Shared weights. Those that Python code does not write take no memory before the first exchange.
        self._base = [_any_shape(v, v.shape if on_host else [0]) for v in variables]
        self._in_step = False
        # Keras keeps a variable as long as its model, and so what the variable holds.
        method = weakref.WeakMethod(self.note_write)

        def note() -> None:
            noted = method()
            if noted is not None:
                noted()

        for variable in variables:
            on_assign(variable, note)

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

    def stay(self) -> None:
        """Keep to the shared weights from here on."""
        self.settle()
        self._moves.assign(False)

    @property
    def is_apart(self) -> bool:
        """True if the weights of this rank are not the shared ones."""
        return bool(self.since.numpy()) or self.goes_ahead

    @property
    def goes_ahead(self) -> bool:
        """True if the weights are the shared ones plus a share of the residual."""
        return bool(self._exchanges.numpy() == _APART)

    def settle(self) -> None:
        """Return to the shared weights, after an exchange. Not in a graph."""
        if self.goes_ahead:
            for variable, base in zip(self.variables, self.shared(), strict=True):
                shared = tf.raw_ops.DeepCopy(x=base) if self.on_host else base
                raw_variable(variable).assign(shared, read_value=False)
            self._exchanges.assign(0)

    def resume(self, share: tf.Tensor, unsent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Undo `settle`, if the script does not write weights; see `leave`. Not in a graph."""
        self.keep()
        self._exchanges.assign(_APART)
        return self.leave(share, unsent)

    def keep(self) -> tf.Tensor:
        """Keep the weights as the shared ones."""
        for base, variable in zip(self._base, self.variables, strict=True):
            # On a GPU the variables share one array until the weights move to another.
            weights = tf.convert_to_tensor(variable)
            base.assign(tf.raw_ops.DeepCopy(x=weights) if self.on_host else weights, read_value=False)
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

    def renew(self) -> None:
        """Prepare for new weights."""
        self.restart(self.length)
        self._exchanges.assign(0)

    def enter(self) -> None:
        """Begin a step whose gradients have been computed: return to the shared weights."""

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
        tf.cond(first, check, _nothing)
        with tf.device("CPU:0"):
            exchanged = self._exchanges > 0
        tf.cond(exchanged, self._return, _nothing)

    @property
    def is_unwritten(self) -> bool:
        """True if the weights are the shared ones. Not in a graph."""
        return _are_equal([view_of(raw_variable(v)) for v in self.variables], [view_of(b) for b in self._base])

    def expect(self, sizes: Sequence[int], wanted: Sequence[Gradient]) -> None:
        """Record the number of elements of each array of a sample, and whether updates are of rows."""
        self.samples = list(sizes)
        # Between two exchanges only the rows of a sparse update are written, by operations of the graph.
        self.on_host &= not any(isinstance(update, tf.IndexedSlices) for update in wanted)

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
            self._exchanges.assign(tf.where(self._moves, tf.minimum(before + 1, _APART), 0))
        moved = []
        for variable, shared, rest in zip(self.variables, self.shared(), unsent, strict=True):
            ahead = shared + tf.cast(share * rest, shared.dtype)
            moved.append(raw_variable(variable).assign(ahead, read_value=False))
        return moved

    def state(self) -> tf.Tensor:
        """Return the numbers of a `_State`, an int64 vector."""
        numbers = self.since, self.length, self.first_bad, self._exchanges, self._moves
        return tf.stack([tf.cast(n, tf.int64) for n in numbers])

    def set(
        self, state: tf.Tensor, weights: Sequence[tf.Tensor], shared: Mapping[int, tf.Tensor]
    ) -> list[tf.Operation]:
        """Set numbers, weights and shared weights after a step on the host; return the operations.

        Args:
            state: see `state`.
            weights: weights of each variable.
            shared: shared weights by the number of the variable; the others are there already.
        """
        since, length, first_bad, exchanges, moves = tf.unstack(state)
        # Reads of the shared weights in a branch depend on these numbers, so they come after their change.
        written = [self._exchanges.assign(tf.cast(exchanges, tf.int32)), self._moves.assign(moves > 0)]
        written += [self.since.assign(since), self.length.assign(length)]
        written += [self.first_bad.assign(tf.cast(first_bad, tf.int32))]
        written += [self._base[i].assign(values, read_value=False) for i, values in shared.items()]
        pairs = zip(self.variables, weights, strict=True)
        return [*written, *(raw_variable(v).assign(w, read_value=False) for v, w in pairs)]

    def restart(self, length: tf.Tensor) -> None:
        """Begin another period of some steps."""
        with tf.device("CPU:0"):
            self.length.assign(length)
            self.since.assign(0)
            self.first_bad.assign(-1)


def _are_equal(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Return whether arrays have the same elements."""
    pairs = zip(some, others, strict=True)
    return all(np.array_equal(a[part], b[part]) for a, b in pairs for part in _parts(a))


def _each(
    function: Callable[..., np.ndarray],
    some: Sequence[np.ndarray],
    others: Sequence[np.ndarray],
    out: Sequence[np.ndarray],
) -> None:
    """Set arrays to a function of two."""
    for a, b, result in zip(some, others, out, strict=True):
        function(a, b, out=result)


def _set_ahead(
    shared: Sequence[np.ndarray], unsent: Sequence[np.ndarray], share: np.float32, out: Sequence[np.ndarray]
) -> None:
    """Set arrays to the shared weights plus a share of the residual; without `unsent`, to the former alone.

    Args:
        shared: arrays of the shapes and dtypes of the variables.
        unsent: the residual, see `HostExchange.unsent`; may be empty.
        share: factor of the residual.
        out: arrays of these shapes and dtypes.
    """
    for base, rest, array in itertools.zip_longest(shared, unsent, out):
        if rest is None:
            array[...] = base
            continue
        for part in _parts(base):
            ahead = np.multiply(rest[part], share, out=array[part] if array.dtype == rest.dtype else None)
            np.add(base[part], ahead.astype(base.dtype, copy=False), out=array[part])


def _parts(array: np.ndarray) -> list[slice] | list[EllipsisType]:
    """Return indices of rows of an array that stay in the caches; of a small one the index of all."""
    if array.size <= _TILE:
        return [...]
    rows = max(1, len(array) * _TILE // array.size)
    return [slice(at, at + rows) for at in range(0, len(array), rows)]


def _nothing() -> tf.Tensor:
    return tf.constant(True)


def _any_shape(variable: Variable, shape: Sequence[int]) -> tf.Variable:
    """Return a variable of zeros on the device of another, for values of any shape."""
    device = device_of(variable) or "CPU:0"
    with tf.device(device):
        return tf.Variable(own_zeros(shape, device, variable.dtype), shape=tf.TensorShape(None), trainable=False)
