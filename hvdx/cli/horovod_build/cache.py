"""Cache of built wheels, each in a folder whose name contains a digest of its build's settings."""

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdx.cache import cache_folder
from hvdx.cli.horovod_build import patches, source
from hvdx.errors import ConfigError
from hvdx.kernels import trust
from hvdx.log import Log

_log = Log(__name__)

_METADATA = "metadata.json"


@dataclass(frozen=True)
class Key:
    """Settings of a build. Two keys that differ in any field have different names.

    Attributes:
        tensorflow: version of TensorFlow.
        mpi: vendor and version of the MPI.
        mpi_home: folder of the MPI, which the build writes into the wheel; "" for an MPI inside the environment, which
            the wheel finds by a relative path.
        gpu: "nccl", "mpi" or None.
        gloo: True if Gloo is built in.
        settings: environment variables with the folders of CUDA and NCCL.
    """

    tensorflow: str
    mpi: str
    mpi_home: str = ""
    gpu: str | None = None
    gloo: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    horovod: str = source.VERSION
    patches: int = patches.REVISION
    python: str = sys.implementation.cache_tag
    platform: str = f"{sysconfig.get_platform()}-{''.join(platform.libc_ver())}"

    @property
    def name(self) -> str:
        """Readable folder name that ends with a digest of the whole key."""
        parts = [self.horovod, self.python, f"tf{self.tensorflow}", self.mpi.replace(" ", "")]
        parts += [f"gpu-{self.gpu}"] if self.gpu else []
        parts += ["gloo"] if self.gloo else []
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return re.sub(r"[^\w.+-]", "_", "-".join([*parts, digest]))


def root() -> Path:
    """Return the folder of Horovod's wheels, sources, tools and logs."""
    return cache_folder() / "horovod"


def make_root() -> Path:
    """Create the folder of `root`, and make sure that no other user can write to it.

    Raises:
        ConfigError: if another user owns it, or all users may write to it.
    """
    # Not writable by the user's group, whatever the umask: what is in it is executed.
    root().mkdir(0o755, parents=True, exist_ok=True)
    # The user may have put a link there, to a larger disk.
    folder = root().resolve()
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o022 == 0o020:
        # An earlier version left the mode to the umask, which often allows the user's group to write.
        folder.chmod(0o755)
    try:
        trust.check(folder)
    except PermissionError as error:
        raise ConfigError(
            f"build-horovod: expected a cache folder of your own, got one that others can change: {error}. "
            f"Do: remove {folder}, or set HVDX_CACHE to another folder."
        ) from error
    return folder


def get(key: Key, folder: Path) -> Path | None:
    """Return the wheel for a key from the cache `folder`.

    Args:
        key: settings of the build.
        folder: cache folder.

    Returns:
        The wheel; None if there is none, its digest is wrong, or another user can have written it (with a warning).
    """
    metadata = _metadata(folder / key.name)
    wheel = folder / key.name / str(metadata.get("wheel", ""))
    if not wheel.is_file():
        return None
    try:
        trust.check(wheel.parent)
        trust.check(wheel)
    except PermissionError as error:
        _log.warning(f"the cached wheel is not used, and built again: {error}")
        return None
    return wheel if source.digest(wheel) == metadata.get("sha256") else None


def put(key: Key, wheel: Path, folder: Path) -> Path:
    """Copy a wheel into the cache `folder`, and return its new path. An entry appears only when complete."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        entry = temporary / "entry"
        entry.mkdir(0o755)
        shutil.copyfile(wheel, entry / wheel.name)
        (entry / wheel.name).chmod(0o644)
        built = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metadata = {"wheel": wheel.name, "sha256": source.digest(wheel), "built": built, "key": asdict(key)}
        (entry / _METADATA).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        target = folder / key.name
        if target.exists():
            os.rename(target, temporary / "old")
        os.rename(entry, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target / wheel.name


def _metadata(entry: Path) -> dict[str, Any]:
    try:
        found = json.loads((entry / _METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
