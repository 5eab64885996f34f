"""Groups of simulated ranks: the cost of their transfers, the meeting of a collective, and smaller groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdx.costs.model import Situation
from hvdx.costs.sizes import ring_bytes
from hvdx.errors import ConfigError, ExchangeError
from hvdx.simulation.virtual_clock import Turn


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
    """Network between ranks, by the cost model of `hvdx advise`.

    The ranks of a host share its link, and use none among themselves.

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


@dataclass(frozen=True)
class Contribution:
    """Contribution of one rank to a collective.

    Attributes:
        rows: bytes to each rank, a number or float64[size], of each transfer.
        times: float64[members], arrival of the rank and of those that repeat it.
    """

    what: str
    value: Any
    rows: list[Any]
    times: np.ndarray


class Group:
    """Ranks that communicate.

    Args:
        turn: lock of the rank that runs.
        network: network between all ranks of the group.
        running: the ranks that run, in ascending order.
        repeats: int64[size], for each rank the position in `running` of the rank that it repeats, or its own.

    Attributes:
        weights: int64[running], number of ranks for which each running rank stands, itself included.
        turned: int64[size], number of ranks before each rank that repeat the same one. See `parts_for`.
    """

    def __init__(self, turn: Turn, network: Network, running: Sequence[int], repeats: np.ndarray) -> None:
        self.turn, self.network, self.running, self.repeats = turn, network, list(running), repeats
        self.weights = np.bincount(repeats, minlength=len(self.running))
        self.turned = np.zeros(len(repeats), np.int64)
        for position, weight in enumerate(self.weights):
            self.turned[repeats == position] = np.arange(weight)
        self._all = turn.condition()
        self._contributions: list[Any] = [None] * len(self.running)
        self._arrived = self._round = 0
        self._outcome: Any = None

    def again(self) -> "Group":
        """Return a group of the same ranks for another channel."""
        return Group(self.turn, self.network, self.running, self.repeats)

    def everyone(self, values: Sequence[Any]) -> list[Any]:
        """Return a value for each rank of the group, from those of the ranks that run."""
        return [values[position] for position in self.repeats]

    def parts_for(self, rank: int, values: Sequence[Any]) -> list[Any]:
        """Return what each rank of the group sends to one rank, from the parts that the running ranks have for all.

        A rank that repeats another one sends that rank's parts to other ranks, so that nobody receives a part twice:
        a sum of copies would have fewer elements than a sum of the parts of different ranks.

        Args:
            values: for each running rank, a sequence of its parts for all ranks.
        """
        size = len(self.repeats)
        return [
            values[position][(rank + turned) % size] for position, turned in zip(self.repeats, self.turned, strict=True)
        ]

    def weighted_sum(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sum over all ranks, from the arrays of those that run, in their order."""
        total: Any = 0
        for i, (array, weight) in enumerate(zip(arrays, self.weights, strict=True)):
            term = array if weight == 1 else array * array.dtype.type(weight)
            total = term if i == 0 else total + term
        return np.asarray(total)

    def meet(self, rank: int, contribution: Contribution, finish: Callable[[list[Contribution]], Any]) -> Any:
        """Give this rank's contribution, and return what `finish` makes of all; the last rank to arrive calls it.

        Raises:
            ExchangeError: if ranks call different collectives, another rank has failed, or the time limit has passed.
        """
        self._contributions[self.running.index(rank)] = contribution
        self._arrived += 1
        if self._arrived < len(self._contributions):
            this = self._round
            self.turn.wait(self._all, lambda: self._round != this)
            return self._outcome
        names = sorted({other.what for other in self._contributions})
        if len(names) > 1:
            raise ExchangeError(f"simulate: the ranks are in different collectives: {', '.join(names)}.")
        self._outcome = finish(self._contributions)
        self._contributions = [None] * len(self._contributions)
        self._arrived, self._round = 0, self._round + 1
        self._all.notify_all()
        return self._outcome

    def all_to_all(self, contributions: Sequence[Contribution]) -> list[Transfer]:
        """Return the cost of each transfer of a collective, from the bytes that each rank sends to each rank."""
        costs, size = [], self.network.size
        columns = (np.arange(size) + self.turned[:, None]) % size
        for rows in zip(*(c.rows for c in contributions), strict=True):
            known = np.array([np.broadcast_to(row, size) for row in rows], np.float64)
            costs.append(self.network.all_to_all(known[self.repeats[:, None], columns]))
        return costs


def divided(
    whole: Group, hosts: Sequence[str], divisions: Sequence[tuple[int, int, int]]
) -> dict[int, tuple[Group, list[int]]]:
    """Divide a group.

    Args:
        hosts: name of each rank's host.
        divisions: part, key and rank of each rank that runs.

    Returns:
        For each part, its group and the ranks in it.

    Raises:
        ConfigError: if some ranks repeat others, and the parts are neither hosts nor ranks with the same local rank.
    """
    if len(divisions) == len(hosts):
        members = {part: [rank for other, _, rank in sorted(divisions) if other == part] for part, _, _ in divisions}
    else:
        members = _members_of_all(hosts, divisions)
    position = {rank: i for i, rank in enumerate(whole.running)}
    sharing = _sharing([{hosts[rank] for rank in ranks} for ranks in members.values()])
    parts = {}
    for part, ranks in members.items():
        running = [i for i, rank in enumerate(ranks) if rank in position]
        places = {position[ranks[i]]: place for place, i in enumerate(running)}
        repeats = np.array([places[whole.repeats[rank]] for rank in ranks])
        network = Network(whole.network.situation, [hosts[rank] for rank in ranks], sharing)
        parts[part] = Group(whole.turn, network, running, repeats), ranks
    return parts


def _members_of_all(hosts: Sequence[str], divisions: Sequence[tuple[int, int, int]]) -> dict[int, list[int]]:
    """Return the ranks of each part, from the divisions of the ranks that run."""
    seen: dict[str, int] = {}
    local = []
    for host in hosts:
        local.append(seen.get(host, 0))
        seen[host] = local[-1] + 1
    for kind in (hosts, local):
        if all((a == b) == (kind[one] == kind[other]) for a, _, one in divisions for b, _, other in divisions):
            return {part: [r for r in range(len(hosts)) if kind[r] == kind[one]] for part, _, one in divisions}
    raise ConfigError(
        f"simulate: {len(hosts)} workers, of which {len(divisions)} run: expected a strategy that divides the ranks by "
        "host or by local rank, got another division. Simulate 64 workers at most, without --elements."
    )


def _sharing(parts: Sequence[set[str]]) -> int:
    """Return the largest number of parts on several hosts that have a rank on one host, at least 1."""
    across = [part for part in parts if len(part) > 1]
    return max((sum(host in part for part in across) for part in across for host in part), default=1)
