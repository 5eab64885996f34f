"""Communicators of simulated ranks: collectives exchange real arrays, and move the ranks' virtual clocks.

A collective begins when its last rank has arrived. It takes the seconds that `Network` predicts for its bytes, and ends
at the same time on all ranks.

In a large world only some ranks run, each in a thread. The others repeat them: their messages are those of the rank
that they repeat, and its work takes as long on their cores. Then results are sums of repeated messages; but parts for
one rank each, as in an all-to-all, are of different ranks and different elements, so that their sums are realistic.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from hvdx.comm import clock
from hvdx.comm.interfaces import BufferFor, Channel, GraphComm, Mailbox, Received, Reduction
from hvdx.costs.model import Situation
from hvdx.errors import ConfigError
from hvdx.simulation.groups import Contribution, Group, Network, Transfer, divided
from hvdx.simulation.virtual_clock import RankClock, Turn

T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes of one rank.

    Attributes:
        sent, received: bytes to and from other ranks.
        crossing: bytes to ranks on other hosts.
        buffer: bytes received in the largest transfer.
    """

    sent: float = 0.0
    received: float = 0.0
    crossing: float = 0.0
    buffer: float = 0.0

    def add(self, transfer: Transfer, rank: int) -> None:
        """Count a transfer."""
        self.sent += float(transfer.sent[rank])
        self.received += float(transfer.received[rank])
        self.crossing += float(transfer.crossing[rank])
        self.buffer = max(self.buffer, float(transfer.received[rank]))

    def reset(self) -> None:
        """Set all counters to zero."""
        self.sent = self.received = self.crossing = self.buffer = 0.0


class _Member:
    """One rank of a group, and the bytes that it counts."""

    def __init__(self, rank: int, group: Group, traffic: Traffic) -> None:
        self.rank, self.group, self.traffic = rank, group, traffic

    @contextmanager
    def inside(self) -> Iterator[RankClock]:
        """Count this rank's work up to here, and none within the block. Return its clock."""
        mine = clock.timer()
        if not isinstance(mine, RankClock):
            raise ConfigError("simulate: a collective: expected the thread of a rank, got one without a virtual clock.")
        with mine.paused():
            yield mine

    def collective(
        self,
        what: str,
        value: Any,
        rows: Sequence[Any],
        combine: Callable[[list[Any]], Any],
        price: Callable[[], Transfer] | None = None,
    ) -> tuple[Any, float, list[float]]:
        """Take part in a collective.

        Args:
            value: contribution of this rank, which must not change later.
            rows: bytes to each rank, a number or float64[size], of each transfer, one after another.
            combine: function from the values of the ranks that run to the result, which all ranks share.
            price: cost of the only transfer; by default that of `rows`, as messages from each rank to each rank.

        Returns:
            The result, the virtual time at which the first transfer began, and the seconds of each transfer.
        """
        with self.inside() as mine:

            def finish(contributions: list[Contribution]) -> tuple[Any, float, list[Transfer]]:
                begin = max(float(c.times.max()) for c in contributions)
                costs = self.group.all_to_all(contributions) if price is None else [price()]
                return combine([c.value for c in contributions]), begin, costs

            contribution = Contribution(what, value, list(rows), mine.times.copy())
            result, begin, costs = self.group.meet(self.rank, contribution, finish)
            for cost in costs:
                self.traffic.add(cost, self.rank)
            seconds = [cost.seconds for cost in costs]
            mine.meet(begin, sum(seconds))
            return result, begin, seconds


class SimulatedChannel(Channel):
    """Channel between simulated ranks."""

    def __init__(self, rank: int, group: Group, traffic: Traffic) -> None:
        self.rank, self.size = rank, group.network.size
        self._group, self._member = group, _Member(rank, group, traffic)

    def exchange(self, header: Sequence[int], message: np.ndarray | None = None) -> Received:
        with self._member.inside() as mine:
            arrival = float(mine.times[0])
            rows = [8 * (len(header) + 1), *([] if message is None else [message.size])]
            value = list(header), None if message is None else message.copy()
            (headers, messages), begin, seconds = self._member.collective("exchange", value, rows, self._gathered)
            return Received(headers, messages, begin + seconds[0] - arrival, sum(seconds[1:]))

    def _gathered(self, values: list[Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        headers = np.array([header for header, _ in values], np.int64)[self._group.repeats]
        return headers, [m for _, m in self._group.everyone(values) if m is not None]

    def all_reduce(self, vector: np.ndarray) -> None:
        with self._member.inside():
            size, group = vector.nbytes, self._group
            total, *_ = self._member.collective(
                "all_reduce", vector.copy(), [], group.weighted_sum, lambda: group.network.ring(size)
            )
            vector[:] = total

    def scatter_pieces(self, vector: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        with self._member.inside():
            rows, mine = [np.diff(bounds) * vector.itemsize], slice(bounds[self.rank], bounds[self.rank + 1])
            vectors, *_ = self._member.collective("scatter_pieces", vector.copy(), rows, self._group.everyone)
            return np.stack([theirs[mine] for theirs in vectors])

    def gather_pieces(self, piece: np.ndarray, bounds: np.ndarray, into: np.ndarray) -> None:
        with self._member.inside():
            pieces, *_ = self._member.collective("gather_pieces", piece.copy(), [piece.nbytes], self._group.everyone)
            for begin, end, theirs in zip(bounds[:-1], bounds[1:], pieces, strict=True):
                # The piece of a rank that repeats another one has the length of its own bounds.
                into[begin:end] = theirs if theirs.size == end - begin else np.resize(theirs, end - begin)

    def share(self, elements: int) -> list[np.ndarray] | None:
        if len(set(self._group.repeats)) < self.size:
            return None
        with self._member.inside():
            arrays: list[np.ndarray]
            arrays, *_ = self._member.collective("share", np.zeros(elements, np.float32), [8], self._group.everyone)
            return arrays

    def all_to_all_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Send each rank a few numbers of its own; see `Channel`."""
        with self._member.inside():
            row = numbers[0].nbytes
            everyone, *_ = self._member.collective("all_to_all_rows", numbers.copy(), [row], list)
            return np.stack(self._group.parts_for(self.rank, everyone))

    def all_to_all(self, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        with self._member.inside():
            rows, value = [np.array([part.size for part in parts])], [part.copy() for part in parts]
            everyone, *_ = self._member.collective("all_to_all", value, rows, list)
            return self._group.parts_for(self.rank, everyone)


class SimulatedComm(GraphComm):
    """Communicator of a simulated rank, on the host and for exchanges of the graph, whose tensors are NumPy arrays.

    Args:
        rank: rank of the owner.
        group: all ranks.
        hosts: name of each rank's host.
        mine: virtual clock of the owner.
        rarely: whether most steps have no all-reduce; see `Situation.reduction`.
        traffic: counters of the owner; new ones by default.
    """

    def __init__(
        self,
        rank: int,
        group: Group,
        hosts: Sequence[str],
        mine: RankClock,
        rarely: bool = False,
        traffic: Traffic | None = None,
    ) -> None:
        self.rank, self.size, self.hosts = rank, group.network.size, list(hosts)
        here = [other for other in range(self.size) if hosts[other] == hosts[rank]]
        self.local_rank, self.local_size = here.index(rank), len(here)
        names = list(dict.fromkeys(hosts))
        self.cross_rank, self.cross_size = names.index(hosts[rank]), len(names)
        self.group, self.clock, self.rarely = group, mine, rarely
        self.traffic = traffic or Traffic()
        self._member = _Member(rank, group, self.traffic)

    def start(self) -> None:
        """Set clock and counters to zero, on all ranks at once. Collective."""
        self._member.collective("start", None, [], lambda values: None)
        self.clock.reset()
        self.traffic.reset()

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        rows = [8, len(pickle.dumps(value))]
        return list(self._member.collective(f"gather {what}", value, rows, self.group.everyone)[0])

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        addend, group = np.array(vector, np.float64), self.group
        total, *_ = self._member.collective(
            f"sum {what}", addend, [], group.weighted_sum, lambda: group.network.ring(addend.nbytes)
        )
        return np.array(total)

    def broadcast(self, tensors: Sequence[Any], root: int, what: str) -> list[Any]:
        arrays = [np.array(t) for t in tensors]
        rows = [sum(a.nbytes for a in arrays) if self.rank == root else 0]
        everyone, *_ = self._member.collective(f"broadcast {what}", arrays, rows, self.group.everyone)
        return [a.copy() for a in everyone[root]]

    def all_reduce(self, tensors: Sequence[Any], how: Reduction, name: str) -> list[Any]:
        arrays, network = [np.asarray(t) for t in tensors], self.group.network
        how = how if network.situation.narrows else replace(how, wire="none")
        itemsize = max((a.itemsize for a in arrays), default=4) if how.wire == "none" else 2
        elements = sum(a.size for a in arrays)
        found, *_ = self._member.collective(
            f"all_reduce {name}",
            arrays,
            [],
            lambda values: [self._reduced(each, how) for each in zip(*values, strict=True)],
            lambda: network.reduction(itemsize, elements, self.rarely),
        )
        return list(found)

    def _reduced(self, arrays: Sequence[np.ndarray], how: Reduction) -> np.ndarray:
        narrow = _NARROW[how.wire]
        total = self.group.weighted_sum([narrow(a) for a in arrays])
        return narrow(total / total.dtype.type(self.size) if how.average else total)

    def all_gather(self, tensor: Any, name: str) -> Any:
        array = np.array(tensor)
        everyone, *_ = self._member.collective(f"all_gather {name}", array, [8, array.nbytes], self.group.everyone)
        return np.concatenate(everyone)

    def all_to_all(self, tensor: Any, splits: Any, name: str) -> tuple[Any, Any]:
        """Raise ConfigError: no strategy that is simulated uses it."""
        raise _left_out("alltoall")

    def subset(self, ranks: Sequence[int]) -> "GraphComm | None":
        """Raise ConfigError: no strategy that is simulated uses it."""
        raise _left_out("process sets")

    def channel(self, what: str) -> Channel:
        group, *_ = self._member.collective(f"open {what}", None, [8], lambda values: self.group.again())
        return SimulatedChannel(self.rank, group, self.traffic)

    def divide(self, part: int, key: int, what: str) -> "SimulatedComm":
        parts, *_ = self._member.collective(
            f"divide {what}", (part, key, self.rank), [24], lambda divisions: divided(self.group, self.hosts, divisions)
        )
        group, ranks = parts[part]
        hosts = [self.hosts[rank] for rank in ranks]
        some = SimulatedComm(ranks.index(self.rank), group, hosts, self.clock, self.rarely, self.traffic)
        some.parent, some.parent_ranks = self, ranks
        return some

    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        """Raise ConfigError: messages without a collective have no virtual time."""
        raise _left_out("exchanges without a common step")


def world(
    situation: Situation,
    slow: np.ndarray,
    core_speed: float,
    running_hosts: int,
    timer: Callable[[], float],
    rarely: bool = False,
) -> list[SimulatedComm]:
    """Return the communicators of the ranks that run, each to be used by its own thread.

    Args:
        situation: number of workers, workers on a host, link and machine.
        slow: float64[workers], factor on the time of each rank's work.
        core_speed: speed of the ranks' cores, relative to this machine's.
        running_hosts: number of hosts whose ranks run; those of the others repeat them.
        timer: returns the seconds of work of the calling thread.
        rarely: whether most steps have no all-reduce.

    Example:
        >>> from hvdx.costs.types import Link
        >>> pair = world(Situation(2, (1,), 0.0, Link(0.0, 1e6)), np.ones(2), 1.0, 2, lambda: 0.0)
        >>> [comm.rank for comm in pair]
        [0, 1]
    """
    count, per_host = situation.workers, situation.per_host
    hosts = [f"host{rank // per_host + 1}" for rank in range(count)]
    ranks = np.arange(count)
    repeats = ranks // per_host % running_hosts * per_host + ranks % per_host
    running = list(range(min(count, running_hosts * per_host)))
    turn = Turn()
    group = Group(turn, Network(situation, hosts), running, repeats)
    comms = []
    for rank in running:
        factors = slow[repeats == rank] / core_speed
        comms.append(SimulatedComm(rank, group, hosts, RankClock(factors, timer), rarely))
    return comms


def on_all(comms: Sequence[SimulatedComm], work: Callable[[SimulatedComm], T]) -> list[T]:
    """Call a function on each rank that runs, in a thread of its own, and return the results in their order.

    A rank runs while it holds the lock, which it gives up in each collective.

    Raises:
        BaseException: the first error of any rank, which ends all ranks.
    """
    turn = comms[0].group.turn
    with ThreadPoolExecutor(len(comms), "hvdx-rank") as pool:
        started = [pool.submit(_run, comm, work) for comm in comms]
        try:
            wait(started)
        except BaseException as error:
            with turn.lock:
                turn.fail(error)
            raise
    if turn.error is not None:
        raise turn.error
    return [future.result() for future in started]


def _run(comm: SimulatedComm, work: Callable[[SimulatedComm], T]) -> T:
    with comm.group.turn.lock:
        clock.use(comm.clock)
        try:
            comm.clock.resume()
            return work(comm)
        except BaseException as error:
            comm.group.turn.fail(error)
            raise
        finally:
            clock.use(None)


def _left_out(what: str) -> ConfigError:
    return ConfigError(
        f"simulate: {what} cannot be simulated. Choose another strategy; `hvdx advise` predicts some of those that "
        "exchange without a common step, and `hvdx compare` measures them."
    )


def _half(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(array.dtype)


def _bfloat16(array: np.ndarray) -> np.ndarray:
    """Round float32 numbers to the nearest ones of bfloat16."""
    bits = np.array(array, np.float32, ndmin=1).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32).reshape(array.shape)
    return np.where(np.isfinite(array), rounded, array).astype(array.dtype)


_NARROW: dict[str, Callable[[np.ndarray], np.ndarray]] = {"none": lambda a: a, "fp16": _half, "bf16": _bfloat16}
