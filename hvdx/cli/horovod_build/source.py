"""Horovod's source: downloaded with pip, checked against a pinned digest, unpacked, and patched."""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


#: Part of a cached wheel's key. Raise it with every change below.
REVISION = 1


@dataclass(frozen=True)
class Patch:
    """Replacement of `old`, which must occur exactly once in `file`, by `new`; `why` explains it to the reader."""

    file: str
    old: str
    new: str
    why: str


PATCHES = (
    Patch(
        "horovod/tensorflow/xla_mpi_ops.cc",
        "#if TENSORFLOW_VERSION >= 2006000000\n\n#include",
        "#if TENSORFLOW_VERSION >= 2006000000 && TENSORFLOW_VERSION < 2017000000 && HAVE_GPU\n\n#include",
        "The XLA operations exist only in GPU builds, but a CPU build includes their headers, which later releases of "
        "TensorFlow moved. hvdx does not exchange inside XLA, so newer GPU builds can omit the file too.",
    ),
    Patch(
        "horovod/tensorflow/mpi_ops.cc",
        """\
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
""",
        """\
#if __has_include("xla/stream_executor/stream.h")
#include "xla/stream_executor/stream.h"
#else
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#endif
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
""",
        "GPU builds: the header moved, and TensorFlow's libraries no longer export AsGpuStreamValue. From 2.16 on, "
        "the stream itself returns the same handle.",
    ),
    Patch(
        "CMakeLists.txt",
        "\nproject(horovod CXX)\n",
        '\nproject(horovod CXX)\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..;$ORIGIN/../../../../../lib")\n',
        "An MPI installed by pip is in the environment's lib folder. A path relative to the library also finds it "
        "after the wheel is installed into another environment.",
    ),
)


def apply_patches(source: Path, patches: Sequence[Patch] = PATCHES) -> None:
    """Apply patches, in order, to the unpacked source folder, which holds setup.py.

    Raises:
        HvdxError: if a file is missing, or does not contain the text exactly once.
    """
    for patch in patches:
        path = source / patch.file
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise HvdxError(f"{patch.file}: expected it in Horovod's source, found no such file. {_ADVICE}") from None
        count = text.count(patch.old)
        if count != 1:
            first = patch.old.strip().splitlines()[0]
            raise HvdxError(f"{patch.file}: expected the text at {first!r} once, found it {count} times. {_ADVICE}")
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")


_ADVICE = "Do: build the pinned release of Horovod; another release needs other patches."
