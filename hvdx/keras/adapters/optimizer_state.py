"""The variables of a Keras optimiser, by what they are."""

from typing import Any

import keras


def innermost(optimizer: Any) -> Any:
    """The optimiser that changes weights: the one inside a loss-scale optimiser, else the one given."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def local_variables(optimizer: Any) -> list[Any]:
    """What an optimiser keeps that belongs to its rank: gradients that it is still accumulating."""
    return list(getattr(innermost(optimizer), "_accumulated_gradients", ()))


def moving_averages(optimizer: Any) -> list[Any]:
    """Moving averages of the weights, of an optimiser with `use_ema`."""
    return [v for v in getattr(innermost(optimizer), "_model_variables_moving_average", None) or () if v is not None]


def slots(optimizer: Any) -> list[Any]:
    """The state that an optimiser makes of gradients, such as momenta, but not the count of steps."""
    inner = innermost(optimizer)
    shared = [inner._iterations, inner._learning_rate, *moving_averages(inner)]
    known = {id(v) for v in (*shared, *local_variables(inner))}
    return [v for v in inner.variables if id(v) not in known]
