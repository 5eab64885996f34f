"""`SplitEmbedding`: an embedding whose table is split over the ranks of a group."""

from collections.abc import Sequence

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm.mesh import bounds_of
from hvdx.errors import ConfigError
from hvdx.keras.layers import collectives
from hvdx.keras.layers.initial import Draw
from hvdx.keras.layers.split_layer import SplitLayer
from hvdx.keras.layers.whole import name_as_plain
from hvdx.keras.types import TensorLike
from hvdx.keras.weight_parts import WeightPart, part_of


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
        rows = collectives.average_gradient(rows, ranks.size)
        vectors = collectives.rows_of_ids(ranks, tf.cast(rows, self.compute_dtype), lookup)
        outputs = tf.reshape(vectors, tf.concat([tf.shape(inputs), [self.output_dim]], axis=0))
        outputs.set_shape([*inputs.shape, self.output_dim])
        return outputs


name_as_plain(SplitEmbedding, keras.layers.Embedding)
