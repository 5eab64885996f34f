"""Bytes that each layer of a model sends in a step, and holds in memory: split over ranks, and whole."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import keras

from hvdx.costs.sizes import ring_bytes
from hvdx.errors import ConfigError
from hvdx.keras.joining import join
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.types import Variable
from hvdx.keras.variables import dtype_of
from hvdx.keras.weight_parts import whole_shape
from hvdx.report.table import quantity, render

# Bytes of an id that a rank sends to another rank, with the times that it occurs, and of the index of a gradient's row.
_ID, _INDEX = 16, 4
# Shape of the variable on which the optimiser's state is measured.
_PROBE = (3, 5)
_HEADER = ("layer", "weights", "is", "sent split", "sent whole", "held split", "held whole", "sends less")


class Costs(NamedTuple):
    """Costs of a layer on one rank.

    Attributes:
        sent: bytes that the rank sends in a training step.
        held: bytes of the weights and of the optimiser's state for them.
    """

    sent: int
    held: int


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a layer on one rank, split and whole.

    Attributes:
        name: name of the layer.
        weights: number of weights.
        is_split: whether the layer is split.
        split: costs if the layer is split; None if hvdx cannot split layers of its kind.
        whole: costs if every rank holds the whole layer.
    """

    name: str
    weights: int
    is_split: bool
    split: Costs | None
    whole: Costs

    @property
    def present(self) -> Costs:
        """Costs of the layer in this model, split or not."""
        return self.split if self.is_split and self.split is not None else self.whole


@dataclass(frozen=True)
class Setting:
    """Ranks and batches for which costs are computed.

    Attributes:
        ranks: number N of ranks.
        split: number M of ranks in a group.
        batch: number of samples in the batch of each rank.
        slots: number of values that the optimiser keeps for each weight.
    """

    ranks: int
    split: int
    batch: int
    slots: float


def summary(
    model: keras.Model,
    batch: int = 32,
    split: int | None = None,
    ranks: int | None = None,
    print_fn: Callable[[str], object] | None = None,
) -> None:
    """Print the bytes that each layer sends in a training step and holds in memory: split over ranks, and whole.

    - "Sent" is what one rank sends under `AllReduce()` in float32: gradients, and for a split layer also activations.
      Other strategies send fewer bytes of gradients.
    - "Held" is the memory of weights and of the optimiser's state, such as momenta, on one rank.
    - The figures of a `Dense` or `Embedding` that is not split are those of the split layer in its place.
    - Figures of embeddings are upper limits, for batches in which no id occurs twice.

    Args:
        model: built model; the optimiser's state is counted if the model is compiled.
        batch: number of samples in the batch of each rank.
        split: number M of ranks that share a split layer; by default that of `hvdx.init(split=)`.
        ranks: number N of ranks; by default the size of the world, or `split` in a world of one.
        print_fn: function that prints the text; by default `print`.

    Raises:
        ConfigError: if the model is not built, or a number is not valid.

    Example:
        >>> model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024, name="wide")])
        >>> summary(model, batch=8, split=4)
        4 ranks in groups of 4, batches of 8
        layer          weights     is  sent split  sent whole  held split  held whole  sends less
        -------------  -------  -----  ----------  ----------  ----------  ----------  ----------
        wide             263 k  whole     73.7 kB     1.58 MB      263 kB     1.05 MB       split
        as split         263 k                        1.58 MB                 1.05 MB
        nothing split    263 k                        1.58 MB                 1.05 MB
    """
    setting = setting_of(model, batch, split, ranks)
    costs = layer_costs(model, setting)
    cells = [
        [
            c.name,
            _number(c.weights),
            "split" if c.is_split else "whole",
            quantity(c.split.sent, "B") if c.split else "",
            quantity(c.whole.sent, "B"),
            quantity(c.split.held, "B") if c.split else "",
            quantity(c.whole.held, "B"),
            "" if c.split is None else "split" if c.split.sent < c.whole.sent else "whole",
        ]
        for c in costs
    ]
    weights = _number(sum(c.weights for c in costs))
    for title, chosen in (("as split", [c.present for c in costs]), ("nothing split", [c.whole for c in costs])):
        sent, held = (quantity(sum(values), "B") for values in zip(*chosen, strict=True)) if chosen else ("0 B", "0 B")
        cells.append([title, weights, "", "", sent, "", held, ""])
    plural = "s" * (setting.ranks > 1)
    head = f"{setting.ranks} rank{plural} in groups of {setting.split}, batches of {setting.batch}"
    (print_fn or print)(f"{head}\n{render(cells, header=_HEADER)}")


def setting_of(model: keras.Model, batch: int, split: int | None, ranks: int | None) -> Setting:
    """Check the arguments of `summary`, and put in their defaults.

    Raises:
        ConfigError: see `summary`.
    """
    world = join()
    split = split if split is not None else world.mesh.split if world.mesh is not None else 1
    ranks = ranks if ranks is not None else world.size if world.size > 1 else split
    for name, value in (("batch", batch), ("split", split), ("ranks", ranks)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"summary: {name}: expected a positive number, got {value!r}.")
    if ranks % split:
        raise ConfigError(
            f"summary: split={split}: expected a divisor of {ranks}, the number of ranks. Give both: summary(model, "
            f"split={split}, ranks={split})."
        )
    if not model.built:
        raise ConfigError(
            f"summary: model {model.name} has no weights yet. Give it a keras.Input, or call it on a batch first."
        )
    return Setting(ranks, split, batch, slots_per_weight(getattr(model, "optimizer", None)))


def slots_per_weight(optimizer: keras.optimizers.Optimizer) -> float:
    """Return the number of values that an optimiser keeps for each weight: 1 for SGD with momentum, 2 for Adam.

    Args:
        optimizer: Keras optimiser, or None. A copy of it is built for a small variable.
    """
    if optimizer is None:
        return 0.0
    inner = innermost(optimizer)
    copy = keras.optimizers.get({"class_name": type(inner).__name__, "config": inner.get_config()})
    copy.build([keras.Variable(keras.ops.zeros(_PROBE), name="probe")])
    return sum(math.prod(v.shape) for v in copy.variables if len(v.shape)) / math.prod(_PROBE)


def layer_costs(model: keras.Model, setting: Setting) -> list[LayerCosts]:
    """Return the costs of each layer that has weights, in the order of the model.

    Args:
        model: built model.
        setting: ranks and batches.
    """
    found, trained = [], False
    for layer in leaves_of(model):
        if not layer.weights:
            continue
        whole, split = Costs(_whole_sent(layer, setting), _held(layer, setting, 1)), None
        if isinstance(layer, keras.layers.Dense) and setting.split > 1:
            split = Costs(_dense_sent(layer, setting, trained), _held(layer, setting, setting.split))
        elif isinstance(layer, keras.layers.Embedding) and setting.split > 1:
            split = Costs(_embedding_sent(layer, setting), _held(layer, setting, setting.split))
        weights = sum(math.prod(whole_shape(v)) for v in layer.weights)
        is_split = setting.split > 1 and hasattr(layer, "plain_class")
        found.append(LayerCosts(layer.name, weights, is_split, split, whole))
        trained = trained or bool(layer.trainable_weights)
    return found


def leaves_of(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yield the layers of a model, and of the models in it."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from leaves_of(layer)
        else:
            yield layer


def _held(layer: keras.layers.Layer, setting: Setting, parts: int) -> int:
    """Return the bytes of a layer's weights and of the optimiser's state, if they are divided into some parts."""
    total, trained = 0.0, {id(v) for v in layer.trainable_weights}
    for variable in layer.weights:
        size = math.prod(whole_shape(variable)) * dtype_of(variable.dtype).itemsize
        share = 1 if _is_shared(layer, variable) else parts
        total += size / share * (1 + setting.slots * (id(variable) in trained))
    return round(total)


def _is_shared(layer: keras.layers.Layer, variable: Variable) -> bool:
    """Return whether all ranks hold the whole variable of a split layer: the bias after a sum over the ranks."""
    return getattr(layer, "input_is_split", False) and variable is layer.bias


def _whole_sent(layer: keras.layers.Layer, setting: Setting) -> int:
    """Return the bytes that a rank sends of the gradients of a whole layer."""
    if isinstance(layer, keras.layers.Embedding):
        # The rows of all ids are gathered; nothing is summed on the way.
        row = layer.output_dim * dtype_of(layer.variable_dtype).itemsize + _INDEX
        return bool(layer.trainable_weights) * (setting.ranks - 1) * _rows(layer, setting.batch, 0) * row
    return ring_bytes(_trained_bytes(layer), setting.ranks)


def _trained_bytes(layer: keras.layers.Layer, shared: bool | None = None) -> int:
    """Return the bytes of a layer's gradients; of those that all ranks share or do not share, if `shared` is given."""
    return sum(
        math.prod(whole_shape(v)) * dtype_of(v.dtype).itemsize
        for v in layer.trainable_weights
        if shared is None or _is_shared(layer, v) == shared
    )


def _dense_sent(layer: keras.layers.Layer, setting: Setting, below: bool) -> int:
    """Return the bytes that a rank sends of a split `Dense`.

    Args:
        layer: the layer.
        setting: ranks and batches.
        below: whether layers before it are trained, so that its input needs a gradient.
    """
    inputs, outputs = whole_shape(layer.kernel)
    others, size = setting.split - 1, dtype_of(layer.compute_dtype).itemsize
    rows = _rows(layer, setting.batch, 1)
    if getattr(layer, "input_is_split", False):
        # Forward the outputs are summed, backward their gradients are gathered.
        activations = 2 * others * rows * outputs
    else:
        # The inputs are gathered, and their gradients are summed.
        activations = (1 + below) * others * rows * inputs
        if getattr(layer, "gather_output", True):
            activations += 2 * others * rows * outputs // setting.split
    parts = ring_bytes(_trained_bytes(layer, shared=False) / setting.split, setting.ranks // setting.split)
    return size * activations + parts + ring_bytes(_trained_bytes(layer, shared=True), setting.ranks)


def _embedding_sent(layer: keras.layers.Layer, setting: Setting) -> int:
    """Return the bytes that a rank sends of a split `Embedding`, if no id occurs twice in a batch."""
    rows, others = _rows(layer, setting.batch, 0), setting.split - 1
    vector = layer.output_dim * dtype_of(layer.compute_dtype).itemsize
    trained = bool(layer.trainable_weights)
    sent = rows * others * (_ID + (1 + trained) * vector) / setting.split
    row = layer.output_dim * dtype_of(layer.variable_dtype).itemsize + _INDEX
    return round(sent + trained * (setting.ranks // setting.split - 1) * rows * row)


def _rows(layer: keras.layers.Layer, batch: int, row_axes: int) -> int:
    """Return the number of rows of a layer's input in a batch; axes of unknown length count as 1.

    Args:
        layer: the layer.
        batch: number of samples.
        row_axes: number of axes of a row: 1 for vectors, 0 for ids.
    """
    try:
        shape = layer.input.shape
    except (AttributeError, ValueError):
        # A subclassed model does not record the shapes of its layers.
        return batch
    return batch * math.prod(extent or 1 for extent in shape[1 : len(shape) - row_axes])


def _number(count: int) -> str:
    return quantity(count, "").strip()
