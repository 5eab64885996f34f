"""Two jobs that save to one directory of checkpoints: the second is refused, and removes nothing."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from hvdx.comm import supervision
from hvdx.errors import ConfigError
from hvdx.keras.checkpoint import owner
from hvdx.keras.checkpoint.folder import Folder
from hvdx.keras.checkpoint.owner import Owner
from tests.strategies.virtual import on_all

WHO = {"job": "Slurm job 17", "restarts": "0", "user": "ada", "host": "node3", "pid": 4711, "since": "2026-11-22"}
# Program of another process, which holds the lock for some seconds.
HOLD = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.write(file, sys.argv[2].encode())
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """Return a function that starts a process which holds the folder."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID", supervision.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    others = []

    def start(seconds=60, **more):
        words = [sys.executable, "-c", HOLD, str(tmp_path / owner.NAME), json.dumps(WHO | more), str(seconds)]
        others.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        assert others[-1].stdout.readline() == b"held\n"
        return others[-1]

    yield start
    for other in others:
        other.kill()
        other.wait()


def is_free(folder):
    """Own a folder and release it; return whether nothing is left there."""
    Owner(folder, wait=0).release()
    return not (folder / owner.NAME).exists()


def test_error_of_the_second_job_names_the_first(tmp_path, hold):
    hold()
    with pytest.raises(ConfigError) as refused:
        Owner(tmp_path, wait=0.2)
    owner_named = "Slurm job 17 (ada, process 4711 on node3, since 2026-11-22) is using"
    assert owner_named in str(refused.value)
    assert f"remove {tmp_path / owner.NAME}" in str(refused.value)
    (tmp_path / owner.NAME).unlink()
    assert is_free(tmp_path)


@pytest.mark.parametrize(("attempt", "allowed"), [("a:3", True), ("a:2", False), ("b:3", False)])
def test_next_attempt_of_a_supervised_run_does_not_wait_for_a_lost_host(tmp_path, hold, monkeypatch, attempt, allowed):
    hold(job="", run="a", attempt="2")
    monkeypatch.setenv(supervision.VARIABLE, attempt)
    if allowed:
        Owner(tmp_path, wait=0.5).release()
    else:
        with pytest.raises(ConfigError, match="another training"):
            Owner(tmp_path, wait=0.2)


def test_folder_of_a_killed_job_is_free(tmp_path, hold):
    other = hold()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert is_free(tmp_path)


def test_second_job_waits_for_the_end_of_the_first(tmp_path, hold):
    hold(seconds=0.5)
    Owner(tmp_path, wait=30).release()


@pytest.mark.parametrize(
    ("variables", "allowed"),
    [
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "17"}, False),  # two trainings of one job
        ({"SLURM_JOB_ID": "18", "SLURM_RESTART_COUNT": "1"}, False),
    ],
)
def test_requeued_job_takes_the_folder_of_its_failed_host(tmp_path, hold, monkeypatch, variables, allowed):
    """A file server may keep the locks of a failed host until the host is back."""
    hold()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if allowed:
        taken = Owner(tmp_path, wait=5)
        assert json.loads((tmp_path / owner.NAME).read_text())["pid"] == os.getpid()
        taken.release()
    else:
        with pytest.raises(ConfigError):
            Owner(tmp_path, wait=0.2)


def test_file_system_without_locks_is_detected(tmp_path, monkeypatch):
    def lock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lock)
    assert not Owner(tmp_path, wait=0).locked


def test_next_training_of_this_process_takes_the_folder_of_a_failed_one(tmp_path):
    Owner(tmp_path, wait=0)
    assert owner.holds(tmp_path)
    Owner(tmp_path, wait=0)
    assert is_free(tmp_path)
    assert not owner.holds(tmp_path)


def test_refusal_reaches_all_ranks_and_keeps_the_files_of_the_first_job(tmp_path, hold, monkeypatch):
    hold()
    monkeypatch.setattr(owner, "WAIT_SECONDS", 0.2)
    (tmp_path / ".hvdx-saving-0a1b").mkdir()

    def both(comm):
        folder = Folder(str(tmp_path), comm)
        folder.check_to_read()
        with pytest.raises(ConfigError, match="Slurm job 17") as refused:
            folder.check()
        assert refused.value.collective
        return str(refused.value)

    first, second = on_all(2, both)
    assert first == second
    assert (tmp_path / ".hvdx-saving-0a1b").is_dir()


def test_check_to_read_removes_the_files_of_a_killed_job(tmp_path):
    (tmp_path / ".hvdx-saving-0a1b").mkdir()
    on_all(2, lambda comm: Folder(str(tmp_path), comm).check_to_read())
    assert os.listdir(tmp_path) == []
