"""Floating point dtypes that NumPy lacks."""

from pathlib import Path

import numpy as np

from hvdx.errors import AverageError


def small_float(name: str, path: Path) -> np.dtype:
    """Return bfloat16, or one of the float8 dtypes.

    Args:
        name: name of the dtype in `ml_dtypes`: "bfloat16", "float8_e4m3fn", "float8_e5m2" and others.

    Raises:
        AverageError: if `ml_dtypes` is not installed.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise AverageError(
            f"{path}: expected the package ml_dtypes, for its {name} tensors, found none. Do: pip install ml_dtypes"
        ) from None
    return np.dtype(getattr(ml_dtypes, name))
