"""Arrays that ranks share, and ranks that cannot share any."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from hvdx.comm import memory
from tests.strategies.virtual import on_all


@pytest.fixture(autouse=True)
def _first_report(monkeypatch):
    monkeypatch.setattr(memory, "_reported", False)


def share(comm):
    """Share an array of 10, 11, 12 ... elements; return the arrays and the channel."""
    channel = comm.channel("a test")
    return memory.share(channel, 10 + comm.rank, f"rank {comm.rank}"), channel


def test_all_ranks_see_what_one_writes():
    def run(comm):
        arrays, channel = share(comm)
        zeros = not any(a.any() for a in arrays)
        channel.exchange([])
        arrays[comm.rank][:] = comm.rank + 1
        channel.exchange([])
        arrays[0][-1 - comm.rank] = -comm.rank
        channel.exchange([])
        return zeros, [a.tolist() for a in arrays]

    wanted = [[1.0] * 7 + [-2.0, -1.0, 0.0], [2.0] * 11, [3.0] * 12]
    assert on_all(3, run) == [(True, wanted)] * 3
    gc.collect()  # a mapping holds its file
    assert not any("hvdx-updates" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_array_may_be_empty():
    def run(comm):
        return [a.size for a in memory.share(comm.channel("a test"), 5 * comm.rank, "rank")]

    assert on_all(2, run) == [[0, 5]] * 2


FAULTS = {
    "no memory": ("_make", lambda args: args[0] == 11, "rank 1: cannot create shared memory"),
    "another container": ("_opened", lambda args: args[2] == 10, "rank 0: cannot open the memory of another rank"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_without_memory_is_reported_once_and_all_do_without(fault, monkeypatch):
    name, fails, text = FAULTS[fault]
    right = getattr(memory, name)

    def wrong(*args):
        if fails(args):
            raise OSError("not permitted")
        return right(*args)

    printed = []
    monkeypatch.setattr(memory, name, wrong)
    monkeypatch.setattr(memory, "_report", printed.append)
    assert [arrays for arrays, _ in on_all(3, share)] == [None] * 3
    (line,) = printed
    assert line.startswith(f"{text}: not permitted.")
    assert ("one container" in line) == (fault == "another container")


def test_report_is_printed_once(capfd):
    for text in ("one", "two"):
        memory._report(text)
    assert capfd.readouterr().err == "hvdx: one\n"


@pytest.mark.parametrize(
    ("error", "remedy"), [(OSError(24, "x"), "ulimit -n"), (OSError(12, "x"), "ulimit -v"), (ValueError("x"), "")]
)
def test_remedy_for_a_limit(error, remedy):
    assert remedy in memory._remedy(error)
    assert bool(remedy) == bool(memory._remedy(error))


def test_python_without_memfd_create(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    (array,) = on_all(1, lambda comm: memory.share(comm.channel("a test"), 3, "rank"))[0]
    assert array.tolist() == [0, 0, 0]


def test_memory_of_another_job_is_refused():
    file = memory._make(3, 77)
    array = memory._opened(os.getpid(), file, 3, 77)
    assert array.dtype == np.float32
    for args in ((3, 78), (100, 77)):
        with pytest.raises(ValueError, match="another"):
            memory._opened(os.getpid(), file, *args)
    os.close(file)
    with open(os.devnull) as other, pytest.raises(ValueError, match="another file"):
        memory._opened(os.getpid(), other.fileno(), 3, 77)
