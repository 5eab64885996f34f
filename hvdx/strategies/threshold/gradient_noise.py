"""Noise of the ranks' gradients, estimated from a sample of their elements.

An optimiser such as Adam divides by the root of the second moment of its gradients. Let the gradient of a rank be
s + n, where the noise n has mean 0 and variance V. The second moment of one rank's gradient is s^2 + V, and that of the
mean of N gradients s^2 + V / N. If each rank's optimiser sees the gradients of its rank alone, its steps are too small
by the root of the ratio of the two, up to sqrt(N). Only a comparison of the ranks can tell s from n: the gradient
itself may change from step to step as much as the noise does.

Source: McCandlish et al. 2018, "An empirical model of large-batch training", who estimate s^2 and V from the norms of
the gradients of a small and a large batch.
"""

from dataclasses import dataclass

import numpy as np

#: Elements of the gradients in a sample.
SAMPLE = 64
# Samples of the last steps count, about as many as Adam's second moment averages.
_WINDOW = 1000
# float16 in an integer of a header.
_WORD = 4


class NoiseEstimate:
    """Running estimate of the share of noise in the ranks' gradients; the same on all ranks.

    Attributes:
        state: float64[3]: number of samples; their mean s^2 and mean s^2 + V.

    Example:
        >>> estimate = NoiseEstimate()
        >>> estimate.observe(np.array([[1.0, -1.0], [-1.0, 1.0]]))
        >>> estimate.observe(np.array([[7.0, 7.0]]))  # nobody else is left: no change
        >>> round(estimate.factor(4), 6), estimate.factor(1)
        (2.0, 1.0)
    """

    def __init__(self) -> None:
        self.state = np.zeros(3)

    def observe(self, samples: np.ndarray, each: int = 1) -> None:
        """Add the sample of a step to the estimate.

        Args:
            samples: float[ranks, n], the same n elements of the gradient of each rank. Or float[k, n], results of
                `common_sample`.
            each: number of ranks in each of the samples.
        """
        values = samples.astype(np.float64)
        if not values.size or not np.isfinite(values).all():
            return
        ranks, whole = each * len(values), np.mean(values**2)
        if each > 1:
            whole, values = np.mean(values[:, 0] ** 2), values[:, _WORD:]
        of_mean = np.mean(values.mean(axis=0) ** 2)
        self._add(float(whole), float(of_mean), ranks)

    def observe_sums(self, total: np.ndarray, squares: float, ranks: int) -> None:
        """Add the sample of a step to the estimate, given sums over the ranks.

        Args:
            total: float64[n], sums of the same n elements of the gradients of all ranks.
            squares: sum of the squares of the elements of all ranks.
            ranks: number of ranks.
        """
        if total.size and np.isfinite(squares) and np.isfinite(total).all():
            self._add(squares / (ranks * total.size), float(np.mean((total / ranks) ** 2)), ranks)

    def _add(self, whole: float, of_mean: float, ranks: int) -> None:
        """Add the mean square of the ranks' gradients, and that of their mean, to the estimate.

        A rank that all others have left learns nothing of the noise.
        """
        if ranks == 1:
            return
        self.state[0] += 1
        weight = 1 / min(self.state[0], _WINDOW)
        self.state[1:] += weight * (np.array([(ranks * of_mean - whole) / (ranks - 1), whole]) - self.state[1:])

    def factor(self, ranks: int) -> float:
        """Return the root of (second moment of one gradient / second moment of the mean of `ranks` gradients)."""
        _, signal, whole = self.state
        share = min(max(signal / whole, 0.0), 1.0) if whole > 0 else 1.0
        return float((share + (1 - share) / ranks) ** -0.5)


@dataclass(frozen=True)
class GatheredSample:
    """Samples of all ranks, or results of `common_sample`.

    Attributes:
        values: float[k, n].
        each: number of ranks in each of the samples.
    """

    values: np.ndarray
    each: int

    def add_to(self, estimate: NoiseEstimate) -> None:
        """Add the sample to an estimate."""
        estimate.observe(self.values, self.each)


@dataclass(frozen=True)
class SummedSample:
    """Sums over the ranks of their samples; see `NoiseEstimate.observe_sums`."""

    total: np.ndarray
    squares: float
    ranks: int

    def add_to(self, estimate: NoiseEstimate) -> None:
        """Add the sample to an estimate."""
        estimate.observe_sums(self.total, self.squares, self.ranks)


def words_of(sample: np.ndarray, dtype: type[np.floating] = np.float16) -> list[int]:
    """Return a sample as numbers of a narrower type, four or two of them in an integer of a header.

    Args:
        sample: float[n].
        dtype: float16 or float32.
    """
    each = 8 // np.dtype(dtype).itemsize
    words = np.zeros(-(-sample.size // each) * each, dtype)
    # An element that the type cannot hold becomes infinity, and the estimate leaves the sample out.
    with np.errstate(over="ignore"):
        words[: sample.size] = sample
    found: list[int] = words.view(np.int64).tolist()
    return found


def common_sample(samples: np.ndarray) -> np.ndarray:
    """Return the samples of some ranks as one: the root mean square, three zeros, and the mean of each element.

    The estimate is then that of the samples themselves, with as many values to send as for one rank.

    Args:
        samples: float[ranks, n], the same n elements of the gradient of each rank.

    Returns:
        float64[4 + n]

    Example:
        >>> common_sample(np.array([[1.0, 1, 1, 1], [-1, 1, 1, 1]]))
        array([1., 0., 0., 0., 0., 1., 1., 1.])
    """
    values = samples.astype(np.float64)
    # A header holds whole integers, so further elements are zeros.
    padded = -(-values.shape[1] // _WORD) * _WORD
    root = np.sqrt(np.sum(np.mean(values**2, axis=0)) / max(padded, 1))
    return np.concatenate([[root], np.zeros(_WORD - 1), values.mean(axis=0)])


def sums_of(common: np.ndarray, ranks: int) -> tuple[np.ndarray, float]:
    """Return the sums of the elements over some ranks, and the sum of all squares, from their common sample.

    Args:
        common: result of `common_sample`.
        ranks: number of ranks in it.

    Example:
        >>> sums_of(common_sample(np.array([[1.0, 1, 1, 1], [-1, 1, 1, 1]])), 2)
        (array([0., 2., 2., 2.]), 8.0)
    """
    padded = -(-(common.size - _WORD) // _WORD) * _WORD
    return ranks * common[_WORD:], float(common[0] ** 2 * padded * ranks)
