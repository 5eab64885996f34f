"""Probes of `hvdx doctor`: programs in child processes, so that a crash or a hang is a finding."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hvdx.cli.common.mpi_tools import Mpi, launch
from hvdx.cli.common.processes import Outcome, child_environment, parse_reports, run

_TIMEOUT = 60.0  # seconds; a cold TensorFlow on a network file system has taken most of this
_LAUNCH_TIMEOUT = 30.0  # seconds

# A program prints each fact at once, so that facts before a crash are kept.
_TELL = """
import json
def tell(**facts):
    print("HVDX " + json.dumps(facts), flush=True)
"""

_FRAMEWORKS = """
import importlib, os, pathlib
import numpy
tell(numpy=numpy.__version__)
# As Keras does, whose import fails if the backend's does.
backend, place = os.environ.get("KERAS_BACKEND"), "KERAS_BACKEND"
if not backend:
    file = pathlib.Path(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras"), "keras.json")
    try:
        backend, place = json.loads(file.read_text())["backend"], str(file)
    except (OSError, ValueError, LookupError, TypeError):
        backend, place = "tensorflow", ""
tell(backend=backend, place=place)
if backend in ("tensorflow", "jax", "torch"):
    framework = importlib.import_module(backend)
    tell(**{backend: framework.__version__})
import keras
tell(keras=keras.__version__, backend=keras.backend.backend())
if backend == "tensorflow":
    tell(cuda=bool(framework.test.is_built_with_cuda()), gpus=len(framework.config.list_physical_devices("GPU")))
elif backend == "torch":
    tell(gpus=framework.cuda.device_count())
elif backend == "jax":
    tell(gpus=sum(device.platform == "gpu" for device in framework.devices()))
"""

_HOROVOD = """
import importlib.metadata, importlib.util, os
spec = importlib.util.find_spec("horovod")
if spec is not None:
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"
    tell(present=True, version=version)
    folder = (list(spec.submodule_search_locations or []) or [""])[0]
    try:
        # Written by Horovod's build, with a superfluous comma in some builds.
        text = open(os.path.join(folder, "metadata.json")).read().replace(",\\n}", "\\n}")
        tell(built_against=json.loads(text).get("tensorflow", ""))
    except (OSError, ValueError):
        pass
    import tensorflow
    import horovod.tensorflow as hvd
    parts = [part for part in ("mpi", "gloo", "nccl", "cuda") if getattr(hvd, part + "_built")()]
    tell(imports=True, parts=parts)
"""

_MPI4PY = """
import mpi4py
tell(version=mpi4py.__version__)
from mpi4py import MPI
vendor, numbers = MPI.get_vendor()
tell(library=MPI.Get_library_version().strip("\\0 \\n").splitlines()[0], vendor=vendor)
levels = {MPI.THREAD_SINGLE: "THREAD_SINGLE", MPI.THREAD_FUNNELED: "THREAD_FUNNELED",
          MPI.THREAD_SERIALIZED: "THREAD_SERIALIZED", MPI.THREAD_MULTIPLE: "THREAD_MULTIPLE"}
tell(threads=levels[MPI.Query_thread()])
"""

_NUMBA = """
import importlib.util
if importlib.util.find_spec("numba") is not None:
    tell(present=True)
    import numba
    tell(version=numba.__version__)
    from hvdx import cache, codec
    tell(kernels=codec.Threshold().prepared, folder=str(cache.kernels_folder()))
"""

_RANK = """
from mpi4py import MPI
tell(rank=MPI.COMM_WORLD.Get_rank(), size=MPI.COMM_WORLD.Get_size())
"""

_PROGRAMS = {"horovod": _HOROVOD, "frameworks": _FRAMEWORKS, "mpi4py": _MPI4PY, "numba": _NUMBA}


@dataclass(frozen=True)
class Finding:
    """Facts that a probe printed, and the reason of its failure ("" if it succeeded)."""

    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def read(outcome: Outcome) -> Finding:
    """Read the facts from a probe's output."""
    facts: dict[str, Any] = {}
    for some in parse_reports(outcome.out):
        facts.update(some)
    return Finding(facts, "" if outcome.code == 0 else outcome.reason())


def probe(name: str) -> Finding:
    """Run one probe: "frameworks", "horovod", "mpi4py" or "numba"."""
    return read(run([sys.executable, "-c", _TELL + _PROGRAMS[name]], _TIMEOUT, child_environment()))


def probe_launch(mpi: Mpi) -> tuple[list[tuple[int, int]], str]:
    """Start two ranks; return each one's rank and world size, and the reason of a failure ("" if none)."""
    if mpi.mpirun is None:
        return [], "no mpirun"
    outcome = launch(2, [sys.executable, "-c", _TELL + _RANK], _LAUNCH_TIMEOUT, mpi)
    ranks = sorted((seen["rank"], seen["size"]) for seen in parse_reports(outcome.out))
    return ranks, "" if outcome.code == 0 else outcome.reason()


def probe_all(mpi: Mpi) -> tuple[dict[str, Finding], tuple[list[tuple[int, int]], str]]:
    """Run all probes, two at a time, since each keeps one core busy and small machines have two."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        running = {name: pool.submit(probe, name) for name in _PROGRAMS}
        launched = pool.submit(probe_launch, mpi)
        return {name: future.result() for name, future in running.items()}, launched.result()
