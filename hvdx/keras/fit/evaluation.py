"""Validation on several ranks, and the end of an epoch, which they reach together."""

import tensorflow as tf

from hvdx.comm import Comm
from hvdx.comm.mesh import mesh_of
from hvdx.errors import ConfigError
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import dataset_of, number_of_batches
from hvdx.keras.types import Logs
from hvdx.keras.weight_parts import has_parts


class Evaluation(Part):
    """Compare positions at a validation and at the end of an epoch; all ranks of a group evaluate all its batches.

    With split layers, a rank that has fewer batches than its group goes on with batches that do not count.
    """

    def __init__(self, comm: Comm, counting: Counting):
        super().__init__()
        self._comm, self._counting = comm, counting
        # Number of batches that do not count, after this rank's own.
        self._missing = 0
        self._filler: tf.data.Dataset | None = None

    def on_test_begin(self, logs: Logs = None) -> None:
        """Compare the numbers of batches in this rank's group.

        Raises:
            ConfigError: on all ranks, if a number is unknown.
        """
        everyone = all_gather_at(self._comm, f"validation in epoch {self._counting.epoch + 1}", self._batches())
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

    def _batches(self) -> int | None:
        """Return this rank's number of batches: -1 if it is unknown, None for a model without split layers."""
        if not has_parts(self.model):
            return None
        iterator = epoch_iterator(self)
        dataset = dataset_of(iterator)
        self._filler = None if dataset is None else tf.nest.map_structure(_one_row, dataset.element_spec)
        number = number_of_batches(iterator)
        return -1 if number is None else number

    def on_test_end(self, logs: Logs = None) -> None:
        """Take this rank's part in the batches that others of its group still have."""
        missing, self._missing = self._missing, 0
        if missing:
            values = [v.numpy() for v in self.model.metrics_variables]
            for _ in range(missing):
                self.model.test_step(self._filler)
            for variable, value in zip(self.model.metrics_variables, values, strict=True):
                variable.assign(value)
        all_gather_at(self._comm, f"the end of validation in epoch {self._counting.epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Compare the positions."""
        all_gather_at(self._comm, f"the end of epoch {epoch + 1}")


def _one_row(spec: tf.TypeSpec) -> tf.Tensor:
    """Return a tensor of a batch with one sample of zeros; Keras cannot reduce the loss of an empty batch."""
    return tf.zeros([1, *(extent or 1 for extent in spec.shape[1:])], spec.dtype)
