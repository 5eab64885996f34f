"""Evaluation of models with split layers: all ranks of a group take part in every batch of the group."""

from typing import Any

import tensorflow as tf

from hvdx.comm import Comm
from hvdx.comm.mesh import mesh_of
from hvdx.errors import ConfigError
from hvdx.keras.fit import callback_list
from hvdx.keras.shards import has_parts


class GroupEvaluation:
    """Evaluation in which a rank that has fewer batches than its group goes on with batches that do not count.

    Args:
        comm: all ranks.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        # Number of batches that do not count, after this rank's own.
        self._missing = 0
        self._filler: Any = None

    def batches(self, callback: Any) -> int | None:
        """Return this rank's number of batches: -1 if it is unknown, None for a model without split layers.

        Args:
            callback: a callback, in its `on_test_begin`.
        """
        if not has_parts(callback.model):
            return None
        iterator = callback_list.epoch_iterator(callback)
        dataset = getattr(iterator, "_distributed_dataset", None)
        self._filler = None if dataset is None else tf.nest.map_structure(_one_row, dataset.element_spec)
        number = getattr(iterator, "num_batches", None)
        return -1 if number is None else int(number)

    def begin(self, everyone: list[int | None]) -> None:
        """Compare the numbers of batches in this rank's group.

        Args:
            everyone: results of `batches`, of all ranks.

        Raises:
            ConfigError: on all ranks, if a number is unknown.
        """
        self._missing = 0
        numbers = [number for number in everyone if number is not None]
        if not numbers:
            return
        if min(numbers) < 0:
            raise ConfigError.on_all_ranks(
                f"evaluation with split layers: expected a known number of batches on all ranks, got none on rank "
                f"{numbers.index(-1)}. Give fit validation_steps=, or evaluate steps=."
            )
        mesh = mesh_of(self._comm)
        mine = mesh.groups[mesh.index]
        self._missing = max(numbers[rank] for rank in mine) - numbers[self._comm.rank]

    def finish(self, model: Any) -> None:
        """Take this rank's part in the batches that others of its group still have."""
        missing, self._missing = self._missing, 0
        if not missing:
            return
        values = [v.numpy() for v in model.metrics_variables]
        for _ in range(missing):
            model.test_step(self._filler)
        for variable, value in zip(model.metrics_variables, values, strict=True):
            variable.assign(value)


def _one_row(spec: Any) -> Any:
    """Return a tensor of a batch with one sample of zeros; Keras cannot reduce the loss of an empty batch."""
    return tf.zeros([1, *(extent or 1 for extent in spec.shape[1:])], spec.dtype)
