"""Cache folder for built Horovod wheels and compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `HVDX_CACHE`, or by default hvdx below the user's cache folder (`XDG_CACHE_HOME`, or ~/.cache)."""
    chosen = os.environ.get("HVDX_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().absolute() / "hvdx"


def kernels_folder() -> Path:
    """Return the folder of compiled kernels."""
    return cache_folder() / "kernels"
