"""Horovod's source: downloaded with pip, checked against a pinned digest, unpacked."""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvdx.cli.common.processes import run
from hvdx.errors import HvdxError

#: The Horovod release that hvdx builds, and the digest of its source archive.
VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_ARCHIVE = f"horovod-{VERSION}.tar.gz"
_TIMEOUT = 600.0  # seconds


def fetch(folder: Path, env: Mapping[str, str]) -> Path:
    """Download the source archive into `folder`, unless a good copy is there, and return its path.

    Args:
        folder: folder of source archives.
        env: environment variables with which pip finds setuptools.

    Raises:
        HvdxError: if pip cannot download the archive, or its digest is not the pinned one.
    """
    archive = folder / _ARCHIVE
    if archive.exists() and digest(archive) == SHA256:
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    print(f"hvdx: downloading the source of Horovod {VERSION}", flush=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as temporary:
        # pip runs the archive's setup.py to read its name, which needs setuptools.
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", temporary]
        command = [sys.executable, "-m", "pip", "download", *options, f"horovod=={VERSION}"]
        outcome = run(command, _TIMEOUT, env)
        downloaded = Path(temporary) / _ARCHIVE
        if outcome.code != 0 or not downloaded.exists():
            raise HvdxError(
                f"build-horovod: expected pip to download horovod {VERSION}, got: {outcome.reason()}. "
                f"Do: put {_ARCHIVE} into {folder} by hand, or run this on a machine with network access."
            )
        check(downloaded)
        os.replace(downloaded, archive)
    return archive


def check(archive: Path) -> None:
    """Compare an archive's digest with the pinned one.

    Raises:
        HvdxError: if they differ.
    """
    found = digest(archive)
    if found != SHA256:
        raise HvdxError(
            f"{archive.name}: expected sha256 {SHA256}, got {found}. "
            "Do: find the package index or proxy that serves the altered file; nothing was unpacked."
        )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the source archive into `folder` and return the folder that holds its setup.py.

    Raises:
        HvdxError: if a member would be written outside `folder`, or there is no setup.py.
    """
    with tarfile.open(archive) as tar:
        try:
            _extract(tar, folder)
        except tarfile.TarError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise HvdxError(
                f"{archive.name}: expected files below one folder, got: {error}. Do: delete {archive}."
            ) from error
    source = folder / f"horovod-{VERSION}"
    if not (source / "setup.py").exists():
        raise HvdxError(f"{archive.name}: expected {source.name}/setup.py in it, found none. Do: delete {archive}.")
    return source


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Extract all members; raise TarError for absolute names, "..", links that lead out, and devices."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    # Python before 3.11.4, such as that of Debian 12, has no filters.
    for member in tar:
        target = os.path.join(os.path.dirname(member.name), member.linkname) if member.issym() else member.linkname
        paths = [member.name, *([target] if member.issym() or member.islnk() else [])]
        outside = any(os.path.isabs(p) or os.path.normpath(p).split(os.sep)[0] == ".." for p in paths)
        if outside or member.isdev():
            raise tarfile.ReadError(f"{member.name!r} would be outside the destination")
    tar.extractall(folder)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
