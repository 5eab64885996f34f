"""What codecs check of the arrays that they are given."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx.kernels.pieces import check_arrays


def check_update(update: Sequence[Any], sizes: Sequence[int]) -> int:
    """Hold an update against the sizes that the state was made for: the number of its elements.

    Raises:
        TypeError: not float32 arrays.
        ValueError: not contiguous, or of other sizes.
    """
    n = check_arrays(update, "update")
    if len(update) != len(sizes) or any(u.size != size for u, size in zip(update, sizes, strict=True)):
        raise ValueError(f"update: expected arrays of {list(sizes)} elements, got {[u.size for u in update]}.")
    return n


def check_out(out: Sequence[np.ndarray]) -> int:
    """Hold an output against what decoders can add to: the number of its elements.

    Raises:
        TypeError: not float32 arrays.
        ValueError: not contiguous, or read-only.
    """
    return check_arrays(out, "out", writable=True)
