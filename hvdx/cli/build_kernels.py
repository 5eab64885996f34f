"""`hvdx build-kernels`: compiles the kernels of the threshold codec before the first training does."""

import argparse
import sys
import time

from hvdx.cache import kernels_folder

NAME = "build-kernels"
HELP = "compile the kernels of Threshold for this machine's processor, and keep them"
EXAMPLE = "hvdx build-kernels"
DETAILS = """\
The first training with Threshold compiles them too, and later ones load them. Kernels
belong to one version of hvdx, Numba and Python and to one type of processor: on a cluster, run this
on a compute node, once for each type. Machines may share the folder. Whoever can write to it can
run code as whoever loads from it.

environment:
  HVDX_CACHE   where they are kept, in kernels/ (default: hvdx in $XDG_CACHE_HOME or ~/.cache)

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: none."""


def run(args: argparse.Namespace) -> int:
    """Compile, unless it is done; 0 when the kernels are kept, 1 when they cannot be."""
    # Imported here, since it brings Numba.
    from hvdx import codec

    threshold, begin = codec.Threshold(), time.monotonic()
    if threshold.prepared:
        print(f"hvdx: the kernels are compiled already, in {kernels_folder()}")
        return 0
    print(f"hvdx: compiling the kernels: about {threshold.compile_seconds} s of an idle core", flush=True)
    why = threshold.prepare()
    if why:
        print(f"hvdx: cannot keep the kernels in {kernels_folder()}: {why}. Set HVDX_CACHE to a folder that can be "
              "written to.", file=sys.stderr)  # fmt: skip
        return 1
    print(f"hvdx: compiled in {time.monotonic() - begin:.0f} s, kept in {kernels_folder()}")
    return 0
