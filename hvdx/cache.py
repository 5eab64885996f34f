"""Cache folder for built Horovod wheels and compiled kernels."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return `HVDX_CACHE`, or by default hvdx below the user's cache folder (`XDG_CACHE_HOME`, or ~/.cache).

    A container's user may have no home folder; the default is then a folder of that user for temporary files.
    """
    chosen = os.environ.get("HVDX_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(caches).expanduser().absolute() / "hvdx"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return Path(tempfile.gettempdir()) / f"hvdx-{os.getuid()}"


def kernels_folder() -> Path:
    """Return the folder of compiled kernels."""
    return cache_folder() / "kernels"
