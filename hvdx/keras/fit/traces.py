"""Traces kept between fits: the next fit of the same training need not trace its step again.

TensorFlow never frees the inner graph of a traced Keras step, so a script that calls `fit` in a loop would lose memory
with every trace, and wait for it.
"""

import weakref
from collections.abc import Callable, Sequence

import keras

from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.fit.idling import Idling
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.models import use_train_function
from hvdx.keras.seams.optimizers import rate_of
from hvdx.strategies import Strategy


class KeptTrace:
    """Training function of a fit that has ended, in the place of the model's own one.

    Keras calls it in a fit without `Distribute`, and then it makes the model's own function, which trains alone.
    `Model.compile` replaces it, as it does any training function.

    Args:
        model: the model, after its fit; its optimisers are detached.
        function: training function of the fit.
        adapters: adapter of each optimiser in it.
        strategy: strategy of the fit.
        mode: what else the trace depends on.
        idling: what a rank without a batch does in place of the function; None if no rank has fewer batches.
    """

    def __init__(
        self,
        model: keras.Model,
        function: Callable[..., object],
        adapters: Sequence[Adapter],
        strategy: Strategy,
        mode: object,
        idling: Idling | None,
    ):
        self._mode, self.idling = mode, idling
        self._model = weakref.ref(model)
        self.function, self.adapters = function, list(adapters)
        self._strategy, self._traced, self._settings = repr(strategy), _traced(model), _settings(model)

    def __call__(self, *args: object) -> object:
        model: keras.Model = self._model()
        model.make_train_function(force=True)
        return model.train_function(*args)

    def fits(self, model: keras.Model, strategy: Strategy, mode: object) -> bool:
        """Return whether the trace is what a new one of this model under this strategy would be.

        As in Keras, attributes that were changed after `compile`, such as `clipnorm`, count after the next `compile`.
        """
        traced = _traced(model)
        # Adapters that a script attached are still there.
        present = [None if a.owner is not None else a for a in self.adapters]
        return (
            self._model() is model
            and (self._strategy, self._mode) == (repr(strategy), mode)
            and self._settings == _settings(model)
            and len(self._traced) == len(traced)
            and all(a is b for a, b in zip(self._traced, traced, strict=True))
            and all(adapter_of(o) is a for o, a in zip(optimizers_of(model), present, strict=True))
        )


def keep(
    model: keras.Model, adapters: Sequence[Adapter], strategy: Strategy, mode: object, idling: Idling | None
) -> None:
    """Keep the training function of a fit that ends, if all its adapters can be attached again.

    Args:
        model: the model; its optimisers are detached, and its settings are those before the fit.
        adapters: adapter of each optimiser.
        strategy: strategy of the fit.
        mode, idling: see `KeptTrace`.
    """
    function = model.train_function
    kept = function is not None and not isinstance(function, KeptTrace)
    kept = kept and all(a.reusable_across_fits for a in adapters)
    # An optimiser that came in during the fit is in the trace without an adapter.
    kept = kept and len(optimizers_of(model)) == len(adapters)
    use_train_function(model, KeptTrace(model, function, adapters, strategy, mode, idling) if kept else None)


def kept(model: keras.Model, strategy: Strategy, mode: object) -> KeptTrace | None:
    """Return the trace that an earlier fit of the same training has kept, if there is one.

    Args:
        model: the model at the start of a fit, before its optimisers are attached.
        strategy: strategy of the fit.
        mode: what else the trace depends on.
    """
    function = model.train_function
    return function if isinstance(function, KeptTrace) and function.fits(model, strategy, mode) else None


def _traced(model: keras.Model) -> list[object]:
    """Return the objects that a trace refers to and a script may replace, such as trainable weights."""
    optimizers = optimizers_of(model)
    # A variable, or a schedule.
    rates = [rate_of(innermost(o)) for o in optimizers]
    return [*optimizers, *rates, *model.trainable_variables]


def _settings(model: keras.Model) -> tuple[object, ...]:
    return model.run_eagerly, model.steps_per_execution, model.jit_compile
