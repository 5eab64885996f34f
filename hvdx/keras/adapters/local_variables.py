"""Local variables: weights that each rank trains alone, beside those that all ranks train together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import keras

from hvdx.errors import ConfigError
from hvdx.keras.adapters.base import scaled
from hvdx.keras.backend import is_a, tf
from hvdx.keras.optimizer_state import innermost, slots
from hvdx.keras.seams.layers import KerasVariable, raw_variable
from hvdx.keras.seams.optimizers import slot_prefix, trained_variables
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import listed


def trained_by(layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None) -> list[Variable]:
    """Return the trainable weights of one layer or several.

    Args:
        layers: None, a built `keras.layers.Layer`, or a collection of them.

    Raises:
        ConfigError: if an element is not a layer, or not built.
    """
    found = [layers] if isinstance(layers, keras.layers.Layer) else list(layers or ())
    for layer in found:
        if not isinstance(layer, keras.layers.Layer):
            raise ConfigError(f"local_layers: expected layers of Keras, got {layer!r}. Do: give a list of layers.")
        if not layer.built:
            raise ConfigError(
                f"local_layers: expected built layers, got {layer.name} without weights. Do: build the model first "
                "(keras.Input, or model.build(shape))."
            )
    return [v for layer in found for v in layer.trainable_weights]


class LocalVariables:
    """Set of local variables, in which a Keras variable and the TensorFlow variable inside it are the same.

    Args:
        scale: divide the gradients of local variables by the number of ranks, as Horovod does. Their size then
            equals that of averaged gradients of one loss over all ranks.

    Example:
        >>> weight = keras.Variable(1.0)
        >>> local = LocalVariables()
        >>> local.add(weight.value)
        >>> local.holds(weight), local.holds(keras.Variable(1.0))
        (True, False)
    """

    def __init__(self, scale: bool = True):
        self.scale = scale
        self._refs: set[Hashable] = set()

    def add(self, variables: Variable | Collection[Variable] | None) -> None:
        """Add one variable of Keras or TensorFlow, or several; None for none.

        Raises:
            ConfigError: if an element is not a variable.
        """
        expected = "local variables: expected variables of Keras or TensorFlow"
        remedy = "give a variable, or a list such as layer.trainable_weights"
        self._refs |= {_ref(v) for v in listed(variables, KerasVariable | tf.Variable, expected, remedy)}

    def divide(self, scale: bool) -> None:
        """Choose whether gradients are divided by the number of ranks."""
        self.scale = scale

    def holds(self, variable: Variable) -> bool:
        """Return whether a variable is in the set; False for a tensor."""
        return (isinstance(variable, KerasVariable) or is_a(variable, "Variable")) and _ref(variable) in self._refs

    def exchange_others(
        self,
        variables: Sequence[Variable],
        gradients: Sequence[Gradient],
        size: int,
        exchange: Callable[[list[Gradient]], list[Gradient]],
    ) -> list[Gradient]:
        """Combine the gradients of all other variables, and scale those of the local variables.

        Args:
            variables: variables of the gradients.
            gradients: `tf.Tensor` or `tf.IndexedSlices`, one per variable.
            size: number of ranks.
            exchange: function that combines gradients over the ranks.
        """
        if not self._refs:
            return exchange(list(gradients))
        factor = 1.0 / size if self.scale else 1.0
        here = [self.holds(v) for v in variables]
        shared = [g for g, own in zip(gradients, here, strict=True) if not own]
        combined = iter(exchange(shared) if shared else [])
        return [scaled(g, factor) if own else next(combined) for g, own in zip(gradients, here, strict=True)]

    def of(self, optimizer: keras.optimizers.Optimizer) -> list[Variable]:
        """Return the local variables that an optimiser trains, and its state for them."""
        inner = innermost(optimizer)
        if not self._refs or not inner.built:
            return []
        own = [v for v in trained_variables(inner) if self.holds(v)]
        names = tuple(map(slot_prefix, own))
        return own + [slot for slot in slots(inner) if own and slot.name.startswith(names)]


def _ref(variable: Variable) -> Hashable:
    return raw_variable(variable).ref()
