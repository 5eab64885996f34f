"""Ties an optimiser to a strategy that averages weights: steps of its own on each rank, and now and then an average."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdx.comm import GraphComm
from hvdx.comm.base import Reduction
from hvdx.errors import ConfigError
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import Adapter, apply_constraints, describe, refuse_local_skip, scaled
from hvdx.keras.adapters.optimizer_state import innermost, local_variables, moving_averages, slots
from hvdx.strategies import Strategy, TensorSpec
from hvdx.strategies.telemetry import AveragingTelemetry, Telemetry

# Optimisers whose momenta are their rank's own, from an earlier fit or from a checkpoint.
_trained_apart: "weakref.WeakSet[Any]" = weakref.WeakSet()
# Samples of a rank that saw none; where nobody saw any, all count alike.
_NO_SAMPLES = 1e-6


class AveragingAdapter(Adapter):
    """Lets an optimiser train alone, and averages what it trained every so many steps.

    `before_step` and `after_step` stand around every call of the optimiser, on all ranks alike: a rank may skip a step
    whose loss scale overflowed, and still comes to the average.

    Attributes:
        since: int64 variable, calls since the last average.
        samples: float32 variable, samples that this rank saw since then.
        averages: int64 variable, number of averages.
    """

    reports = True
    stands_around = True

    def __init__(self, strategy: Strategy, comm: GraphComm, optimizer: Any, name: str, gain: float = 1.0):
        super().__init__(name, gain)
        self.strategy = strategy
        self.comm = comm
        self._optimizer = weakref.ref(optimizer)
        self._counted = False
        self._exchange: Any = None
        if strategy.rank_local_state and updates.assigns_weights(innermost(optimizer)):
            raise ConfigError(
                f"optimizer {type(innermost(optimizer)).__name__}: it computes weights from its state, so averaging "
                "them without it would be undone by the next step. Use ParameterAveraging(average_optimizer=True)."
            )
        self.holds_loss_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.since, self._due, self.averages, self._excluded = (_variable(tf.int64) for _ in range(4))
        self.samples, self._divergence = _variable(tf.float32), _variable(tf.float32)
        self._seconds = _variable(tf.float64)

    def reset(self) -> None:
        """See `Adapter.reset`."""
        super().reset()
        for variable in (self.averages, self._excluded, self._seconds):
            variable.assign(tf.zeros_like(variable))

    def count_step(self) -> None:
        """Steps are counted where they begin."""

    def count_samples(self, count: Any) -> None:
        """See `Adapter.count_samples`."""
        self._counted = True
        with tf.device("CPU:0"):
            self.samples.assign_add(tf.cast(count, tf.float32))

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """See `Adapter.gradients`: this rank's own."""
        if not self.holds_loss_scale:
            refuse_local_skip()
        if self.strategy.rank_local_state:
            _trained_apart.add(self._inner)
        return [scaled(g, self.gain) for g in gradients]

    def before_step(self) -> None:
        """See `Adapter.before_step`: when is the next average?"""
        if self.strategy.counts_samples and not self._counted:
            raise ConfigError(
                "ParameterAveraging: weighted=True: nobody counts the samples. Use the Distribute callback, or call "
                "hvdx.keras.count_samples(optimizer, batch_size) before each step of your own loop."
            )
        with tf.device("CPU:0"):
            # Ranks that skip steps count them differently; right after an average they are alike.
            due = self._period(tf.cast(tf.convert_to_tensor(self._inner._iterations), tf.int64))
            self._due.assign(tf.where(tf.equal(self.since, 0), due, self._due))

    def _period(self, calls: Any) -> Any:
        """Calls until the next average, when there were `calls` of them before."""
        micro = self._inner.gradient_accumulation_steps or 1
        first, *later = self.strategy.schedule
        period = tf.constant(first[1], tf.int64)
        for step, longer in later:
            period = tf.where(calls // micro >= step, tf.constant(longer, tf.int64), period)
        return period * micro

    def after_step(self) -> None:
        """See `Adapter.after_step`: is it time?"""
        with tf.device("CPU:0"):
            self.steps.assign_add(1)
            since = tf.convert_to_tensor(self.since.assign_add(1))
        tf.cond(since >= self._due, self._average, lambda: tf.constant(False))

    def flush(self) -> None:
        """See `Adapter.flush`: average now.

        Raises:
            ReplicaError: on all ranks, if they have not taken as many steps.
        """
        if self._opened().agree(int(self.since.numpy())):
            self._average()

    def prepare_broadcast(self) -> None:
        """See `Adapter.prepare_broadcast`: nothing ever is, and an average would spoil the weights of rank 0."""

    @property
    def _outer(self) -> Any:
        """The optimiser that is tied; it holds this adapter, and not the other way round."""
        return self._optimizer()

    @property
    def _inner(self) -> Any:
        return innermost(self._outer)

    def _averaged(self) -> tuple[list[Any], list[Any]]:
        """The weights, and what else is averaged with them."""
        inner = self._inner
        state = [*moving_averages(inner), *(() if self.strategy.rank_local_state else slots(inner))]
        return list(inner._trainable_variables), [v for v in state if tf.as_dtype(v.dtype).is_floating]

    def _average(self) -> Any:
        weights, state = self._averaged()
        tensors = [_wide(v) for v in (*weights, *state)]
        with tf.control_dependencies(tensors):
            begin = tf.timestamp()
        # Reading everything once is all that it costs: one NaN makes the sum NaN.
        finite = tf.math.is_finite(tf.add_n([tf.cast(tf.reduce_sum(t), tf.float32) for t in tensors]))
        counts = tf.maximum(self.samples, _NO_SAMPLES) if self.strategy.counts_samples else tf.constant(1.0)
        means = self._means(tensors, tf.where(finite, counts, 0.0))
        with tf.control_dependencies(means):
            self._seconds.assign_add(tf.timestamp() - begin)
        self._divergence.assign(_distance(tensors[: len(weights)], means[: len(weights)]))
        for variable, mean in zip((*weights, *state), means, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))
        # The mean of what a constraint allows may be what it does not.
        apply_constraints(weights)
        if self.strategy.rank_local_state:
            tf.cond(finite, lambda: tf.constant(False), self._forget)
        self._agree_on_counters()
        for counter, more in ((self.averages, 1), (self._excluded, tf.cast(tf.logical_not(finite), tf.int64))):
            counter.assign_add(more)
        for variable in (self.since, self.samples):
            variable.assign(tf.zeros_like(variable))
        return tf.constant(True)

    def _means(self, tensors: Sequence[Any], mine: Any) -> list[Any]:
        """The weighted means over the ranks; NaN on all of them, if no rank counts.

        Args:
            tensors: this rank's.
            mine: float32, how much it counts; with 0 its tensors may hold anything.
        """
        weights = {dtype: tf.cast(mine, dtype) for dtype in {t.dtype for t in tensors}}
        shares = [tf.math.multiply_no_nan(t, weights[t.dtype]) for t in tensors]
        means: list[Any] = self._opened().step(shares, weights)
        return means

    def _opened(self) -> Any:
        """The exchange of the weights and what is averaged with them, opened once the optimiser has its variables."""
        if self._exchange is None or not self._exchange.specs:
            weights, state = self._averaged()
            self._exchange = self.strategy.open(self.comm, [_as_sent(v) for v in (*weights, *state)], name=self.name)
        return self._exchange

    def _forget(self) -> Any:
        """Momenta that hold NaN would spoil the next step again."""
        for variable in slots(self._inner):
            if tf.as_dtype(variable.dtype).is_floating:
                value = tf.convert_to_tensor(variable)
                variable.assign(tf.where(tf.math.is_finite(value), value, tf.zeros_like(value)))
        return tf.constant(True)

    def _agree_on_counters(self) -> None:
        """Where ranks skip steps, they take rank 0's count and loss scale: a mean of those would be of no use.

        Gradients that are half accumulated belong to counts that were, so accumulation begins anew.
        """
        outer, inner = self._outer, self._inner
        if outer is inner:
            return
        counters = [inner._iterations, outer.step_counter, outer.dynamic_scale]
        mine = tf.stack([tf.cast(tf.convert_to_tensor(c), tf.float64) for c in counters])
        mine *= float(self.comm.rank == 0)
        (those,) = self.comm.all_reduce([mine], Reduction(average=False), f"{self.name}.counters")
        micro = inner.gradient_accumulation_steps or 1
        count, *scale = tf.unstack(those)
        for variable, value in zip(counters, [count // micro * micro, *scale], strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        for variable in local_variables(inner):
            variable.assign(tf.zeros_like(tf.convert_to_tensor(variable)))

    def cost(self) -> Telemetry:
        """See `Adapter.cost`."""
        averages, exchange = int(self.averages.numpy()), self._opened()
        sent = averages * exchange.sent
        return AveragingTelemetry(
            steps=int(self.steps.numpy()),
            elements=exchange.elements,
            sent=sent,
            received=sent,
            exchanging=float(self._seconds.numpy()),
            averages=averages,
            divergence=float(self._divergence.numpy()),
            excluded=int(self._excluded.numpy()),
        )

    # -- what belongs to a rank ---------------------------------------------------------------------------------------

    def rank_local_variables(self, now: bool = True) -> list[Any]:
        """See `Adapter.rank_local_variables`: between two averages, everything."""
        if now and not int(self.since.numpy()):
            return slots(self._inner) if self.strategy.rank_local_state else []
        outer, inner = self._outer, self._inner
        local = {id(v) for v in local_variables(inner)}
        state = {id(v): v for v in (*outer.variables, *inner.variables) if id(v) not in local}
        return [*inner._trainable_variables, *state.values()]

    @property
    def has_state(self) -> bool:
        """See `Adapter.has_state`."""
        return bool(self.since.numpy()) or (self.strategy.rank_local_state and self._inner in _trained_apart)

    def before_saving(self) -> None:
        """See `Adapter.before_saving`: saving leaves the training as it is, and each rank saves its own weights."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `Adapter.state_dict`; right after an average there is nothing to remember, but that momenta are apart."""
        if not self.strategy.rank_local_state and not int(self.since.numpy()):
            return {}
        return {name: variable.numpy() for name, variable in self._place_in_period().items()}

    @property
    def state_key(self) -> str:
        """See `Adapter.state_key`."""
        return f"{self.strategy.name}, {'own' if self.strategy.rank_local_state else 'averaged'} state"

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Adapter.load_state_dict`; with nothing to restore, the weights were averaged."""
        if self.strategy.rank_local_state:
            _trained_apart.add(self._inner)
        for name, variable in self._place_in_period().items():
            variable.assign(state.get(name, np.zeros((), variable.dtype.as_numpy_dtype)))

    def _place_in_period(self) -> dict[str, tf.Variable]:
        return {"since": self.since, "due": self._due, "samples": self.samples}


def _variable(dtype: tf.DType) -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(tf.zeros((), dtype), trainable=False)


def _wide(variable: Any) -> Any:
    """Its value in the dtype that it is added up in."""
    value = tf.convert_to_tensor(variable)
    return value if value.dtype.size >= 4 else tf.cast(value, tf.float32)


def _as_sent(variable: Any) -> TensorSpec:
    spec = describe(variable)
    return TensorSpec(spec.name, spec.shape, max(spec.itemsize, 4))


def _distance(tensors: Sequence[Any], means: Sequence[Any]) -> Any:
    """2-norm of the difference, in units of the norm of the mean."""
    squares = [tf.cast(tf.reduce_sum(tf.square(t - m)), tf.float32) for t, m in zip(tensors, means, strict=True)]
    norms = [tf.cast(tf.reduce_sum(tf.square(m)), tf.float32) for m in means]
    return tf.sqrt(tf.math.divide_no_nan(tf.add_n(squares), tf.add_n(norms)))
