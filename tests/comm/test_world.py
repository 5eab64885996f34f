"""The choice of what carries tensors in the graph."""

import pytest

from hvdx.comm import world
from tests.strategies.virtual import on_all


@pytest.mark.parametrize(
    ("there", "chosen", "said"),
    [
        ((True, True, True), "horovod", ""),
        ((True, False, True), "mpi", "not installed on rank 1, so"),
        ((False, False, False), "mpi", "not installed, so"),
    ],
)
def test_one_rank_without_horovod_decides_for_all_and_rank_0_says_so(there, chosen, said, capsys):
    assert on_all(3, lambda comm: world._choose(comm, there[comm.rank])) == [chosen] * 3
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == text.count("hvdx build-horovod") == int(chosen == "mpi")
