"""What ties one optimiser to a strategy: the exchange of a step, as part of the training function, and what it cost."""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdx import comm as world
from hvdx.comm import Comm, GraphComm, failure
from hvdx.comm.base import Reduction
from hvdx.errors import ConfigError, HvdxError
from hvdx.keras import updates
from hvdx.strategies import Exchange, GraphStrategy, HostStrategy, Strategy, TensorSpec
from hvdx.strategies.telemetry import Telemetry, merged

# What a strategy remembers for an optimiser from one fit to the next, by the variables it is about.
_Open = dict[tuple[int, ...], tuple[Exchange, list[Any]]]
_remembered: "weakref.WeakKeyDictionary[Any, tuple[str, _Open]]" = weakref.WeakKeyDictionary()


class Binding:
    """What ties one optimiser to a strategy.

    Attributes:
        strategy: what combines the gradients or updates.
        name: alike on all ranks and different for each optimiser of a model.
        gain: factor on the combined gradients.
        variables: those that were exchanged; empty before the first step is traced.
        specs: name, shape and size of each.
        reached: True once a training step went through the optimiser.
        owner: the callback that tied it and will untie it; None where a script did.
        steps: int64 variable, number of steps that reached the optimiser, skipped and accumulated ones too.
        private: True where each rank's optimiser has a state of its own.
    """

    strategy: Strategy
    private = False

    def __init__(self, name: str, gain: float = 1.0):
        self.name = name
        self.gain = gain
        self.variables: list[Any] = []
        self.specs: list[TensorSpec] = []
        self.reached = False
        self.owner: Any = None
        self.agrees_on_overflow = False
        with tf.device("CPU:0"):
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    def reset(self) -> None:
        """Count from zero."""
        self.steps.assign(0)

    def count_step(self) -> None:
        """One more step has reached the optimiser."""
        with tf.device("CPU:0"):
            self.steps.assign_add(1)

    def see(self, variables: Sequence[Any]) -> None:
        """Note the variables whose gradients come next."""
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ConfigError(
                    f"variable {variable.path}: float8 scales are overwritten by each rank's own gradients, which "
                    "hvdx does not combine. Train with another dtype policy."
                )
        self.reached = True
        self.variables = list(variables)
        self.specs = [describe(v) for v in variables]

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients that the optimiser is to clip and apply.

        Args:
            gradients: one tensor or `IndexedSlices` a variable, none of them None.
        """
        raise NotImplementedError

    def apply(self, optimizer: Any, step: Callable[[], Any], variables: Sequence[Any]) -> None:
        """Change the weights; by default the optimiser's own step does.

        Args:
            optimizer: the one that is tied.
            step: its own update step.
            variables: the weights.
        """
        step()

    def agree_on_overflow(self) -> None:
        """All ranks will decide together whether to skip a step: a loss scale's `check_finite` asks `any_overflow`."""
        self.agrees_on_overflow = True

    def any_overflow(self, overflowed: Any) -> Any:
        """float32: above 0 where a rank's loss scale overflowed, the same on all ranks."""
        raise NotImplementedError

    def resume(self) -> None:
        """Steps come next, after something else: what that took is not computing."""

    def flush(self) -> None:
        """Others are about to look at the weights: add what is still on its way. Collective."""

    def cost(self) -> Telemetry:
        """What the exchanges cost since `reset`."""
        raise NotImplementedError


class GraphBinding(Binding):
    """Ties an optimiser to a strategy whose exchange is part of the graph.

    Attributes:
        seconds: float64 variable, time between the last gradient and the last combined gradient, summed over steps.
        exchanges: int64 variable, number of exchanges.
    """

    def __init__(self, strategy: GraphStrategy, comm: GraphComm, name: str, gain: float = 1.0):
        super().__init__(name, gain)
        self.strategy: GraphStrategy = strategy
        self.comm = comm
        with tf.device("CPU:0"):
            self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self.exchanges = tf.Variable(0, dtype=tf.int64, trainable=False)

    def reset(self) -> None:
        """See `Binding.reset`."""
        super().reset()
        for variable in (self.seconds, self.exchanges):
            variable.assign(tf.zeros_like(variable))

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Combine gradients over the ranks, and count the time it takes."""
        if not self.agrees_on_overflow:
            refuse_private_skip()
        # The clock waits for all gradients; the exchange does not, so that groups may leave one by one.
        with tf.control_dependencies([_values(g) for g in gradients]):
            begin = tf.timestamp()
        combined = self.strategy.exchange(self.comm, gradients, self.name)
        with tf.control_dependencies([_values(g) for g in combined]):
            elapsed = tf.timestamp() - begin
        with tf.device("CPU:0"):
            self.seconds.assign_add(elapsed)
            self.exchanges.assign_add(1)
        return [_scaled(g, self.gain) for g in combined]

    def any_overflow(self, overflowed: Any) -> Any:
        """See `Binding.any_overflow`."""
        (anywhere,) = self.comm.all_reduce([overflowed], Reduction(average=False), f"{self.name}.overflow")
        return anywhere

    def cost(self) -> Telemetry:
        """See `Binding.cost`."""
        exchanges = int(self.exchanges.numpy())
        sent = exchanges * self.strategy.bytes_per_step(self.specs, self.comm.size)
        elements = sum(s.elements for s in self.specs)
        return Telemetry(
            steps=exchanges, elements=elements, sent=sent, received=sent, exchanging=float(self.seconds.numpy())
        )


class HostBinding(Binding):
    """Ties an optimiser to a strategy that works on the host's arrays."""

    def __init__(self, strategy: HostStrategy, comm: Comm, optimizer: Any, name: str, gain: float = 1.0):
        super().__init__(name, gain)
        self.strategy: HostStrategy = strategy
        self.comm = comm
        self.private = strategy.placement == "update"
        if self.private:
            updates.check_kind(optimizer)
        self._momentum = updates.momentum_of(optimizer) if self.private else 0.0
        made_by, opened = _remembered.get(optimizer, ("", {}))
        # An optimiser may serve several lists of variables, and other ones after some were frozen.
        self._open: _Open = opened if made_by == repr(strategy) else {}
        if strategy.remembers:
            _remembered[optimizer] = repr(strategy), self._open
        # The lists of variables that this binding has seen; what is open besides them is of earlier fits.
        self._used: set[tuple[int, ...]] = set()
        self._finite: Any = True
        self._last: tuple[Exchange, list[Any]] | None = None

    @property
    def exchange(self) -> Exchange | None:
        """What the strategy remembers for the variables that were exchanged last; None before the first step."""
        return self._latest()[0]

    @property
    def exchanged(self) -> list[Any]:
        """The variables of `exchange`."""
        return self._latest()[1]

    def _latest(self) -> tuple[Exchange | None, list[Any]]:
        return self._last or next(reversed(self._open.values()), (None, []))

    @property
    def continues(self) -> bool:
        """Whether the optimiser has a state of its rank from an earlier fit, or from a checkpoint."""
        return self.private and bool(self._open)

    def reset(self) -> None:
        """See `Binding.reset`."""
        super().reset()
        for exchange, _ in self._open.values():
            exchange.telemetry = Telemetry(elements=exchange.telemetry.elements)

    def resume(self) -> None:
        """See `Binding.resume`."""
        for exchange, _ in self._open.values():
            exchange.resume()

    def reopen(self, variables: Sequence[Any]) -> None:
        """Begin anew, before the first step. Collective.

        Args:
            variables: the weights that will be exchanged.
        """
        self.variables = list(variables)
        # Of an exchange that an exception ended a message may still be on its way.
        self._open.clear()
        self._opened(list(variables))

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from a checkpoint, after `reopen`.

        Args:
            arrays: what the exchange remembered.
        """
        assert self.exchange is not None
        self.exchange.restore(arrays)

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """See `Binding.gradients`: combined here, or made fit for this rank's optimiser."""
        if not self.agrees_on_overflow:
            refuse_private_skip()
        if not self.private:
            combined = self._call([tf.convert_to_tensor(g) for g in gradients], True, self.variables)
            return [_scaled(tf.cast(c, g.dtype), self.gain) for c, g in zip(combined, gradients, strict=True)]
        # One NaN makes the sum NaN, and reading the gradients once is all that it costs.
        sums = [tf.reduce_sum(tf.cast(_values(g), tf.float32)) for g in gradients]
        self._finite = tf.math.is_finite(tf.add_n(sums))
        # NaN would stay in this rank's momentum for good.
        clean = [
            tf.cond(self._finite, lambda g=g: tf.identity(_values(g)), lambda g=g: tf.zeros_like(_values(g)))
            for g in gradients
        ]
        return [_scaled(_with_values(g, c), self.gain) for g, c in zip(gradients, clean, strict=True)]

    def apply(self, optimizer: Any, step: Callable[[], Any], variables: Sequence[Any]) -> None:
        """See `Binding.apply`."""
        if not self.private:
            step()
            return
        wanted = updates.updates_of(optimizer, step, variables)
        _add(variables, self._call(wanted, self._finite, variables))

    def flush(self) -> None:
        """See `Binding.flush`."""
        for exchange, variables in self._open.values():
            late = exchange.flush()
            if late is not None:
                _add(variables, late)
                for variable in variables:
                    # Keras applies constraints in the step, which was over when this came.
                    if getattr(variable, "constraint", None) is not None:
                        variable.assign(variable.constraint(variable))

    def any_overflow(self, overflowed: Any) -> Any:
        """See `Binding.any_overflow`."""
        comm = self.comm

        def ask(mine: np.ndarray) -> np.float32:
            return np.float32(comm.any_true(bool(mine > 0)))

        with tf.device("CPU:0"):
            anywhere = tf.numpy_function(ask, [overflowed], tf.float32)
        anywhere.set_shape(())
        return anywhere

    def cost(self) -> Telemetry:
        """See `Binding.cost`."""
        costs = [exchange.telemetry for exchange, _ in self._open.values()]
        return merged([cost for cost in costs if cost.steps] or costs)

    def _call(self, tensors: list[Any], finite: Any, variables: Sequence[Any]) -> list[Any]:
        """The exchange of one step, as an operation of the graph."""
        # TensorFlow keeps what it may call for as long as the process lives: not the binding and its arrays.
        me, them, private = weakref.ref(self), [weakref.ref(v) for v in variables], self.private

        def host(is_finite: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            try:
                binding, alive = me(), [v() for v in them]
                if binding is None:
                    raise HvdxError("a training function outlived the optimiser it was made for. Trace it anew.")
                exchange = binding._opened(alive)
                combined = exchange.step([np.asarray(a, order="C") for a in arrays], bool(is_finite))
            except BaseException as error:
                failure.remember(error)
                raise
            # A copy of gradients: an optimiser may keep one, and the next step writes to the same place.
            return combined if private else [a.copy() for a in combined]

        with tf.device("CPU:0"):
            given = [finite, *(tf.cast(t, tf.float32) for t in tensors)]
            results = tf.numpy_function(host, given, [tf.float32] * len(tensors))
        for result, variable in zip(results, variables, strict=True):
            result.set_shape(variable.shape)
        return results

    def _opened(self, variables: list[Any]) -> Exchange:
        """The exchange for these variables, with what others have not sent yet of the same ones."""
        key = tuple(id(v) for v in variables)
        if key not in self._open:
            exchange = self.strategy.open(self.comm, [describe(v) for v in variables], self._momentum)
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
                del self._open[other]


def _hand_over(old: Exchange, its: Sequence[Any], new: Exchange, variables: Sequence[Any]) -> None:
    """Have `new` send what `old` has not sent of the variables that both exchange."""
    places = {id(v): i for i, v in enumerate(its)}
    for variable, to_send in zip(variables, new.unsent, strict=True):
        if id(variable) in places:
            unsent = old.unsent[places[id(variable)]]
            to_send[...] += unsent
            unsent[...] = 0


def _add(variables: Sequence[Any], combined: Sequence[Any]) -> None:
    for variable, update in zip(variables, combined, strict=True):
        variable.assign_add(tf.cast(update, variable.dtype))


def bind(strategy: Strategy, optimizer: Any, name: str, gain: float = 1.0) -> Binding:
    """Make the binding that a strategy needs; starts Horovod for those that use it."""
    if isinstance(strategy, HostStrategy):
        if isinstance(world.start(), GraphComm) and world.start().size > 1:
            world.start().channel("what this strategy sends")  # refuses, and says what can
        return HostBinding(strategy, world.start(), optimizer, name, gain)
    if isinstance(strategy, GraphStrategy):
        return GraphBinding(strategy, world.graph(), name, gain)
    raise ConfigError(
        f"strategy {strategy!r}: it has to see the steps of a fit before it can choose. Use the Distribute callback, "
        "or name a strategy: hvdx.AllReduce(), hvdx.Threshold()."
    )


def describe(variable: Any) -> TensorSpec:
    """Name, shape and size of a Keras or TensorFlow variable."""
    dtype = tf.as_dtype(variable.dtype)
    return TensorSpec(getattr(variable, "path", variable.name), tuple(variable.shape), dtype.size)


def refuse_private_skip() -> None:
    """A loss-scale optimiser made around a tied one skips a step on its rank alone; the others would wait."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), keras.optimizers.LossScaleOptimizer):
            raise ConfigError(
                "mixed_float16: the loss-scale optimiser was made after the optimiser had been distributed, and it "
                "would skip steps on one rank only. Distribute it instead: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or use the Distribute callback."
            )
        frame = frame.f_back


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _with_values(gradient: Any, values: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def _scaled(gradient: Any, gain: float) -> Any:
    return gradient if gain == 1.0 else _with_values(gradient, _values(gradient) * gain)
