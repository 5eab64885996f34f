"""Python packages that Horovod's build uses: those of the environment, or a separate copy."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvdx.cli.common.processes import child_environment, run
from hvdx.errors import HvdxError

_TIMEOUT = 900.0  # seconds; cmake is a large download


def build_requirements() -> list[str]:
    """Return the requirements of hvdx's `build` extra, in pip's format.

    Raises:
        HvdxError: if hvdx is not installed, so that it has no metadata.

    Example:
        >>> "wheel" in build_requirements()
        True
    """
    try:
        lines = importlib.metadata.requires("hvdx") or []
    except importlib.metadata.PackageNotFoundError:
        raise HvdxError(
            "build-horovod: expected hvdx to be installed, found only its files. Do: pip install -e . in its folder."
        ) from None
    marked = (line.partition(";") for line in lines)
    return [name.strip() for name, _, marker in marked if re.search(r"extra\s*==\s*['\"]build['\"]", marker)]


def unmet(requirements: Sequence[str]) -> list[str]:
    """Return the requirements that this environment does not meet."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return list(requirements)
    missing = []
    for text in requirements:
        requirement = Requirement(text)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(text)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(text)
    return missing


def build_environment(root: Path) -> dict[str, str]:
    """Return environment variables with which a child process finds all build requirements.

    If the environment lacks some, all are installed into a separate folder below `root`. The environment itself is not
    changed, so that a newer setuptools that another package needs is not replaced.

    Args:
        root: cache folder of Horovod.

    Raises:
        HvdxError: if pip cannot install them.
    """
    requirements = build_requirements()
    missing = unmet(requirements)
    if not missing:
        return child_environment()
    digest = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:8]
    folder = root / "tools" / f"{sys.implementation.cache_tag}-{digest}"
    if not folder.exists():
        print(f"hvdx: installing build packages ({', '.join(missing)} missing) into {folder}", flush=True)
        _install(requirements, folder)
    plain = child_environment()
    old_path = plain.get("PYTHONPATH")
    return {
        **plain,
        "PATH": os.pathsep.join((str(folder / "bin"), plain["PATH"])),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), old_path))),
    }


def _install(requirements: Sequence[str], folder: Path) -> None:
    """Install into a temporary folder and rename it to `folder`, so that `folder` is never incomplete."""
    folder.parent.mkdir(0o755, parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(temporary), *requirements]
        outcome = run(command, _TIMEOUT)
        if outcome.code != 0:
            raise HvdxError(
                f"build-horovod: expected pip to install {', '.join(requirements)}, got: {outcome.reason()}. "
                "Do: pip install 'hvdx[build]' with network access, then try again."
            )
        if not folder.exists():
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
