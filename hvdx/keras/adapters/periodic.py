"""Adapter for strategies on the host in which each rank may take several steps alone between two exchanges."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.comm.host_graph import change, on_host, wait_for
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import apply_constraints
from hvdx.keras.adapters.host import HostAdapter, alive, unsent_on_gpu
from hvdx.keras.adapters.period import GraphPeriod, HostPeriod, Period, nothing
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.weight_parts import part_of
from hvdx.strategies import HostExchange, Strategy
from hvdx.strategies.contract import agree_on_steps


class PeriodicAdapter(HostAdapter):
    """Adapter that exchanges what a rank has added to its weights in a period, whose length the exchange chooses.

    Between two exchanges, each rank's optimiser changes its own weights. After an exchange all ranks have the same
    shared weights, to which the combined changes were added. In periods of one step, a rank goes on from the shared
    weights plus a share of its residual, so its optimiser sees the effect of all its updates. `flush` returns to the
    shared weights.

    Split layers are exchanged in each step.

    Source: step-ahead error feedback, Xu et al. 2021 (arXiv:2008.05823).
    """

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(strategy, comm, optimizer, name, gain)
        # Periods by the `id` of each variable, as open exchanges.
        self._periods: dict[tuple[int, ...], HostPeriod | GraphPeriod] = {}
        self._reads_weights = updates.reads_weights(innermost(optimizer))
        self._writes_rows = updates.writes_rows(innermost(optimizer))
        # Periods to which `go_on` is to return.
        self._drained: list[HostPeriod | GraphPeriod] = []

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        if not _are_split(self.variables):
            rows = any(isinstance(g, tf.IndexedSlices) for g in gradients)
            # Between two exchanges only the rows of a sparse update are written, by operations of the graph.
            period = self._period_of(self.variables, rows and self._writes_rows)
            # Keras decays the weights next, and an update may depend on them: those are the shared weights.
            if self._reads_weights or rows or isinstance(period, GraphPeriod):
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
        period.expect(self._sample_sizes(optimizer, gradients, variables))
        if isinstance(period, HostPeriod):
            self._advance(period, wanted, first_bad, sample)
        else:
            self._advance_in_graph(period, wanted, first_bad, sample)

    def _advance(
        self,
        period: HostPeriod,
        wanted: Sequence[Gradient],
        first_bad: int | tf.Tensor,
        sample: Sequence[tf.Tensor],
    ) -> None:
        """Take a step of a period on the host, in one operation of the graph.

        Args:
            wanted: updates of the step, one for each variable.
            first_bad, sample: see `HostAdapter._call`.
        """
        variables, exchange = period.variables, self._step_of(period.variables)
        # TensorFlow keeps the function until the process ends.
        count, reference = len(variables), weakref.ref(period)

        def work(updates: Sequence[np.ndarray], bad: int, *arrays: np.ndarray) -> Sequence[npt.ArrayLike]:
            alive(reference).advance(updates, arrays[:count], int(bad), list(arrays[count:]), exchange)
            return ()

        with tf.device("CPU:0"):
            updates = [tf.cast(tf.convert_to_tensor(u), v.dtype) for u, v in zip(wanted, variables, strict=True)]
            others = [tf.cast(first_bad, tf.int64), *map(tf.convert_to_tensor, variables)]
            _, after = change(work, updates, [*others, *(tf.cast(s, tf.float32) for s in sample)])
            pairs = zip(variables, after, strict=True)
            written = [raw_variable(v).assign(w, read_value=False) for v, w in pairs]
        wait_for(written)

    def _advance_in_graph(
        self,
        period: GraphPeriod,
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
        tf.cond(begins, period.keep, nothing)
        tf.cond(only, nothing, go_alone)
        tf.cond(ends, exchange, nothing)

    def _exchange_in_graph(
        self,
        period: GraphPeriod,
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
            return alive(adapter_ref).open_for(key)

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

    def _period_of(self, variables: Sequence[Variable], rows: bool = False) -> HostPeriod | GraphPeriod:
        """Return the period of some variables; with `rows`, one that writes some rows of them."""
        key = tuple(id(v) for v in variables)
        if key not in self._periods or (rows and isinstance(self._periods[key], HostPeriod)):
            # Variables that are made in `tf.init_scope` count as made by the function that is being traced, which
            # TensorFlow then traces once more. Another thread has no graph.
            with ThreadPoolExecutor(1) as thread:
                made = thread.submit(self._make_period, variables, rows, self._periods.pop(key, None)).result()
            self._periods[key] = made
        return self._periods[key]

    def _make_period(
        self, variables: Sequence[Variable], rows: bool, before: HostPeriod | GraphPeriod | None
    ) -> HostPeriod | GraphPeriod:
        earlier = before if isinstance(before, HostPeriod) else None
        in_graph = rows or self._on_device(variables)
        made, mine = GraphPeriod(variables, earlier) if in_graph else HostPeriod(variables), {id(v) for v in variables}
        # Each of two lists would restore its own weights of a variable that is in both.
        for other in (p for p in self._periods.values() if mine & {id(v) for v in p.variables}):
            both: list[Period] = [other, made]
            for period in both:
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
            if agree_on_steps(period.taken, "the last exchange", self.comm):
                # A sample of zeros does not change the estimate of the noise.
                if isinstance(period, HostPeriod):
                    sample = [np.zeros(size, np.float32) for size in period.samples]
                    period.end(sample, self._step_of(period.variables))
                else:
                    zeros = [tf.zeros(size) for size in period.samples]
                    self._exchange_in_graph(period, period.changes(), period.first_bad, zeros, period.since)
                apply_constraints(period.variables)
            period.settle()

    def drain(self) -> None:
        """End the periods: a checkpoint holds the weights of all ranks."""
        apart = [period for period in self._periods.values() if period.goes_ahead]
        self.flush()
        self._drained = apart

    def go_on(self) -> None:
        for period in self._drained:
            if isinstance(period, HostPeriod):
                period.resume(self.open_for(tuple(id(v) for v in period.variables)))
            else:
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
        period.renew(exchange.period)
        self._drained = [period] if "ahead" in state else []


def _are_split(variables: Sequence[Variable]) -> bool:
    return any(part_of(v) is not None for v in variables)
