"""What split layers have in common: this rank's part of each weight, in memory and in files."""

from collections.abc import Callable

import keras

from hvdx.comm.mesh import Mesh
from hvdx.comm.split_tensors import SplitTensors
from hvdx.errors import ConfigError
from hvdx.keras.layers.group import Shared, joined_mesh
from hvdx.keras.layers.initial import Draw, PartInitializer
from hvdx.keras.layers.rules import check_constraint, split_regularizer
from hvdx.keras.layers.whole import cut_saved, guard_files, refuse_to_save
from hvdx.keras.types import Store
from hvdx.keras.weight_parts import WeightPart, mark, tensors_of


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
