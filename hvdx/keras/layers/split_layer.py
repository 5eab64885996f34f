"""What split layers have in common: their group, initial values, this rank's part of each weight, and whole files."""

from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvdx.comm.mesh import Mesh
from hvdx.comm.split_tensors import SplitTensors
from hvdx.errors import ConfigError
from hvdx.keras.joining import join
from hvdx.keras.seams.layers import change_loaded_state, guard_saving
from hvdx.keras.types import Store, TensorLike, Variable
from hvdx.keras.weight_parts import WeightPart, has_parts, mark, mark_state, part_of, tensors_of

T = TypeVar("T")
Draw = Literal["whole", "shard"]
# Initialisers whose values do not depend on the shape, and so need no correction.
_PER_ELEMENT = ("Constant", "Ones", "RandomNormal", "RandomUniform", "TruncatedNormal", "Zeros")
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_NORMS = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)
_REMEDY = (
    "this rank holds one part of its weights, so it cannot save them alone. Call plain = hvdx.keras.gather(model) on "
    "all ranks, then plain.save(...) on rank 0. During fit, use hvdx.keras.Checkpoint or "
    "keras.callbacks.ModelCheckpoint with the Distribute callback."
)
# Whether Keras refuses by now to save parts.
_guarded = False


def joined_mesh() -> Mesh | None:
    """Return the mesh of the joined world; None if layers are not split. The first call joins the world."""
    return join().mesh


def bytes_sent() -> int:
    """Return the bytes that this rank has sent in the collectives of split layers, since the world was joined.

    The bytes of the strategy, which combines gradients, are not included.

    Example:
        >>> bytes_sent()
        0
    """
    mesh = joined_mesh()
    return 0 if mesh is None else tensors_of(mesh).sent


class Shared(Generic[T]):
    """Value that a deep copy of a layer shares with the layer."""

    def __init__(self, value: T):
        self.value = value

    def __deepcopy__(self, memo: object) -> "Shared[T]":
        return self


class PartInitializer(keras.initializers.Initializer):
    """Initialiser of one part of a weight.

    Args:
        initializer: initialiser of the whole weight.
        draw: "whole": draw the whole weight and keep this part, so that the weights are those of a layer that is not
            split, with the same seed. "shard": draw this part alone, with the variance of the whole weight, for weights
            that are larger than the memory of a rank.

    Raises:
        ConfigError: if `draw` is unknown, or the initialiser cannot draw a part alone.
    """

    def __init__(self, initializer: keras.initializers.Initializer, part: WeightPart, draw: Draw, where: str):
        if draw not in ("whole", "shard"):
            raise ConfigError(f"{where}: draw: expected 'whole' or 'shard', got {draw!r}.")
        self._initializer, self._part, self._draw = initializer, part, draw
        if draw == "shard":
            self._initializer = _of_part(initializer, part, where)

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> tf.Tensor:
        """Return the initial values of the part."""
        if self._draw == "shard":
            return self._initializer(shape, dtype=dtype)
        return self._part.cut(self._initializer(self._part.shape, dtype=dtype))


def _of_part(
    initializer: keras.initializers.Initializer, part: WeightPart, where: str
) -> keras.initializers.Initializer:
    """Return an initialiser that draws a part with a seed of its own and the variance of the whole weight."""
    kinds = {cls.__name__ for cls in type(initializer).__mro__}
    scaled = "VarianceScaling" in kinds
    if not scaled and not kinds & set(_PER_ELEMENT):
        raise ConfigError(
            f"{where}: draw='shard': expected an initializer of independent values, such as GlorotUniform, got "
            f"{type(initializer).__name__}, which needs the whole weight. Use draw='whole'."
        )
    config = initializer.get_config()
    if config.get("seed") is None and hasattr(initializer, "seed"):
        config["seed"] = initializer.seed
    if isinstance(config.get("seed"), int):
        # Parts with the same seed would hold the same values.
        config["seed"] = int(np.random.SeedSequence([config["seed"], part.position]).generate_state(1)[0] >> 1)
    if scaled:
        general = keras.initializers.VarianceScaling
        scale = initializer.scale * _fan(part.part_shape, initializer.mode) / _fan(part.shape, initializer.mode)
        return general(scale, initializer.mode, initializer.distribution, seed=config["seed"])
    return type(initializer).from_config(config)


def _fan(shape: tuple[int, ...], mode: str) -> float:
    """Return the number by which `VarianceScaling` divides its scale, for a matrix."""
    inputs, outputs = shape[0], shape[-1]
    return max(1.0, {"fan_in": inputs, "fan_out": outputs, "fan_avg": (inputs + outputs) / 2}[mode])


def _guard_files() -> None:
    """Make Keras refuse to save models that hold parts, and load only their parts of an optimiser's state, from now on.

    Keras opens a file, and so empties it, before it asks the layers for their weights. So the functions that save are
    wrapped, which leaves existing files unchanged.
    """
    global _guarded
    if _guarded:
        return
    _guarded = True
    guard_saving(_refuse)
    change_loaded_state(_cut_state)


def _refuse(model: keras.Model) -> None:
    if has_parts(model):
        raise ConfigError(f"model {model.name}: {_REMEDY}")


def _cut_state(optimizer: keras.optimizers.Optimizer, store: Store) -> Store:
    mark_state(optimizer)
    return _cut_saved(store, optimizer.variables)


def _cut_saved(store: Store, variables: list[Variable]) -> Store:
    """Return saved values, cut to this rank's parts.

    Args:
        store: saved values, by the number of the variable.
        variables: variables in their order; None is left out.
    """
    present = [v for v in variables if v is not None]
    if all(part_of(v) is None for v in present):
        return store
    found = {key: store[key] for key in store.keys()}  # noqa: SIM118 - a store of Keras has no iterator
    for i, variable in enumerate(present):
        part, value = part_of(variable), found.get(str(i))
        if part is not None and value is not None and tuple(value.shape) == part.shape:
            found[str(i)] = part.cut(value)
    return found


def _check_constraint(constraint: keras.constraints.Constraint | None, part: WeightPart, where: str) -> None:
    """Refuse a constraint that needs more than this rank's part of a weight; `where` names the weight.

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


def _split_regularizer(
    regularizer: keras.regularizers.Regularizer | None, ranks: SplitTensors, where: str
) -> Callable[[TensorLike], tf.Tensor] | None:
    """Return a regulariser whose loss is that of the whole weight, and whose gradient that of this rank's part.

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
        _guard_files()
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
            part: shape and place of the part.

        Raises:
            ConfigError: if one of the three needs the whole weight.
        """
        initializer, regularizer, constraint = (
            getattr(self, f"{name}_{kind}") for kind in ("initializer", "regularizer", "constraint")
        )
        where = f"layer {self.name}: {name}"
        _check_constraint(constraint, part, where)
        variable = self.add_weight(
            name=name,
            shape=part.part_shape,
            initializer=PartInitializer(initializer, part, self.draw, where),
            regularizer=_split_regularizer(regularizer, self._ranks.value, where),
            constraint=constraint,
        )
        mark(variable, part)
        return variable

    def save_own_variables(self, store: Store) -> None:
        """Save the weights of the plain layer; refuse to save a part.

        Raises:
            ConfigError: if this rank holds a part of the weights.
        """
        if self._mesh is not None:
            raise ConfigError(f"layer {self.name}: {_REMEDY}")
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Store) -> None:
        """Load the weights of the plain layer, and keep this rank's part."""
        values = store if self._mesh is None else _cut_saved(store, self.weights)  # type: ignore[attr-defined]
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
