"""Choice of the engine for tensors in the graph."""

import pytest

from hvdx.comm import world
from tests.strategies.virtual import on_all


@pytest.mark.parametrize(
    ("installed", "chosen", "said"),
    [
        ((True, True, True), "horovod", ""),
        ((True, False, True), "mpi", "not installed on rank 1, so"),
        ((False, False, False), "mpi", "not installed, so"),
    ],
)
def test_all_ranks_choose_mpi_if_one_lacks_horovod_and_rank_0_prints_it(installed, chosen, said, capsys):
    assert on_all(3, lambda comm: world._choose(comm, installed[comm.rank])) == [chosen] * 3
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == text.count("hvdx build-horovod") == int(chosen == "mpi")
