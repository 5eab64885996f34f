"""Plain copies of models with split layers, with whole weights."""

import warnings

import keras

from hvdx.comm import Comm
from hvdx.errors import ConfigError
from hvdx.keras.joining import join
from hvdx.keras.types import Variable
from hvdx.keras.weight_parts import has_parts, mark_state, part_of, whole_shape, whole_values

_INTO = "Build the same model with plain layers of Keras, and give it: hvdx.keras.gather(model, into=plain)."


def gather(model: keras.Model, into: keras.Model | None = None) -> keras.Model:
    """Return a copy of a model that has plain layers in the place of split ones, and whole weights. Collective.

    The copy needs neither hvdx nor other ranks. Optimiser variables are copied too, if the optimiser is built.

    Args:
        model: built model; all ranks call this function, also those that do not use the copy.
        into: plain model of the same layers that receives the weights; by default a new one is made, which works for
            sequential and functional models.

    Returns:
        The copy, or `into`.

    Raises:
        ConfigError: if a new model cannot be made, or `into` has other weights.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> gather(model).predict(keras.ops.ones((1, 2)), verbose=0).shape
        (1, 1)
    """
    return gather_to(model, into, keep=True)


def gather_to(model: keras.Model, into: keras.Model | None, keep: bool) -> keras.Model | None:
    """Gather a model's whole weights on some ranks. Collective over the group.

    Args:
        model, into: as for `gather`.
        keep: whether this rank makes a copy. If False, it only sends its parts, and the result is None.

    Raises:
        ConfigError: as for `gather`, on all ranks of the group.
    """
    plain: keras.Model | None = None
    problem, with_optimizer = None, False
    joined = join()
    group = joined if joined.mesh is None else joined.mesh.group
    if keep:
        try:
            plain = _plain_copy(model) if into is None else into
            _check_shapes(model.weights, plain.weights)
            with_optimizer = _have_same_optimizer(model, plain)
        except ConfigError as error:
            problem = str(error)
    mine = problem, with_optimizer
    everyone = group.all_gather_object(mine, "gathering a model") if has_parts(model) else [mine]
    problem = next((said for said, _ in everyone if said is not None), None)
    if problem is not None:
        raise ConfigError.on_all_ranks(problem)
    _copy(model.weights, None if plain is None else plain.weights, group)
    if any(wanted for _, wanted in everyone):
        mark_state(model.optimizer)
        _copy(
            model.optimizer.variables,
            plain.optimizer.variables if plain is not None and with_optimizer else None,
            group,
        )
    return plain


def _have_same_optimizer(model: keras.Model, plain: keras.Model) -> bool:
    """Return whether a copy can receive the optimiser's state, and build its optimiser if so."""
    optimizer: keras.optimizers.Optimizer = getattr(model, "optimizer", None)
    copied: keras.optimizers.Optimizer = getattr(plain, "optimizer", None)
    if optimizer is None or not optimizer.built or type(optimizer) is not type(copied):
        return False
    if not copied.built:
        copied.build(plain.trainable_variables)
    mark_state(optimizer)
    _check_shapes(optimizer.variables, copied.variables)
    return True


def _check_shapes(variables: list[Variable], copies: list[Variable]) -> None:
    shapes = [[whole_shape(v) for v in variables], [tuple(v.shape) for v in copies]]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"gather: expected weights of the shapes {shapes[0]}, got {shapes[1]}. {_INTO}")


def _copy(variables: list[Variable], copies: list[Variable] | None, group: Comm) -> None:
    """Gather whole values, one variable at a time, and assign them to the copies, if there are any. Collective."""
    for i, variable in enumerate(variables):
        if copies is not None or part_of(variable) is not None:
            (value,) = whole_values([variable], group)
            if copies is not None:
                copies[i].assign(value)


def _plain_copy(model: keras.Model) -> keras.Model:
    """Return a new model with plain layers, compiled as the given one."""
    try:
        plain = keras.models.clone_model(model, clone_function=_plain_layer, recursive=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"gather: model {model.name}: it cannot be copied: {error} {_INTO}") from error
    if model.compiled:
        try:
            plain.compile_from_config(_plain_config(model.get_compile_config()))
        except (TypeError, ValueError) as error:
            warnings.warn(f"gather: the copy of model {model.name} is not compiled: {error}", stacklevel=2)
    return plain


def _plain_config(config: object) -> object:
    """Return a serialised configuration that names plain losses and metrics in the place of split ones."""
    if isinstance(config, list | tuple):
        return type(config)(_plain_config(c) for c in config)
    if not isinstance(config, dict):
        return config
    if str(config.get("module")).startswith("hvdx.keras.layers."):
        return keras.saving.serialize_keras_object(_plain_layer(keras.saving.deserialize_keras_object(config)))
    return {key: _plain_config(value) for key, value in config.items()}


def _plain_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return a new layer, loss or metric of the same options, plain if the given one is split."""
    kind = getattr(layer, "plain_class", type(layer))
    return kind.from_config(layer.get_config())
