"""Sums of the updates of a host's ranks: in memory that they share, or by messages if they cannot share memory.

Each rank sums one piece of the vector, and each element in rank order, so both ways give the same bits. Then each rank
sets its piece of a result, of which all ranks get the whole.
"""

import abc
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hvdx.comm import Channel
from hvdx.comm.alignment import aligned
from hvdx.strategies.threshold.dealing import Dealing

# Elements that are summed at a time. They stay in the level-2 cache until they have been checked.
_CHUNK = 1 << 16
# Elements of a tensor from which this rank's own blocks are read where they are. For a small tensor the calls that this
# takes cost more than a copy.
_LARGE = 1 << 16


def open_sums(channel: Channel, sizes: Sequence[int]) -> "HostSums":
    """Open the sums of a host: in shared memory, if the ranks can share it. Collective.

    Args:
        channel: the ranks of the host; at least two.
        sizes: number of elements of each tensor.
    """
    dealing = Dealing(sizes, channel.size)
    updates = channel.share(sum(sizes))
    result = None if updates is None else channel.share(0 if channel.rank else sum(sizes))
    if updates is None or result is None:
        return MessageSums(channel, dealing)
    return SharedSums(channel, dealing, updates, result[0])


class HostSums(abc.ABC):
    """Sums of the updates of a host's ranks.

    A step consists of `offer`, an exchange of the channel, `add_up`, another exchange, and `gather`. The ranks may
    share the arrays: a rank may write to `targets` between the exchange after `add_up` and `gather`, and
    a result is valid until this rank's first exchange after its next `offer`.

    Args:
        channel: the ranks of the host.
        dealing: division of the vector; rank r sums piece r.

    Attributes:
        result: float32[n], all pieces of the result after `gather`; callers must not change it.
        targets: contiguous views of this rank's piece of the result, in the order of the piece, if the piece may be
            written there instead of being given to `gather`; else None.
        gathered: bytes that this rank gives to other ranks in `gather`.
    """

    result: np.ndarray
    targets: list[np.ndarray] | None = None
    gathered: int

    def __init__(self, channel: Channel, dealing: Dealing):
        self.dealing, self._channel, self._rank = dealing, channel, channel.rank

    @abc.abstractmethod
    def publish(self, tensors: Sequence[np.ndarray]) -> None:
        """Make this rank's update available to the other ranks, after an exchange of the channel.

        Args:
            tensors: contiguous float32 arrays of the sizes that were given, which must not change before `add_up`.
        """

    @abc.abstractmethod
    def add_up(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        """Set `out` to the sum of the updates of all ranks, for this rank's piece; return whether it is finite.

        Args:
            tensors: those of `offer`.
            out: float32[piece].
        """

    @abc.abstractmethod
    def values(self, element: int, tensors: Sequence[np.ndarray]) -> list[float]:
        """Return the value of each rank at an element of this rank's piece, in rank order.

        Args:
            element: number of the element in the piece.
            tensors: those of `add_up`, which was called before.
        """

    @abc.abstractmethod
    def gather(self, piece: np.ndarray | None) -> float:
        """Set `result` to the pieces of all ranks; return the seconds of waiting for other ranks. Collective.

        Args:
            piece: float32[piece], that of this rank; None if it was written to `targets`.
        """

    def total(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Set `out` to the sum of the updates of all ranks, for this rank's piece. Collective.

        Args:
            tensors, out: see `add_up`.
        """
        self.publish(tensors)
        self._channel.exchange([])
        self.add_up(tensors, out)
        self._channel.exchange([])  # all ranks have read this update before one of them publishes the next


class MessageSums(HostSums):
    """Sums by messages: an all-to-all of the updates and an all-gather of the result."""

    def __init__(self, channel: Channel, dealing: Dealing):
        super().__init__(channel, dealing)
        self._pieces, self.result = np.zeros(dealing.elements, np.float32), aligned(dealing.elements)
        self._theirs = self._pieces[:0]
        self.gathered = 4 * (dealing.count - 1) * int(np.diff(dealing.bounds)[self._rank])

    def publish(self, tensors: Sequence[np.ndarray]) -> None:
        self._pieces[:] = self.dealing.split(np.concatenate([np.ravel(t) for t in tensors]))

    def add_up(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        self._theirs = self._channel.scatter_pieces(self._pieces, self.dealing.bounds)
        with np.errstate(over="ignore", invalid="ignore"):
            return _add(list(self._theirs), out)

    def values(self, element: int, tensors: Sequence[np.ndarray]) -> list[float]:
        values: list[float] = self._theirs[:, element].tolist()
        return values

    def gather(self, piece: np.ndarray | None) -> float:
        assert piece is not None
        self._channel.gather_pieces(piece, self.dealing.bounds, self._pieces)
        self.dealing.join(self._pieces, self.result)
        return 0.0


class SharedSums(HostSums):
    """Sums in memory that all ranks read and write.

    Each rank copies what others need of its update to an array of its own, and reads its piece from the arrays of all.
    The result is one array for all ranks.

    Args:
        channel, dealing: see `HostSums`.
        updates: array of each rank, float32[n], in the order of the vector.
        result: float32[n].
    """

    def __init__(self, channel: Channel, dealing: Dealing, updates: Sequence[np.ndarray], result: np.ndarray):
        super().__init__(channel, dealing)
        self._updates, self.result = list(updates), result
        self.gathered = 4 * int(np.diff(dealing.bounds)[self._rank])
        self._end = dealing.elements // dealing.round * dealing.round
        rest = dealing.rest(result, self._rank)
        self.targets = [*dealing.blocks(result[: self._end], self._rank), *([rest] if rest.size else [])]
        self._spans = list(self._find_spans())

    def _find_spans(self) -> "list[tuple[int, int, int]]":
        """Divide the whole rounds of the vector into (begin, end, number of the large tensor that holds them or -1)."""
        spans, at, size = [], 0, self.dealing.round
        for number, (begin, end) in enumerate(pairwise(self.dealing.ends)):
            first, last = -(-begin // size) * size, end // size * size
            if last - first >= _LARGE:
                spans += [(at, first, -1), (first, last, number)]
                at = last
        return [span for span in [*spans, (at, self._end, -1)] if span[0] < span[1]]

    def publish(self, tensors: Sequence[np.ndarray]) -> None:
        mine, count, block = self._updates[self._rank], self.dealing.count, self.dealing.block
        large = {number: (begin, end) for begin, end, number in self._spans if number >= 0}
        for number, (begin, end) in enumerate(pairwise(self.dealing.ends)):
            flat, target = np.ravel(tensors[number]), mine[begin:end]
            if number not in large:
                target[:] = flat
                continue
            first, last = (at - begin for at in large[number])
            target[:first], target[last:] = flat[:first], flat[last:]
            here, there = (array[first:last].reshape(-1, count, block) for array in (flat, target))
            there[:, : self._rank], there[:, self._rank + 1 :] = here[:, : self._rank], here[:, self._rank + 1 :]

    def add_up(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            rests = [self.dealing.rest(update, self._rank) for update in self._updates]
            finite = _add(rests, out[self._end // self.dealing.count :])
            for span in self._spans:
                finite &= self._add_span(span, tensors, out)
            return finite

    def _add_span(self, span: tuple[int, int, int], tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        """Do the work of `add_up` for one of the spans."""
        begin, end, number = span
        updates = [update[begin:end] for update in self._updates]
        if number >= 0:
            first = begin - self.dealing.ends[number]
            updates[self._rank] = np.ravel(tensors[number])[first : first + end - begin]
        blocks = [self.dealing.blocks(update, self._rank) for update in updates]
        count, block, finite = self.dealing.count, self.dealing.block, True
        total = out[begin // count : end // count].reshape(-1, block)
        some = max(1, _CHUNK // block)
        for low in range(0, len(total), some):
            finite &= _add([b[low : low + some] for b in blocks], total[low : low + some])
        return finite

    def values(self, element: int, tensors: Sequence[np.ndarray]) -> list[float]:
        place = self.dealing.origin(self._rank, element)
        values = [float(update[place]) for update in self._updates]
        number = int(np.searchsorted(self.dealing.ends, place, side="right")) - 1
        values[self._rank] = float(np.ravel(tensors[number])[place - self.dealing.ends[number]])
        return values

    def gather(self, piece: np.ndarray | None) -> float:
        if piece is not None:
            self.dealing.place(piece, self._rank, self.result)
        return self._channel.exchange([]).waited


def _add(arrays: Sequence[np.ndarray], out: np.ndarray) -> bool:
    """Set `out`, contiguous, to the sum of two or more arrays, in their order; return whether it is finite."""
    np.add(arrays[0], arrays[1], out=out)
    for array in arrays[2:]:
        np.add(out, array, out=out)
    flat = out.reshape(-1)
    # The square of a finite sum may overflow.
    return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())
