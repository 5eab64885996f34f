"""Adapter for strategies that exchange weights on the host, such as a parameter server."""

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import apply_constraints, describe
from hvdx.keras.adapters.host import HostAdapter, any_rank
from hvdx.keras.optimizer_state import innermost, moving_averages
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.seams.optimizers import rate_of
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import view_of
from hvdx.keras.weight_parts import by_ranks, mark_state
from hvdx.strategies import HostExchange, StepInput, Strategy


class WeightsAdapter(HostAdapter):
    """Adapter that takes the optimiser's own step, sends the weights, and continues with the weights that it receives.

    The exchange sees every change of the weights since the last exchange, such as decay, constraints, or clipping by a
    script. If ranks are asynchronous, servers hold the weights from the beginning of an epoch to the next flush; in a
    script's own loop, and if a step trains several lists of variables, from the first step. Of changes that scripts
    make between a flush and the next session, only those of rank 0 count.

    Args:
        strategy, comm, optimizer, name, gain: see `HostAdapter`; the optimiser may be a loss-scale optimiser.

    Raises:
        ConfigError: if the optimiser has no updates that servers can add up; in a step, if a variable is stored in less
            than 32 bits, or is in two lists of variables between two flushes.
        ReplicaError: in a step or a flush, if some workers take their first step and others flush without one.
    """

    reusable_across_fits = False  # its exchange is opened while the step is traced

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        inner = innermost(optimizer)
        super().__init__(strategy, comm, inner, name, gain)
        if inner.use_ema and inner.ema_overwrite_frequency:
            raise ConfigError(
                f"optimizer {inner.name}: ema_overwrite_frequency overwrites the weights on every worker, and servers "
                "would add up the changes. Leave it out: Keras overwrites the weights when fit ends."
            )
        self._label = f"optimizer {inner.name}"
        self._scaler = optimizer if optimizer is not inner else None
        # For each list of variables: True once the exchange has its initial weights.
        self._begun: dict[tuple[int, ...], tf.Variable] = {}
        # That of the first list, made before the step is traced: a step that makes variables is traced twice.
        self._unused: list[tf.Variable] = [_make_flag()]
        # Lists of variables that this rank has exchanged since the last flush, each by the `id` of its variables.
        self._current: set[tuple[int, ...]] = set()

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return this rank's own gradients."""
        # Some ranks may skip their first steps, but all ranks trace the step. So the exchange is opened while tracing.
        first = not self._used
        self._opened(list(self.variables))
        if first and self.owner is not None and _initialized(self.variables):
            self.begin_epoch()
        return super().gradients(gradients)

    def apply(
        self, optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
    ) -> None:
        """Take the optimiser's step and exchange the weights; the first step also sends the weights before it."""
        begun, dtype = self._flag(tuple(id(v) for v in variables)), updates.served_dtype(variables)
        with tf.device("CPU:0"):
            # One operation begins the session and takes the step. The operations of two optimisers then run in the same
            # order on all ranks. An operation inside a condition of the graph could run in another order.
            before = tf.cond(
                begun,
                lambda: [tf.zeros([0], dtype) for _ in variables],
                lambda: [tf.cast(v, dtype) for v in variables],
            )
        with tf.control_dependencies(before):
            step()
        gradients, self._gradients = self._gradients, []
        # Ranks compare samples of different steps, so their elements are the same in all steps.
        sample = self._sample(optimizer, gradients, variables, moves=False)
        pulled = self._call([*before, *variables], self._first_bad, variables, dtype, sample=sample)
        for variable, value in zip(variables, pulled, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        with tf.control_dependencies(pulled), tf.device("CPU:0"):
            begun.assign(True)

    def _take(self, exchange: HostExchange, step_input: StepInput) -> Sequence[npt.ArrayLike]:
        """Push and pull weights.

        Args:
            exchange: exchange of the weights.
            step_input: weights before the step, or empty arrays if the exchange is open; then weights after the step.
        """
        count = len(step_input.tensors) // 2
        if not exchange.is_open:
            exchange.begin([np.asarray(t) for t in step_input.tensors[:count]])
        return exchange.take(step_input._replace(tensors=step_input.tensors[count:]))

    def begin_epoch(self) -> None:
        """Begin the session of the only list of variables, so that no rank waits for the first step of rank 0.

        With several lists it is unknown which of them this epoch trains.
        """
        if len(self._used) == 1:
            self._begin(next(iter(self._used)))

    def _begin(self, key: tuple[int, ...]) -> None:
        """Begin the session of a list with the present weights, before the first step."""
        exchange, variables = self._open[key]
        if not exchange.is_open:
            with tf.init_scope():
                exchange.begin([view_of(v) for v in variables])
                self._flag(key).assign(True)
            exchange.restart_timer()

    def flush(self) -> None:
        if not self._used:
            # Other ranks may be opening an exchange in their first step, which needs this rank.
            self._agree_on_opening(opens=False)
        for key in [key for key in self._open if key in self._used]:
            exchange = self._open[key][0]
            variables = self._open[key][1]
            if not exchange.is_open:
                # This rank has skipped all its steps. The others may have taken some, so it begins the session, too.
                exchange.begin([view_of(v) for v in variables])
            final = exchange.flush()
            self._flag(key).assign(False)
            if final is not None:
                changed = [(v, value) for v, value in zip(variables, final, strict=True) if value is not None]
                for variable, value in changed:
                    variable.assign(tf.cast(value, variable.dtype))
                apply_constraints([v for v, _ in changed])
        self._current.clear()
        self._agree_on_averages()

    def drain(self) -> None:
        """Flush, because a checkpoint needs the weights, which the servers hold."""
        self.flush()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state of the exchange, with an entry "apart": it says that the momenta are rank-local."""
        return {} if self.exchange is None else {"apart": np.ones((), np.int8)} | super().state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict({name: array for name, array in state.items() if name != "apart"})

    def reopen(self, variables: Sequence[Variable]) -> None:
        self.renew()
        super().reopen(variables)
        self._current.clear()

    def renew(self) -> None:
        for begun in self._begun.values():
            begun.assign(False)
        self._used.clear()
        self._current.clear()

    def _flag(self, key: tuple[int, ...]) -> tf.Variable:
        """Return the variable that is True once the exchange of a list has its initial weights."""
        if key not in self._begun:
            self._begun[key] = self._unused.pop() if self._unused else _make_flag()
        return self._begun[key]

    def _opened(self, variables: list[Variable]) -> HostExchange:
        """Return the exchange for these variables; renew that of an earlier fit, which an exception may have ended."""
        key = tuple(id(v) for v in variables)
        opens = key not in self._used
        earlier = opens and key in self._open
        shared = [] if key in self._current else self._shared(variables)
        if opens:
            self._agree_on_opening(opens=True, shared=shared)
        elif shared:
            raise self._overlapping(shared)
        exchange = super()._opened(variables)
        if earlier:
            exchange.renew()
        self._current.add(key)
        if opens:
            # A flush assigns the weights of this list after those of lists that this fit no longer trains.
            self._open[key] = self._open.pop(key)
        return exchange

    def _shared(self, variables: Sequence[Variable]) -> list[str]:
        """Return the names of variables that are also in another list that the servers hold."""
        held = {i for other in self._current for i in other}
        return [describe(v).name for v in variables if id(v) in held]

    def _agree_on_opening(self, opens: bool, shared: Sequence[str] = ()) -> None:
        """Check that all ranks open an exchange, or that all flush without one. Collective.

        Args:
            opens: True if this rank opens an exchange.
            shared: names of variables in it that are also in another list that the servers hold.
        """
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
            f"{self._label}: variable {shared[0]}: expected it in one list of variables between two "
            "flushes, got it in two; servers keep each list separately. Give optimizer.apply the same list in every "
            "step, or call hvdx.keras.flush(optimizer) before you change the list."
        )
        return error.as_collective() if collective else error

    def _agree_on_averages(self) -> None:
        """Average the moving averages of the weights, so that Keras sets the same weights on all workers at the end."""
        optimizer = self._optimizer()
        mark_state(optimizer)
        for ranks, averages in by_ranks(moving_averages(optimizer), self.comm):
            for variable in averages:
                mine = np.ravel(variable.numpy()).astype(np.float64)
                total = ranks.all_reduce_sum(mine, f"{self.name}.averages")
                variable.assign((total / ranks.size).reshape(variable.shape).astype(variable.dtype))

    def any_overflow(self, overflowed: tf.Tensor) -> tf.Tensor:
        """Return the overflow of any rank; if ranks are asynchronous, of this rank's group, which skips the step."""
        if not self.strategy.asynchronous:
            return super().any_overflow(overflowed)
        mesh = self.comm.mesh
        return overflowed if mesh is None else any_rank(mesh.group, overflowed)

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return all optimiser variables except the learning rate and moving averages; step counters differ, too."""
        inner: keras.optimizers.Optimizer = self._optimizer()
        common = {id(v) for v in (rate_of(inner), *moving_averages(inner))}
        mine = {id(v): v for part in (inner, self._scaler) if part is not None for v in part.variables}
        return [v for i, v in mine.items() if i not in common]


def _make_flag() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(False, trainable=False)


def _initialized(variables: Sequence[Variable]) -> bool:
    """Return whether variables have values; those of a layer that is built in the traced step get theirs later."""
    with tf.init_scope():
        return all(bool(raw_variable(v).is_initialized()) for v in variables)
