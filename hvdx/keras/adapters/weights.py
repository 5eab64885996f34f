"""Ties an optimiser to a strategy that exchanges weights on the host, such as a parameter server."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.adapters.base import apply_constraints, describe
from hvdx.keras.adapters.host import HostAdapter
from hvdx.keras.adapters.optimizer_state import innermost, moving_averages
from hvdx.strategies import Strategy


class WeightsAdapter(HostAdapter):
    """Lets an optimiser take its own step, gives the weights to the exchange, and goes on with those that come back.

    Whatever else happens to weights meanwhile (decay, constraints, a script's own clipping) is part of what the
    exchange sees. Where ranks are asynchronous, servers hold the weights from one flush to the next; what happens to
    them between a flush and the next step is not for the servers to add up.

    Args:
        strategy, comm, optimizer, name, gain: see `HostAdapter`; the optimiser may be a loss-scale one.

    Raises:
        ConfigError: an optimiser whose steps cannot be added up; of a step also variables whose updates cannot.
        ReplicaError: of a step and a flush, where some workers take their first step and others flush without one.
    """

    def __init__(self, strategy: Strategy, comm: Comm, optimizer: Any, name: str, gain: float = 1.0):
        inner = innermost(optimizer)
        super().__init__(strategy, comm, inner, name, gain)
        if inner.use_ema and inner.ema_overwrite_frequency:
            raise ConfigError(
                f"optimizer {inner.name}: ema_overwrite_frequency sets the weights anew on every worker, and servers "
                "would add that up. Leave it out: Keras sets them when fit ends."
            )
        self._label = f"optimizer {inner.name}"
        self._scaler = optimizer if optimizer is not inner else None
        # Whether the exchange has had the weights to begin with, for each list of variables.
        self._begun: dict[tuple[int, ...], tf.Variable] = {}
        # The lists that were met since the last flush.
        self._current: set[tuple[int, ...]] = set()

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """See `Adapter.gradients`: this rank's own."""
        # While the step is traced, which all ranks do: there may be some that skip their first ones.
        self._opened(list(self.variables))
        return super().gradients(gradients)

    def apply(self, optimizer: Any, step: Callable[[], Any], variables: Sequence[Any]) -> None:
        """See `Adapter.apply`. In the first step the exchange gets the weights as they were before it."""
        begun, dtype = self._flag(tuple(id(v) for v in variables)), _dtype(variables)
        with tf.device("CPU:0"):
            # One operation does both: those of two optimisers come in one order on all ranks, and a condition in the
            # graph with an operation in it would not.
            before = tf.cond(
                begun,
                lambda: [tf.zeros([0], dtype) for _ in variables],
                lambda: [tf.cast(v, dtype) for v in variables],
            )
        with tf.control_dependencies(before):
            step()
        pulled = self._call([*before, *variables], self._first_bad, variables, _step, dtype)
        for variable, value in zip(variables, pulled, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        with tf.control_dependencies(pulled), tf.device("CPU:0"):
            begun.assign(True)

    def flush(self) -> None:
        """See `Adapter.flush`."""
        if not self._used:
            # Others may be opening an exchange in their first step, for which they need this rank.
            self._meet(opens=False)
        for key in [key for key in self._open if key in self._used]:
            exchange: Any = self._open[key][0]
            variables = self._open[key][1]
            if not exchange.is_open:
                # This rank has skipped all its steps, or all ranks have: nobody knows that of the others.
                exchange.begin([np.asarray(tf.convert_to_tensor(v)) for v in variables])
            final = exchange.flush()
            self._flag(key).assign(False)
            if final is not None:
                for variable, value in zip(variables, final, strict=True):
                    variable.assign(tf.cast(value, variable.dtype))
                apply_constraints(variables)
        self._current.clear()
        self._agree_on_averages()

    def drain(self) -> None:
        """See `Adapter.drain`: servers have the weights, and nobody goes on."""
        self.flush()

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `Adapter.state_dict`; without a residual there is nothing to remember, but that momenta are apart."""
        return {} if self.exchange is None else {"apart": np.ones((), np.int8)} | super().state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Adapter.load_state_dict`."""
        super().load_state_dict({name: array for name, array in state.items() if name != "apart"})

    def reopen(self, variables: Sequence[Any]) -> None:
        """See `Adapter.reopen`."""
        self.renew()
        super().reopen(variables)
        self._current.clear()

    def renew(self) -> None:
        """See `Adapter.renew`: the next step begins anew with the new weights."""
        for begun in self._begun.values():
            begun.assign(False)
        self._used.clear()
        self._current.clear()

    def _flag(self, key: tuple[int, ...]) -> tf.Variable:
        if key not in self._begun:
            with tf.init_scope(), tf.device("CPU:0"):
                self._begun[key] = tf.Variable(False, trainable=False)
        return self._begun[key]

    def _opened(self, variables: list[Any]) -> Any:
        """See `HostAdapter`: what was opened by an earlier fit, which an exception may have ended, begins anew."""
        key = tuple(id(v) for v in variables)
        opens = key not in self._used
        earlier = opens and key in self._open
        shared = [] if key in self._current else self._shared(variables)
        if opens:
            self._meet(opens=True, shared=shared)
        elif shared:
            raise self._overlapping(shared)
        exchange: Any = super()._opened(variables)
        if earlier:
            exchange.renew()
        self._current.add(key)
        return exchange

    def _shared(self, variables: Sequence[Any]) -> list[str]:
        """Variables that are in another list as well, one that the servers hold."""
        held = {i for other in self._current for i in other}
        return [describe(v).name for v in variables if id(v) in held]

    def _meet(self, opens: bool, shared: Sequence[str] = ()) -> None:
        """Have all ranks open an exchange, or all flush without one. Collective."""
        everyone = self.comm.all_gather_object((opens, list(shared)), f"the first step of {self.name}")
        idle = [rank for rank, (theirs, _) in enumerate(everyone) if not theirs]
        if 0 < len(idle) < len(everyone):
            raise ReplicaError(
                f"{self._label}: expected a step of every worker before the first flush, got none of "
                f"worker{'s' * (len(idle) > 1)} {', '.join(map(str, idle))}, while the others take theirs. Take at "
                "least one step on each worker, or start fewer workers."
            )
        found = next((names for _, names in everyone if names), None)
        if found:
            raise self._overlapping(found, collective=True)

    def _overlapping(self, shared: Sequence[str], collective: bool = False) -> ConfigError:
        error = ConfigError(
            f"{self._label}: variable {shared[0]}: expected it in one of the lists of variables "
            "between two flushes, got it in two, and servers keep each list apart. Give optimizer.apply the same list "
            "in every step, or call hvdx.keras.flush(optimizer) before another one."
        )
        error.collective = collective
        return error

    def _agree_on_averages(self) -> None:
        """Each worker has followed its own way through the weights; what Keras sets in the end is one network."""
        for variable in moving_averages(self._optimizer()):
            total = self.comm.all_reduce_sum(np.ravel(variable.numpy()).astype(np.float64), f"{self.name}.averages")
            variable.assign((total / self.comm.size).reshape(variable.shape).astype(variable.dtype))

    def any_overflow(self, overflowed: Any) -> Any:
        """See `Adapter.any_overflow`; where nobody waits for this rank, it alone skips its step."""
        return overflowed if self.strategy.asynchronous else super().any_overflow(overflowed)

    def rank_local_variables(self, now: bool = True) -> list[Any]:
        """Everything but the learning rate: workers differ in their steps as well."""
        inner: Any = self._optimizer()
        alike = {id(v) for v in (inner._learning_rate, *moving_averages(inner))}
        mine = {id(v): v for part in (inner, self._scaler) if part is not None for v in part.variables}
        return [v for i, v in mine.items() if i not in alike]


def _step(exchange: Any, arrays: list[np.ndarray], finite: bool) -> list[np.ndarray]:
    """Push and pull; the first half of the arrays is empty unless the exchange is to get the weights."""
    before, after = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    if not exchange.is_open:
        exchange.begin(before)
    return exchange.step(after, finite)


def _dtype(variables: Sequence[Any]) -> tf.DType:
    """What weights are exchanged in: as the exchange has it."""
    for variable in variables:
        if tf.as_dtype(variable.dtype).size < 4:
            raise ConfigError(
                f"variable {getattr(variable, 'path', variable.name)}: it is stored as {variable.dtype}, and every "
                "pull would round what the servers have. Train under a mixed policy, such as mixed_bfloat16."
            )
    return tf.float64 if any(tf.as_dtype(v.dtype).size > 4 for v in variables) else tf.float32
