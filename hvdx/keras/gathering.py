"""Plain copies of models with split layers, with whole weights: for a script, and for `ModelCheckpoint` in a fit."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import keras

from hvdx.comm import Comm
from hvdx.errors import ConfigError
from hvdx.keras.fit.part import Part
from hvdx.keras.joining import join
from hvdx.keras.seams.callbacks import steps_since_saving
from hvdx.keras.types import Logs, Variable
from hvdx.keras.weight_parts import has_parts, mark_state, part_of, whole_shape, whole_values

_INTO = "Build the same model with plain layers of Keras, and give it: hvdx.keras.gather(model, into=plain)."
# These callbacks load weights on rank 0 alone.
_REFUSED = ("BackupAndRestore", "OrbaxCheckpoint")


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
    return _gather_to(model, into, keep=True)


def _gather_to(model: keras.Model, into: keras.Model | None, keep: bool) -> keras.Model | None:
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


class PlainCopies(Part):
    """Plain copy of a model for the callbacks of rank 0 that save it; it has the whole weights of split layers."""

    def __init__(self) -> None:
        super().__init__()
        self._savers: list[keras.callbacks.ModelCheckpoint] = []
        self._refused: list[str] = []
        self._counters: list[_Counter] = []
        self._to_refuse: Sequence[str] = ()
        self._copy: keras.Model | None = None

    def serve(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Serve the callbacks of a `fit`, before those that run on rank 0 only are removed elsewhere."""
        self._savers = [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
        self._refused = [type(c).__name__ for c in callbacks if type(c).__name__ in _REFUSED]

    def offer(self) -> tuple[list[tuple[Literal["epoch"] | int, int, int]], list[str]]:
        """Return the frequency and the counts of each callback that saves, and the callbacks that are refused."""
        return [(c.save_freq, *steps_since_saving(c)) for c in self._savers], self._refused

    def agree(self, offered: list[tuple[list[tuple[Literal["epoch"] | int, int, int]], list[str]]]) -> None:
        """Count the steps of rank 0's callbacks on all ranks.

        Raises:
            ConfigError: on all ranks, if a callback of rank 0 cannot handle split layers.
        """
        described, self._to_refuse = offered[0]
        self._counters, self._copy = [_Counter(*counts) for counts in described], None
        self._refuse()

    def _refuse(self) -> None:
        if self._to_refuse and has_parts(self.model):
            raise ConfigError.on_all_ranks(
                f"callbacks: {self._to_refuse[0]}: it saves and loads on rank 0 alone, which holds a part of the split "
                "layers. Use hvdx.keras.Checkpoint."
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Gather the weights if a callback saves after this step. Collective."""
        # Layers that are built in the first step were unknown before it.
        self._refuse()
        # Every counter must count the step.
        due = [counter.saves(batch) for counter in self._counters]
        if any(due):
            self._gather()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Gather the weights if a callback saves after each epoch. Collective."""
        if any(counter.frequency == "epoch" for counter in self._counters):
            self._gather()

    def _gather(self) -> None:
        mesh = join().mesh
        if mesh is None or mesh.index or not has_parts(self.model):
            return
        keep = mesh.position == 0
        self._copy = _gather_to(self.model, self._copy, keep)
        if keep:
            for callback in self._savers:
                callback.set_model(self._copy)


@dataclass
class _Counter:
    """Steps of a `ModelCheckpoint`, counted in the same way, on all ranks.

    Attributes:
        frequency: its `save_freq`.
        seen: number of steps since it saved last.
        last: number of the last step in its epoch.
    """

    frequency: Literal["epoch"] | int
    seen: int
    last: int

    def saves(self, batch: int) -> bool:
        """Count a step, and return whether the callback saves after it."""
        self.seen += batch + 1 if batch <= self.last else batch - self.last
        self.last = batch
        if self.frequency == "epoch" or self.seen < self.frequency:
            return False
        self.seen = 0
        return True
