"""The contract of an adapter, which ties one optimiser to a strategy, as part of the training function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdx.errors import ConfigError
from hvdx.strategies import Strategy, TensorSpec
from hvdx.strategies.telemetry import Telemetry


class Adapter:
    """What ties one optimiser to a strategy.

    Attributes:
        strategy: what combines the gradients or updates.
        name: alike on all ranks and different for each optimiser of a model.
        gain: factor on the combined gradients.
        variables: those that were exchanged; empty before the first step is traced.
        specs: name, shape and size of each.
        reached: True once a training step went through the optimiser.
        exchange: on the host, what the strategy opened for the variables that were exchanged last; None before that.
        local: variables whose gradients stay on their rank; None where the adapter cannot do that.
        owner: the callback that tied it and will untie it; None where a script did.
        holds_loss_scale: True where a loss-scale optimiser is tied, and steps that it skips are dealt with.
        steps: int64 variable, number of steps that reached the optimiser, skipped and accumulated ones too.
    """

    strategy: Strategy
    #: Whether what it costs is worth a place beside the metrics.
    reports = False
    #: Whether it stands around the whole of the optimiser's `apply`, by `before_step` and `after_step`.
    stands_around = False
    exchange: Any = None
    local: Any = None

    def __init__(self, name: str, gain: float = 1.0):
        self.name = name
        self.gain = gain
        self.variables: list[Any] = []
        self.specs: list[TensorSpec] = []
        self.stepped = False
        self.owner: Any = None
        self.holds_loss_scale = False
        with tf.device("CPU:0"):
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    def reset(self) -> None:
        """Count from zero."""
        self.steps.assign(0)

    def count_step(self) -> None:
        """One more step has reached the optimiser."""
        self.stepped = True
        with tf.device("CPU:0"):
            self.steps.assign_add(1)

    def record_variables(self, variables: Sequence[Any]) -> None:
        """Note the variables whose gradients come next."""
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ConfigError(
                    f"variable {variable.path}: float8 scales are overwritten by each rank's own gradients, which "
                    "hvdx does not combine. Train with another dtype policy."
                )
        self.stepped = True
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

    def before_step(self) -> None:
        """Every call of the optimiser begins so, where the adapter stands around it."""

    def after_step(self) -> None:
        """Every call of the optimiser ends so, where the adapter stands around it."""

    def count_samples(self, count: Any) -> None:
        """This rank sees so many samples in the step that comes.

        Args:
            count: a whole number, or a scalar tensor.
        """

    def any_overflow(self, overflowed: Any) -> Any:
        """float32: above 0 where a rank's loss scale overflowed, the same on all ranks."""
        raise NotImplementedError

    def restart_timer(self) -> None:
        """Restart the clock of computing before a run of steps."""

    def renew(self) -> None:
        """Begin anew with other weights, after an exception perhaps; what was not sent yet stays.

        The next step has to be one that is traced.
        """

    def flush(self) -> None:
        """Others are about to look at the weights: add what is still on its way. Collective."""

    def prepare_broadcast(self) -> None:
        """The weights are about to become those of rank 0: have nothing on its way to them. Collective."""
        self.flush()

    def first_bad(self) -> tuple[int, str]:
        """The first step since it was asked last in which a gradient of this rank held NaN or infinity, and was used.

        Returns:
            The number of the step, and the name of the variable; 0 and "" where there was none.
        """
        return 0, ""

    def cost(self) -> Telemetry:
        """What the exchanges cost since `reset`."""
        raise NotImplementedError

    # -- what belongs to a rank, and goes on from fit to fit and from checkpoint to checkpoint ------------------------

    def rank_local_variables(self, now: bool = True) -> list[Any]:
        """Weights and variables of the optimiser that are this rank's own.

        Args:
            now: those that are at this moment; else those that may become so.
        """
        return []

    @property
    def has_state(self) -> bool:
        """Whether the optimiser has a state of its rank from an earlier fit, or from a checkpoint."""
        return False

    def before_saving(self) -> None:
        """A checkpoint is about to be written. Collective."""
        self.flush()

    def drain(self) -> None:
        """A checkpoint is about to be written in mid-epoch, and steps go on as if none had been. Collective."""

    @property
    def state_key(self) -> str:
        """What a strategy must have in common with another to go on from its state."""
        return self.strategy.name

    @property
    def exchanged(self) -> list[Any]:
        """The weights that `arrays` is about."""
        return []

    def state_dict(self) -> dict[str, np.ndarray]:
        """What it remembers, for a checkpoint; after `before_saving`."""
        return {}

    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """What a rank restores of what the ranks saved, where their number was another; see `Strategy.merge`."""
        return self.strategy.merge(saved, rank, size)

    def reopen(self, variables: Sequence[Any]) -> None:
        """Begin anew, before the first step. Collective.

        Args:
            variables: the weights that were `exchanged`.
        """

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a checkpoint, after `reopen`.

        Args:
            arrays: what `state` or `merge` gave.
        """


def describe(variable: Any) -> TensorSpec:
    """Name, shape, size and constraint of a Keras or TensorFlow variable."""
    dtype, constraint = tf.as_dtype(variable.dtype), getattr(variable, "constraint", None)
    held_to = "" if constraint is None else type(constraint).__name__
    return TensorSpec(getattr(variable, "path", variable.name), tuple(variable.shape), dtype.size, held_to)


def refuse_local_skip() -> None:
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


def apply_constraints(variables: Sequence[Any]) -> None:
    """Keras applies constraints in the optimiser's step; this is for what changes weights after it."""
    for variable in variables:
        if getattr(variable, "constraint", None) is not None:
            variable.assign(variable.constraint(variable))


def values_of(gradient: Any) -> Any:
    """The numbers of a gradient, dense or of rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Any, values: Any) -> Any:
    """A gradient of the same rows with other numbers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def scaled(gradient: Any, gain: float) -> Any:
    """A gradient times a factor."""
    return gradient if gain == 1.0 else with_values(gradient, values_of(gradient) * gain)
