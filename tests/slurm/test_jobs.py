"""Scripts of `hvdx job slurm` on a real Slurm: time limit, lost node, early signal, job array."""

import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from hvdx.cli.main import main
from tests.launch import run

pytestmark = pytest.mark.long

SCRIPT = str(Path(__file__).with_name("train_digits.py"))
RANKS, EPOCHS, STEPS_AN_EPOCH = 2, 14, 11
# Settings for quiet ranks.
QUIET = "export TF_CPP_MIN_LOG_LEVEL=3 PMIX_MCA_psec=native"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the weights of an uninterrupted training."""
    folder = tmp_path_factory.mktemp("straight")
    done = run(RANKS, [SCRIPT, str(folder), str(EPOCHS), "0"], timeout=120)
    assert done.code == 0, done
    return weights(folder)


def weights(folder):
    """Return the digest of the weights, which must be the same on all ranks."""
    (digest,) = {path.read_text() for path in folder.glob("weights-*.txt")}
    assert len(list(folder.glob("weights-*.txt"))) == RANKS
    return digest


def steps(folder):
    """Return the number of steps that rank 0 has taken, including repeated ones."""
    path = folder / "steps-0.txt"
    return len(path.read_text().split()) if path.exists() else 0


def job(folder, *options, seconds=0.0, target=None, program=sys.executable):
    """Write the script of a training, and return its path."""
    path = folder / "train.sh"
    cluster = ["--nodes", "2", "--tasks-per-node", "1", "--cpus-per-task", "1", "--output", str(folder / "out-%a.txt")]
    command = [program, SCRIPT, str(folder) if target is None else target, str(EPOCHS), str(seconds)]
    words = ["job", "slurm", *cluster, "--env-setup", QUIET, *options, "-o", str(path), "--", *command]
    assert main(words) == 0, shlex.join(words)
    return path


def until(what, limit=90):
    """Wait until a condition is true."""
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.2)


def output(folder):
    return "\n".join(path.read_text() for path in folder.glob("out-*.txt"))


def test_job_requeued_before_its_time_limit_ends_with_the_same_weights(cluster, tmp_path, straight):
    # The steps take 70 seconds. Slurm sends USR1 after 30 to 60 seconds, when the ranks have started.
    number = cluster.sbatch(job(tmp_path, "--time", "0:03:00", "--signal", "120", seconds=0.45))
    assert cluster.wait(number, timeout=400) == "COMPLETED", output(tmp_path)
    said = output(tmp_path)
    assert int(cluster.show(number)["Restarts"]) >= 1, said
    assert "SIGUSR1 on rank" in said
    assert "goes back into the queue" in said
    assert "resuming after" in said
    assert steps(tmp_path) == EPOCHS * STEPS_AN_EPOCH, "a step was repeated or omitted"
    assert weights(tmp_path) == straight


def test_lost_node_repeats_only_the_steps_since_the_last_checkpoint(cluster, tmp_path, straight):
    # Slurm itself would notice after five minutes; the job's script notices earlier, and names the host.
    number = cluster.sbatch(job(tmp_path, "--time", "0:10:00", seconds=0.1))
    until(lambda: steps(tmp_path) > 50, limit=90)
    cluster.node_lost("hvdx2")
    try:
        until(lambda: "goes back into the queue" in output(tmp_path), limit=150)
        # Once Slurm notices the loss, it restarts the job on another node. (On a node that came back so soon, it would
        # repeat its kill of the job.) Noticing takes minutes, in which the job's credential expires: see `cred_expire`.
        # Here the test waits for that, and then tells Slurm.
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


def test_job_without_environment_in_another_folder_survives_an_early_signal(cluster, tmp_path, straight):
    script = job(tmp_path, "--time", "0:10:00", "--env-setup", f"export PATH={Path(sys.executable).parent}:$PATH",
                 program="python", target=".")  # fmt: skip
    number = cluster.sbatch(script, "--export=NONE")
    # The ranks have begun, are still importing TensorFlow, and do not handle the signal yet.
    until(lambda: len(list(tmp_path.glob("begun-*.txt"))) == RANKS)
    cluster.ask("scancel", "--batch", "--signal=USR1", str(number))
    assert cluster.wait(number, timeout=180) == "COMPLETED", output(tmp_path)
    # 138: the signal ended both ranks. 143: it ended one, and srun terminated the other before its signal came.
    assert re.search(r"after USR1 \(exit code (138|143)\)", output(tmp_path)), output(tmp_path)
    assert cluster.show(number)["Restarts"] == "1"
    assert weights(tmp_path) == straight


def test_only_the_saved_task_of_an_array_is_requeued(cluster, tmp_path, straight):
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
