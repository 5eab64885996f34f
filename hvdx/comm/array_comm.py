"""Communicator whose collectives take arrays on the host, for training steps that Python calls.

`HostGraphComm` calls them from a TensorFlow graph.
"""

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hvdx.comm import progress
from hvdx.comm.buckets import BucketThread, GivenSums, fill
from hvdx.comm.interfaces import BufferFor, Channel, Comm, GraphComm, Mailbox, Reduction, T, of_comm
from hvdx.comm.sums import DenseSums
from hvdx.errors import ExchangeError, ReplicaError

_WIRES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


class ArrayComm(GraphComm):
    """Collectives of arrays on top of a host communicator, matched by their order. Creating one is collective.

    Args:
        comm: communicator on the host, with channels.

    Example:
        >>> from hvdx.comm.local import virtual_world
        >>> alone = ArrayComm(virtual_world(1)[0])
        >>> alone.all_reduce([np.arange(3.0, dtype="float32"), np.float32(1)], Reduction(), "gradients")
        [array([0., 1., 2.], dtype=float32), array(1., dtype=float32)]
    """

    # They change when a rank dies.
    rank, size = of_comm("rank"), of_comm("size")
    local_rank, local_size = of_comm("local_rank"), of_comm("local_size")
    cross_rank, cross_size = of_comm("cross_rank"), of_comm("cross_size")
    hosts, world_ranks, recoveries = of_comm("hosts"), of_comm("world_ranks"), of_comm("recoveries")

    #: Class of the error of ranks whose calls do not fit.
    mismatch: type[ReplicaError] = ReplicaError

    def __init__(self, comm: Comm):
        self._comm = comm
        self.mesh, self.survives = comm.mesh, comm.survives
        self._dense, self._made = DenseSums(comm), comm.recoveries
        self._leaves_host = len(set(comm.hosts)) > 1
        self._behind = BucketThread(self._sums_once)
        self._sets: dict[tuple[int, ...], ArrayComm | None] = {}

    def complete(self, work: Callable[[], T]) -> T:
        return self._comm.complete(work)

    def all_gather_object(self, value: T, what: str) -> list[T]:
        return self._comm.all_gather_object(value, what)

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        return self._comm.all_reduce_sum(vector, what)

    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> Sequence[npt.ArrayLike]:
        return self._comm.broadcast(tensors, root, what)

    def any_true(self, mine: bool) -> bool:
        return self._comm.any_true(mine)

    def channel(self, what: str) -> Channel:
        return self._comm.channel(what)

    def divide(self, part: int, key: int, what: str) -> Comm:
        return self._comm.divide(part, key, what)

    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        return self._comm.mailbox(box, buffer_for)

    def close(self) -> None:
        """Close the channels of the all-reduce; the host communicator stays open."""
        self._behind.close()
        self._dense.close()

    def all_reduce(self, tensors: Sequence[np.ndarray], how: Reduction, name: str) -> list[np.ndarray]:  # type: ignore[override]
        """Sum or average arrays over the ranks; see `GraphComm.all_reduce`.

        Args:
            tensors: floats of any shapes; they may be overwritten.
            how: options, of which `average`, `wire`, `predivide` and `of_step` apply: an array has no rows of its own,
                and groups would add the same elements.
            name: see `GraphComm.all_reduce`.
        """
        vectors = [self._vector(t, how) for t in tensors]
        sums = self._sums(vectors, how, name if how.of_step and vectors[0].dtype.kind != "i" else "")
        return [v.reshape(t.shape).astype(t.dtype, copy=False) for v, t in zip(sums, tensors, strict=True)]

    def given_sums(self, how: Reduction, name: str) -> GivenSums | None:
        """Return an all-reduce that takes each array of a step when it has been computed, and sends while others are.

        Args:
            how: see `all_reduce`; `sizes` are those of all arrays.
            name: see `GraphComm.all_reduce`.

        Returns:
            It sends copies where arrays are narrowed, and else overwrites them. None if that gains nothing, or if ranks
            may die: one that died in the middle of a bucket would leave the others at different buckets.
        """
        buckets = fill([n * (2 if how.wire in _WIRES else 4) for n in how.sizes])
        if len(buckets) < 2 or not self._leaves_host or self.survives:
            return None

        def give(number: int, vectors: Sequence[np.ndarray]) -> None:
            self._give_bucket(number, buckets, vectors, how, name)

        def take(count: int) -> list[Sequence[np.ndarray]]:
            *found, last = self._behind.take(count)
            self._check_marks(last[len(buckets[-1]) :], how)
            return [*found, last[: len(buckets[-1])]]

        return GivenSums(buckets, lambda array: self._vector(array, how), give, take)

    def _give_bucket(
        self, number: int, buckets: Sequence[Sequence[int]], vectors: Sequence[np.ndarray], how: Reduction, marks: str
    ) -> None:
        """Hand over a bucket of a step to the thread; the last one has the marks, see `_sums`."""
        self._behind.give(number, marked(vectors, marks if number == len(buckets) - 1 else ""), self._factor(how))

    def _vector(self, tensor: np.ndarray, how: Reduction) -> np.ndarray:
        """Return the vector that is sent for an array: divided by `predivide`, and cast to the network's dtype."""
        before = how.predivide if how.average else 1.0
        sent = tensor / tensor.dtype.type(before) if before != 1.0 else tensor
        # Within a host nothing is sent, and a cast would cost time and digits.
        wire = _WIRES.get(how.wire) if self._leaves_host else None
        return np.atleast_1d(sent.astype(wire) if wire and sent.dtype.kind == "f" and sent.itemsize >= 4 else sent)

    def _factor(self, how: Reduction) -> float:
        """Return the factor on a sum of the ranks that are left."""
        return how.predivide / self._comm.size if how.average else 1.0

    def all_gather(self, tensor: np.ndarray, name: str) -> np.ndarray:  # type: ignore[override]
        return self._gathered(tensor)[0]

    def all_to_all(self, tensor: np.ndarray, splits: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
        self._renew()
        rows, counts = self._exchanged(tensor, splits)
        return rows, counts

    def subset(self, ranks: Sequence[int]) -> "ArrayComm | None":
        key, mine = tuple(ranks), self.rank in ranks
        if key not in self._sets:
            some = self._comm.divide(int(mine), self.rank, "a process set")
            self._sets[key] = type(self)(some) if mine else None
        return self._sets[key]

    def _check_marks(self, sums: Sequence[np.ndarray], how: Reduction) -> None:
        """Raise ExchangeError if the sums of the ranks' marks tell that not all are at one position.

        Args:
            sums: sums of the marks, or nothing.
            how: reduction by which they were summed.
        """
        size = self._comm.size
        for total in sums:
            # Float16 and bfloat16 round a sum of many ranks.
            if np.abs(total.astype(np.float64)).min() / self._factor(how) < size - 1 - size / 256:
                raise ExchangeError(
                    f"the all-reduce: the workers are in different steps, this one in {progress.here().place or 'none'}"
                    ". A step that only some workers take would be added to another step of the others. Do: decide by "
                    "hvdx.keras.combine(value), which is the same on all workers."
                )

    def _sums(self, vectors: Sequence[np.ndarray], how: Reduction, marks: str) -> Sequence[np.ndarray]:
        """Replace vectors by their sums over the ranks, and return them.

        Args:
            vectors: see `_sums_once`.
            how: reduction, of which the factor applies.
            marks: name of a step in which all ranks have to be; "" for none.
        """
        sent = marked(vectors, marks)
        if not self.survives:
            self._sums_once(sent, self._factor(how))
        else:
            # After a death, the addends are needed once more, and the factor is another.
            found = self._comm.complete(lambda: self._sums_once([v.copy() for v in sent], self._factor(how)))
            for vector, total in zip(sent, found, strict=True):
                vector[...] = total
        self._check_marks(sent[len(vectors) :], how)
        return vectors

    def _sums_once(self, vectors: Sequence[np.ndarray], scale: float) -> Sequence[np.ndarray]:
        """Replace vectors by their sums over the ranks, with one collective per dtype, and return them."""
        self._renew()
        for dtype in sorted({v.dtype for v in vectors}, key=str):
            self._dense.add_up([v for v in vectors if v.dtype == dtype], scale, self._cast)
        return vectors

    @staticmethod
    def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return an array as a new one of another dtype."""
        return values.astype(dtype)

    def _renew(self) -> None:
        """Open the channels of the ranks that are left."""
        if self._made != self._comm.recoveries:
            self._dense, self._made = DenseSums(self._comm), self._comm.recoveries

    def _gathered(self, rows: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate(self._parts(rows))]

    def _parts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the rows of each rank: views, which the next exchange overwrites."""
        received = self._dense.everyone.exchange([len(rows)], rows.reshape(-1).view(np.uint8))
        parts = zip(received.headers[:, 0], received.messages, strict=True)
        return [m.view(rows.dtype).reshape(n, *rows.shape[1:]) for n, m in parts]

    def _exchanged(self, rows: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        everyone = self._dense.everyone
        fits = len(counts) == everyone.size and counts.min() >= 0 and counts.sum() == len(rows)
        # A rank whose numbers do not fit says so to all, which would wait for it otherwise.
        sent = counts.astype(np.int64) if fits else np.full(everyone.size, -1)
        came = everyone.all_to_all_rows(sent.reshape(-1, 1))[:, 0]
        if came.min() < 0:
            raise self.mismatch(
                f"splits: expected {everyone.size} numbers of rows that add up to those of the tensor, got others on "
                f"rank {self.world_ranks[int(came.argmin())]}. Do: give one for each rank."
            )
        width = rows.itemsize * math.prod(rows.shape[1:])
        parts = np.split(rows.reshape(-1).view(np.uint8), np.cumsum(sent)[:-1] * width)
        received = np.concatenate(everyone.all_to_all(parts, (came * width).tolist()))
        return [received.view(rows.dtype).reshape(came.sum(), *rows.shape[1:]), came.astype(np.int32)]


def marked(vectors: Sequence[np.ndarray], name: str) -> Sequence[np.ndarray]:
    """Return the vectors, and behind them marks of this rank's position if there is a name; see `progress.signs`."""
    return [*vectors, progress.signs(name).astype(vectors[0].dtype)] if name else vectors
