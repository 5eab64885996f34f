"""Errors of several ranks in a folder of checkpoints: one error if all are the same, else a list of them."""

import pytest

from hvdx.errors import ConfigError, HvdxError, ReplicaError
from hvdx.keras.checkpoint.folder import Folder
from tests.strategies.virtual import on_all


def errors(folder, text):
    """Return the errors that two ranks raise if each fails with `text(rank)`."""

    def fail(comm):
        def work():
            raise ConfigError(text(comm.rank))

        with pytest.raises(HvdxError) as caught:
            Folder(str(folder), comm).on_all_ranks("restoring", work, "Do: something else.")
        return caught.value

    return on_all(2, fail)


def test_errors_that_differ_in_keras_numbers_only_are_one_error(tmp_path):
    found = errors(tmp_path, lambda rank: f"sequential_{rank}/dense_{rank + 5}/kernel: expected float32[6x8]")
    assert [type(error) for error in found] == [ConfigError] * 2
    assert all(error.collective for error in found)


def test_different_errors_of_ranks_are_listed(tmp_path):
    found = errors(tmp_path, lambda rank: f"dense/kernel: got float32[{rank}]")
    assert [type(error) for error in found] == [ReplicaError] * 2
    assert "rank 0: dense/kernel: got float32[0]; rank 1: dense/kernel: got float32[1]" in str(found[0])
