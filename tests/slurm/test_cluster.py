"""The test cluster behaves like a real Slurm cluster."""

import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvdx.cli.common.processes import run
from tests.slurm import cluster as cluster_module
from tests.slurm.cluster import CPUS, NODES, Cluster, ClusterError, obstacle

pytestmark = pytest.mark.long

WHO = """
from mpi4py import MPI
world = MPI.COMM_WORLD
print("rank", world.rank, "of", world.size, "on", MPI.Get_processor_name(), "sum", world.allreduce(world.rank + 1))
"""


@pytest.fixture
def short():
    """Make a folder with a short path for sockets, since pytest's own paths are long if tests run in parallel."""
    with tempfile.TemporaryDirectory(prefix="hvdx-") as folder:
        yield Path(folder)


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a batch script for the test's folder, and returns its path."""

    def write(*lines):
        path = tmp_path / "job.sh"
        path.write_text("\n".join(["#!/bin/bash", f"#SBATCH --chdir={tmp_path} --output=out.txt --time=2", *lines, ""]))
        return path

    return write


def test_srun_starts_a_world_on_two_nodes(cluster):
    done = cluster.run(["srun", "--mpi=pmix", "-N", "2", "-n", "2", "--time=2", sys.executable, "-c", WHO], 60)
    assert done.code == 0, done.text
    assert sorted(done.out.splitlines()) == ["rank 0 of 2 on hvdx1 sum 3", "rank 1 of 2 on hvdx2 sum 3"]


def test_two_ranks_a_node(cluster):
    done = cluster.run(
        ["srun", "--mpi=pmix", "-N", "2", "--ntasks-per-node=2", "--time=2", sys.executable, "-c", WHO], 60
    )
    assert done.code == 0, done.text
    expected = [f"rank {rank} of 4 on {NODES[rank // 2]} sum 10" for rank in range(4)]
    assert sorted(done.out.splitlines()) == expected


def test_mpirun_in_a_job_uses_its_nodes(cluster, script, tmp_path):
    (tmp_path / "who.py").write_text(WHO)
    job = cluster.sbatch(script("mpirun -n 4 python who.py"), "-N2", "--ntasks-per-node=2")
    assert cluster.wait(job, timeout=60) == "COMPLETED", (tmp_path / "out.txt").read_text()
    expected = [f"rank {rank} of 4 on {NODES[rank // 2]} sum 10" for rank in range(4)]
    assert sorted((tmp_path / "out.txt").read_text().splitlines()) == expected


def test_nodes_have_the_configured_cpus(cluster):
    assert cluster.ask("sinfo", "-h", "-N", "-o", "%N %c %T").splitlines() == [f"{node} {CPUS} idle" for node in NODES]


def test_sbatch_runs_a_script_with_this_python_first_on_path(cluster, script, tmp_path):
    job = cluster.sbatch(script("which python3 || which python", "echo $SLURM_JOB_NUM_NODES"), "--nodes=2")
    assert cluster.wait(job) == "COMPLETED"
    python, nodes = (tmp_path / "out.txt").read_text().splitlines()
    assert python.rsplit("/", 1)[0] == sys.executable.rsplit("/", 1)[0]
    assert nodes == "2"


def test_wait_reports_the_state_at_its_time_limit(cluster, script):
    job = cluster.sbatch(script("exit 3"))
    assert cluster.wait(job) == "FAILED"
    assert cluster.show(job)["ExitCode"] == "3:0"
    with pytest.raises(ClusterError, match=r"expected RUNNING within 1 s, got .*FAILED"):
        cluster.wait(job, "RUNNING", timeout=1)


def test_requeued_job_starts_soon_and_is_counted(cluster, script, tmp_path):
    job = cluster.sbatch(script('touch started.$SLURM_RESTART_COUNT; [ -n "$SLURM_RESTART_COUNT" ] || sleep 100'))
    cluster.wait(job, "RUNNING")
    _appears(tmp_path / "started.")
    begin = time.monotonic()
    cluster.ask("scontrol", "requeue", str(job))
    _appears(tmp_path / "started.1")
    assert time.monotonic() - begin < 30  # about 10 s; 120 s by Slurm's default
    assert cluster.wait(job) == "COMPLETED"
    assert cluster.show(job)["Restarts"] == "1"


def test_job_gets_a_signal_before_its_limit(cluster, script, tmp_path):
    # The signal is due 60 s before a limit of one minute. Slurm checks limits twice a minute, so it comes soon.
    job = cluster.sbatch(
        script("trap 'echo warned; exit 0' USR1", "sleep 100 &", "wait $!"), "--signal=B:USR1@60", "--time=1"
    )
    assert cluster.wait(job, timeout=90) == "COMPLETED"
    assert "warned" in (tmp_path / "out.txt").read_text().splitlines()


def test_node_that_fails_requeues_its_job(cluster, script, tmp_path):
    job = cluster.sbatch(script('touch on.$SLURMD_NODENAME; [ -n "$SLURM_RESTART_COUNT" ] || sleep 100'), "-whvdx1")
    _appears(tmp_path / "on.hvdx1")
    (tmp_path / "on.hvdx1").unlink()
    cluster.node_lost("hvdx1")
    cluster.node_down("hvdx1")
    try:
        assert cluster.node_state("hvdx1").rstrip("*") == "down"
        assert not (tmp_path / "on.hvdx1").exists()
    finally:
        cluster.node_resume("hvdx1")
    assert cluster.wait(job) == "COMPLETED"
    assert cluster.show(job)["Restarts"] == "1"


def test_failed_start_gives_the_reason_and_leaves_nothing(tmp_path, short, monkeypatch, cluster):
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "slurmctld"
    broken.write_text("#!/bin/sh\necho no controller today; exit 7\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{cluster.environment['PATH']}")
    with pytest.raises(ClusterError, match=r"slurmctld at its end, exit code 7\n(.*\n)*no controller today"):
        Cluster(short / "c").__enter__()
    assert str(short / "c") not in _command_lines()


def test_obstacle_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(cluster_module.os, "geteuid", lambda: 1000)
    assert "expected root" in obstacle()
    monkeypatch.setattr(cluster_module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(cluster_module.shutil, "which", lambda name, path: None if name == "slurmd" else name)
    assert "expected slurmd, found none. Do: apt install slurmctld slurmd" in obstacle()


def test_cluster_ends_jobs_that_ignore_signals(tmp_path, short, cluster, script):
    with Cluster(short / "c") as second:
        assert second.folder != cluster.folder
        job = second.sbatch(script("trap '' TERM INT", "touch running", "while true; do sleep 987; done"))
        second.wait(job, "RUNNING")
        _appears(tmp_path / "running")
    listed = _command_lines()
    assert str(short / "c") not in listed
    assert "sleep 987" not in listed


def _command_lines():
    return run(["ps", "axww", "-o", "args"], timeout=20).out


def _appears(path, timeout=60):
    """Wait for a file that a job writes."""
    end = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear within {timeout} s"
        time.sleep(0.1)
