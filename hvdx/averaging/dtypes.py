"""The floating point types that NumPy does not have of itself."""

from pathlib import Path

import numpy as np

from hvdx.errors import AverageError


def small_float(name: str, path: Path) -> np.dtype:
    """bfloat16, or one of the float8 types.

    Args:
        name: as `ml_dtypes` calls it: "bfloat16", "float8_e4m3fn", "float8_e5m2" and others.
        path: the file that has it, for the message.

    Raises:
        AverageError: `ml_dtypes` is not installed.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise AverageError(
            f"{path}: expected the package ml_dtypes, for its {name} tensors, found none. Do: pip install ml_dtypes"
        ) from None
    return np.dtype(getattr(ml_dtypes, name))
