"""A host that is lost ends the attempt, with a stand-in for ssh."""

import queue
import time

import pytest

from hvdx.cli.supervising import attempt
from hvdx.cli.supervising.attempt import Lifelines, Signals, run_attempt
from hvdx.cli.supervising.supervisor import Failure, find_failure
from tests.cli import stand_in

# Connections to a host break when there is a file of its name and "broken"; it answers unless there is one with "gone".
SSH = """#!/bin/sh
for command; do host=$before; before=$command; done
if [ "$command" = "exec cat" ]; then
    echo >>"$0-$host-made"
    while [ ! -e "$0-$host-broken" ]; do sleep 0.02; done
    rm "$0-$host-broken"
    exit 255
fi
[ ! -e "$0-$host-gone" ] || { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Return a function that makes a file of a host; it returns the path."""
    stand_in.ssh(SSH, tmp_path, monkeypatch)
    monkeypatch.setattr(attempt, "_AGAIN", 0.05)
    return lambda host, what: tmp_path / f"ssh-{host}-{what}"


def await_lines(path, count):
    end = time.monotonic() + 10
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_host_that_does_not_answer_is_lost(ssh):
    lost = queue.Queue()
    with Lifelines(["a", "b", "localhost"], lambda *what: lost.put(what)):
        for host in "ab":
            await_lines(ssh(host, "made"), 1)
        ssh("b", "gone").touch()
        ssh("b", "broken").touch()
        assert lost.get(timeout=10) == ("b", "ssh: connect to host b port 22: No route to host")
    assert lost.empty()
    assert not ssh("localhost", "made").exists()


def test_connection_that_breaks_is_made_again(ssh):
    with Lifelines(["a"], lambda *_: pytest.fail("it answers")):
        await_lines(ssh("a", "made"), 1)
        ssh("a", "broken").touch()
        await_lines(ssh("a", "made"), 2)


def test_no_connection_in_a_batch_system(ssh, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with Lifelines(["a"], lambda *_: None):
        time.sleep(0.2)
    assert not ssh("a", "made").exists()


def test_attempt_ends_when_a_host_is_lost(ssh, capfd):
    ssh("b", "gone").touch()
    ssh("b", "broken").touch()
    with Signals() as signals:
        attempt = run_attempt(["sh", "-c", "exec sleep 60"], signals, ["a", "b"])
    assert attempt.ended - attempt.began < 10
    reason = "ssh: connect to host b port 22: No route to host"
    assert find_failure(attempt.text, attempt.code) == Failure(reason, "", "b")
    assert f"hvdx: host b is lost: {reason}" in capfd.readouterr().err
