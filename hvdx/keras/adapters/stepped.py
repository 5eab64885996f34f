"""Adapters for JAX and PyTorch, whose training steps Python calls; here those that combine gradients within the step.

An exchange of gradients is a call of Python code within the step. Updates and weights are exchanged after it:
see `stepped_updates` and `stepped_averages`. The optimiser takes its own step there, unchanged.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import keras
import numpy as np

from hvdx.comm import Comm, clock
from hvdx.comm.buckets import GivenSums
from hvdx.errors import ExchangeError
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.finite import holds_bad
from hvdx.keras.backends import stepped
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.optimizers import trained_variables
from hvdx.keras.types import Gradient, Variable
from hvdx.strategies import Exchange, HostExchange, StepInput, Strategy
from hvdx.strategies.telemetry import Telemetry


class Count:
    """A count with the methods of a variable of TensorFlow."""

    def __init__(self) -> None:
        self._value = 0

    def assign(self, value: object) -> None:
        """Set the count to a number, or to another count."""
        self._value = int(value.numpy() if isinstance(value, Count) else cast(int, value))

    def assign_add(self, more: int) -> None:
        self._value += more

    def numpy(self) -> int:
        return self._value


class SteppedAdapter(Adapter):
    """Adapter whose steps are counted, and whose exchanges are called, by Python."""

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(name, gain)
        self.strategy, self.comm = strategy, comm
        self.logs_cost = strategy.placement == "weights" or strategy.runs == "host"
        self._optimizer = weakref.ref(optimizer)
        # Rows of the step that is taken or traced, and since the last exchange; None if all ranks have as many.
        self._batch: float | None = None
        self._rows: float | None = None

    def _counter(self) -> Count:
        return Count()

    def count_step(self) -> None:
        """Do nothing in the step, which JAX traces once: `meet` counts."""
        self.stepped = True

    def expect_one_pass(self) -> None:
        """Expect one backward pass in each step, whose gradients the optimiser is given."""

    def begin_batch(self, rows: float | None) -> None:
        """Begin a step of some rows, or its trace: `gradients` makes it one for batches of as many."""
        self._batch = rows

    def add_rows(self, rows: float) -> None:
        """Count the rows of a step that is taken now, for `meet`."""
        self._rows = (self._rows or 0.0) + rows

    def any_overflow(self, overflowed: Gradient) -> Gradient:
        """Return the overflow of any rank, so that the loss scales of all stay alike; if asynchronous, of this one."""
        if self.strategy.asynchronous:
            return overflowed

        def ask(arrays: list[np.ndarray]) -> list[np.ndarray]:
            return [np.asarray(self.comm.any_true(bool(arrays[0] > 0)), np.float32)]

        return stepped().on_host(ask, [overflowed])[0]

    def close(self) -> None:
        """Close what the fit has opened. Collective."""

    def due(self, steps: int) -> bool:
        """Count steps that were taken, and return whether `meet` is to be called now.

        Args:
            steps: steps since the last call: more than 1 where several are executed together.
        """
        self.steps.assign_add(steps)
        return False

    def meet(self) -> None:
        """Exchange between two steps, while the model's variables hold their values. Collective."""

    def share(self, rows: float | None) -> float:
        """Return the weight of a rank with some rows in a mean: these divided by their mean. Collective if not None."""
        if rows is None or not self.strategy.weighs:
            return 1.0
        total = float(self.comm.all_reduce_sum(np.array([rows]), f"{self.name}.rows")[0])
        return rows * self.comm.size / total if total else 0.0


class SteppedExchange(SteppedAdapter):
    """Adapter with one exchange; one on the host has a residual, and is that of the optimiser's next fit too."""

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(strategy, comm, optimizer, name, gain)
        self._exchange: Exchange[np.ndarray] | None = None
        before = _remembered.pop(innermost(optimizer), None)
        if before is not None:
            same = (repr(strategy), comm) == before[:2]
            if same and {id(v) for v in before[2]} == {id(v) for v in trained_variables(innermost(optimizer))}:
                self.record_variables(before[2])
                self._exchange = cast("Exchange[np.ndarray]", before[3])
            else:
                before[3].close()

    def _opened(self) -> Exchange[np.ndarray]:
        if self._exchange is None:
            self._exchange = cast("Exchange[np.ndarray]", self.strategy.open(self.comm, self.specs, name=self.name))
        return self._exchange

    @property
    def exchange(self) -> HostExchange | None:  # type: ignore[override]
        return self._exchange if isinstance(self._exchange, HostExchange) else None

    @property
    def exchanged(self) -> list[Variable]:
        return self.variables

    @property
    def has_state(self) -> bool:
        return self.strategy.rank_local_state and self._exchange is not None

    def reset(self) -> None:
        super().reset()
        if self.exchange is not None:
            self.exchange.reset_telemetry()

    def restart_timer(self) -> None:
        if self.exchange is not None:
            self.exchange.restart_timer()

    def close(self) -> None:
        if self.exchange is not None and self.strategy.persists_between_fits:
            _remembered[innermost(self._optimizer())] = repr(self.strategy), self.comm, self.variables, self.exchange
        elif self._exchange is not None:
            self._exchange.close()

    def cost(self) -> Telemetry:
        return Telemetry() if self.exchange is None else self.exchange.telemetry

    @property
    def telemetries(self) -> list[Telemetry] | None:
        return None if self.strategy.runs == "graph" else [] if self.exchange is None else [self.exchange.telemetry]

    @property
    def state_key(self) -> str:
        return f"{self.strategy.name}, {self.strategy.placement}"

    def state_dict(self) -> dict[str, np.ndarray]:
        return {} if self.exchange is None else self.exchange.state_dict()

    def reopen(self, variables: Sequence[Variable]) -> None:
        self.record_variables(variables)
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None
        self._opened()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        cast(HostExchange, self._opened()).load_state_dict(state)


class SteppedGradients(SteppedExchange):
    """Adapter that combines gradients within the step; where hosts and buckets are several, during the backward pass.

    The first step shows whether that can be: each gradient has to be the one that the pass has computed.
    """

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(strategy, comm, optimizer, name, gain)
        self._sums: GivenSums | None = None
        self._unwatch: Callable[[], None] | None = None
        self._watched: list[Variable] = []
        self._may_watch = self._asked = False
        # Gradients of the present step that were given, by number, in a step whose pass is watched; and their weight.
        self._given: dict[int, Gradient] | None = None
        self._weight = 1.0

    def reset(self) -> None:
        super().reset()
        self._seconds, self._exchanges, self._first_bad = 0.0, 0, (0, "")

    def _add_seconds(self, more: float) -> None:
        self._seconds += more

    def seconds_away(self) -> float:
        # The counters of an exchange on the host do not have the wait for the sum of rows before it.
        return self._seconds

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
        super().close()

    def expect_one_pass(self) -> None:
        self._may_watch = not self._asked

    def begin_batch(self, rows: float | None) -> None:
        super().begin_batch(rows)
        # A callback may freeze layers.
        if self._sums is not None and all(v.trainable for v in self._watched):
            with clock.measured(self._add_seconds):
                self._weight, self._given = self.share(rows), {}

    def begin_call(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[Gradient]:
        gradients, rows = super().begin_call(optimizer, gradients, variables), self._batch
        if not self._accumulates or rows is None:
            return gradients

        def weigh(_: list[np.ndarray]) -> list[np.ndarray]:
            with clock.measured(self._add_seconds):
                return [np.asarray(self.share(rows), np.float32)]

        (weight,) = stepped().on_host(weigh, [keras.ops.zeros((), "float32")])
        return [g * keras.ops.cast(weight, g.dtype) for g in gradients]

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Combine gradients over the ranks, and measure the time."""
        if self._given is not None:
            self._check_given(gradients)
            return stepped().on_host(self._take_sums, gradients)
        rows = None if self._accumulates else self._batch
        combined = stepped().on_host(lambda arrays: self._combine(arrays, rows), gradients)
        if self._may_watch:
            self._watch(gradients)
        return combined

    def _watch(self, gradients: Sequence[Gradient]) -> None:
        """Let the exchange begin within the backward pass in the next steps, if it can on all ranks. Collective."""
        self._may_watch, self._asked = False, True
        sums = None if self._exchange is None else self._exchange.given_sums()
        if sums is None:
            return
        self._unwatch = stepped().watch_gradients(self.variables, gradients, self._give)
        if not self.comm.any_true(self._unwatch is None):
            self._sums, self._watched = sums, list(self.variables)

    def _give(self, number: int, gradient: Gradient, array: np.ndarray) -> None:
        """Hand over a gradient that the backward pass of a training step has computed."""
        if self._given is None or self._sums is None:
            return
        if holds_bad(array) and not self._first_bad[0]:
            self._first_bad = self.steps.numpy() + 1, self._watched[number].path
        if self._weight != 1.0:
            array *= array.dtype.type(self._weight)
        self._sums.give(number, array)
        self._given[number] = gradient

    def _check_given(self, gradients: Sequence[Gradient]) -> None:
        """Raise ExchangeError if the optimiser is given other gradients than were sent."""
        given, self._given = self._given or {}, None
        sent = [given.get(i) for i in range(len(self._watched))]
        if len(sent) != len(gradients) or any(a is not b for a, b in zip(sent, gradients, strict=True)):
            raise ExchangeError(
                f"{self.name}: expected the gradients of the backward pass, as in the first step, which are sent while "
                "it computes others; got others. Do: AllReduce(groups=2), which sends nothing before the pass has "
                "ended."
            )

    def _take_sums(self, arrays: list[np.ndarray]) -> Sequence[np.ndarray]:
        with clock.measured(self._add_seconds):
            combined = cast(GivenSums, self._sums).take()
        self._exchanges += 1
        return self._results(combined, arrays)

    def _combine(self, arrays: list[np.ndarray], rows: float | None) -> Sequence[np.ndarray]:
        bad = first_bad(arrays)
        if bad >= 0 and not self._first_bad[0]:
            self._first_bad = self.steps.numpy() + 1, self.specs[bad].name
        with clock.measured(self._add_seconds):
            weight = self.share(rows)
            mine = [a if weight == 1.0 else a * a.dtype.type(weight) for a in arrays]
            exchange = self._opened()
            if isinstance(exchange, HostExchange):
                given = StepInput([m.astype(np.float32, copy=False) for m in mine], finite=bad < 0)
                combined: Sequence[object] = exchange.take(given)
            else:
                combined = exchange.step(mine)
        self._exchanges += 1
        return self._results(combined, arrays)

    def _results(self, combined: Sequence[object], arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        results = [_like(c, a) for c, a in zip(combined, arrays, strict=True)]
        return [r * r.dtype.type(self.gain) for r in results] if self.gain != 1.0 else results

    def first_bad(self) -> tuple[int, str]:
        found, self._first_bad = self._first_bad, (0, "")
        return found

    def cost(self) -> Telemetry:
        if self.exchange is not None:
            return self.exchange.telemetry
        sent = self._exchanges * (self._exchange.sent if self._exchange is not None else 0)
        elements = sum(s.elements for s in self.specs)
        return Telemetry(steps=self._exchanges, elements=elements, sent=sent, received=sent, exchanging=self._seconds)


# Of an optimiser whose fit has ended: its strategy, ranks, variables and exchange.
_Memory = tuple[str, Comm, list[Variable], HostExchange]
_remembered: "weakref.WeakKeyDictionary[keras.optimizers.Optimizer, _Memory]" = weakref.WeakKeyDictionary()


def first_bad(arrays: Sequence[np.ndarray]) -> int:
    """Return the index of the first array that holds NaN or infinity; -1 if none does.

    Example:
        >>> first_bad([np.ones(2), np.array([0.0, np.nan])])
        1
    """
    return next((i for i, array in enumerate(arrays) if holds_bad(array)), -1)


def _like(result: object, array: np.ndarray) -> np.ndarray:
    return np.asarray(result).astype(array.dtype, copy=False).reshape(array.shape)
