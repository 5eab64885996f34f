"""What split layers have in common: this rank's part of each weight, in memory and in files."""

from collections.abc import Callable

import keras
import tensorflow as tf

from hvdx.comm.mesh import Mesh
from hvdx.comm.split_tensors import SplitTensors
from hvdx.errors import ConfigError
from hvdx.keras.layers.group import Shared, joined_mesh
from hvdx.keras.layers.initial import Draw, PartInitializer
from hvdx.keras.layers.whole import cut_saved, guard_files, refuse_to_save
from hvdx.keras.types import Store, TensorLike
from hvdx.keras.weight_parts import WeightPart, mark, tensors_of

_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_NORMS = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)


def check_constraint(constraint: keras.constraints.Constraint | None, part: WeightPart, where: str) -> None:
    """Refuse a constraint that needs more than this rank's part of a weight.

    Args:
        constraint: constraint of Keras, or None.
        part: the part.
        where: owner of the weight, for the message.

    Raises:
        ConfigError: if it computes norms along the axis that is split, or is not one of Keras.
    """
    axes = getattr(constraint, "axis", None)
    axes = axes if isinstance(axes, list | tuple) else [axes]
    if constraint is None or isinstance(constraint, keras.constraints.NonNeg):
        return
    if isinstance(constraint, _NORMS) and part.axis not in [axis % len(part.shape) for axis in axes]:
        return
    each = "element" if len(part.shape) == 1 else ("row (axis=1)", "column (axis=0)")[part.axis]
    raise ConfigError(
        f"{where}: expected a constraint that acts on each {each}, got {type(constraint).__name__}, which needs the "
        "whole weight. Give it the other axis, leave it out, or use a layer of Keras."
    )


def split_regularizer(
    regularizer: keras.regularizers.Regularizer | None, ranks: SplitTensors, where: str
) -> Callable[[TensorLike], tf.Tensor] | None:
    """Return a regulariser whose loss is that of the whole weight, and whose gradient that of this rank's part.

    Args:
        regularizer: regulariser of Keras, or None.
        ranks: collectives of the group.
        where: owner of the weight, for the message.

    Raises:
        ConfigError: if the loss is not a sum over the elements.
    """
    if regularizer is None:
        return None
    if not isinstance(regularizer, _SUMS):
        raise ConfigError(
            f"{where}: expected the regularizer L1, L2 or L1L2, got {type(regularizer).__name__}, which may need the "
            "whole weight. Use one of these, or a layer of Keras."
        )

    def loss(part: TensorLike) -> tf.Tensor:
        @tf.custom_gradient
        def total(mine: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return ranks.sum(mine), lambda gradient: gradient

        return total(tf.convert_to_tensor(regularizer(part)))

    return loss


class SplitLayer:
    """Base class of split layers, beside the layer of Keras. With groups of one rank, it changes nothing.

    Attributes:
        plain_class: class of the layer that `hvdx.keras.gather` puts in the place of this one.
        draw: "whole" or "shard"; see `PartInitializer`.
    """

    plain_class: type[keras.layers.Layer]
    draw: Draw
    name: str
    add_weight: Callable[..., keras.Variable]
    # Set by `_join_group`.
    _mesh: Shared[Mesh] | None = None
    _ranks: Shared[SplitTensors]

    def _join_group(self) -> Mesh | None:
        """Join the group of ranks that split this layer; return its mesh, or None if the layer is not split.

        Raises:
            ConfigError: if the layer has options that need whole weights.
        """
        mesh = joined_mesh()
        if mesh is None:
            return None
        guard_files()
        if getattr(self, "lora_rank", None) or getattr(self, "quantization_mode", None):
            raise ConfigError(
                f"layer {self.name}: LoRA and quantization need whole weights. Leave them out, or use "
                f"{self.plain_class.__name__}."
            )
        self._mesh, self._ranks = Shared(mesh), Shared(tensors_of(mesh))
        # XLA cannot compile exchanges with other ranks.
        self.supports_jit = False
        return mesh

    def _refuse_fewer(self, extent: int, what: str, parts: int) -> None:
        """Raise ConfigError if there are fewer columns or rows than ranks in the group."""
        if extent < parts:
            raise ConfigError.on_all_ranks(
                f"layer {self.name}: expected at least {parts} {what}, one for each rank of the group, got {extent}. "
                f"Use keras.layers.{self.plain_class.__name__} for small layers, which are not worth splitting."
            )

    def _add_part(self, name: str, part: WeightPart) -> keras.Variable:
        """Make this rank's part of a weight.

        Args:
            name: name of the weight, and prefix of its initialiser, regulariser and constraint.
            part: the part.

        Raises:
            ConfigError: if one of the three needs the whole weight.
        """
        initializer, regularizer, constraint = (
            getattr(self, f"{name}_{kind}") for kind in ("initializer", "regularizer", "constraint")
        )
        where = f"layer {self.name}: {name}"
        check_constraint(constraint, part, where)
        variable = self.add_weight(
            name=name,
            shape=part.part_shape,
            initializer=PartInitializer(initializer, part, self.draw, where),
            regularizer=split_regularizer(regularizer, self._ranks.value, where),
            constraint=constraint,
        )
        mark(variable, part)
        return variable

    def save_own_variables(self, store: Store) -> None:
        """Save the weights of the plain layer; refuse to save a part.

        Raises:
            ConfigError: if this rank holds a part of the weights.
        """
        refuse_to_save(self, self._mesh)
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Store) -> None:
        """Load the weights of the plain layer, and keep this rank's part."""
        values = store if self._mesh is None else cut_saved(store, self.weights)  # type: ignore[attr-defined]
        super().load_own_variables(values)  # type: ignore[misc]

    def enable_lora(self, *args: object, **kwargs: object) -> None:
        """Refuse LoRA for split weights."""
        if self._mesh is not None:
            raise ConfigError(
                f"layer {self.name}: LoRA needs whole weights. Use keras.layers.{self.plain_class.__name__}."
            )
        super().enable_lora(*args, **kwargs)  # type: ignore[misc]

    def quantize(self, *args: object, **kwargs: object) -> None:
        """Refuse quantisation of split weights."""
        if self._mesh is not None:
            raise ConfigError(f"layer {self.name}: quantization needs whole weights. Use hvdx.keras.gather(model).")
        super().quantize(*args, **kwargs)  # type: ignore[misc]
