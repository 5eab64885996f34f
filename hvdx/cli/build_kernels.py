"""`hvdx build-kernels`: compile the kernels of the threshold codec before the first training."""

import argparse
import time

from hvdx.cache import kernels_folder
from hvdx.log import Log

_log = Log(__name__)

DETAILS = """\
Without this command, the first training with Threshold compiles the kernels, and later ones load them. Compiled
kernels fit one version of hvdx, Numba and Python and one type of processor: on a cluster, run this on a compute
node, once for each type. Machines may share the folder. Keep it writable by trusted users only: anyone who can
write to it can run code as the users who load from it.

environment:
  HVDX_CACHE   parent folder of kernels/ (default: hvdx in $XDG_CACHE_HOME or ~/.cache)

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no options."""


def run(args: argparse.Namespace) -> int:
    """Compile the kernels unless they are kept already. Return 1 if they cannot be kept, else 0."""
    # Imported here because it imports Numba.
    from hvdx import codec

    threshold, begin = codec.Threshold(), time.monotonic()
    if threshold.prepared:
        print(f"hvdx: the kernels are compiled already, in {kernels_folder()}")
        return 0
    print(f"hvdx: compiling the kernels: about {threshold.compile_seconds} s on an idle core", flush=True)
    why = threshold.prepare()
    if why:
        _log.error(f"cannot keep the kernels in {kernels_folder()}: {why}. Set HVDX_CACHE to a folder of your own.")
        return 1
    print(f"hvdx: compiled in {time.monotonic() - begin:.0f} s, kept in {kernels_folder()}")
    return 0
