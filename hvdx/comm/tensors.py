"""Reductions that all communicators for the graph share: groups of tensors, and the rows of embeddings."""

import abc
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from hvdx.comm.interfaces import GraphComm, Reduction, Wire
from hvdx.errors import ConfigError, ReplicaError


class MismatchError(ReplicaError, tf.errors.FailedPreconditionError):
    """The ranks are in different calls of a collective. Horovod raises TensorFlow's class, which this one is too.

    Args:
        message: see `hvdx.errors`.
    """

    def __init__(self, message: str):
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class TensorComm(GraphComm):
    """Base class that reduces tensors group by group and gathers the rows of `tf.IndexedSlices`."""

    def all_reduce(
        self, tensors: Sequence[tf.Tensor | tf.IndexedSlices], how: Reduction, name: str
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        result: list[tf.Tensor | tf.IndexedSlices] = list(tensors)
        if how.sparse == "dense":
            result = [tf.convert_to_tensor(t) if isinstance(t, tf.IndexedSlices) else t for t in result]
        sparse = [i for i, t in enumerate(result) if isinstance(t, tf.IndexedSlices)]
        for k, group in enumerate(_split(len(result), how.groups)):
            members = [i for i in group if i not in sparse]
            theirs = replace(how, sizes=tuple(how.sizes[i] for i in members if how.sizes))
            combined = self.reduce_group([result[i] for i in members], theirs, f"{name}.group{k}") if members else []
            for i, tensor in zip(members, combined, strict=True):
                result[i] = tensor
        # The gradient of an embedding is the last that a backward pass computes.
        for i in sparse:
            result[i] = self._gather_slices(result[i], how, f"{name}.{i}")
        return result

    @abc.abstractmethod
    def reduce_group(self, tensors: list[tf.Tensor], how: Reduction, name: str) -> list[tf.Tensor]:
        """Reduce dense tensors in one collective.

        Args:
            tensors: one tensor or more.
            how: options, of which `average`, `wire`, `predivide`, `device` and `sizes` apply.
            name: name of the collective, the same on all ranks.
        """

    def _gather_slices(self, slices: tf.IndexedSlices, how: Reduction, name: str) -> tf.IndexedSlices:
        """Concatenate the rows of all ranks, as in the gradient of the whole batch; add up equal lookups.

        Keras' Adam squares each row by itself, also rows of one index, so a sum of the rows of a batch would change the
        step. But if all ranks have looked up the same indices in the same order, each once, these do not depend on the
        batch, such as those of positions: one process looks them up once, and each row is the sum over its whole batch.
        Positions that are looked up for each sample are there several times.
        """
        with device_scope(how.device_sparse):
            values = self._gather_values(slices.values, how.wire, f"{name}.values")
            # A negative number before each rank's indices makes them comparable; they may differ in number.
            count = tf.shape(slices.indices, slices.indices.dtype)
            marked = self.all_gather(tf.concat([-1 - count, slices.indices], 0), f"{name}.indices")
            if how.average:
                values /= tf.cast(self.size, values.dtype)
            length = tf.shape(marked)[0] // self.size
            fits = tf.equal(length * self.size, tf.shape(marked)[0])

            def alike() -> tf.Tensor:
                parts = tf.reshape(marked, [self.size, length])
                once = tf.equal(tf.size(tf.unique(parts[0])[0]), length)
                return tf.logical_and(once, tf.reduce_all(tf.equal(parts, parts[0])))

            def added() -> tuple[tf.Tensor, tf.Tensor]:
                shape = tf.concat([[self.size, length - 1], tf.shape(values)[1:]], 0)
                return tf.reduce_sum(tf.reshape(values, shape), 0), marked[1:length]

            def joined() -> tuple[tf.Tensor, tf.Tensor]:
                return tf.identity(values), tf.boolean_mask(marked, tf.greater_equal(marked, 0))

            values, indices = tf.cond(tf.cond(fits, alike, lambda: tf.constant(False)), added, joined)
        values.set_shape([None, *slices.values.shape[1:]])
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _gather_values(self, values: tf.Tensor, wire: Wire, name: str) -> tf.Tensor:
        if wire == "fp16":
            return tf.cast(self.all_gather(tf.cast(values, tf.float16), name), values.dtype)
        if wire == "bf16":
            return tf.cast(self.all_gather(tf.cast(values, tf.bfloat16), name), values.dtype)
        return self.all_gather(values, name)


def device_scope(device: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that places operations on a device; "" leaves the placement to TensorFlow."""
    return tf.device(device) if device else contextlib.nullcontext()


def _split(count: int, groups: int | tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Split the indices 0..count-1 into groups.

    Args:
        count: number of indices.
        groups: number of runs of nearly equal length (int), or the groups; each index in none of them is its own group.
    """
    if isinstance(groups, int):
        bounds = np.linspace(0, count, min(groups, max(count, 1)) + 1).astype(int)
        return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    named = {i for group in groups for i in group}
    if named and max(named) >= count:
        raise ConfigError(f"groups: expected indices below {count}, got {max(named)}.")
    return [list(group) for group in groups] + [[i] for i in range(count) if i not in named]
