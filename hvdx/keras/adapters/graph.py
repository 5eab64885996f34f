"""Adapter for strategies that combine gradients inside the graph."""

import weakref
from collections.abc import Sequence

import keras
import tensorflow as tf

from hvdx.comm import GraphComm
from hvdx.comm.interfaces import Reduction
from hvdx.keras.adapters.base import Adapter, refuse_local_skip, scaled, values_of, with_values
from hvdx.keras.adapters.first_bad import FirstBad
from hvdx.keras.adapters.local_variables import LocalVariables
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.optimizers import step_counter
from hvdx.keras.types import Gradient, Variable
from hvdx.strategies import Exchange, Strategy, TensorSpec
from hvdx.strategies.telemetry import Telemetry


class GraphAdapter(Adapter):
    """Adapter between an optimiser and a strategy whose exchange is part of the graph.

    Attributes:
        seconds: float64 variable, seconds from the last gradient to the last combined gradient, summed over steps.
        exchanges: int64 variable, number of exchanges.
        local: variables whose gradients stay on their rank.
    """

    comm: GraphComm
    reusable_across_fits = True

    def __init__(
        self, strategy: Strategy, comm: GraphComm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(name, gain)
        self._optimizer = weakref.ref(innermost(optimizer))
        self.local = LocalVariables()
        self.strategy = strategy
        self.comm = comm
        self._first_bad = FirstBad()
        self._exchange: Exchange[tf.Tensor] | None = None
        with tf.device("CPU:0"):
            self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self.exchanges = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.rows_sent = tf.Variable(0, dtype=tf.int64, trainable=False)

    def reset(self) -> None:
        super().reset()
        for variable in (self.seconds, self.exchanges, self.rows_sent):
            variable.assign(tf.zeros_like(variable))
        self._first_bad.reset()

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Combine gradients over the ranks, and measure the time."""
        if not self.holds_loss_scale:
            refuse_local_skip()
            # With a loss scale this check is left out: an overflow is normal there, and the step is skipped.
            gradients = self._first_bad.look(gradients, self.steps)
        # The timer waits for all gradients. The exchange sends each group when the group is complete.
        with tf.control_dependencies([values_of(g) for g in gradients]):
            begin = tf.timestamp()
        combined = self.local.exchange_others(self.variables, gradients, self.comm.size, self._exchanged)
        with tf.control_dependencies([values_of(g) for g in combined]):
            elapsed = tf.timestamp() - begin
        with tf.device("CPU:0"):
            self.seconds.assign_add(elapsed)
            self.exchanges.assign_add(1)
        return [scaled(g, self.gain) for g in combined]

    def _exchanged(self, gradients: list[Gradient]) -> list[Gradient]:
        """Return the mean gradients; with rows, the ranks' weights travel with the gradients that they weigh."""
        if not self.weighs or self._accumulates:
            return self._step(self._opened(), gradients)
        with tf.device("CPU:0"):
            weight = tf.cast(tf.divide(self.rows, self.full), tf.float32)
        weighed = [scaled(g, weight) for g in gradients]
        *means, mean = self._step(self._opened(TensorSpec(f"{self.name}.rows", (), 4)), [*weighed, weight])
        return _divided(means, mean)

    def _step(self, exchange: Exchange[tf.Tensor], gradients: Sequence[Gradient]) -> list[Gradient]:
        """Take a step of the exchange, and count the bytes of rows: this rank sends its own to each other rank."""
        rows = [g for g in gradients if isinstance(g, tf.IndexedSlices)] if exchange.row_itemsize != 0 else []
        if rows:
            with tf.device("CPU:0"):
                sizes = [tf.size(g.values, tf.int64) * (exchange.row_itemsize or g.values.dtype.size) for g in rows]
                sizes += [tf.size(g.indices, tf.int64) * g.indices.dtype.size for g in rows]
                self.rows_sent.assign_add((self.comm.size - 1) * tf.add_n(sizes))
        return list(exchange.step(gradients))

    @property
    def _shared(self) -> list[tuple[Variable, TensorSpec]]:
        """Variables that are not local, and their specs."""
        return [(v, s) for v, s in zip(self.variables, self.specs, strict=True) if not self.local.holds(v)]

    def _opened(self, *more: TensorSpec) -> Exchange[tf.Tensor]:
        """Open the exchange of the shared variables, and of further tensors."""
        variables, specs = [v for v, _ in self._shared], [s for _, s in self._shared]
        exchange: Exchange[tf.Tensor] = self.open_exchange(variables, [*specs, *more])
        self._exchange = exchange
        return exchange

    def any_overflow(self, overflowed: tf.Tensor) -> tf.Tensor:
        (anywhere,) = self.comm.all_reduce([overflowed], Reduction(average=False), f"{self.name}.overflow")
        return anywhere

    def first_bad(self) -> tuple[int, str]:
        step, variable = self._first_bad.found.numpy().tolist()
        self._first_bad.reset()
        return (step, self.specs[variable].name) if step else (0, "")

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        optimizer = self._optimizer()
        return [] if optimizer is None else self.local.of(optimizer)

    @property
    def has_state(self) -> bool:
        """True if local variables have been trained."""
        optimizer = self._optimizer()
        return optimizer is not None and bool(self.local.of(optimizer)) and int(step_counter(optimizer).numpy()) > 0

    def cost(self) -> Telemetry:
        exchanges = int(self.exchanges.numpy())
        sent = exchanges * (self._exchange.sent if self._exchange is not None else 0) + int(self.rows_sent.numpy())
        elements = sum(s.elements for _, s in self._shared)
        return Telemetry(
            steps=exchanges, elements=elements, sent=sent, received=sent, exchanging=float(self.seconds.numpy())
        )


def _divided(gradients: list[Gradient], mean: tf.Tensor) -> list[Gradient]:
    """Return gradients divided by the mean weight, which is 1 if all ranks had full batches."""

    def divided() -> list[tf.Tensor]:
        factor = tf.math.divide_no_nan(1.0, mean)
        return [values_of(scaled(g, factor)) for g in gradients]

    values = tf.cond(tf.equal(mean, 1.0), lambda: [tf.identity(values_of(g)) for g in gradients], divided)
    for value, gradient in zip(values, gradients, strict=True):
        value.set_shape(values_of(gradient).shape)
    return [with_values(g, v) for g, v in zip(gradients, values, strict=True)]
