"""Models that simulated ranks train: a small network on images of digits, or updates of any size without a model."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hvdx.strategies import TensorSpec

#: Momentum of SGD.
MOMENTUM = 0.9
_RATE = 0.05
# Made updates: length of the part that is repeated; elements of a layer, which have one scale; and spreads, as standard
# deviations of logarithms, of the scales of layers and of elements.
_REPEATED, _LAYER = 1 << 22, 1 << 18
_OF_LAYERS, _OF_ELEMENTS = 1.5, 0.25
# Updates of different ranks and steps begin at different elements, in multiples of 64 up to this number.
_SHIFT = 1 << 15


class Replica(Protocol):
    """Model and optimiser of one rank.

    Attributes:
        weights: float32 arrays.
        slots: momenta, arrays of the same shapes.
    """

    weights: list[np.ndarray]
    slots: list[np.ndarray]

    def gradients(self, rows: int) -> list[np.ndarray]:
        """Return the mean gradients of this rank's next rows, times their number divided by that of an even share."""

    def updates(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the changes of the weights that SGD with momentum makes of gradients; valid until the next call."""

    def add(self, updates: Sequence[np.ndarray]) -> None:
        """Add changes to the weights."""

    def assign(self, tensors: Sequence[np.ndarray]) -> None:
        """Set the weights; if there are twice as many tensors, also the momenta."""

    def loss(self) -> float | None:
        """Return the cross-entropy on held-out data; None if there is no model."""


class Workload(Protocol):
    """Model that all ranks train.

    Attributes:
        specs: its tensors.
        batch: rows of a rank in a step, on average.
    """

    specs: list[TensorSpec]
    batch: int

    def replica(self, rank: int) -> Replica:
        """Return the model of a rank; all ranks begin with the same weights."""


class Digits:
    """Network with one hidden layer on images of digits, trained by SGD; each rank draws batches of its own.

    Args:
        train, held_out: images, float32[n, pixels], and classes from 0 to 9, int64[n].
        hidden: units of the hidden layer.
        batch: samples in a batch of one rank, on average.
        seed: seed of the weights and of the batches.
    """

    def __init__(
        self,
        train: tuple[np.ndarray, np.ndarray],
        held_out: tuple[np.ndarray, np.ndarray],
        hidden: int = 256,
        batch: int = 32,
        seed: int = 0,
    ) -> None:
        self.train, self.held_out, self.batch, self.seed = train, held_out, batch, seed
        self._shapes = (train[0].shape[1], hidden), (hidden,), (hidden, 10), (10,)
        names = "hidden/kernel", "hidden/bias", "classes/kernel", "classes/bias"
        self.specs = [TensorSpec(name, shape, 4) for name, shape in zip(names, self._shapes, strict=True)]

    def initial(self) -> list[np.ndarray]:
        """Return the weights before the first step: uniform (Glorot and Bengio 2010) kernels, biases of 0."""
        random = np.random.default_rng(self.seed)
        made = []
        for shape in self._shapes:
            limit = (6 / sum(shape)) ** 0.5 if len(shape) == 2 else 0.0
            made.append(random.uniform(-limit, limit, shape).astype(np.float32))
        return made

    def replica(self, rank: int) -> "_DigitsReplica":
        return _DigitsReplica(self, np.random.default_rng([self.seed, rank]))


class _DigitsReplica:
    def __init__(self, task: Digits, random: np.random.Generator) -> None:
        self._task, self._random = task, random
        self.weights = task.initial()
        self.slots = [np.zeros_like(w) for w in self.weights]

    def gradients(self, rows: int) -> list[np.ndarray]:
        images, classes = self._task.train
        chosen = self._random.integers(len(images), size=rows)
        x, y = images[chosen], classes[chosen]
        last = self.weights[2]
        hidden, shares = self._forward(x)
        shares[np.arange(len(y)), y] -= 1.0
        shares /= np.float32(self._task.batch)
        behind = shares @ last.T * (hidden > 0)
        return [x.T @ behind, behind.sum(0), hidden.T @ shares, shares.sum(0)]

    def _forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the hidden units and the probabilities of the classes."""
        kernel, bias, last, offset = self.weights
        hidden = np.maximum(x @ kernel + bias, 0.0)
        scores = hidden @ last + offset
        scores = np.exp(scores - scores.max(1, keepdims=True))
        return hidden, scores / scores.sum(1, keepdims=True)

    def updates(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        for slot, gradient in zip(self.slots, gradients, strict=True):
            slot[...] = np.float32(MOMENTUM) * slot - np.float32(_RATE) * gradient
        return self.slots

    def add(self, updates: Sequence[np.ndarray]) -> None:
        for weight, update in zip(self.weights, updates, strict=True):
            np.add(weight, update, out=weight)

    def assign(self, tensors: Sequence[np.ndarray]) -> None:
        # strict=False: without the momenta there are fewer tensors.
        for array, tensor in zip([*self.weights, *self.slots], tensors, strict=False):
            array[...] = tensor

    def loss(self) -> float | None:
        x, y = self._task.held_out
        shares = self._forward(x)[1][np.arange(len(y)), y]
        return float(-np.log(np.maximum(shares, 1e-30)).mean())


class Made:
    """Updates of a given size with heavy tails, without a model.

    An element is a number of a Laplace distribution, times a log-normal factor of its own, times a log-normal factor of
    its layer. Messages of density 0.01 then have 8 bits an entry, and some percent of entries with more than one tau,
    as those of recorded updates have; but updates here do not depend on the step before. Ranks and steps have the same
    numbers, at other elements.

    Args:
        elements: number of elements.
        seed: seed of the numbers.
        batch: rows of a rank in a step, on average.

    Example:
        >>> made = Made(1000)
        >>> [array.shape for array in made.replica(0).gradients(32)]
        [(1000,)]
    """

    def __init__(self, elements: int, seed: int = 0, batch: int = 32) -> None:
        self.batch = batch
        random = np.random.default_rng(seed)
        count = min(elements + _SHIFT, _REPEATED)
        numbers = random.standard_exponential(count, np.float32)
        numbers *= np.exp(np.float32(_OF_ELEMENTS) * random.standard_normal(count, np.float32))
        numbers *= 2 * random.integers(2, size=count, dtype=np.int8) - 1
        layers = np.exp(_OF_LAYERS * random.standard_normal(-(-count // _LAYER))).astype(np.float32)
        numbers *= np.repeat(layers, _LAYER)[:count] * np.float32(1e-4)
        self.numbers = np.resize(numbers, elements + _SHIFT)
        self.specs = [TensorSpec("made", (elements,), 4)]

    def replica(self, rank: int) -> "_MadeReplica":
        return _MadeReplica(self.numbers, rank)


class _MadeReplica:
    def __init__(self, numbers: np.ndarray, rank: int) -> None:
        self._numbers, self._rank, self._step = numbers, rank, 0
        self.weights = self.slots = [self._from(0)]

    def _from(self, begin: int) -> np.ndarray:
        return self._numbers[begin : begin + self._numbers.size - _SHIFT]

    def gradients(self, rows: int) -> list[np.ndarray]:
        self._step += 1
        return [self._from(64 * ((977 * self._rank + 131 * self._step) % (_SHIFT // 64)))]

    def updates(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(gradients)

    def add(self, updates: Sequence[np.ndarray]) -> None:
        """Do nothing: there is no model."""

    def assign(self, tensors: Sequence[np.ndarray]) -> None:
        """Do nothing: there is no model."""

    def loss(self) -> float | None:
        return None
