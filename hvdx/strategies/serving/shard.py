"""Shard of the weights at one server: the rules by which updates are applied and workers may continue.

The code reads no clock and sends no messages, so that tests can enumerate all small cases.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvdx.strategies.serving.messages import SessionConfig

#: Function that adds an update, times a factor, to an array of the size of the shard.
Addend = Callable[[np.ndarray, float], None]


@dataclass(frozen=True)
class Release:
    """Permission for a worker to continue with the current weights.

    Attributes:
        worker: rank of the worker.
        staleness: staleness of the update that it pushed.
        accepted: whether that update was accepted.
        final: whether all workers have flushed, so that the weights are final.
    """

    worker: int
    staleness: int = 0
    accepted: bool = True
    final: bool = False


class Shard:
    """Shard of the weights, and the rules by which updates change it.

    Args:
        config: configuration of the session.
        weights: initial weights, config.dtype[config.elements].

    Attributes:
        weights: float64[config.elements], because an update that counts 1/N may be below the last bit of a float32.
        version: number of times that updates were applied.
        updates: number of accepted updates.
        applied: number of accepted updates that are in the weights; the others wait to be aggregated.
        refused: number of refused updates.

    Example:
        >>> shard = Shard(SessionConfig(workers=2, elements=1, aggregate=2, share=0.5), np.zeros(1, np.float32))
        >>> one = lambda out, factor: np.add(out, factor, out=out)
        >>> shard.push(0, version=0, update=one)
        [Release(worker=0, staleness=1, accepted=True, final=False)]
        >>> shard.weights.tolist(), shard.push(1, 0, one)[0].worker, shard.weights.tolist()
        ([0.0], 1, [1.0])

    Source: staleness, its scale and the aggregation of n updates: Zhang et al. 2015, "Staleness-aware async-SGD for
    distributed deep learning"; the bound: Ho et al. 2013, "stale synchronous parallel parameter server".
    """

    def __init__(self, config: SessionConfig, weights: np.ndarray):
        self.config, self.weights = config, weights.astype(np.float64)
        self.version = self.updates = self.applied = self.refused = 0
        self._clocks = dict.fromkeys(config.members, 0)
        # Workers that push; the others have flushed or left.
        self._training = set(config.members)
        self._flushed: set[int] = set()
        self._waiting: dict[int, Release] = {}
        self._pending: list[tuple[int, float, Addend | None]] = []

    def push(self, worker: int, version: int, update: Addend | None) -> list[Release]:
        """Count a worker's step, and apply its update when enough updates are pending.

        Args:
            worker: rank of the worker.
            version: version of the weights from which the update was computed.
            update: the update; None if it was refused: the step counts, and nothing is added.

        Returns:
            The workers that may continue. This worker may be released later.
        """
        # The update is applied next, together with all pending updates. A staleness of 1 means that the weights have
        # not changed since the pull.
        staleness = self.version + 1 - version
        self._clocks[worker] += 1
        self._waiting[worker] = Release(worker, staleness, update is not None)
        self._pending.append((worker, self.config.share * staleness**-self.config.staleness_exponent, update))
        self.updates += update is not None
        self.refused += update is None
        return self._proceed()

    def flush(self, worker: int) -> list[Release]:
        """Note that a worker pushes nothing until all have flushed; when all have, apply the pending updates."""
        self._training.discard(worker)
        self._flushed.add(worker)
        return self._proceed()

    def leave(self, worker: int) -> list[Release]:
        """Remove a worker that has disconnected; no other worker waits for it from now on."""
        if worker not in self._clocks:
            return []  # it pushes to other sessions
        self._training.discard(worker)
        self._flushed.discard(worker)
        self._waiting.pop(worker, None)
        return self._proceed()

    def awaited_by(self, worker: int) -> list[int]:
        """Return the workers that a worker waits for; empty if it is not waiting."""
        if worker in self._flushed:
            return sorted(self._training)
        if worker not in self._waiting:
            return []
        return [
            w
            for w in sorted(self._training)
            if self._clocks[w] < self._clocks[worker] - (self.config.max_staleness or 0)
        ]

    def _proceed(self) -> list[Release]:
        """Apply the updates that are due, and release the workers that may continue."""
        all_flushed = not self._training
        # If all have flushed, one pending update is enough.
        if len(self._pending) >= max(1, min(self.config.aggregate, len(self._training))):
            self._apply()
        slowest = min((self._clocks[w] for w in self._training), default=0)
        bound = self.config.max_staleness
        free = [w for w in self._waiting if bound is None or self._clocks[w] - slowest <= bound]
        released = [self._waiting.pop(w) for w in sorted(free)]
        if all_flushed:
            released += [Release(w, final=True) for w in sorted(self._flushed)]
            self._training, self._flushed = self._flushed, set()
            self._clocks = dict.fromkeys(self._clocks, 0)
        return released

    def _apply(self) -> None:
        """Add the pending updates in the order of their workers, so that the order of arrival makes no difference."""
        accepted = [(worker, share, add) for worker, share, add in self._pending if add is not None]
        self._pending.clear()
        if not accepted:
            return
        for _, share, add in sorted(accepted, key=lambda item: item[0]):
            add(self.weights, share)
        self.applied += len(accepted)
        self.version += 1
