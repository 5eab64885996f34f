"""Choice of the engine for tensors in the graph, and processes that do not join."""

import os
from types import SimpleNamespace

import pytest
import tensorflow as tf

from hvdx.comm import horovod, world
from tests.launch import run
from tests.strategies.virtual import on_all


@pytest.mark.parametrize(
    ("ranks", "chosen", "said"),
    [
        # Of each rank: whether Horovod is installed, whether there are GPUs, whether NCCL sends their tensors.
        (((True, False, False),) * 2, "mpi", "engine='horovod'"),
        (((False, False, False),) * 2, "mpi", ""),
        (((False, True, False),) * 2, "mpi", "hvdx build-horovod --gpu nccl"),
        (((True, True, False),) * 2, "mpi", "hvdx build-horovod --gpu nccl"),
        (((True, True, True),) * 2, "horovod", ""),
        (((True, True, True), (True, True, False)), "mpi", "no NCCL on rank 1"),
    ],
)
def test_mpi_is_chosen_unless_all_ranks_have_nccl_and_rank_0_prints_what_that_needs(ranks, chosen, said, capsys):
    assert on_all(2, lambda comm: world._choose(comm, *ranks[comm.rank])) == [chosen] * 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == int(bool(said))


@pytest.mark.parametrize(("gpus", "found"), [([], (True, False, False)), (["GPU:0"], (True, True, True))])
def test_horovod_is_loaded_only_if_there_are_gpus(gpus, found, monkeypatch):
    loaded = []
    monkeypatch.setattr(world, "_horovod_is_installed", lambda: True)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(horovod, "load", lambda: loaded.append(1) or SimpleNamespace(nccl_built=lambda: 1))
    assert world._horovod_and_gpus() == found
    assert len(loaded) == len(gpus)


def test_child_process_of_a_rank_does_not_join():
    code = """
import subprocess, sys
from hvdx import comm
comm.start()
child = [sys.executable, "-c", "from hvdx import comm; print(f'CHILD of {comm.start().size}')"]
subprocess.run(child, check=True)
print(f"SUM {sum(comm.start().all_gather_object(1, 'test'))}")
"""
    done = run(2, ["-c", code], 60)
    assert done.code == 0, done
    assert done.out.count("CHILD of 1") == done.out.count("does not join the workers") == done.out.count("SUM 2") == 2


def test_ranks_of_a_launcher_that_a_rank_has_started_join(monkeypatch):
    for process, is_child in (("0", False), (str(os.getpid()), False), (str(os.getppid()), True)):
        monkeypatch.setenv("HVDX_RANK_PROCESS", process)
        assert world._is_child_of_rank() == is_child
