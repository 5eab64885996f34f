"""Batches of NumPy arrays, which a fit on JAX or PyTorch reads in the order of TensorFlow's `index_shuffle`."""

import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np

from hvdx.keras.fit.arrays import rows_at
from hvdx.keras.seams.iterators import OwnBatches
from hvdx.keras.types import Structure

# Constants of TensorFlow's `index_shuffle`: bits of the smallest block, first number of the key, and two of the cipher.
_BLOCK, _FIRST_KEY, _C, _Z = 16, 498_247_692, 0xFFFFFFFC, 0x7369F885192C0EF5
_ROUNDS = 4


class ArrayBatches(OwnBatches):
    """Batches of some rows of arrays, for `fit`, `evaluate` and `predict`; each pass reads them anew.

    Args:
        arrays: structure of `Rows`; see `arrays.tensors_of`.
        positions: function that begins a pass, and yields the positions of each batch's rows, int64[m].
        steps: number of batches of a pass; None if each pass may have another.
        rows: rows of a full batch.
        last: rows of the last batch.
    """

    def __init__(
        self, arrays: Structure, positions: Callable[[], Iterator[np.ndarray]], steps: int | None, rows: int, last: int
    ):
        self._arrays, self._positions, self._steps, self._rows, self._last = arrays, positions, steps, rows, last

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("a share with drop_remainder=False has no length where workers may die.")
        return self._steps

    def __iter__(self) -> Iterator[Structure]:
        return (rows_at(self._arrays, at) for at in self._positions())

    @property
    def num_batches(self) -> int | None:
        return self._steps

    @property
    def batch_size(self) -> int:
        return self._rows

    @property
    def partial_batch_size(self) -> int:
        """Rows of the last batch, also if it is full."""
        return self._last

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the arrays."""
        return [a.shape for a in keras.tree.flatten(self._arrays) if a is not None]


def shuffled(positions: np.ndarray, key: Sequence[int], count: int) -> np.ndarray:
    """Return where some positions are in a random order, the same as that of `tf.random.experimental.index_shuffle`.

    Each position is encrypted by four rounds of the block cipher Simon, until the result is a position. For which
    counts TensorFlow's order is another says `loses_one`.

    Args:
        positions: int64[m].
        key: seed and number of the order.
        count: number of positions that there are.

    Example:
        >>> sorted(shuffled(np.arange(5), (0, 1), 5).tolist())
        [0, 1, 2, 3, 4]
    """
    bits = (count - 1).bit_length()
    word = max(bits + bits % 2, _BLOCK) // 2
    mask = (1 << word) - 1
    keys = [k & 0xFFFFFFFF & mask for k in (_FIRST_KEY, *key)]
    last = np.array(keys[2], np.uint64)
    turned = int(_rotated(last, word - 3, word)) ^ int(_rotated(last, word - 4, word))
    keys.append((_C ^ _Z & 1 ^ keys[0] ^ turned) & mask)
    if 2 * word == _BLOCK:
        return _small_order(tuple(keys), count)[positions]
    found = _encrypted(positions, keys, word)
    while len(outside := np.flatnonzero(found >= count)):
        found[outside] = _encrypted(found[outside], keys, word)
    return found


def _rotated(x: np.ndarray, by: int, word: int) -> np.ndarray:
    return (x << np.uint64(by) | x >> np.uint64(word - by)) & np.uint64((1 << word) - 1)


def _encrypted(values: np.ndarray, keys: Sequence[int], word: int) -> np.ndarray:
    def mixed(x: np.ndarray) -> np.ndarray:
        return _rotated(x, 1, word) & _rotated(x, 8, word) ^ _rotated(x, 2, word)

    left = values.astype(np.uint64) >> np.uint64(word)
    right = values.astype(np.uint64) & np.uint64((1 << word) - 1)
    for i in range(0, _ROUNDS, 2):
        left ^= mixed(right) ^ np.uint64(keys[i])
        right ^= mixed(left) ^ np.uint64(keys[i + 1])
    return (left << np.uint64(word) | right).astype(np.int64)


# It takes some milliseconds, and a share whose rows may be divided anew asks for a few positions at a time.
@functools.lru_cache(maxsize=2)
def _small_order(keys: tuple[int, ...], count: int) -> np.ndarray:
    """Return where all positions are, of which the smallest block may hold many more."""
    values = np.arange(1 << _BLOCK)
    once = _encrypted(values, keys, _BLOCK // 2)
    # `steps[i]` is the result of up to 2^n encryptions of i.
    steps = np.where(values < count, values, once)
    for _ in range(_BLOCK):
        steps = steps[steps]
    return np.asarray(steps[once[:count]])


def loses_one(count: int) -> bool:
    """Return whether TensorFlow's `index_shuffle` draws one of so many positions twice, and another never.

    Its block is a bit too small for 4^n + 1 positions, from 65,537 on: `shuffled` has another order for these.

    Example:
        >>> loses_one(4**8 + 1), loses_one(4**8)
        (True, False)
    """
    return any(count == 4**n + 1 for n in range(_BLOCK // 2, 32))
