"""Positions of the ranks: those that exchange anything outside of the graph compare in which hook they are."""

from typing import Any

from hvdx.comm import Comm
from hvdx.errors import ReplicaError


def all_gather_at(comm: Comm, place: str, payload: object = None) -> list[Any]:
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
