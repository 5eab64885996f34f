"""Weighted means of tensors, computed block by block in float64."""

import collections
import functools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np

from hvdx.averaging.network import Network, Tensor, native
from hvdx.errors import AverageError, ConfigError

#: Rule for values without a mean, such as integers: they must be "equal", or those of one network are taken.
Integers = Literal["equal", "first", "last"]

# Elements per block: enough to make the overhead of calls negligible, few enough for the CPU caches.
_BLOCK = 1 << 17
# Names of step counters of optimisers in PyTorch (which stores them as floats), in TensorFlow, and in Keras 3.
_STEPS = re.compile(r"(^|\.)state\..+\.step$|(^|/)_?iterations?$|(^|/)optimizer/vars/0$")
_THREADS = min(4, len(os.sched_getaffinity(0)))


def resolve_weights(
    count: int, weights: Sequence[float] | None = None, ema: float | None = None, swa: bool = False
) -> list[float]:
    """Return the weight of each network; only ratios matter.

    Args:
        count: number of networks.
        weights: one number per network.
        ema: decay of an exponential moving average over the networks, oldest first.
        swa: stochastic weight averaging: equal weights.

    Returns:
        One number per network: none negative, and not all zero.

    Raises:
        ConfigError: if more than one option is given, or a number is invalid.

    Example:
        >>> resolve_weights(3), resolve_weights(2, [3, 1]), resolve_weights(3, ema=0.5)
        ([1.0, 1.0, 1.0], [3.0, 1.0], [0.25, 0.25, 0.5])

    Source: Izmailov et al. 2018, "Averaging weights leads to wider optima and better generalization" (swa).
    """
    if (weights is not None) + (ema is not None) + swa > 1:
        raise ConfigError("weights, ema, swa: expected at most one of them. Leave out the others.")
    if ema is not None:
        if not 0 < ema < 1:
            raise ConfigError(f"ema: expected a number between 0 and 1, such as 0.99, got {ema!r}.")
        return [ema ** (count - 1 - i) * (1.0 if i == 0 else 1 - ema) for i in range(count)]
    if weights is None:
        return [1.0] * count
    numbers = [float(w) for w in weights]
    if len(numbers) != count:
        raise ConfigError(f"weights: expected {count} numbers, one per network, got {len(numbers)}.")
    if not all(np.isfinite(w) and w >= 0 for w in numbers) or not sum(numbers):
        raise ConfigError(f"weights: expected numbers that are not negative, and one above zero; got {numbers}.")
    return numbers


class Mean:
    """Weighted mean of networks, tensor by tensor.

    Args:
        networks: networks with the same tensors (see `hvdx.averaging.api`).
        weights: result of `resolve_weights`.
        integers: see `Integers`.
        progress: function that is called with the number of bytes that were just read.

    Attributes:
        not_a_number: names of tensors whose mean holds NaN.
        infinite: names of tensors whose mean has a block with infinity and without NaN.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        weights: Sequence[float],
        integers: Integers = "equal",
        progress: Callable[[int], object] | None = None,
    ):
        # Scaling by a power of two avoids overflow, and changes no other result.
        exponent = math.frexp(max(weights))[1]
        self._weights = [math.ldexp(weight, -exponent) for weight in weights] if set(weights) != {1.0} else weights
        self._networks, self._integers = networks, integers
        self._progress = progress or (lambda count: None)
        self._local = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self.not_a_number: list[str] = []
        self.infinite: list[str] = []

    def values(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """Yield the mean of one tensor, block by block; see `hvdx.averaging.network.Values`.

        Raises:
            AverageError: if the tensor has no mean, or if integers differ that must be equal.
        """
        inputs = [network.tensors[tensor.name] for network in self._networks]
        block = self._block_of(tensor)
        starts = range(0, tensor.size, _BLOCK)
        for result in self._in_order([functools.partial(block, inputs, start) for start in starts]):
            self._progress(result.nbytes * len(inputs))
            yield result

    def _block_of(self, tensor: Tensor) -> Callable[[list[Tensor], int], np.ndarray]:
        kind = native(tensor.dtype)
        if _counts_steps(tensor):
            return self._agreed
        if np.issubdtype(kind, np.complexfloating):
            return lambda inputs, start: self._averaged(inputs, start, np.dtype(np.complex128))
        # NumPy does not count the bfloat16 and float8 dtypes of ml_dtypes as floating point numbers.
        if np.issubdtype(kind, np.floating) or kind.name.startswith(("bfloat", "float")):
            return lambda inputs, start: self._averaged(inputs, start, np.dtype(np.float64))
        if kind.kind in "iub":
            return self._agreed
        raise AverageError(f"{self._networks[0].path}: {tensor.name}: {tensor.dtype} cannot be averaged.")

    def _averaged(self, inputs: list[Tensor], start: int, wide: np.dtype) -> np.ndarray:
        count = min(_BLOCK, inputs[0].size - start)
        total, term = self._scratch("total", wide, count), self._scratch("term", wide, count)
        # Networks of weight 0 are left out, since 0 times infinity would be NaN.
        counted = [(t, w) for t, w in zip(inputs, self._weights, strict=True) if w]
        scale = sum(self._weights)
        result = np.empty(count, inputs[0].dtype)
        into = total
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for tensor, weight in counted:
                raw = self._scratch("raw", tensor.dtype, count)
                tensor.read(start, raw)
                np.copyto(into, raw)
                if weight != 1.0:
                    np.multiply(into, weight, out=into)
                if into is term:
                    np.add(total, term, out=total)
                into = term
            if scale != 1.0:
                np.divide(total, scale, out=total)
            # The maximum is NaN if an element is. It takes less time than a test of each element.
            if not (np.isfinite(total.max()) and np.isfinite(total.min())):
                if result.itemsize == wide.itemsize:
                    self._divide_first(counted, start, total, scale)
                self._note(inputs[0].name, total)
            np.copyto(result, total, casting="unsafe")
        if result.itemsize == wide.itemsize:
            _keep_equal([tensor for tensor, _ in counted], start, result)
        return result

    def _scratch(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        """Return an array that this thread reuses: allocation for each block would take as long as the arithmetic."""
        kept: dict[str, np.ndarray] = self._local.__dict__
        if name not in kept or kept[name].dtype != dtype:
            kept[name] = np.empty(_BLOCK, dtype)
        return kept[name][:count]

    def _divide_first(
        self, counted: Sequence[tuple[Tensor, float]], start: int, total: np.ndarray, scale: float
    ) -> None:
        """Recompute non-finite elements in place: a float64 sum can overflow where the mean does not."""
        where = ~np.isfinite(total)
        again = np.zeros(int(where.sum()), total.dtype)
        for tensor, weight in counted:
            again += tensor.array_at(start, total.size)[where].astype(total.dtype) * (weight / scale)
        total[where] = again

    def _note(self, name: str, total: np.ndarray) -> None:
        if np.isfinite(total).all():
            return
        names = self.not_a_number if np.isnan(total).any() else self.infinite
        if name not in names:
            names.append(name)

    def _agreed(self, inputs: list[Tensor], start: int) -> np.ndarray:
        count = min(_BLOCK, inputs[0].size - start)
        taken = 0 if self._integers != "last" else len(inputs) - 1
        blocks = [tensor.array_at(start, count) for tensor in inputs]
        if self._integers == "equal":
            for network, other in zip(self._networks, blocks, strict=True):
                unequal = np.flatnonzero(other != blocks[0])
                if unequal.size:
                    a, b = blocks[0][unequal[0]], other[unequal[0]]
                    reason = "The optimisers made different numbers of steps, and these have no mean: take that"
                    if not _counts_steps(inputs[0]):
                        reason = "Integers and booleans have no mean: take those"
                    raise AverageError(
                        f"{network.path}: {inputs[0].name}: expected {a}, as in {self._networks[0].path}, got {b}"
                        f"{_place(inputs[0], start + int(unequal[0]))}. {reason} of one network with --integers first, "
                        'or last (integers="first").'
                    )
        return blocks[taken].astype(inputs[0].dtype, copy=False)

    def _in_order(self, tasks: list[Callable[[], np.ndarray]]) -> Iterator[np.ndarray]:
        """Yield the results of tasks in their order; threads compute a few tasks ahead."""
        if len(tasks) < 2 * _THREADS or _THREADS < 2:
            yield from (task() for task in tasks)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "hvdx-average")
        ahead: collections.deque[Future[np.ndarray]] = collections.deque()
        try:
            for task in tasks:
                if len(ahead) >= 4 * _THREADS:
                    yield ahead.popleft().result()
                ahead.append(self._pool.submit(task))
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _counts_steps(tensor: Tensor) -> bool:
    return tensor.size == 1 and _STEPS.search(tensor.name) is not None


def _keep_equal(inputs: list[Tensor], start: int, result: np.ndarray) -> None:
    """Set elements that are equal in all networks to exactly that value.

    Narrower dtypes need no such step, since their means round to it. Sums of the widest dtypes have rounding errors
    and may overflow.
    """
    first, equal = inputs[0].array_at(start, result.size), np.ones(result.size, bool)
    for tensor in inputs[1:]:
        equal &= tensor.array_at(start, result.size) == first
    np.copyto(result, first, where=equal)


def _place(tensor: Tensor, element: int) -> str:
    return f" at {[int(i) for i in np.unravel_index(element, tensor.shape)]}" if tensor.size > 1 else ""
