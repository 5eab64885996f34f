"""Restarts with fake launches: when, with which hosts, and what is said."""

import dataclasses
import os
import signal

import pytest

from hvdx.cli.supervising import supervisor
from hvdx.cli.supervising.attempt import Attempt
from hvdx.cli.supervising.supervisor import Job, supervise
from hvdx.comm import supervision

KILLED = "process rank 1 with PID 5 on node b exited on\nsignal 9 (Killed).\n"


def ended(code=137, text=KILLED, trained=10.0, saved=None, saves=True):
    """Return an attempt of 100 s."""
    return Attempt(0.0, 100.0, trained, saves, saved, "epoch 3" if saved else "", code, text)


DONE = ended(0, "")


class Fake:
    """Fake launcher and hosts.

    Args:
        attempts: attempts in their order.
        absent: hosts that do not answer, for each question.
    """

    def __init__(self, *attempts, absent=()):
        self.attempts, self.absent = list(attempts), list(absent)
        self.started, self.numbers = [], []

    def supervise(self, restarts=3, hosts=None, least=1):
        workers = sum(hosts.values()) if hosts else 4
        job = Job(lambda hosts, workers: [f"{n}:{c}" for n, c in hosts.items()] + [str(workers)],
                  workers, hosts or {}, restarts, least)  # fmt: skip
        return supervise(job, self.run, self.ask)

    def run(self, command, signals, hosts):
        assert len(hosts) == max(len(command) - 1, 0)
        self.started.append(command)
        self.numbers.append(supervision.attempt())
        attempt = self.attempts.pop(0)
        return attempt(signals) if callable(attempt) else attempt

    def ask(self, hosts):
        return dict.fromkeys(self.absent.pop(0) if self.absent else [], "No route to host")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "_PAUSES", (0.001, 0.01))
    monkeypatch.setattr(supervisor, "_ASK_AGAIN", 0.001)
    monkeypatch.setenv(supervision.VARIABLE, "")
    monkeypatch.setenv(supervision.SAVED_VARIABLE, "")


def said(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("hvdx: ")]


def test_job_starts_again_and_each_failure_has_a_line(capfd):
    fake = Fake(
        ended(saved=60.0), ended(1, "hvdx: rank 0 of 4 on a failed; ending the job on all ranks: OSError: x"), DONE
    )
    assert fake.supervise() == 0
    assert fake.started == [["4"]] * 3
    assert [number for _, number in fake.numbers] == ["1", "2", "3"]
    assert len({name for name, _ in fake.numbers}) == 1
    first, second, last = said(capfd)
    assert first == (
        "hvdx: attempt 1 of 4 failed: rank 1 on b: killed by SIGKILL. Lost: 40 s of training, all after epoch 3. "
        "Attempt 2 begins in 0.001 s."
    )
    assert "attempt 2 of 4 failed: rank 0 on a: OSError: x. Lost: 90 s of training, all of this attempt." in second
    assert "Attempt 3 begins in 0.002 s." in second, "a longer pause without a new checkpoint"
    assert "attempt 3 has finished the job. 140 of " in last, "50 s of the first attempt and 90 s of the last"


def test_job_without_failure_says_nothing(capfd):
    assert Fake(DONE).supervise() == 0
    assert said(capfd) == []


def test_restarts_are_counted_and_the_code_is_that_of_the_last_attempt(capfd):
    fake = Fake(ended(137), ended(3))
    assert fake.supervise(restarts=1) == 3
    assert said(capfd)[-1].endswith("No restart: --max-restarts 1 is reached.")


@pytest.mark.parametrize(
    ("attempts", "code", "named"),
    [
        ([ended(1, "hvdx: ConfigError: split=3", None)], 1, "a restart does not cure a ConfigError"),
        ([ended(2, "usage: train.py", None)], 2, "exit code 2 before the first step means a wrong command line"),
        ([ended(trained=None), ended(trained=None)], 137, "the same error came twice before the first step"),
        ([ended(trained=None), ended(), ended(trained=None), ended(1, "OSError: x", None), DONE], 0, None),
    ],
)  # fmt: skip
def test_failure_that_would_repeat_ends_the_job(attempts, code, named, capfd):
    fake = Fake(*attempts)
    assert fake.supervise(restarts=9) == code
    assert fake.attempts == []
    if named:
        assert f"No restart: {named}" in said(capfd)[-1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 1)])
def test_signal_to_the_supervisor_ends_the_job(number, code, capfd):
    def terminated(signals):
        os.kill(os.getpid(), number)
        return ended(1)

    before = signal.getsignal(number)
    assert Fake(terminated).supervise() == code
    assert signal.getsignal(number) is before
    assert len(said(capfd)) == (number != signal.SIGHUP)


def test_training_that_has_saved_for_later_is_not_restarted(capfd):
    assert Fake(ended(75, "")).supervise() == 75
    assert said(capfd) == []


def test_missing_checkpoint_is_named_once(capfd):
    assert Fake(ended(saves=False), ended(saves=False), DONE).supervise() == 0
    first, second, _ = said(capfd)
    assert first.endswith("The training has no checkpoint, so each attempt begins anew. Do: hvdx run --checkpoint DIR")
    assert "no checkpoint" not in second


def test_lost_hosts_are_left_out_and_come_back(capfd):
    lost = "PRTE has lost communication with a remote daemon.\n  Remote daemon: [x] on node c\n"
    fake = Fake(ended(), ended(0, lost), DONE, absent=[["b"], []])
    assert fake.supervise(hosts={"a": 2, "b": 2, "c": 1}) == 0
    assert fake.started == [["a:2", "b:2", "c:1", "5"], ["a:2", "c:1", "3"], ["a:2", "b:2", "c:1", "5"]]
    first, second, _ = said(capfd)
    assert "Attempt 2 begins in 0.002 s, with 3 of 5 workers (no answer from b: No route to host)." in first
    assert "c: the launcher has lost the host" in second


def test_job_waits_for_enough_workers(capfd, monkeypatch):
    fake = Fake(ended(), DONE, absent=[["b"], ["b"], []])
    assert fake.supervise(hosts={"a": 2, "b": 2}, least=3) == 0
    assert fake.started[1] == ["a:2", "b:2", "4"]
    assert "2 workers are left, and --min-workers is 3 (no answer from b: No route to host)" in said(capfd)[0]
    monkeypatch.setattr(supervisor, "HOSTS_LIMIT", 0.0)
    assert Fake(ended(), absent=[["b"]]).supervise(hosts={"a": 2, "b": 2}, least=3) == 137
    assert "No restart: 2 workers are left" in said(capfd)[-1]


def test_restart_knows_where_checkpoints_were(tmp_path):
    """Also those of an attempt before the last; unless a training may begin anew."""
    known = []

    def attempt(*folders):
        def run(_):
            known.append([supervision.has_saved(tmp_path / name) for name in ("a", "b")])
            return dataclasses.replace(ended(), folders={str(tmp_path / name) for name in folders})

        return run

    Fake(attempt("a"), attempt(), attempt("b"), DONE).supervise()
    assert known == [[False, False], [True, False], [True, False]]
    assert supervision.has_saved(tmp_path / "b")
    known.clear()
    os.environ[supervision.SAVED_VARIABLE] = ""
    supervise(Job(lambda *_: [], 4, {}, 2, begins_anew=True), Fake(attempt("a"), attempt("a"), DONE).run)
    assert known == [[False, False]] * 2
