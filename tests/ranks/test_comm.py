import pytest

from tests.checks import COMM_CHECKS


@pytest.mark.parametrize("check", COMM_CHECKS.values(), ids=COMM_CHECKS)
def test_comm_passes(comm, check):
    check(comm)
