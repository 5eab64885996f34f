"""Arrays that TensorFlow takes as tensors without a copy."""

import numpy as np
from numpy.typing import DTypeLike

# TensorFlow requires this of a tensor's address on the CPU (Eigen's EIGEN_MAX_ALIGN_BYTES). NumPy's own arrays begin 16
# bytes after such an address, if they are large.
_BYTES = 64


def aligned(elements: int, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Return an uninitialised array whose address is a multiple of 64.

    Args:
        elements: number of elements.
        dtype: type of an element.

    Example:
        >>> is_aligned(aligned(100_000))
        True
    """
    size = elements * np.dtype(dtype).itemsize
    space = np.empty(size + _BYTES, np.uint8)
    begin = -space.ctypes.data % _BYTES
    return space[begin : begin + size].view(dtype)


def is_aligned(array: np.ndarray) -> bool:
    """Return whether TensorFlow takes an array without a copy."""
    return array.ctypes.data % _BYTES == 0
