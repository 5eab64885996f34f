"""`SplitEmbedding`: an embedding whose table is split over the ranks of a group."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdx.comm.mesh import bounds_of
from hvdx.errors import ConfigError
from hvdx.keras.layers import collectives
from hvdx.keras.layers.group import Shared, joined_mesh, refuse_fewer
from hvdx.keras.layers.initial import Draw, ShardInitializer
from hvdx.keras.layers.rules import check_constraint, split_regularizer
from hvdx.keras.layers.whole import cut_saved, guard_files, name_as_plain, refuse_to_save
from hvdx.keras.shards import Shard, mark, shard_of, tensors_of


class SplitEmbedding(keras.layers.Embedding):
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

    #: Class of the layer that `hvdx.keras.gather` puts in the place of this one.
    plain_class = keras.layers.Embedding
    built: Any
    _embeddings: Any

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        lora_rank: int | None = None,
        *args: Any,
        draw: Draw = "whole",
        **kwargs: Any,
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
        self._mesh: Any = None
        self._ranks: Any = None
        if weights is not None:
            self.build()
            table = np.asarray(weights[0] if isinstance(weights, list) and len(weights) == 1 else weights)
            shard = shard_of(self._embeddings)
            self.set_weights([table if shard is None or table.shape != shard.shape else shard.cut(table)])

    def build(self, input_shape: Any = None) -> None:
        """Make this rank's part of the table. Not collective."""
        if self.built:
            return
        mesh = joined_mesh()
        if mesh is None:
            super().build(input_shape)
            return
        guard_files()
        if self.lora_rank or self.quantization_mode:
            raise ConfigError(
                f"layer {self.name}: LoRA and quantization need whole weights. Leave them out, or use Embedding."
            )
        refuse_fewer(self, self.input_dim, "rows (input_dim)", mesh.split)
        self._mesh, self._ranks = Shared(mesh), Shared(tensors_of(mesh))
        # XLA cannot compile exchanges with other ranks.
        self.supports_jit = False
        where = f"layer {self.name}: embeddings"
        shard = Shard((self.input_dim, self.output_dim), 0, bounds_of(self.input_dim, mesh.split), mesh.position)
        check_constraint(self.embeddings_constraint, shard, where)
        self._embeddings = self.add_weight(
            name="embeddings",
            shape=shard.part_shape,
            initializer=ShardInitializer(self.embeddings_initializer, shard, self.draw, where),
            regularizer=split_regularizer(self.embeddings_regularizer, self._ranks.value, where),
            constraint=self.embeddings_constraint,
        )
        mark(self._embeddings, shard)
        self.built = True

    def call(self, inputs: Any) -> Any:
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

    def _look_up(self, inputs: Any) -> Any:
        ranks, shard = self._ranks.value, shard_of(self._embeddings)
        assert shard is not None
        ids = tf.reshape(tf.cast(inputs, tf.int64), [-1])
        # Keras, too, counts negative ids from the end.
        ids = tf.where(ids < 0, ids + self.input_dim, ids)
        lookup = ranks.send_ids(ids, shard.bounds, self.name)
        # A gather from the variable itself copies only these rows.
        rows = tf.gather(self._embeddings.value, lookup.rows)
        # The gradient is divided here, where it is sparse.
        rows = collectives.average_gradient(rows, ranks.size)
        vectors = collectives.rows_of_ids(ranks, tf.cast(rows, self.compute_dtype), lookup)
        outputs = tf.reshape(vectors, tf.concat([tf.shape(inputs), [self.output_dim]], axis=0))
        outputs.set_shape([*inputs.shape, self.output_dim])
        return outputs

    def save_own_variables(self, store: Any) -> None:
        """Save the table of `Embedding`; refuse to save a part.

        Raises:
            ConfigError: if this rank holds a part of the table.
        """
        refuse_to_save(self, self._mesh)
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the table of `Embedding`, and keep this rank's part."""
        super().load_own_variables(store if self._mesh is None else cut_saved(store, [self._embeddings]))

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Refuse LoRA for a split table."""
        if self._mesh is not None:
            raise ConfigError(f"layer {self.name}: LoRA needs whole weights. Use keras.layers.Embedding.")
        super().enable_lora(*args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refuse quantisation of a split table."""
        if self._mesh is not None:
            raise ConfigError(f"layer {self.name}: quantization needs whole weights. Use hvdx.keras.gather(model).")
        super().quantize(*args, **kwargs)


name_as_plain(SplitEmbedding, keras.layers.Embedding)
