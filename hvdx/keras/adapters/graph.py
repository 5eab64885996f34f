"""Adapter for strategies that combine gradients inside the graph."""

import weakref
from collections.abc import Sequence

import keras
import tensorflow as tf

from hvdx.comm import GraphComm
from hvdx.comm.base import Reduction
from hvdx.keras.adapters.base import Adapter, refuse_local_skip, scaled, values_of
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

    def reset(self) -> None:
        super().reset()
        for variable in (self.seconds, self.exchanges):
            variable.assign(tf.zeros_like(variable))
        self._first_bad.reset()

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Combine gradients over the ranks, and measure the time."""
        if not self.holds_loss_scale:
            refuse_local_skip()
            # With a loss scale this check is left out: an overflow is normal there, and the step is skipped.
            self._first_bad.look([values_of(g) for g in gradients], self.steps)
        # The timer waits for all gradients. The exchange sends each group when the group is complete.
        with tf.control_dependencies([values_of(g) for g in gradients]):
            begin = tf.timestamp()
        combined = self.local.exchange_others(
            self.variables, gradients, self.comm.size, lambda g: self._opened().step(g)
        )
        with tf.control_dependencies([values_of(g) for g in combined]):
            elapsed = tf.timestamp() - begin
        with tf.device("CPU:0"):
            self.seconds.assign_add(elapsed)
            self.exchanges.assign_add(1)
        return [scaled(g, self.gain) for g in combined]

    @property
    def _shared(self) -> list[tuple[Variable, TensorSpec]]:
        """Variables that are not local, and their specs."""
        return [(v, s) for v, s in zip(self.variables, self.specs, strict=True) if not self.local.holds(v)]

    def _opened(self) -> Exchange[tf.Tensor]:
        exchange: Exchange[tf.Tensor] = self.open_exchange([v for v, _ in self._shared], [s for _, s in self._shared])
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
        sent = exchanges * (self._exchange.sent if self._exchange is not None else 0)
        elements = sum(s.elements for _, s in self._shared)
        return Telemetry(
            steps=exchanges, elements=elements, sent=sent, received=sent, exchanging=float(self.seconds.numpy())
        )
