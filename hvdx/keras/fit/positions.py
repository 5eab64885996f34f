"""Positions of the ranks: those that exchange anything outside of the graph compare in which hook they are."""

from typing import Any

from hvdx.comm import Comm
from hvdx.errors import ReplicaError
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.evaluation import GroupEvaluation
from hvdx.keras.fit.part import Part


def all_gather_at(comm: Comm, place: str, payload: Any = None) -> list[Any]:
    """Gather a payload from all ranks, and check that they are in the same hook. Collective.

    Every hook that exchanges data begins with this call. If two ranks are in different hooks, they receive an error
    and do not deadlock.

    Args:
        comm: the ranks.
        place: name of the place for messages, such as "the end of epoch 3".
        payload: any picklable object.

    Returns:
        The payloads in rank order.

    Raises:
        ReplicaError: on all ranks, if their places differ.
    """
    everyone = comm.all_gather_object((place, payload), place)
    places = [where for where, _ in everyone]
    if len(set(places)) > 1:
        listed = "; ".join(f"rank {rank} is at {where}" for rank, where in enumerate(places))
        raise ReplicaError(
            f"the ranks are in different places: {listed}. Give fit the same arguments on every rank: validation "
            "data, epochs and initial_epoch too."
        )
    return [theirs for _, theirs in everyone]


class Positions(Part):
    """Compare the positions of the ranks at a validation and at the end of an epoch.

    Args:
        comm: the ranks.
        counting: counts of the fit.
    """

    def __init__(self, comm: Comm, counting: Counting):
        super().__init__()
        self._comm, self._counting = comm, counting
        self._evaluation = GroupEvaluation(comm)

    def on_test_begin(self, logs: Any = None) -> None:
        """Begin a validation; groups of split layers compare their numbers of batches."""
        batches = self._evaluation.batches(self)
        self._evaluation.begin(all_gather_at(self._comm, f"validation in epoch {self._counting.epoch + 1}", batches))

    def on_test_end(self, logs: Any = None) -> None:
        """End a validation; this rank takes part in the batches that its group still has."""
        self._evaluation.finish(self.model)
        all_gather_at(self._comm, f"the end of validation in epoch {self._counting.epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End an epoch."""
        all_gather_at(self._comm, f"the end of epoch {epoch + 1}")
