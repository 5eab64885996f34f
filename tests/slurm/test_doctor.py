"""`hvdx doctor --batch` on a real Slurm."""

import json
import sys

import pytest

pytestmark = pytest.mark.long

HVDX = [sys.executable, "-m", "hvdx"]
DOCTOR = [*HVDX, "doctor", "--batch", "--json"]


@pytest.fixture
def doctor(cluster, tmp_path):
    """Return a function that runs `hvdx doctor --batch --json` with options; it returns outcome and checks by name."""

    def ask(*options, timeout=120):
        done = cluster.run([*DOCTOR, *options], timeout, XDG_CACHE_HOME=str(tmp_path))
        assert done.code is not None, done.text
        return done, {check["name"]: check for check in json.loads(done.out)["checks"]}

    yield ask
    assert cluster.ask("squeue", "-h", "-t", "PD,R") == ""
    assert list(tmp_path.glob("hvdx/*")) == []


def test_good_cluster(doctor):
    done, found = doctor()
    assert done.code == 0, done.text
    assert {check["status"] for check in found.values()} == {"ok"}
    assert found["batch system"]["value"].startswith("Slurm 2")
    assert found["inside a job"]["value"].startswith("no")
    assert found["default partition"]["value"] == "main, time limit 1:00:00, 3 nodes"
    assert "pmix" in found["srun --mpi"]["value"]
    for way in ("srun --mpi=pmix", "mpirun in a job"):
        assert found[way]["value"].startswith("rank 0 of 2 on hvdx1, rank 1 of 2 on hvdx2; ")
        assert "MPI" in found[way]["value"].split(";")[1]
    assert "waiting for the batch system" in done.err


def test_singletons_are_found_and_the_remedy_names_pmix(doctor):
    done, found = doctor("--mpi", "pmi2")
    check = found["srun --mpi=pmi2"]
    if not check["value"].split("; ")[1].startswith("Open MPI"):
        pytest.skip("an MPI that speaks PMI-2")
    assert check["status"] == "problem", check
    assert check["value"].startswith("2 tasks, each 'rank 0 of 1', on hvdx1, hvdx2; Open MPI")
    assert check["remedy"].startswith("mpirun in a job works: use that.")
    assert "srun --mpi=pmix" in check["remedy"]
    assert found["mpirun in a job"]["status"] == "ok"
    assert done.code == 1


def test_doctor_inside_a_job_starts_steps(cluster, tmp_path):
    salloc = ["salloc", "-N2", "-n2", "--time=2", "--quiet"]
    done = cluster.run([*salloc, *DOCTOR], 120, XDG_CACHE_HOME=str(tmp_path))
    found = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert found["inside a job"]["value"].startswith("yes, Slurm job ")
    assert found["srun --mpi=pmix"]["status"] == "ok", found
    assert found["mpirun"]["status"] == "ok", found
    assert cluster.ask("squeue", "-h", "-t", "PD,R") == ""


def test_unknown_partition_is_a_problem(doctor):
    done, found = doctor("--partition", "nowhere")
    assert done.code == 1
    assert "nvalid partition" in found["srun --mpi=pmix"]["value"]
    assert "--partition NAME" in found["srun --mpi=pmix"]["remedy"]


def test_job_in_a_full_queue_is_cancelled_at_the_time_limit(cluster, doctor, tmp_path):
    script = tmp_path / "full.sh"
    script.write_text("#!/bin/sh\nsleep 100\n")
    job = cluster.sbatch(script, "-N2", "--exclusive", "--time=2", f"--output={tmp_path}/out")
    try:
        cluster.wait(job, "RUNNING")
        done, found = doctor("--batch-timeout", "3")
        assert "PENDING" in found["srun --mpi=pmix"]["value"]
        assert "the job was cancelled" in found["srun --mpi=pmix"]["value"]
        assert "mpirun in a job" not in found
        assert done.code == 1
        assert cluster.ask("squeue", "-h", "-t", "PD,R", "-o", "%i").split() == [str(job)]
    finally:
        cluster.ask("scancel", str(job))
        cluster.wait(job)
