"""Seconds and bytes of transfers between ranks, by the cost model of `hvdx advise`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdx.costs.model import Situation
from hvdx.costs.sizes import ring_bytes


@dataclass(frozen=True)
class Transfer:
    """Cost of one transfer.

    Attributes:
        seconds: duration for all ranks.
        sent, received: float64[ranks], bytes to and from other ranks.
        crossing: float64[ranks], bytes to ranks on other hosts.
    """

    seconds: float
    sent: np.ndarray
    received: np.ndarray
    crossing: np.ndarray


class Network:
    """Network between ranks. The ranks of a host share its link, and use none among themselves.

    Args:
        situation: link and machine; its numbers of workers are replaced by those of the ranks.
        hosts: host of each rank.
        sharing: number of groups of ranks that use a host's link at the same time.

    Example:
        >>> from hvdx.costs.types import Link
        >>> network = Network(Situation(2, (1,), 0.0, Link(0.0, 1e6)), ["a", "b"])
        >>> round(network.all_to_all(np.full((2, 2), 1e6)).seconds, 2)
        1.0
    """

    def __init__(self, situation: Situation, hosts: Sequence[str], sharing: int = 1) -> None:
        names, self._host = np.unique(np.array(hosts), return_inverse=True)
        self.size, self._hosts, self._per_host = len(hosts), len(names), int(np.bincount(self._host).max())
        link = replace(situation.link, bandwidth=situation.link.bandwidth / sharing)
        self.situation = replace(situation, workers=self.size, per_host=self._per_host, link=link)

    def all_to_all(self, sizes: np.ndarray) -> Transfer:
        """Return the cost of an exchange on the host, in which each rank sends some bytes to every other rank at once.

        The busiest link takes longest, and all ranks end with it.

        Args:
            sizes: float64[ranks, ranks], bytes from each rank (row) to each rank. Those to itself do not travel.
        """
        if self.size == 1:
            return Transfer(0.0, np.zeros(1), np.zeros(1), np.zeros(1))
        between = np.array(sizes, np.float64)
        np.fill_diagonal(between, 0.0)
        sent, received = between.sum(1), between.sum(0)
        crossing = sent
        if self._hosts == 1:
            crossing = np.zeros(self.size)
            busiest, others = max(sent.max(), received.max()), self.size - 1
        elif self._per_host == 1:
            busiest, others = max(sent.max(), received.max()), self.size - 1
        else:
            at = np.eye(self._hosts)[self._host]
            to_hosts = between @ at
            crossing = sent - to_hosts[np.arange(self.size), self._host]
            links = at.T @ to_hosts
            np.fill_diagonal(links, 0.0)
            busiest = max(links.sum(0).max(), links.sum(1).max())
            others = self._per_host * (self.size - self._per_host)
        # `Situation.all_to_all` takes the same bytes for each pair of ranks.
        seconds = sum(self.situation.all_to_all(float(busiest) / others).values())
        return Transfer(seconds, sent, received, crossing)

    def ring(self, payload: float) -> Transfer:
        """Return the cost of an all-reduce of MPI, of vectors of some bytes."""
        return self._reduced(payload, sum(self.situation.ring(payload).values()))

    def reduction(self, itemsize: int, elements: int, rarely: bool) -> Transfer:
        """Return the cost of an all-reduce of tensors; see `Situation.reduction`."""
        return self._reduced(itemsize * elements, sum(self.situation.reduction(itemsize, elements, rarely).values()))

    def _reduced(self, payload: float, seconds: float) -> Transfer:
        sent = np.full(self.size, float(ring_bytes(payload, self.size)))
        # In a ring in the order of the hosts, only one rank of each host sends to another host.
        return Transfer(seconds, sent, sent, sent / self._per_host if self._hosts > 1 else np.zeros(self.size))
