"""`hvdx build-horovod`: build Horovod for this environment's TensorFlow and MPI, install it and test it."""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from hvdx.cli.horovod_build import needs, source, wheel
from hvdx.errors import ConfigError
from hvdx.log import Log

_log = Log(__name__)

DETAILS = f"""\
Horovod {source.VERSION} is published only as source, which does not compile with current TensorFlow. This command
patches the source, builds a wheel (about two minutes, once), keeps the wheel, installs it, and runs an all-reduce on
two workers. GPU builds (--gpu) are untested in this release: please report your result.

environment:
  HVDX_CACHE   folder of the wheels (default: hvdx in $XDG_CACHE_HOME or ~/.cache)

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--gpu",
        choices=("nccl", "mpi"),
        help="reduce GPU tensors with NCCL or with a CUDA-aware MPI (untested); default: a CPU build",
    )
    parser.add_argument("--gloo", action="store_true", help="also build Gloo, for Horovod's elastic mode")
    parser.add_argument("--force", action="store_true", help="build again even if a wheel is cached")
    parser.add_argument("--jobs", type=int, metavar="N", help="parallel compilers (default: by cores and memory)")
    parser.add_argument("--no-test", action="store_true", help="skip the all-reduce on two workers")
    parser.add_argument(
        "--wheel-only", type=Path, metavar="DIR", help="put the wheel into DIR and leave the environment alone"
    )


def run(args: argparse.Namespace) -> int:
    """Build, install and test. Return 0 if Horovod works, 1 if something is missing or fails."""
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs: expected 1 or more, got {args.jobs}. Do: leave it out for the default.")
    found = needs.survey(args.gpu)
    print_survey(found)
    if found.missing:
        return 1
    key = wheel.Key(found.tensorflow, found.mpi.name, found.mpi.home, args.gpu, args.gloo, found.settings)
    try:
        return _run(args, found, key)
    except (wheel.BuildError, wheel.ProofError) as error:
        _log.error(str(error))
        return 1


def _run(args: argparse.Namespace, found: needs.Survey, key: wheel.Key) -> int:
    root = wheel.make_root()
    kept = None if args.force else wheel.kept(key, root)
    if kept is not None and args.wheel_only is None and wheel.is_installed(kept):
        _say(f"Horovod {key.horovod} for this TensorFlow and MPI is installed already (--force builds it again)")
        return 0
    if kept is not None:
        _say(f"using the cached wheel in {kept.parent}")
    file = kept or build_wheel(key, found.settings, args.jobs)
    if args.wheel_only is not None:
        args.wheel_only.mkdir(parents=True, exist_ok=True)
        _say(f"wheel: {shutil.copy2(file, args.wheel_only)}")
        return 0
    wheel.install(file)
    _say(f"installed Horovod {key.horovod} into {sys.prefix}")
    if args.no_test:
        return 0
    return _prove(found)


def build_wheel(key: wheel.Key, settings: dict[str, str], jobs: int | None = None) -> Path:
    """Download, patch, build and cache a wheel.

    Args:
        settings: environment variables with the folders of CUDA and NCCL.
        jobs: number of parallel compilers; by cores and memory by default.

    Returns:
        The wheel, in the cache.

    Raises:
        HvdxError: if the source cannot be fetched, differs from the pinned one, or does not compile; or if others may
            write to the cache.
    """
    root = wheel.make_root()
    env = needs.build_environment(root)
    archive = source.fetch(root / "source", env)
    log = root / "logs" / f"{key.name}.log"
    jobs = jobs or wheel.default_jobs()
    with tempfile.TemporaryDirectory(prefix="hvdx-horovod-") as temporary:
        unpacked = source.unpack(archive, Path(temporary))
        source.apply_patches(unpacked)
        _say(f"building Horovod {key.horovod} with {jobs} parallel compilers; log: {log}")
        start = time.monotonic()
        built = wheel.build(unpacked, Path(temporary), _variables(env, settings, key.gpu, key.gloo), jobs, log)
        _say(f"built in {time.monotonic() - start:.0f} s")
        return wheel.keep(key, built, root)


def print_survey(found: needs.Survey) -> None:
    """Print every requirement: the path or version found, or the remedy if it is missing."""
    _say(f"checking the environment {sys.prefix}")
    width = max(len(need.name) for need in found.needs)
    for need in found.needs:
        print(f"  {'ok' if need.found else 'MISSING':<8} {need.name:<{width}}  {need.found or need.remedy}")
    if found.missing:
        sys.stdout.flush()
        names = ", ".join(need.name for need in found.missing)
        _log.error(f"cannot build Horovod yet, missing: {names}. The remedies are above.")


def _variables(env: dict[str, str], settings: dict[str, str], gpu: str | None, gloo: bool) -> dict[str, str]:
    """Return the build's environment variables, without those of the user's shell that select the parts to build."""
    stale = ("HOROVOD_WITH_", "HOROVOD_WITHOUT_", "HOROVOD_GPU_")
    kept = {name: value for name, value in env.items() if not name.startswith(stale)}
    # The build imports TensorFlow, possibly on a login node without a GPU.
    return {**kept, **settings, **wheel.switches(gpu, gloo), "CUDA_VISIBLE_DEVICES": "-1"}


def _prove(found: needs.Survey) -> int:
    if found.mpi.mpirun is None:
        _say("not tested, as there is no mpirun; test it with the cluster's launcher, such as `srun -n 2`")
        return 0
    start = time.monotonic()
    command = wheel.prove(found.mpi)
    _say(f"tested: two workers ran an all-reduce ({time.monotonic() - start:.0f} s): {command} ...")
    return 0


def _say(text: str) -> None:
    print(f"hvdx: {text.replace(os.path.expanduser('~') + os.sep, '~/')}", flush=True)
