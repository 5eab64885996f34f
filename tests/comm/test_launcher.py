import os

import pytest

from hvdx.comm import launcher
from hvdx.comm.launcher import Launch, Share, detect, fair_cores, kernel_threads, share_of_cores, threads_for
from hvdx.comm.mpi import check_size
from hvdx.errors import LaunchError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
# As MPICH 4.2 and Intel MPI set them.
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
PALS = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "1"}
CRAY = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
PMIX = {"PMIX_RANK": "5"}


@pytest.mark.parametrize(
    ("environ", "launcher", "place"),
    [
        (OPEN_MPI, "Open MPI", (1, 4, 0, 2)),
        (SLURM, "Slurm", (3, 8, 1, 2)),
        (SLURM | OPEN_MPI, "Open MPI", (1, 4, 0, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "Hydra", (0, 2, None, None)),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"}, "Slurm", (3, 8, 1, 2)),  # srun --mpi=pmi2
        (SLURM | {"PMI_RANK": "1", "PMI_SIZE": "16"}, "Hydra", (1, 16, None, None)),  # Hydra, started by srun
        (SLURM | HYDRA, "Hydra", (2, 4, 0, 2)),
        (HYDRA, "Hydra", (2, 4, 0, 2)),
        (PALS | CRAY, "PALS", (5, 8, 1, 4)),
        (PALS | PMIX, "PALS", (5, None, 1, 4)),
        (CRAY, "Hydra", (5, 8, 1, 4)),
        (PALS | PMIX | OPEN_MPI, "Open MPI", (1, 4, 0, 2)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}, "Slurm", (3, 8, 1, 2)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "1"}, "Slurm", (3, 8, 1, 3)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "MVAPICH", (1, 2, None, None)),
        ({"PMIX_RANK": "1"}, "PMIx", (1, None, None, None)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"} | OPEN_MPI, "Horovod (Gloo)", (1, 2, None, None)),
    ],
)
def test_detect_reads_the_launchers_variables(environ, launcher, place):
    found = detect(environ)
    assert found.launcher == launcher
    assert (found.rank, found.size, found.local_rank, found.local_size) == place


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"PMI_RANK": "x", "PMI_SIZE": "2"}]
)
def test_detect_returns_none_without_a_launcher(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("masks", "mine", "cores"),
    [
        ([0b11], 0, 2),
        ([0b1111, 0b1111], 1, 2),  # not bound: two cores each
        ([0b0011, 0b1100], 1, 2),  # bound
        ([0b1, 0b1, 0b1], 0, 1 / 3),  # more ranks than cores
        ([0b1111, 0b0001], 0, 3.5),  # three cores of its own, and half of a shared one
        ([0b111, 0b111], 0, 1.5),
        ([(1 << 16) - 1 << 48] * 4, 2, 4),  # four ranks share sixteen of sixty-four cores
    ],
)
def test_fair_cores_divides_shared_cores(masks, mine, cores):
    assert fair_cores(masks, mine) == pytest.approx(cores)


@pytest.mark.parametrize(("share", "threads"), [(1 / 3, 1), (1.5, 1), (3.0, 3)])
def test_threads_are_whole_cores_and_at_least_one(monkeypatch, share, threads):
    monkeypatch.setattr(launcher, "_fair", share)
    assert threads_for(2, {}).threads == threads


@pytest.fixture
def sixteen(monkeypatch):
    """Set up four unbound ranks on sixteen cores."""
    monkeypatch.setattr(launcher, "_fair", 4)
    monkeypatch.setattr(launcher.socket, "gethostname", lambda: "node7.cluster")


PBS = {"PBS_JOBID": "1.server"}


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, Share(4)),
        ({"OMP_NUM_THREADS": "9"}, Share(9, "OMP_NUM_THREADS", True)),
        ({"OMP_NUM_THREADS": "9,3"}, Share(9, "OMP_NUM_THREADS", True)),  # OpenMP's nested form
        ({"OMP_NUM_THREADS": "1", "SLURM_CPUS_PER_TASK": "3"}, Share(1, "OMP_NUM_THREADS", True)),
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "4"}, Share(3, "SLURM_CPUS_PER_TASK")),
        # More ranks than tasks: several ranks share the cores of one task.
        ({"SLURM_CPUS_PER_TASK": "16"}, Share(4)),
        ({"SLURM_CPUS_ON_NODE": "8"}, Share(2, "SLURM_CPUS_ON_NODE")),
        ({"SLURM_CPUS_ON_NODE": "2"}, Share(1, "SLURM_CPUS_ON_NODE")),
        (PBS | {"NCPUS": "2", "OMP_NUM_THREADS": "2"}, Share(2, "NCPUS")),  # ompthreads=2
        (PBS | {"NCPUS": "16", "OMP_NUM_THREADS": "16"}, Share(4)),  # no ompthreads: all cores of the chunk
        (PBS | {"NCPUS": "16", "OMP_NUM_THREADS": "5"}, Share(5, "OMP_NUM_THREADS", True)),
        ({"NCPUS": "2"}, Share(4)),  # not set by PBS
        ({"LSB_MCPU_HOSTS": "login 1 node7 8 node8 4"}, Share(2, "LSB_MCPU_HOSTS")),
        ({"LSB_MCPU_HOSTS": "login 1"}, Share(4)),
        # Each rank has one slot of several cores.
        ({"LSB_MCPU_HOSTS": "node7 4", "HVDX_CPUS_PER_TASK": "3"}, Share(3, "HVDX_CPUS_PER_TASK")),
        ({"LSB_MCPU_HOSTS": "node7 4", "HVDX_CPUS_PER_TASK": "8"}, Share(4)),
        ({"SLURM_CPUS_PER_TASK": "3", "HVDX_CPUS_PER_TASK": "2"}, Share(2, "HVDX_CPUS_PER_TASK")),
        ({"OMP_NUM_THREADS": "1", "HVDX_CPUS_PER_TASK": "2"}, Share(1, "OMP_NUM_THREADS", True)),
        ({"LSB_MCPU_HOSTS": "node7 8", "JSM_NAMESPACE_RANK": "0"}, Share(4)),
    ],
)
@pytest.mark.usefixtures("sixteen")
def test_threads_follow_the_environment_up_to_the_share_of_cores(environ, share):
    assert threads_for(4, environ) == share


def test_threads_before_the_world_is_joined_are_a_share_of_the_host(monkeypatch):
    monkeypatch.setattr(launcher, "_fair", None)
    monkeypatch.setattr(launcher.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(launcher.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [threads_for(ranks, {}).threads for ranks in (1, 4, 32)] == [16, 4, 1]
    monkeypatch.setattr(launcher.os, "sched_getaffinity", lambda pid: {3, 4})
    assert threads_for(4, {}).threads == 2


def test_variable_of_one_library_takes_precedence():
    names = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    environ = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "6"}
    assert threads_for(4, environ, names) == Share(6, "TF_NUM_INTRAOP_THREADS", True)


@pytest.mark.usefixtures("sixteen")
def test_kernel_threads_defer_to_omp_num_threads(monkeypatch):
    names = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "PBS_JOBID", "LSB_MCPU_HOSTS")
    for name in ("OMP_NUM_THREADS", "HVDX_CPUS_PER_TASK", *names):
        monkeypatch.delenv(name, raising=False)
    assert (kernel_threads(4), kernel_threads(1), share_of_cores(4)) == (4, None, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert (kernel_threads(4), share_of_cores(4)) == (None, 4)


def test_spares_on_this_host_compute_nothing(monkeypatch):
    monkeypatch.setenv("HVDX_SPARES", "3")
    assert [Launch("Open MPI", 0, 5, 0, here).computing_here for here in (5, 2, None)] == [2, 2, 1]
    monkeypatch.setenv("HVDX_SPARES", "")
    assert Launch("Open MPI", 0, 5, 0, 5).computing_here == 5


def test_core_mask_has_one_bit_per_usable_core():
    assert bin(launcher.core_mask()).count("1") == len(os.sched_getaffinity(0)) == launcher.usable_cores()


def test_error_for_single_rank_worlds_under_srun_names_the_option():
    with pytest.raises(LaunchError, match=r"Slurm started 8 ranks and MPI finds a world of 1 .* srun --mpi=pmix"):
        check_size("MPI", 1, detect(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"}))
