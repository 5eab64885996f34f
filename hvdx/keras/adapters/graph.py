"""Adapters for strategies whose exchange is part of the graph: means of gradients, and averages of weights."""

import weakref
from collections.abc import Mapping, Sequence
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from hvdx import comm as world
from hvdx.comm import GraphComm
from hvdx.comm.interfaces import Reduction
from hvdx.comm.split_tensors import SplitTensors
from hvdx.errors import ConfigError
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import (
    Adapter,
    apply_constraints,
    describe_sum,
    refuse_local_skip,
    scaled,
    values_of,
    with_values,
)
from hvdx.keras.adapters.finite import FirstBad, bad_flags
from hvdx.keras.adapters.local_variables import LocalVariables
from hvdx.keras.optimizer_state import accumulated_gradients, innermost, moving_averages, slots
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.seams.optimizers import step_counter, trained_variables
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import bytes_of, rows_within
from hvdx.keras.weight_parts import mark_state, part_of, tensors_of
from hvdx.strategies import Exchange, Strategy, TensorSpec
from hvdx.strategies.parameter_averaging import AveragingExchange
from hvdx.strategies.split import SplitGraphExchange
from hvdx.strategies.telemetry import AveragingTelemetry, Telemetry

# Optimisers with rank-local momenta from an earlier fit or a checkpoint.
_have_local_momenta: "weakref.WeakSet[keras.optimizers.Optimizer]" = weakref.WeakSet()
# Sample count of a rank without samples; if no rank has any, all count the same.
_NO_SAMPLES = 1e-6
# A variable of more bytes is averaged in blocks of rows.
_BLOCK_BYTES = 2**22


class GraphAdapter(Adapter):
    """Adapter that combines gradients, by an exchange that is part of the graph.

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
        self.seconds, self.exchanges, self.rows_sent = (_zero(d) for d in (tf.float64, tf.int64, tf.int64))

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
        return Telemetry(steps=exchanges, elements=elements, sent=sent, received=sent, exchanging=self.seconds_away())

    def seconds_away(self) -> float:
        # `cost` reads two variables more, in every step.
        return float(self.seconds.numpy())


def _divided(gradients: list[Gradient], mean: tf.Tensor) -> list[Gradient]:
    """Return gradients divided by the mean weight, which is 1 if all ranks had full batches."""

    def divided() -> list[tf.Tensor]:
        factor = tf.math.divide_no_nan(1.0, mean)
        return [values_of(scaled(g, factor)) for g in gradients]

    values = tf.cond(tf.equal(mean, 1.0), lambda: [tf.identity(values_of(g)) for g in gradients], divided)
    for value, gradient in zip(values, gradients, strict=True):
        value.set_shape(values_of(gradient).shape)
    return [with_values(g, v) for g, v in zip(gradients, values, strict=True)]


class AveragingAdapter(Adapter):
    """Adapter that lets each rank's optimiser train alone, and averages weights and state at the end of each period.

    `before_step` and `after_step` run around every call of the optimiser, on all ranks. So a rank that skips a step
    because of an overflow still takes part in the average.

    Attributes:
        since: int64 variable, number of calls since the last average.
        samples: float32 variable, number of samples on this rank since the last average.
        averages: int64 variable, number of averages.
    """

    logs_cost = True
    wraps_apply = True
    comm: GraphComm
    reusable_across_fits = True

    def __init__(
        self, strategy: Strategy, comm: GraphComm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(name, gain)
        self.strategy = strategy
        self.comm = comm
        self._optimizer = weakref.ref(optimizer)
        self._counted = False
        self._exchange: AveragingExchange | SplitGraphExchange | None = None
        updates.check_averages(innermost(optimizer), strategy.rank_local_state)
        self.holds_loss_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.since, self._due, self.averages, self._excluded = (_zero(tf.int64) for _ in range(4))
        self.samples, self._divergence, self._seconds = _zero(tf.float32), _zero(tf.float32), _zero(tf.float64)

    def reset(self) -> None:
        super().reset()
        for variable in (self.averages, self._excluded, self._seconds):
            variable.assign(tf.zeros_like(variable))

    def count_step(self) -> None:
        """Do nothing: `after_step` counts steps, also those that a rank skips."""

    def count_samples(self, count: int | tf.Tensor) -> None:
        super().count_samples(count)
        self._counted = True
        with tf.device("CPU:0"):
            self.samples.assign_add(tf.cast(count, tf.float32))

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return this rank's own gradients."""
        if not self.holds_loss_scale:
            refuse_local_skip()
        if self.strategy.rank_local_state:
            _have_local_momenta.add(self._inner)
        return [scaled(g, self.gain) for g in gradients]

    def before_step(self) -> None:
        """Right after an average, set the number of calls until the next average.

        Raises:
            ConfigError: if the strategy needs the number of samples, and nothing counts them.
        """
        if self.strategy.counts_samples and not self._counted:
            raise ConfigError(
                "ParameterAveraging: weighted=True: expected a count of samples, got none. Use the Distribute "
                "callback, or call hvdx.keras.count_samples(optimizer, batch_size) before each step of your own loop."
            )
        with tf.device("CPU:0"):
            # The step counts of ranks that skip steps differ. Right after an average they are the same.
            due = self._period(tf.cast(tf.convert_to_tensor(step_counter(self._inner)), tf.int64))
            self._due.assign(tf.where(tf.equal(self.since, 0), due, self._due))

    def _period(self, calls: tf.Tensor) -> tf.Tensor:
        """Return the length of the next period in calls, after `calls` calls in all."""
        micro = self._inner.gradient_accumulation_steps or 1
        first, *later = self.strategy.schedule
        period = tf.constant(first[1], tf.int64)
        for step, longer in later:
            period = tf.where(calls // micro >= step, tf.constant(longer, tf.int64), period)
        return period * micro

    def after_step(self) -> None:
        """Count the call, and average if it ends the period."""
        with tf.device("CPU:0"):
            self.steps.assign_add(1)
            since = tf.convert_to_tensor(self.since.assign_add(1))
        tf.cond(since >= self._due, self._average, lambda: tf.constant(False))

    def idle(self, optimizer: keras.optimizers.Optimizer, gradients: list[Gradient], variables: list[Variable]) -> None:
        """Take part in the averages of the others, with the weights as they are."""
        self.before_step()
        step_counter(self._inner).assign_add(1)
        self.after_step()

    def any_overflow(self, overflowed: tf.Tensor) -> tf.Tensor:
        """Return the overflow of this rank, or of its group, which takes the steps of split layers together."""
        group = self._group()
        return overflowed if group is None else group.sum(overflowed)

    def _group(self) -> SplitTensors | None:
        """Return the collectives of the ranks that split layers with this one."""
        everyone = world.start()
        if everyone.mesh is None or self.comm.size != everyone.size:
            return None
        return tensors_of(everyone.mesh)

    def flush(self) -> None:
        """Average now, if there were calls since the last average.

        Raises:
            ReplicaError: on all ranks, if they have taken different numbers of steps.
        """
        if self._opened().agree(int(self.since.numpy())):
            self._average()

    def prepare_broadcast(self) -> None:
        """Do nothing: no update is in flight, and an average would change the weights of rank 0."""

    @property
    def _outer(self) -> keras.optimizers.Optimizer:
        """The attached optimiser. The reference to it is weak, because the optimiser refers to this adapter."""
        return self._optimizer()

    @property
    def _inner(self) -> keras.optimizers.Optimizer:
        return innermost(self._outer)

    def _averaged(self) -> tuple[list[Variable], list[Variable]]:
        """Return the weights, and the optimiser state that is averaged with them."""
        inner = self._inner
        mark_state(inner)
        state = [*moving_averages(inner), *(() if self.strategy.rank_local_state else slots(inner))]
        return trained_variables(inner), [v for v in state if tf.as_dtype(v.dtype).is_floating]

    def _average(self) -> tf.Tensor:
        weights, state = self._averaged()
        variables = [*weights, *state]
        bad = tf.reduce_max(bad_flags([tf.convert_to_tensor(v) for v in variables]))
        with tf.control_dependencies([bad]):
            begin = tf.timestamp()
        finite = tf.equal(bad, 0.0)
        counts = tf.maximum(self.samples, _NO_SAMPLES) if self._counted else tf.constant(1.0)
        shared, group = counts, self._group()
        if group is not None:
            # Parts hold the steps of the whole group, so its ranks are left out together, and have the same weight.
            bad, total = tf.unstack(group.sum(tf.stack([bad, counts])))
            finite, shared = tf.equal(bad, 0.0), total / group.size
        weight, weight_of_parts = (tf.where(finite, w, 0.0) for w in (counts, shared))
        # The exchange of split layers takes all tensors at once.
        split = any(part_of(v) is not None for v in variables)
        large = [v for v in variables if bytes_of(v) > _BLOCK_BYTES and not split]
        small = [v for v in variables if bytes_of(v) <= _BLOCK_BYTES or split]
        before = [_value_for_sum(tf.convert_to_tensor(v)) for v in small]
        means = self._means(before, [part_of(v) is not None for v in small], weight, weight_of_parts)
        in_rows = {id(v): self._average_rows(v, weight, f".{i}") for i, v in enumerate(large)}
        with tf.control_dependencies([*means, *(norm for _, norm in in_rows.values())]):
            self._seconds.assign_add(tf.timestamp() - begin)
        at_once = {id(v): _squares(mine, mean) for v, mine, mean in zip(small, before, means, strict=True)}
        squares, norms = zip(*((at_once | in_rows)[id(v)] for v in weights), strict=True)
        self._divergence.assign(tf.sqrt(tf.math.divide_no_nan(tf.add_n(squares), tf.add_n(norms))))
        for variable, mean in zip(small, means, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))
        # The mean of weights that satisfy a constraint may violate it.
        apply_constraints(weights)
        if self.strategy.rank_local_state:
            tf.cond(finite, lambda: tf.constant(False), self._clear_nonfinite_state)
        self._agree_on_counters()
        for counter, more in ((self.averages, 1), (self._excluded, tf.cast(tf.logical_not(finite), tf.int64))):
            counter.assign_add(more)
        for variable in (self.since, self.samples):
            variable.assign(tf.zeros_like(variable))
        return tf.constant(True)

    def _average_rows(self, variable: Variable, weight: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Replace a variable by its mean, block by block of rows, since the product with the weight is as large.

        Args:
            variable: weight or state, not a part of a split layer.
            weight: see `_means`.
            name: addition to the names of the collectives.

        Returns:
            See `_squares`.
        """
        raw, length, rows = raw_variable(variable), int(variable.shape[0]), rows_within(variable, _BLOCK_BYTES)

        def block(low: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
            places = tf.range(low, tf.minimum(low + rows, length))
            mine = _value_for_sum(tf.gather(raw, places))
            share = tf.cast(weight, mine.dtype)
            exchange = cast(AveragingExchange, self._opened())  # no variable of split layers comes here
            (mean,) = exchange.mean([tf.math.multiply_no_nan(mine, share)], {mine.dtype: share}, name)
            with tf.control_dependencies([raw.scatter_update(tf.IndexedSlices(tf.cast(mean, raw.dtype), places))]):
                more = _squares(mine, mean)
                return low + rows, sums[0] + more[0], sums[1] + more[1]

        start = (tf.constant(0), tf.constant(0.0), tf.constant(0.0))
        end, *squares = tf.while_loop(lambda low, *_: low < length, block, start, parallel_iterations=1)
        with tf.control_dependencies([end]):
            # An assignment to rows makes each later step copy the variable that it reads.
            tf.raw_ops.DisableCopyOnRead(resource=raw.handle)
        return squares[0], squares[1]

    def _means(
        self, tensors: Sequence[tf.Tensor], is_part: Sequence[bool], weight: tf.Tensor, weight_of_parts: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return the weighted means over the ranks; NaN on all ranks if every weight is 0.

        Args:
            tensors: this rank's tensors; with a weight of 0 they may hold NaN or infinity.
            is_part: whether each tensor is a part of a split layer.
            weight, weight_of_parts: float32, this rank's weight in the mean, for whole tensors and for parts.
        """
        dtypes = {t.dtype for t in tensors}
        whole, parts = ({dtype: tf.cast(w, dtype) for dtype in dtypes} for w in (weight, weight_of_parts))
        weights = whole, parts
        shares = [tf.math.multiply_no_nan(t, weights[part][t.dtype]) for t, part in zip(tensors, is_part, strict=True)]
        exchange = self._opened()
        if isinstance(exchange, SplitGraphExchange):
            return exchange.mean(shares, whole, parts)
        return exchange.mean(shares, whole)

    def _opened(self) -> AveragingExchange | SplitGraphExchange:
        """Return the exchange of weights and state; open it again if the optimiser had no variables before."""
        if self._exchange is None or not self._exchange.specs:
            weights, state = self._averaged()
            variables = [*weights, *state]
            exchange = self.open_exchange(variables, [describe_sum(v) for v in variables])
            self._exchange = cast(AveragingExchange | SplitGraphExchange, exchange)
        return self._exchange

    def _clear_nonfinite_state(self) -> tf.Operation:
        """Set NaN and infinity in the optimiser's state to 0, so that the next step can be finite."""
        for variable in slots(self._inner):
            if tf.as_dtype(variable.dtype).is_floating:
                value = tf.convert_to_tensor(variable)
                variable.assign(tf.where(tf.math.is_finite(value), value, tf.zeros_like(value)))
        return tf.constant(True)

    def _agree_on_counters(self) -> None:
        """With a loss scale, give all ranks rank 0's step count and loss scale, which have no useful mean.

        The accumulation of gradients restarts, because half-accumulated gradients belong to the old counts.
        """
        outer, inner = self._outer, self._inner
        if outer is inner:
            return
        counters = [step_counter(inner), outer.step_counter, outer.dynamic_scale]
        mine = tf.stack([tf.cast(tf.convert_to_tensor(c), tf.float64) for c in counters])
        if self.comm.survives:
            # The first row is that of the present rank 0.
            those = tf.gather(self.comm.all_gather(mine[None], f"{self.name}.counters"), 0)
        else:
            mine *= float(self.comm.rank == 0)
            (those,) = self.comm.all_reduce([mine], Reduction(average=False), f"{self.name}.counters")
        micro = inner.gradient_accumulation_steps or 1
        count, *scale = tf.unstack(those)
        for variable, value in zip(counters, [count // micro * micro, *scale], strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        for variable in accumulated_gradients(inner):
            variable.assign(tf.zeros_like(tf.convert_to_tensor(variable)))

    def cost(self) -> Telemetry:
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

    # -- rank-local state ---------------------------------------------------------------------------------------------

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return all weights and optimiser variables; right after an average, only state that is not averaged."""
        if now and not int(self.since.numpy()):
            return slots(self._inner) if self.strategy.rank_local_state else []
        outer, inner = self._outer, self._inner
        local = {id(v) for v in accumulated_gradients(inner)}
        state = {id(v): v for v in (*outer.variables, *inner.variables) if id(v) not in local}
        return [*trained_variables(inner), *state.values()]

    @property
    def has_state(self) -> bool:
        return bool(self.since.numpy()) or (self.strategy.rank_local_state and self._inner in _have_local_momenta)

    def before_saving(self) -> None:
        """Do nothing: each rank saves its own weights, and training continues unchanged."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the position in the period; an empty state right after an average, unless momenta are rank-local."""
        if not self.strategy.rank_local_state and not int(self.since.numpy()):
            return {}
        return {name: variable.numpy() for name, variable in self._period_variables().items()}

    @property
    def state_key(self) -> str:
        return f"{self.strategy.name}, {'own' if self.strategy.rank_local_state else 'averaged'} state"

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Resume within a period; an empty state means a position right after an average."""
        if self.strategy.rank_local_state:
            _have_local_momenta.add(self._inner)
        for name, variable in self._period_variables().items():
            variable.assign(state.get(name, np.zeros((), variable.dtype.as_numpy_dtype)))

    def _period_variables(self) -> dict[str, tf.Variable]:
        return {"since": self.since, "due": self._due, "samples": self.samples}


def _zero(dtype: tf.DType) -> tf.Variable:
    """Return a variable that holds 0, for counts and sums."""
    with tf.device("CPU:0"):
        return tf.Variable(tf.zeros((), dtype), trainable=False)


def _value_for_sum(value: tf.Tensor) -> tf.Tensor:
    """Return the values of a variable, in float32 if its dtype is narrower."""
    return value if value.dtype.size >= 4 else tf.cast(value, tf.float32)


def _squares(mine: tf.Tensor, mean: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the squared 2-norms of the difference between a tensor and its mean, and of the mean, float32."""
    distance, norm = (tf.reduce_sum(tf.square(t)) for t in (mine - mean, mean))
    return tf.cast(distance, tf.float32), tf.cast(norm, tf.float32)
