"""Sums of buckets of gradients in a thread, while the gradients of the other buckets are computed."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from hvdx.errors import ExchangeError

# Bytes of the smallest bucket, and the number of buckets of a large model. A bucket takes 0.5 to 1 ms longer than its
# bytes: its first blocks have to arrive before they are summed. 1 MB takes 8 ms at 1 Gbit/s. Nothing hides the last.
_LEAST_BYTES, _COUNT = 1_000_000, 16
# Seconds that `close` waits for a sum that has begun.
_END_SECONDS = 1.0


def fill(sizes: Sequence[int]) -> list[list[int]]:
    """Divide vectors into buckets, from the last one to the first, which is the order in which gradients are computed.

    Args:
        sizes: bytes of each vector, the same on all ranks.

    Returns:
        The indices of the vectors of each bucket. The last bucket may be smaller than the others.

    Example:
        >>> fill([400_000, 1_200_000, 800_000, 400_000])
        [[3, 2], [1], [0]]
    """
    buckets: list[list[int]] = [[]]
    own, passed, total = 0, 0, sum(sizes)
    for index in reversed(range(len(sizes))):
        if own >= _LEAST_BYTES and _COUNT * passed >= len(buckets) * total:
            buckets.append([])
            own = 0
        buckets[-1].append(index)
        own, passed = own + sizes[index], passed + sizes[index]
    return buckets


class BucketThread:
    """Thread that sums the buckets of a step in the order of their numbers, whatever the order in which they are given.

    So all ranks have one order. A step gives each bucket once, and takes the sums of all.

    Args:
        sums: collective function from the vectors of a bucket and a factor to their sums.

    Example:
        >>> thread = BucketThread(lambda vectors, scale: [scale * v for v in vectors])
        >>> thread.give(1, [np.ones(1)], 3.0)
        >>> thread.give(0, [np.ones(2)], 3.0)
        >>> thread.take(2)
        [[array([3., 3.])], [array([3.])]]
        >>> thread.close()
    """

    def __init__(self, sums: Callable[[Sequence[np.ndarray], float], Sequence[np.ndarray]]):
        self._sums = sums
        self._changed = threading.Condition()
        self._given: dict[int, tuple[Sequence[np.ndarray], float]] = {}
        self._seen: set[int] = set()
        self._done: list[Sequence[np.ndarray]] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def give(self, number: int, vectors: Sequence[np.ndarray], scale: float) -> None:
        """Hand over a bucket, without waiting.

        Args:
            number: number of the bucket in its step, from 0.
            vectors: contiguous floats[any] each; they must not change before `take` returns.
            scale: factor on the sums.

        Raises:
            ExchangeError: if the bucket was given already, because the last step was interrupted.
        """
        with self._changed:
            if number in self._seen:
                raise ExchangeError(
                    "the all-reduce: the last step has ended in the middle of an exchange, so the ranks no longer "
                    "agree on the next one. Do: start the job again."
                )
            self._seen.add(number)
            self._given[number] = vectors, scale
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hvdx all-reduce", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self, count: int) -> list[Sequence[np.ndarray]]:
        """Wait for the sums of all buckets of a step, and return them in the order of their numbers.

        Args:
            count: number of the step's buckets, all of which have been given.

        Raises:
            ExchangeError: if ranks did not join within the time limit; so do any other errors of `sums`, now and later.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or len(self._done) == count)
            if self._error is not None:
                raise self._error
            done, self._done, self._seen = self._done, [], set()
            return done

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._done) in self._given)
                if self._closed:
                    return
                vectors, scale = self._given.pop(len(self._done))
            try:
                sums = self._sums(vectors, scale)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            # Otherwise the gradients would stay in memory until the next step.
            del vectors
            with self._changed:
                self._done.append(sums)
                self._changed.notify_all()


class GivenSums:
    """Sums of the arrays of a step, each of which is given as soon as it has been computed.

    Args:
        buckets: see `fill`.
        send: function from an array to the vector that is sent.
        give: see `BucketThread.give`, without the factor.
        take: see `BucketThread.take`.

    Example:
        >>> thread = BucketThread(lambda vectors, scale: [scale * v for v in vectors])
        >>> sums = GivenSums([[1], [0]], np.negative, lambda n, vectors: thread.give(n, vectors, 2.0), thread.take)
        >>> sums.give(1, np.ones(1))
        >>> sums.give(0, np.zeros(1) + 3)
        >>> sums.take()
        [array([-6.]), array([-2.])]
        >>> thread.close()
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        send: Callable[[np.ndarray], np.ndarray],
        give: Callable[[int, Sequence[np.ndarray]], None],
        take: Callable[[int], Sequence[Sequence[np.ndarray]]],
    ):
        self._buckets = buckets
        self._bucket_of = {i: number for number, bucket in enumerate(buckets) for i in bucket}
        self._send, self._give, self._take = send, give, take
        self._begin()

    def _begin(self) -> None:
        self._vectors: dict[int, np.ndarray] = {}
        self._missing = [len(bucket) for bucket in self._buckets]

    def give(self, index: int, array: np.ndarray) -> None:
        """Hand over an array, without waiting.

        Args:
            index: its number in the step.
            array: floats of any shape; they must not change before `take` returns, and may be overwritten.

        Raises:
            ExchangeError: if it was given already.
        """
        number = self._bucket_of[index]
        if index in self._vectors:
            raise ExchangeError(
                "the all-reduce: a gradient was computed twice in one step, and the first one has been sent. Do: "
                "AllReduce(groups=2), which sends nothing before the end of the backward pass."
            )
        self._vectors[index] = self._send(array)
        self._missing[number] -= 1
        if not self._missing[number]:
            self._give(number, [self._vectors[i] for i in self._buckets[number]])

    def take(self) -> list[np.ndarray]:
        """Wait for the sums of all arrays, which have been given, and return them as vectors; see `BucketThread`."""
        self._begin()
        found = self._take(len(self._buckets))
        pairs = zip(self._buckets, found, strict=True)
        sums = {i: v for bucket, vectors in pairs for i, v in zip(bucket, vectors, strict=True)}
        return [sums[i] for i in range(len(sums))]
