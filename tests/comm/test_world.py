"""Choice of the engine for tensors in the graph."""

import pytest

from hvdx.comm import world
from tests.strategies.virtual import on_all, on_hosts


@pytest.mark.parametrize(
    ("installed", "chosen", "said"),
    [
        ((True, True, True), "horovod", ""),
        ((True, False, True), "mpi", "not installed on rank 1, so"),
        ((False, False, False), "mpi", "not installed, so"),
    ],
)
def test_all_ranks_choose_mpi_if_one_lacks_horovod_and_rank_0_prints_it(
    installed, chosen, said, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("HVDX_CACHE", str(tmp_path / "cache"))
    assert on_all(3, lambda comm: world._choose(comm, installed[comm.rank], bool)) == [chosen] * 3
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == text.count("hvdx build-horovod") == int(chosen == "mpi")
    # A machine without Horovod is told once; a rank that lacks it is told each time.
    assert on_all(3, lambda comm: world._choose(comm, installed[comm.rank], bool)) == [chosen] * 3
    assert ("not installed" in capsys.readouterr().err) == (len(set(installed)) > 1)


@pytest.mark.parametrize(
    ("hosts", "nccl", "chosen"),
    [
        (("a", "a"), (False, False), "horovod"),
        (("a", "b"), (False, False), "mpi"),
        (("a", "b"), (True, True), "horovod"),
        (("a", "b"), (True, False), "mpi"),
    ],
)
def test_installed_horovod_is_used_within_a_host_or_with_nccl(hosts, nccl, chosen, capsys):
    assert on_hosts(hosts, lambda comm: world._choose(comm, True, lambda: nccl[comm.rank])) == [chosen] * 2
    assert capsys.readouterr().err.count("engine='horovod'") == int(chosen == "mpi")


def test_machine_without_a_cache_folder_is_told_each_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HVDX_CACHE", str(tmp_path / "file" / "cache"))
    assert [world._first_time(), world._first_time()] == [True, True]
