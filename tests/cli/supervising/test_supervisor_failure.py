"""The rank, host and reason in outputs of Open MPI, MPICH and hvdx."""

import pytest

from hvdx.cli.supervising.supervisor import Failure, find_failure, would_repeat

NOISE = "I0000 00:00:17 port.cc:153] oneDNN custom operations are on.\nhvdx: 2 workers on one host.\n"
# Open MPI 5.0.11
KILLED = """\
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 8894 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
EXITED = """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-10431@1,1]
   Exit code:    3
"""
IMPROPER = """\
prterun has exited due to process rank 1 with PID 11014 on node vm exiting
improperly. There are three reasons this could occur:
"""
ABORTED = """\
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[30281,1],1]
  Errorcode: 1
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
"""
LOST = """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-a-77@0,0] on node a
  Remote daemon: [prterun-a-77@0,1] on node b
"""
HYDRA = """\
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT node2
=   EXIT CODE: 9
"""
RAISED = "hvdx: rank 1 of 2 on vm failed; ending the job on all ranks: ValueError: no such image\n"
LEFT = "hvdx: rank 1 of 2 on vm ended: sys.exit(3), and the others cannot continue without it; ending the job\n"


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        (KILLED, 137, Failure("killed by SIGKILL", "1", "vm")),
        (KILLED.replace("9 (Killed)", "11 (Segmentation fault)"), 139, Failure("killed by SIGSEGV", "1", "vm")),
        (EXITED, 3, Failure("exit code 3", "1")),
        (IMPROPER, 1, Failure("ended without MPI_Finalize", "1", "vm")),
        (RAISED + ABORTED, 1, Failure("ValueError: no such image", "1", "vm")),
        (LEFT + ABORTED, 3, Failure("sys.exit(3)", "1", "vm")),
        ("hvdx: ReplicaError: epoch 1: the weights differ.\n" + ABORTED, 1,
         Failure("ReplicaError: epoch 1: the weights differ")),
        (LOST, 0, Failure("the launcher has lost the host", "", "b")),
        (HYDRA, 9, Failure("exit code 9", "", "node2")),
        # What another rank says afterwards follows from the first failure.
        (KILLED + "hvdx: ExchangeError: not all ranks\n", 137, Failure("killed by SIGKILL", "1", "vm")),
        ("Traceback:\nNameError: x\n", 1, Failure("NameError: x")),
        ("", 3, Failure("exit code 3")),
        ("", -11, Failure("crashed with SIGSEGV")),
        (KILLED, 0, None),
    ],
)  # fmt: skip
def test_first_message_names_rank_host_and_reason(text, code, expected):
    assert find_failure(NOISE + text, code) == expected


def test_failures_are_the_same_if_only_numbers_differ():
    assert Failure("OSError: process 12").same_as(Failure("OSError: process 13", "1"))
    assert not Failure("OSError: a").same_as(Failure("OSError: b"))
    assert not Failure("OSError: a").same_as(None)


@pytest.mark.parametrize(
    ("reason", "code", "trained", "repeats"),
    [
        ("ConfigError: shard: batch_size", 1, True, True),
        ("hvdx.errors.ConfigError: split", 1, False, True),
        ("ValueError: ConfigError: x", 1, False, False),
        ("sys.exit(2)", 2, False, True),
        ("sys.exit(2)", 2, True, False),
        ("killed by SIGKILL", 137, False, False),
    ],
)
def test_failures_that_would_repeat(reason, code, trained, repeats):
    assert bool(would_repeat(Failure(reason), code, trained)) == repeats
