"""The variables of a Keras optimiser, by kind."""

import keras

from hvdx.keras.seams.optimizers import accumulators_of, averages_of, rate_of, step_counter
from hvdx.keras.types import Variable


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimiser that changes weights: the one inside a loss-scale optimiser, else the given one."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def accumulated_gradients(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """Return the gradients that an optimiser is still accumulating; they belong to its rank."""
    return accumulators_of(innermost(optimizer))


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """Return the moving averages of the weights that an optimiser with `use_ema` keeps."""
    return [v for v in averages_of(innermost(optimizer)) if v is not None]


def slots(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """Return the state that an optimiser derives from gradients, such as momenta, without the step counter."""
    inner = innermost(optimizer)
    shared = [step_counter(inner), rate_of(inner), *moving_averages(inner)]
    known = {id(v) for v in (*shared, *accumulated_gradients(inner))}
    return [v for v in inner.variables if id(v) not in known]
