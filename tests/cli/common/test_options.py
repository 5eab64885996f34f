"""Host files of Open MPI, MPICH and batch systems, and names of hosts."""

import pytest

from hvdx.cli.common.options import parse_hostfile, parse_hosts
from hvdx.errors import LaunchError


def test_forms_of_all_launchers():
    text = "a slots=2 max_slots=9\nb:3\n# c\n\nd # slots=7\nb:1\n"
    assert parse_hostfile(text) == {"a": 2, "b": 4, "d": 1}


def test_names_of_pods():
    text = "train-worker-0.train.default.svc slots=4\ntrain-worker-1.train.default.svc slots=4\n"
    assert parse_hostfile(text) == {f"train-worker-{i}.train.default.svc": 4 for i in range(2)}


@pytest.mark.parametrize("name", ["-oProxyCommand=touch", "-V", "--help", "$(id)", "a;id", "../a"])
def test_names_that_ssh_or_a_shell_would_obey_are_refused(name):
    for parse in (parse_hostfile, parse_hosts):
        with pytest.raises(LaunchError, match="expected"):
            parse(f"node1\n{name}" if parse is parse_hostfile else f"node1,{name}")
