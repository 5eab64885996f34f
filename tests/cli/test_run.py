"""`hvdx run`: the mpirun command, and the environment and output of a rank."""

# Tests: hvdx/cli/common/rank.py

import os
import shlex
import subprocess
import sys

import pytest

from hvdx.cli import run as command
from hvdx.cli.common.mpi_tools import EXPORTED, EXPORTED_PREFIXES, Mpi
from hvdx.cli.main import main

OPEN_MPI = Mpi("Open MPI", "5.0.11", mpirun="/opt/mpirun", launcher_vendor="Open MPI")
MPICH = Mpi("MPICH", "4.2", mpirun="/opt/mpirun", launcher_vendor="MPICH")
RANK = [sys.executable, "-I", "-S", str(command._RANK)]


@pytest.fixture
def dry(monkeypatch, capsys):
    """Return a function that gives the words of the mpirun command for an MPI and options."""

    def words(mpi, *options, root=False):
        monkeypatch.setattr(command, "find_mpi", lambda: mpi)
        monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
        assert main(["run", "--dry-run", *options]) == 0
        return shlex.split(capsys.readouterr().out)

    return words


def test_one_machine(dry):
    begin = ["/opt/mpirun", "-n", "4", "--oversubscribe", "--bind-to", "none"]
    program = [sys.executable, "train.py", "--epochs", "3"]
    rank = ["--mca", "btl", "^tcp", *RANK, "first"]
    assert dry(OPEN_MPI, "-n", "4", *program) == [*begin, *rank, *program]
    assert dry(OPEN_MPI, "-n", "4", *program, root=True) == [*begin, "--allow-run-as-root", *rank, *program]
    assert dry(MPICH, "-n", "4", "--all", "--", *program) == ["/opt/mpirun", "-n", "4", *RANK, "all", *program]


def test_hosts_and_exported_variables(dry, monkeypatch):
    for name in (*os.environ, *EXPORTED):
        if name != "PATH" and (name in EXPORTED or name.startswith(EXPORTED_PREFIXES)):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HVDX_STRATEGY", "threshold")
    words = dry(OPEN_MPI, "--hosts", "a:2,b", sys.executable)
    assert words[1:3] == ["-n", "3"]
    at = words.index("--host")
    assert words[at : at + 6] == ["--host", "a:2,b:1", "-x", "HVDX_STRATEGY", "-x", "PATH"]
    assert dry(MPICH, "--hosts", "a:2,b", sys.executable)[1:5] == ["-n", "3", "-hosts", "a:2,b:1"]


def test_hosts_of_a_file(dry, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb:1\n")
    words = dry(OPEN_MPI, "--hostfile", str(tmp_path / "hosts"), sys.executable)
    assert words[words.index("-n") + 1] == "3"
    assert words[words.index("--host") + 1] == "a:2,b:1"


def test_checkpoint_reaches_the_workers_of_all_hosts(dry, monkeypatch, tmp_path):
    for name in ("HVDX_CHECKPOINT", "HVDX_CHECKPOINT_EVERY"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    words = dry(OPEN_MPI, "--hosts", "a:2,b", "--checkpoint", "ckpt", "--every", "5 minutes", sys.executable)
    assert words[:3] == ["env", f"HVDX_CHECKPOINT={tmp_path}/ckpt", "HVDX_CHECKPOINT_EVERY=5 minutes"]
    assert " -x HVDX_CHECKPOINT -x HVDX_CHECKPOINT_EVERY " in shlex.join(words)


def test_restarts_have_the_hosts_that_are_left(monkeypatch):
    jobs = []
    monkeypatch.setattr(command, "find_mpi", lambda: OPEN_MPI)
    monkeypatch.setattr(command, "check_hosts", lambda hosts: None)
    monkeypatch.setattr(command, "supervise", lambda job: jobs.append(job) or 3)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    assert main(["run", "--hosts", "a:2,b", "--max-restarts", "5", "--min-workers", "2", sys.executable]) == 3
    (job,) = jobs
    assert (job.workers, job.hosts, job.max_restarts, job.min_workers) == (3, {"a": 2, "b": 1}, 5, 2)
    words = job.command({"a": 2}, 2)
    assert words[1:3] == ["-n", "2"]
    assert words[words.index("--host") + 1] == "a:2"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "expected a program"),
        (["python"], "expected -n N"),
        (["-n", "0", "python"], "1 worker or more"),
        (["-n", "3", "--hosts", "a:2", "python"], "room for 2"),
        (["--hosts", "a:x", "python"], "'a:x'"),
        (["--hostfile", "/no/such/file", "python"], "a host on each line, got /no/such/file"),
        (["--hostfile", os.devnull, "python"], "a host on each line"),
        (["--hostfile", "a", "--hosts", "a", "python"], "got both"),
        (["-n", "2", "no-such-program"], "not found"),
        (["-n", "2", "--max-restarts", "-1", "python"], "--max-restarts: expected 0 or more"),
        (["-n", "2", "--max-restarts", "1", "--min-workers", "3", "python"], "--min-workers: expected 1 to 2"),
        (["-n", "2", "--min-workers", "1", "python"], "with --max-restarts 0"),
        (["-n", "2", "--spares", "1", "python"], "--spares: expected 0 or more, with --survive"),
        (["-n", "1", "--survive", "--spares", "1", "python"], "two workers or more, got 1"),
        (["--hosts", "a:3", "-n", "3", "--survive", "--spares", "1", "python"], "room for 2 workers and 1 spares"),
        (["-n", "2", "--every", "1 epoch", "python"], "expected --checkpoint DIR too"),
    ],
)
def test_bad_input_is_named(options, named, capsys):
    assert main(["run", *options]) == 2
    assert named in capsys.readouterr().err


def rank(number, *program, output="first", **more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "OMP_", "OMPI_", "PYTHONHASHSEED"))}
    launched = {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    return subprocess.run(
        [*RANK, output, *program], env=kept | launched | more, capture_output=True, text=True, timeout=60, check=False
    )


def test_ranks_have_their_threads_and_only_the_first_prints():
    code = "import os, sys; print({k: v for k, v in os.environ.items() if k[:3] == 'TF_'}); print('E', file=sys.stderr)"
    first, second = (rank(number, sys.executable, "-c", code) for number in (0, 1))
    share = str(max(1, (os.cpu_count() or 1) // 2))
    for name, value in (("INTRAOP_THREADS", share), ("INTEROP_THREADS", share)):
        assert f"'TF_NUM_{name}': '{value}'" in first.stdout
    assert "'TF_CPP_MIN_LOG_LEVEL': '2'" in first.stdout
    assert (second.stdout, second.stderr) == ("", "E\n")
    said = rank(1, sys.executable, "-c", code, output="all", TF_NUM_INTRAOP_THREADS="7").stdout
    assert "'TF_NUM_INTRAOP_THREADS': '7'" in said


def test_sets_of_strings_have_one_order_on_all_ranks():
    code = "print(list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}))"
    orders = {rank(number, sys.executable, "-c", code, output="all").stdout for number in (0, 1, 1)}
    assert len(orders) == 1
    chosen = rank(0, sys.executable, "-c", "import os; print(os.environ['PYTHONHASHSEED'])", PYTHONHASHSEED="7")
    assert chosen.stdout == "7\n"
