"""The folder in which hvdx keeps what takes long to make: built Horovod wheels, compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`HVDX_CACHE`, or else hvdx below the user's cache folder (`XDG_CACHE_HOME`, or ~/.cache)."""
    chosen = os.environ.get("HVDX_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().absolute() / "hvdx"


def kernels_folder() -> Path:
    """The folder of compiled kernels."""
    return cache_folder() / "kernels"
