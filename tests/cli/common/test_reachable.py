"""Hosts that do not answer, with a stand-in for ssh."""

import socket
import time

import pytest

from hvdx.cli.common import reachable
from hvdx.cli.common.mpi_tools import Mpi
from hvdx.cli.common.reachable import check_hosts
from hvdx.cli.main import main
from hvdx.errors import LaunchError
from tests.cli import stand_in

SSH = """#!/bin/sh
for host; do shift; [ "$#" = 1 ] && break; done
case "$host" in
    good) exit 0;;
    slow) exec sleep 30;;
    odd) exit 127;;
    *) echo "Warning: added a key" >&2
       echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255;;
esac
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    stand_in.ssh(SSH, tmp_path, monkeypatch)
    monkeypatch.setattr(reachable, "_ANSWER", 1.0)


def test_hosts_that_do_not_answer_are_named_with_their_reasons_at_once(ssh):
    begin = time.monotonic()
    with pytest.raises(LaunchError) as error:
        check_hosts(["good", "typo", "slow", "odd", socket.gethostname(), "localhost"])
    assert time.monotonic() - begin < 20
    text = str(error.value)
    assert (
        "got typo: ssh: Could not resolve hostname typo: Name or service not known; slow: no answer in 1 s. Do" in text
    )
    assert text.endswith("try: ssh typo true")
    assert "good" not in text
    assert "odd" not in text
    assert "localhost" not in text


def test_hosts_that_answer_and_other_ways_than_ssh_pass(ssh):
    check_hosts(["good", "odd"])
    check_hosts(["typo"], {"SLURM_JOB_ID": "1"})
    check_hosts(["typo"], {"PRTE_MCA_plm_ssh_agent": "/my/agent"})


def test_run_says_it_before_the_launcher_starts(ssh, capsys, monkeypatch):
    mpi = Mpi("Open MPI", "5.0.11", mpirun="/opt/mpirun", launcher_vendor="Open MPI")
    monkeypatch.setattr("hvdx.cli.run.find_mpi", lambda: mpi)
    monkeypatch.setattr("hvdx.cli.run.run_launcher", lambda *_: pytest.fail("the launcher was started"))
    assert main(["run", "--hosts", "typo:2", "sh", "-c", "true"]) == 2
    assert "run: --hosts: expected hosts on which ssh starts commands without a password" in capsys.readouterr().err
