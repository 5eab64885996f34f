"""Jobs that `hvdx job slurm` writes, on a real Slurm: the time limit, a lost node, an array."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from hvdx.cli.main import main
from tests.launch import run

SCRIPT = str(Path(__file__).with_name("train_digits.py"))
RANKS, EPOCHS, STEPS_AN_EPOCH = 2, 14, 11
# The tests' ranks share a machine.
QUIET = "export TF_CPP_MIN_LOG_LEVEL=3 PMIX_MCA_psec=native"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The weights of a training that nobody interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    done = run(RANKS, [SCRIPT, str(folder), str(EPOCHS), "0"], timeout=120)
    assert done.code == 0, done
    return weights(folder)


def weights(folder):
    """Of all ranks, which are the same."""
    (digest,) = {path.read_text() for path in folder.glob("weights-*.txt")}
    assert len(list(folder.glob("weights-*.txt"))) == RANKS
    return digest


def steps(folder):
    """That rank 0 has taken, the same ones twice where it had to."""
    path = folder / "steps-0.txt"
    return len(path.read_text().split()) if path.exists() else 0


def job(folder, *options, seconds=0.0, target=None, program=sys.executable):
    """Write a script that trains; its path."""
    path = folder / "train.sh"
    given = ["--nodes", "2", "--tasks-per-node", "1", "--cpus-per-task", "1", "--output", str(folder / "out-%a.txt")]
    command = [program, SCRIPT, str(folder) if target is None else target, str(EPOCHS), str(seconds)]
    words = ["job", "slurm", *given, "--env-setup", QUIET, *options, "-o", str(path), "--", *command]
    assert main(words) == 0, shlex.join(words)
    return path


def until(what, limit=90):
    """Wait for something to become true."""
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)


def output(folder):
    return "\n".join(path.read_text() for path in folder.glob("out-*.txt"))


def test_time_limit_is_announced_and_the_requeued_job_ends_with_the_very_weights(cluster, tmp_path, straight):
    # The steps alone take 70 seconds; USR1 comes after 30 to 60, as Slurm likes, when the ranks have long started.
    number = cluster.sbatch(job(tmp_path, "--time", "0:03:00", "--signal", "120", seconds=0.45))
    assert cluster.wait(number, timeout=400) == "COMPLETED", output(tmp_path)
    said = output(tmp_path)
    assert int(cluster.show(number)["Restarts"]) >= 1, said
    assert "SIGUSR1 on rank" in said
    assert "goes back into the queue" in said
    assert "resuming after" in said
    assert steps(tmp_path) == EPOCHS * STEPS_AN_EPOCH, "a step was taken twice, or never"
    assert weights(tmp_path) == straight


def test_node_that_is_lost_in_mid_run_costs_the_steps_since_the_last_checkpoint(cluster, tmp_path, straight):
    # Slurm would notice after five minutes: the job's script finds out, and names the host.
    number = cluster.sbatch(job(tmp_path, "--time", "0:10:00", seconds=0.1))
    until(lambda: steps(tmp_path) > 50, limit=90)
    cluster.node_lost("hvdx2")
    try:
        until(lambda: "goes back into the queue" in output(tmp_path), limit=150)
        # Slurm starts it anew once it has noticed too, on another node. (One that came back so soon would get Slurm's
        # retries of the kill.) That takes minutes, by which the job's credential has expired: see `cred_expire`.
        time.sleep(10)
        cluster.node_down("hvdx2")
        assert cluster.wait(number, timeout=180) == "COMPLETED", output(tmp_path)
    finally:
        cluster.node_resume("hvdx2")
    said = output(tmp_path)
    assert "lost hvdx2 (exit code" in said
    assert cluster.show(number)["Restarts"] == "1"
    assert "resuming after" in said
    assert EPOCHS * STEPS_AN_EPOCH < steps(tmp_path) < EPOCHS * STEPS_AN_EPOCH + 50
    assert weights(tmp_path) == straight


def test_job_without_an_environment_submitted_from_elsewhere_and_signalled_too_early(cluster, tmp_path, straight):
    script = job(tmp_path, "--time", "0:10:00", "--env-setup", f"export PATH={Path(sys.executable).parent}:$PATH",
                 program="python", target=".")  # fmt: skip
    number = cluster.sbatch(script, "--export=NONE")
    until(lambda: cluster.state(number) == "RUNNING")
    time.sleep(2)  # TensorFlow is being imported: nobody listens yet
    cluster.ask("scancel", "--batch", "--signal=USR1", str(number))
    assert cluster.wait(number, timeout=180) == "COMPLETED", output(tmp_path)
    assert "after USR1 (exit code 138)" in output(tmp_path)
    assert cluster.show(number)["Restarts"] == "1"
    assert weights(tmp_path) == straight


def test_task_of_an_array_that_saved_is_requeued_and_no_other(cluster, tmp_path, straight):
    for task in (0, 1):
        (tmp_path / f"task-{task}").mkdir()
    target = f"{tmp_path}/task-$SLURM_ARRAY_TASK_ID"
    number = cluster.sbatch(job(tmp_path, "--time", "0:10:00", "--array", "0-1", seconds=0.05, target=target))
    until(lambda: steps(tmp_path / "task-1") > 20, limit=120)
    cluster.ask("scancel", "--batch", "--signal=USR1", f"{number}_1")
    for task in (0, 1):
        until(lambda t=task: len(list((tmp_path / f"task-{t}").glob("weights-*.txt"))) == RANKS, limit=200)
        assert weights(tmp_path / f"task-{task}") == straight
        assert steps(tmp_path / f"task-{task}") == EPOCHS * STEPS_AN_EPOCH
    said = {task: (tmp_path / f"out-{task}.txt").read_text() for task in (0, 1)}
    assert "resuming after" in said[1]
    assert "resuming after" not in said[0]
