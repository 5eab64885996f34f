"""Files of models with split layers: they hold plain layers of Keras with whole weights."""

import keras

from hvdx.errors import ConfigError
from hvdx.keras.seams.layers import change_loaded_state, guard_saving, name_in_files
from hvdx.keras.types import Store, Variable
from hvdx.keras.weight_parts import has_parts, mark_state, part_of

_REMEDY = (
    "this rank holds one part of its weights, so it cannot save them alone. Call plain = hvdx.keras.gather(model) on "
    "all ranks, then plain.save(...) on rank 0. During fit, use hvdx.keras.Checkpoint or "
    "keras.callbacks.ModelCheckpoint with the Distribute callback."
)
_guarded = False


def name_as_plain(split: type, plain: type) -> None:
    """Make files name the plain class in the place of a split one, so that Keras loads them without hvdx.

    Keras also names layers, and their groups in files, after the class. With the name of the plain class, a split model
    has the names of the plain one, and each can read the other's weights.

    Args:
        split: class of a split layer.
        plain: class of Keras with the same configuration.
    """
    name_in_files(split, plain)


def guard_files() -> None:
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
    return cut_saved(store, optimizer.variables)


def refuse_to_save(layer: keras.layers.Layer, mesh: object) -> None:
    """Raise ConfigError if a layer holds a part of its weights.

    Args:
        layer: layer that is to be saved.
        mesh: None if the layer holds whole weights.
    """
    if mesh is not None:
        raise ConfigError(f"layer {layer.name}: {_REMEDY}")


def cut_saved(store: Store, variables: list[Variable]) -> Store:
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
