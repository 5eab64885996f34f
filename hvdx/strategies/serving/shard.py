"""One server's part of the weights: which updates are applied when, and which workers may go on. It knows no ranks'
addresses, no clock and no bytes, so that its small cases can be tried out completely.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvdx.strategies.serving.messages import SessionConfig

#: Adds an update, times a factor, to an array of the size of the part.
Addend = Callable[[np.ndarray, float], None]


@dataclass(frozen=True)
class Release:
    """A worker that may go on with the weights as they are now.

    Attributes:
        worker: its rank.
        staleness: of the update that it pushed.
        fine: whether that update was accepted.
        final: it has flushed, and so have all others.
    """

    worker: int
    staleness: int = 0
    fine: bool = True
    final: bool = False


class Shard:
    """A part of the weights, and the rule by which updates change it.

    Args:
        config: the rule.
        weights: config.dtype[config.elements].

    Attributes:
        weights: float64[config.elements]: an update that counts 1/N may be below the last bit of a float32.
        version: how often updates were applied.
        updates: accepted updates.
        applied: those of them that are in the weights; the others wait for more to come.
        refused: updates that were not accepted.

    Example:
        >>> shard = Shard(SessionConfig(workers=2, elements=1, aggregate=2, share=0.5), np.zeros(1, np.float32))
        >>> one = lambda out, factor: np.add(out, factor, out=out)
        >>> shard.push(0, version=0, update=one)
        [Release(worker=0, staleness=1, fine=True, final=False)]
        >>> shard.weights.tolist(), shard.push(1, 0, one)[0].worker, shard.weights.tolist()
        ([0.0], 1, [1.0])

    Source: staleness and its scale, and the collecting of n updates: Zhang et al. 2015, "Staleness-aware async-SGD for
    distributed deep learning"; the bound: Ho et al. 2013, "stale synchronous parallel parameter server".
    """

    def __init__(self, config: SessionConfig, weights: np.ndarray):
        self.config, self.weights = config, weights.astype(np.float64)
        self.version = self.updates = self.applied = self.refused = 0
        self._clocks = [0] * config.workers
        # Those that push; the others have flushed, or are gone.
        self._training = set(range(config.workers))
        self._flushed: set[int] = set()
        self._held: dict[int, Release] = {}
        self._collected: list[tuple[int, float, Addend | None]] = []

    def push(self, worker: int, version: int, update: Addend | None) -> list[Release]:
        """A worker has taken a step.

        Args:
            worker: its rank.
            version: of the weights it began with.
            update: None where it was refused: the step counts, and nothing is added.

        Returns:
            The workers that may go on; this one among them, or later.
        """
        # It will be applied next, with all that are collected by then: 1 says that nothing came between.
        staleness = self.version + 1 - version
        self._clocks[worker] += 1
        self._held[worker] = Release(worker, staleness, update is not None)
        self._collected.append((worker, self.config.share * staleness**-self.config.staleness_exponent, update))
        self.updates += update is not None
        self.refused += update is None
        return self._proceed()

    def flush(self, worker: int) -> list[Release]:
        """A worker pushes nothing more until all have flushed; what was collected by then is applied."""
        self._training.discard(worker)
        self._flushed.add(worker)
        return self._proceed()

    def leave(self, worker: int) -> list[Release]:
        """A worker is gone for good: nobody waits for it any more."""
        self._training.discard(worker)
        self._flushed.discard(worker)
        self._held.pop(worker, None)
        return self._proceed()

    def awaited_by(self, worker: int) -> list[int]:
        """The workers that one waits for; none, if it is not waiting."""
        if worker in self._flushed:
            return sorted(self._training)
        if worker not in self._held:
            return []
        return [
            w
            for w in sorted(self._training)
            if self._clocks[w] < self._clocks[worker] - (self.config.max_staleness or 0)
        ]

    def _proceed(self) -> list[Release]:
        """Apply what is due, and let go who may go."""
        everyone_flushed = not self._training
        # Where all have flushed, whatever was collected.
        if len(self._collected) >= max(1, min(self.config.aggregate, len(self._training))):
            self._apply()
        slowest = min((self._clocks[w] for w in self._training), default=0)
        bound = self.config.max_staleness
        free = [w for w in self._held if bound is None or self._clocks[w] - slowest <= bound]
        released = [self._held.pop(w) for w in sorted(free)]
        if everyone_flushed:
            released += [Release(w, final=True) for w in sorted(self._flushed)]
            self._training, self._flushed = self._flushed, set()
            self._clocks = [0] * self.config.workers
        return released

    def _apply(self) -> None:
        """Add what was collected, worker by worker: the order in which it came makes no difference."""
        accepted = [(worker, share, add) for worker, share, add in self._collected if add is not None]
        self._collected.clear()
        if not accepted:
            return
        for _, share, add in sorted(accepted, key=lambda item: item[0]):
            add(self.weights, share)
        self.applied += len(accepted)
        self.version += 1
