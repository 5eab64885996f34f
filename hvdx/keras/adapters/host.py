"""Ties an optimiser to a strategy that combines arrays on the host, between two parts of the graph."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdx.comm import Comm, failure
from hvdx.errors import HvdxError
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import (
    Adapter,
    apply_constraints,
    describe,
    refuse_local_skip,
    scaled,
    values_of,
    with_values,
)
from hvdx.keras.adapters.optimizer_state import innermost, slots
from hvdx.strategies import HostExchange, Strategy
from hvdx.strategies.telemetry import Telemetry, merged

# What a strategy remembers for an optimiser from one fit to the next, by the variables it is about.
_Open = dict[tuple[int, ...], tuple[HostExchange, list[Any]]]


class _Memory(NamedTuple):
    """What was opened for an optimiser, and by whom: in a world that was left it is of no use in the next."""

    strategy: str
    comm: Comm
    opened: _Open


_remembered: "weakref.WeakKeyDictionary[Any, _Memory]" = weakref.WeakKeyDictionary()


class HostAdapter(Adapter):
    """Ties an optimiser to a strategy that works on the host's arrays.

    Attributes:
        rank_local: True where each rank's optimiser has a state of its own.
    """

    reports = True

    def __init__(self, strategy: Strategy, comm: Comm, optimizer: Any, name: str, gain: float = 1.0):
        super().__init__(name, gain)
        inner = innermost(optimizer)
        self.strategy = strategy
        self.comm = comm
        self._optimizer = weakref.ref(inner)
        self.rank_local = strategy.rank_local_state
        if self.rank_local:
            updates.check_kind(inner)
        self._momentum = updates.momentum_of(inner) if self.rank_local else 0.0
        # An optimiser may serve several lists of variables, and other ones after some were frozen.
        self._open: _Open = {}
        before = _remembered.get(inner)
        if before is not None and before.strategy == repr(strategy) and before.comm is comm:
            self._open = before.opened
        if strategy.remembers:
            _remembered[inner] = _Memory(repr(strategy), comm, self._open)
        # The lists of variables that this adapter has seen; what is open besides them is of earlier fits.
        self._used: set[tuple[int, ...]] = set()
        # The first gradient of a step that holds NaN or infinity; -1 if none does.
        self._first_bad: Any = -1
        self._last: tuple[HostExchange, list[Any]] | None = None

    @property
    def exchange(self) -> HostExchange | None:
        """See `Adapter`."""
        return self._latest()[0]

    @property
    def exchanged(self) -> list[Any]:
        """See `Adapter.exchanged`: the variables of `exchange`."""
        return self._latest()[1]

    def _latest(self) -> tuple[HostExchange | None, list[Any]]:
        return self._last or next(reversed(self._open.values()), (None, []))

    @property
    def has_state(self) -> bool:
        """See `Adapter.has_state`."""
        return self.rank_local and bool(self._open)

    def reset(self) -> None:
        """See `Adapter.reset`."""
        super().reset()
        for exchange, _ in self._open.values():
            exchange.telemetry = type(exchange.telemetry)(elements=exchange.telemetry.elements)

    def restart_timer(self) -> None:
        """See `Adapter.restart_timer`."""
        for exchange, _ in self._open.values():
            exchange.restart_timer()

    def rank_local_variables(self, now: bool = True) -> list[Any]:
        """See `Adapter.rank_local_variables`: momenta that were made of this rank's gradients."""
        return slots(self._optimizer()) if self.rank_local else []

    @property
    def state_key(self) -> str:
        """See `Adapter.state_key`."""
        return f"{self.strategy.name}, {self.strategy.placement}"

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `Adapter.state_dict`."""
        return {} if self.exchange is None else self.exchange.state_dict()

    def reopen(self, variables: Sequence[Any]) -> None:
        """See `Adapter.reopen`."""
        self.variables = list(variables)
        # Of an exchange that an exception ended a message may still be on its way.
        for exchange, _ in self._open.values():
            exchange.close()
        self._open.clear()
        self._opened(list(variables))

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Adapter.load_state_dict`."""
        assert self.exchange is not None
        self.exchange.load_state_dict(state)

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """See `Adapter.gradients`: combined here, or made fit for this rank's optimiser."""
        if not self.holds_loss_scale:
            refuse_local_skip()
        if not self.rank_local:
            combined = self._call([tf.convert_to_tensor(g) for g in gradients], -1, self.variables)
            return [scaled(tf.cast(c, g.dtype), self.gain) for c, g in zip(combined, gradients, strict=True)]
        # One NaN makes the sum NaN, and reading the gradients once is all that it costs.
        sums = [tf.reduce_sum(tf.cast(values_of(g), tf.float32)) for g in gradients]
        bad = tf.cast(tf.logical_not(tf.math.is_finite(tf.stack(sums))), tf.int32)
        self._first_bad = tf.where(tf.reduce_max(bad) > 0, tf.argmax(bad, output_type=tf.int32), -1)
        finite = self._first_bad < 0
        # NaN would stay in this rank's momentum for good.
        clean = [
            tf.cond(finite, lambda g=g: tf.identity(values_of(g)), lambda g=g: tf.zeros_like(values_of(g)))
            for g in gradients
        ]
        return [scaled(with_values(g, c), self.gain) for g, c in zip(gradients, clean, strict=True)]

    def apply(self, optimizer: Any, step: Callable[[], Any], variables: Sequence[Any]) -> None:
        """See `Adapter.apply`."""
        if not self.rank_local:
            step()
            return
        wanted = updates.updates_of(optimizer, step, variables)
        _add(variables, self._call(wanted, self._first_bad, variables))

    def flush(self) -> None:
        """See `Adapter.flush`."""
        for exchange, variables in self._open.values():
            late = exchange.flush()
            if late is not None:
                _add(variables, late)
                apply_constraints(variables)

    def drain(self) -> None:
        """See `Adapter.drain`."""
        for exchange, _ in self._open.values():
            exchange.drain()

    def any_overflow(self, overflowed: Any) -> Any:
        """See `Adapter.any_overflow`."""
        comm = self.comm

        def ask(mine: np.ndarray) -> np.float32:
            return np.float32(comm.any_true(bool(mine > 0)))

        with tf.device("CPU:0"):
            anywhere = tf.numpy_function(ask, [overflowed], tf.float32)
        anywhere.set_shape(())
        return anywhere

    def cost(self) -> Telemetry:
        """See `Adapter.cost`."""
        costs = [exchange.telemetry for exchange, _ in self._open.values()]
        return merged([cost for cost in costs if cost.steps] or costs)

    def _call(
        self,
        tensors: list[Any],
        first_bad: Any,
        variables: Sequence[Any],
        work: Callable[[Any, list[np.ndarray], bool], list[np.ndarray]] | None = None,
        dtype: tf.DType = tf.float32,
    ) -> list[Any]:
        """What the exchange of some variables does, by default in a step, as an operation of the graph."""
        # TensorFlow keeps what it may call for as long as the process lives: not the adapter and its arrays.
        me, them, rank_local = weakref.ref(self), [weakref.ref(v) for v in variables], self.rank_local

        def host(bad: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            try:
                adapter, alive = me(), [v() for v in them]
                if adapter is None:
                    raise HvdxError("a training function outlived the optimiser it was made for. Trace it anew.")
                exchange = adapter._opened(alive)
                given = [np.asarray(a, order="C") for a in arrays]
                exchange.blamed = describe(alive[bad]).name if bad >= 0 else ""
                combined = (work or type(exchange).step)(exchange, given, bool(bad < 0))
            except BaseException as error:
                failure.remember(error)
                raise
            # A copy of gradients: an optimiser may keep one, and the next step writes to the same place.
            return combined if rank_local else [a.copy() for a in combined]

        with tf.device("CPU:0"):
            given = [tf.cast(first_bad, tf.int32), *(tf.cast(t, dtype) for t in tensors)]
            # Outside of a graph a list of one comes as the one.
            results = tf.nest.flatten(tf.numpy_function(host, given, [dtype] * len(variables)))
        for result, variable in zip(results, variables, strict=True):
            result.set_shape(variable.shape)
        return results

    def _opened(self, variables: list[Any]) -> HostExchange:
        """The exchange for these variables, with what others have not sent yet of the same ones."""
        key = tuple(id(v) for v in variables)
        if key not in self._open:
            specs = [describe(v) for v in variables]
            exchange: HostExchange = self.strategy.open(self.comm, specs, self._momentum, self.name)
            self._open[key] = exchange, list(variables)
        if key not in self._used:
            self._used.add(key)
            self._take_over(key)
        self._last = self._open[key]
        return self._last[0]

    def _take_over(self, key: tuple[int, ...]) -> None:
        """Have an exchange send what those of earlier fits have not sent of its variables."""
        new, variables = self._open[key]
        for other in [k for k in self._open if k not in self._used]:
            _hand_over(*self._open[other], new, variables)
            if set(other) <= set(key):
                self._open.pop(other)[0].close()


def _hand_over(old: HostExchange, its: Sequence[Any], new: HostExchange, variables: Sequence[Any]) -> None:
    """Have `new` send what `old` has not sent of the variables that both exchange."""
    there, here = {id(v): i for i, v in enumerate(its)}, {id(v) for v in variables}
    unsent = old.residuals
    nothing = [np.zeros(tuple(v.shape), np.float32) for v in variables]
    new.add_to_residual(
        [unsent[there[id(v)]] if id(v) in there else zero for v, zero in zip(variables, nothing, strict=True)]
    )
    old.add_to_residual(
        [-array if id(v) in here else np.zeros_like(array) for v, array in zip(its, unsent, strict=True)]
    )


def _add(variables: Sequence[Any], combined: Sequence[Any]) -> None:
    for variable, update in zip(variables, combined, strict=True):
        variable.assign_add(tf.cast(update, variable.dtype))
