import pytest

from hvdx.comm.launcher import detect

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}


@pytest.mark.parametrize(
    ("environ", "launcher", "place"),
    [
        (OPEN_MPI, "Open MPI", (1, 4, 0, 2)),
        (SLURM, "Slurm", (3, 8, 1, 2)),
        (SLURM | OPEN_MPI, "Open MPI", (1, 4, 0, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "Hydra", (0, 2, None, None)),
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
def test_detect_finds_none_where_nothing_was_launched(environ):
    assert detect(environ) is None
