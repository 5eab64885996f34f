"""Digest of the first batch of a dataset, taken while the batch passes."""

from typing import TypeVar

import numpy as np
import tensorflow as tf
import xxhash

from hvdx.keras.fit.agreement import pipeline
from hvdx.keras.fit.agreement.sample import sample
from hvdx.keras.seams.pipelines import copies_to_device
from hvdx.keras.types import Structure

T = TypeVar("T")


class FirstBatch:
    """Dataset that computes a digest of its first batch when it is read first.

    Args:
        dataset: dataset of batches.

    Attributes:
        dataset: the same batches; each costs some microseconds more.
        digest: digest of the first batch; None before it was read.
        components: digest of each component of the first batch, see `Sample.digests`.

    Example:
        >>> first = FirstBatch(tf.data.Dataset.range(4).batch(2))
        >>> [batch.numpy().tolist() for batch in first.dataset], first.digest is None
        ([[0, 1], [2, 3]], False)
    """

    def __init__(self, dataset: tf.data.Dataset):
        self.digest: int | None = None
        self.components: list[int | None] = []
        with tf.device("CPU:0"):
            unread = tf.Variable(True, trainable=False)

        def note() -> tf.Tensor:
            unread.assign(False)
            return tf.numpy_function(self._note, parts, tf.bool)

        parts: list[tf.Tensor] = []

        def passed(*components: Structure) -> Structure:
            parts[:] = [p for p in tf.nest.flatten(components, expand_composites=True) if _has_values(p)]
            with tf.control_dependencies([tf.cond(unread, note, lambda: True)]):
                result = tf.nest.map_structure(_identity, components)
            # TensorFlow passes the parts of a tuple as arguments.
            return result if type(dataset.element_spec) is tuple else result[0]

        self.dataset = dataset.map(passed)

    def _note(self, *parts: np.ndarray) -> np.bool_:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(str((part.dtype, part.shape)).encode())
            content = repr(part.tolist()).encode() if part.dtype.kind == "O" else np.ascontiguousarray(part).tobytes()
            digest.update(content)
        self.digest = digest.intdigest()
        self.components = sample(parts).digests()
        return np.bool_(True)


def can_pass(dataset: object) -> bool:
    """Return whether `FirstBatch` can stand behind a dataset; TensorFlow allows nothing behind a copy to a GPU."""
    return isinstance(dataset, tf.data.Dataset) and not any(
        copies_to_device(part) for part in pipeline.datasets(dataset)
    )


def _has_values(part: object) -> bool:
    return isinstance(part, tf.Tensor) and part.dtype not in (tf.variant, tf.resource)


def _identity(part: T) -> T:
    return tf.identity(part) if _has_values(part) else part
