"""`SplitDense`: a fully connected layer whose weights are split over the ranks of a group."""

from collections.abc import Sequence
from typing import cast

import keras
import tensorflow as tf

from hvdx.comm.mesh import bounds_of
from hvdx.errors import ConfigError
from hvdx.keras.layers import collectives
from hvdx.keras.layers.group import joined_mesh
from hvdx.keras.layers.initial import Draw
from hvdx.keras.layers.split_layer import SplitLayer
from hvdx.keras.layers.whole import name_as_plain
from hvdx.keras.weight_parts import WeightPart, part_of


class SplitDense(SplitLayer, keras.layers.Dense):
    """`keras.layers.Dense` whose kernel is split over the ranks of a group.

    Each rank holds 1/M of the kernel and of its momenta, and goes on with its own batch. The layer gathers the batches
    of the group, multiplies them by this rank's columns, and sends each rank the outputs of its own batch. Outputs and
    gradients are those of `Dense`. With groups of one rank (see `hvdx.init(split=)`) it is `Dense`.

    Two layers in a row need no exchange between them: give the first `gather_output=False`, the second
    `input_is_split=True`. Only layers that act on each element (activations, dropout) may stand between them.

    Args:
        units: number of outputs, of all ranks together.
        gather_output: whether the outputs are those of this rank's batch. If False, they are this rank's columns of the
            outputs of the group's batches, and `units` must be a multiple of the ranks in the group.
        input_is_split: whether the input is the output of a layer with `gather_output=False`.
        draw: "whole": draw the initial weights as `Dense` does, and keep a part. "shard": draw the part alone, which
            needs less memory.
        kwargs: further arguments of `keras.layers.Dense`; LoRA and quantisation are not supported.

    Raises:
        ConfigError: when the layer is built, if there are fewer units than ranks in the group, or an argument does not
            fit split weights.

    Example:
        >>> layer = SplitDense(3)
        >>> tuple(layer(keras.ops.ones((2, 4))).shape), tuple(layer.kernel.shape)
        ((2, 3), (4, 3))

    Source: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", scheme (a); Shoeybi et
    al. 2019, "Megatron-LM", for pairs of layers.
    """

    plain_class = keras.layers.Dense

    def __init__(
        self,
        units: int,
        *args: object,
        gather_output: bool = True,
        input_is_split: bool = False,
        draw: Draw = "whole",
        **kwargs: object,
    ):
        super().__init__(units, *args, **kwargs)
        self.gather_output, self.input_is_split, self.draw = bool(gather_output), bool(input_is_split), draw

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make this rank's part of the weights. Not collective."""
        mesh = self._join_group()
        if mesh is None:
            super().build(input_shape)
            return
        where = f"layer {self.name}"
        if not self.gather_output and self.input_is_split:
            raise ConfigError(
                f"{where}: expected gather_output=False or input_is_split=True, got both. Two layers form a pair: give "
                "the first gather_output=False, the second input_is_split=True."
            )
        inputs, parts, position = int(cast(int, input_shape[-1])), mesh.split, mesh.position
        bias: WeightPart | None = None
        if self.input_is_split:
            inputs *= parts
            kernel = WeightPart((inputs, self.units), 0, bounds_of(inputs, parts), position)
        else:
            self._refuse_fewer(self.units, "units", parts)
            if not self.gather_output and self.units % parts:
                raise ConfigError(
                    f"{where}: gather_output=False: expected a multiple of {parts} units, got {self.units}. Give "
                    f"{-(-self.units // parts) * parts} units."
                )
            bounds = bounds_of(self.units, parts)
            kernel = WeightPart((inputs, self.units), 1, bounds, position)
            bias = WeightPart((self.units,), 0, bounds, position)
        self._kernel = self._add_part("kernel", kernel)
        self.bias = self._add_bias(bias) if self.use_bias else None
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: int(cast(int, input_shape[-1]))})
        self.built = True

    def _add_bias(self, part: WeightPart | None) -> keras.Variable:
        """Make this rank's part of the bias, or the whole bias if the outputs are not split."""
        if part is not None:
            return self._add_part("bias", part)
        return self.add_weight(
            name="bias",
            shape=(self.units,),
            initializer=self.bias_initializer,
            regularizer=self.bias_regularizer,
            constraint=self.bias_constraint,
        )

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Return the outputs of this rank's batch, or with `gather_output=False` its columns of the group's batches."""
        if self._mesh is None:
            return super().call(inputs, training)
        ranks, split = self._ranks.value, self._mesh.value.split
        kernel = collectives.average_gradient(self.kernel, split)
        bias = None if self.bias is None else tf.convert_to_tensor(self.bias)
        rows = tf.reshape(inputs, [-1, inputs.shape[-1]])
        if self.input_is_split:
            counts = ranks.counts_for(rows, self.name)
            outputs = collectives.sum_rows(ranks, tf.matmul(rows, kernel), counts)
        else:
            gathered, counts = collectives.gather_rows(ranks, rows)
            outputs = tf.matmul(gathered, kernel)
            if bias is not None:
                bias = collectives.average_gradient(bias, split)
        if self.gather_output and not self.input_is_split:
            if bias is not None:
                outputs, bias = tf.add(outputs, bias), None
            part = part_of(self._kernel)
            assert part is not None
            outputs = collectives.columns_to_rows(ranks, outputs, counts, part.bounds)
        if bias is not None:
            outputs = tf.add(outputs, bias)
        if not self.gather_output:
            ranks.remember_counts(counts)
        outputs = tf.reshape(outputs, self._output_shape(inputs, outputs.shape[-1]))
        return outputs if self.activation is None else self.activation(outputs)

    def _output_shape(self, inputs: tf.Tensor, columns: int) -> tf.Tensor:
        """Return the shape of the outputs; the number of samples follows from the number of rows."""
        inner = inputs.shape[1:-1]
        if all(extent is not None for extent in inner):
            return [-1, *inner, columns]
        return tf.concat([[-1], tf.shape(inputs)[1:-1], [columns]], axis=0)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the shape of the outputs of this rank."""
        mesh = joined_mesh()
        columns = self.units if mesh is None or self.gather_output else self.units // mesh.split
        return (*input_shape[:-1], columns)


name_as_plain(SplitDense, keras.layers.Dense)
