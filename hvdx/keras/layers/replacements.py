"""Split layers, with the loss and the metric of a softmax over classes that no rank holds whole."""

from collections.abc import Sequence
from typing import cast

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm.mesh import bounds_of
from hvdx.errors import ConfigError
from hvdx.keras.layers import split_collectives
from hvdx.keras.layers.split_layer import Draw, SplitLayer, joined_mesh
from hvdx.keras.seams.layers import name_in_files, set_mask, set_metric_function
from hvdx.keras.types import TensorLike
from hvdx.keras.weight_parts import WeightPart, part_of, tensors_of


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
        kernel = split_collectives.average_gradient(self.kernel, split)
        bias = None if self.bias is None else tf.convert_to_tensor(self.bias)
        rows = tf.reshape(inputs, [-1, inputs.shape[-1]])
        if self.input_is_split:
            counts = ranks.counts_for(rows, self.name)
            outputs = split_collectives.sum_rows(ranks, tf.matmul(rows, kernel), counts)
        else:
            gathered, counts = split_collectives.gather_rows(ranks, rows)
            outputs = tf.matmul(gathered, kernel)
            if bias is not None:
                bias = split_collectives.average_gradient(bias, split)
        if self.gather_output and not self.input_is_split:
            if bias is not None:
                outputs, bias = tf.add(outputs, bias), None
            part = part_of(self._kernel)
            assert part is not None
            outputs = split_collectives.columns_to_rows(ranks, outputs, counts, part.bounds)
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


class SplitEmbedding(SplitLayer, keras.layers.Embedding):
    """`keras.layers.Embedding` whose table is split over the ranks of a group.

    Each rank holds 1/M of the rows and of their momenta, and goes on with its own batch. It sends its ids to the ranks
    that hold their rows, and receives the rows, each once. The gradients of all ids go back. Outputs and gradients
    are those of `Embedding`; the gradient is sparse. With groups of one rank (see `hvdx.init(split=)`) it is
    `Embedding`.

    Args:
        input_dim: number of rows of the whole table.
        output_dim: length of a row.
        embeddings_initializer, embeddings_regularizer, embeddings_constraint, mask_zero: see `keras.layers.Embedding`.
        weights: initial table, [input_dim, output_dim]; each rank keeps its part.
        lora_rank: not supported by a split table.
        draw: "whole": draw the initial table as `Embedding` does, and keep a part. "shard": draw the part alone, which
            needs less memory.
        kwargs: further arguments of `keras.layers.Embedding`; quantisation is not supported.

    Raises:
        ConfigError: when the layer is built, if there are fewer rows than ranks in the group, or an argument does not
            fit a split table. On all ranks of the group in a step, if there is no row for an id.

    Example:
        >>> layer = SplitEmbedding(10, 3)
        >>> layer(np.array([[1, 2], [2, 9]])).shape, layer.embeddings.shape
        (TensorShape([2, 2, 3]), TensorShape([10, 3]))
    """

    plain_class = keras.layers.Embedding
    built: bool
    _embeddings: keras.Variable

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: str | keras.initializers.Initializer = "uniform",
        embeddings_regularizer: str | keras.regularizers.Regularizer | None = None,
        embeddings_constraint: str | keras.constraints.Constraint | None = None,
        mask_zero: bool = False,
        weights: npt.ArrayLike | list[npt.ArrayLike] | None = None,
        lora_rank: int | None = None,
        *args: object,
        draw: Draw = "whole",
        **kwargs: object,
    ):
        super().__init__(
            input_dim,
            output_dim,
            embeddings_initializer,
            embeddings_regularizer,
            embeddings_constraint,
            mask_zero,
            None,
            lora_rank,
            *args,
            **kwargs,
        )
        self.draw = draw
        if weights is not None:
            self.build()
            table = np.asarray(weights[0] if isinstance(weights, list) and len(weights) == 1 else weights)
            part = part_of(self._embeddings)
            self.set_weights([table if part is None or table.shape != part.shape else part.cut(table)])

    def build(self, input_shape: Sequence[int | None] | None = None) -> None:
        """Make this rank's part of the table. Not collective."""
        if self.built:
            return
        mesh = self._join_group()
        if mesh is None:
            super().build(input_shape)
            return
        self._refuse_fewer(self.input_dim, "rows (input_dim)", mesh.split)
        part = WeightPart((self.input_dim, self.output_dim), 0, bounds_of(self.input_dim, mesh.split), mesh.position)
        self._embeddings = self._add_part("embeddings", part)
        self.built = True

    def call(self, inputs: TensorLike | tf.RaggedTensor) -> tf.Tensor | tf.RaggedTensor:
        """Return the rows of this rank's ids.

        Raises:
            ConfigError: if the ids are a sparse tensor.
        """
        if self._mesh is None:
            return super().call(inputs)
        if isinstance(inputs, tf.SparseTensor):
            raise ConfigError(f"layer {self.name}: expected dense or ragged ids, got a sparse tensor. Make it dense.")
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._look_up(inputs.flat_values))
        return self._look_up(tf.convert_to_tensor(inputs))

    def _look_up(self, inputs: tf.Tensor) -> tf.Tensor:
        ranks, part = self._ranks.value, part_of(self._embeddings)
        assert part is not None
        ids = tf.reshape(tf.cast(inputs, tf.int64), [-1])
        # Keras, too, counts negative ids from the end.
        ids = tf.where(ids < 0, ids + self.input_dim, ids)
        lookup = ranks.send_ids(ids, part.bounds, self.name)
        # A gather from the variable itself copies only these rows.
        rows = tf.gather(self._embeddings.value, lookup.rows)
        # The gradient is divided here, where it is sparse.
        rows = split_collectives.average_gradient(rows, ranks.size)
        vectors = split_collectives.rows_of_ids(ranks, tf.cast(rows, self.compute_dtype), lookup)
        outputs = tf.reshape(vectors, tf.concat([tf.shape(inputs), [self.output_dim]], axis=0))
        outputs.set_shape([*inputs.shape, self.output_dim])
        return outputs


# Files name the plain class in the place of a split one, so that Keras loads them without hvdx. Keras also names
# layers, and their groups in files, after the class. With the name of the plain class, a split model has the names of
# the plain one, and each can read the other's weights.
for _split in (SplitDense, SplitEmbedding):
    name_in_files(_split, _split.plain_class)


@keras.saving.register_keras_serializable("hvdx")
class SplitSparseCategoricalCrossentropy(keras.losses.SparseCategoricalCrossentropy):
    """`keras.losses.SparseCategoricalCrossentropy` of logits whose classes are split over the ranks of a group.

    The predictions are the output of `SplitDense(classes, gather_output=False)`: this rank's classes of the rows of
    the group's batches. The labels and sample weights are those of this rank's batch, and so is the loss. The ranks
    exchange three numbers a row: the maximum, the sum of exponentials, and the target's logit. With groups of one rank
    it is the loss of Keras.

    Args:
        from_logits: must be True.
        ignore_class: label of rows that are left out of the loss.
        reduction, name, dtype: see `keras.losses.SparseCategoricalCrossentropy`.

    Raises:
        ConfigError: if `from_logits` is False. On all ranks of the group in a step, if the predictions have other rows
            than those of the group, or a label is no class.

    Example:
        >>> loss = SplitSparseCategoricalCrossentropy()
        >>> round(float(loss(keras.ops.array([1]), keras.ops.array([[0.0, 0.0]]))), 4)
        0.6931

    Source: Shoeybi et al. 2019, "Megatron-LM", which exchanges the three numbers by two all-reduces and not by one
    all-gather.
    """

    #: Class of the loss that `hvdx.keras.gather` puts in the place of this one.
    plain_class = keras.losses.SparseCategoricalCrossentropy

    def __init__(
        self,
        from_logits: bool = True,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str = "sparse_categorical_crossentropy",
        dtype: str | keras.DTypePolicy | None = None,
    ):
        if not from_logits:
            raise ConfigError(
                "SplitSparseCategoricalCrossentropy: from_logits: expected True, got False. Leave the softmax out of "
                "the last layer; the loss computes it over all ranks."
            )
        super().__init__(from_logits=True, ignore_class=ignore_class, reduction=reduction, name=name, dtype=dtype)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the loss of each row of this rank's batch.

        Args:
            y_true: labels of this rank's batch, [...] or [..., 1].
            y_pred: this rank's classes of the logits of the group's rows, [..., classes].
        """
        mesh = joined_mesh()
        if mesh is None:
            return super().call(y_true, y_pred)
        ranks, labels = tensors_of(mesh), _labels(y_true, y_pred)
        logits = tf.reshape(y_pred, [-1, y_pred.shape[-1]])
        everyone, counts, first = ranks.gather_labels(tf.reshape(labels, [-1]), logits, self.ignore_class)
        losses = tf.reshape(split_collectives.softmax_losses(ranks, logits, everyone, counts, first), tf.shape(labels))
        losses.set_shape(labels.shape)
        if self.ignore_class is not None:
            valid = tf.not_equal(labels, self.ignore_class)
            losses = tf.where(valid, losses, 0)
            # Keras leaves these rows out of the mean, too.
            set_mask(losses, valid)
        return losses


@keras.saving.register_keras_serializable("hvdx")
class SplitSparseCategoricalAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """`keras.metrics.SparseCategoricalAccuracy` of predictions whose classes are split over the ranks of a group.

    Args:
        name, dtype: see `keras.metrics.SparseCategoricalAccuracy`.

    Example:
        >>> metric = SplitSparseCategoricalAccuracy()
        >>> _ = metric.update_state(keras.ops.array([1, 0]), keras.ops.array([[0.0, 1.0], [0.0, 1.0]]))
        >>> float(metric.result())
        0.5
    """

    #: Class of the metric that `hvdx.keras.gather` puts in the place of this one.
    plain_class = keras.metrics.SparseCategoricalAccuracy

    def __init__(self, name: str = "sparse_categorical_accuracy", dtype: str | keras.DTypePolicy | None = None):
        super().__init__(name=name, dtype=dtype)
        set_metric_function(self, _matches)


def _matches(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Return 1 for each row of this rank's batch whose largest prediction is that of its label, else 0.

    Args:
        y_true: labels of this rank's batch, [...] or [..., 1].
        y_pred: this rank's classes of the predictions of the group's rows, [..., classes].
    """
    mesh = joined_mesh()
    if mesh is None:
        return keras.metrics.sparse_categorical_accuracy(y_true, y_pred)
    ranks, labels = tensors_of(mesh), _labels(y_true, y_pred)
    rows = tf.reshape(y_pred, [-1, y_pred.shape[-1]])
    # Labels that are no classes count as misses, as in Keras; only the numbers of rows and classes are needed.
    _, counts, first = ranks.gather_labels(tf.zeros_like(tf.reshape(labels, [-1])), rows, None)
    top, best = tf.reduce_max(rows, axis=1), tf.argmax(rows, axis=1) + first
    # One exchange for both; float64 holds every number of a class.
    mine = tf.stack([tf.cast(top, tf.float64), tf.cast(best, tf.float64)], axis=1)
    received = ranks.columns_to_rows(mine, counts, [2 * rank for rank in range(ranks.size + 1)])
    classes = tf.gather(received[:, 1::2], tf.argmax(received[:, ::2], axis=1), batch_dims=1)
    return tf.cast(tf.equal(tf.reshape(tf.cast(classes, tf.int64), tf.shape(labels)), labels), keras.config.floatx())


def _labels(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Return the labels as int64 without a last dimension of 1 that the predictions lack."""
    labels = tf.cast(y_true, tf.int64)
    return tf.squeeze(labels, -1) if len(labels.shape) == len(y_pred.shape) and labels.shape[-1] == 1 else labels
