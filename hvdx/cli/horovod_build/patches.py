"""Patches of Horovod's source. Each one replaces a text in a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdx.errors import HvdxError

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


def apply(source: Path, patches: Sequence[Patch] = PATCHES) -> None:
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
