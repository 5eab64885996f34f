"""Host files of Open MPI, MPICH and batch systems."""

from hvdx.cli.common.hostfile import parse_hostfile


def test_forms_of_all_launchers():
    text = "a slots=2 max_slots=9\nb:3\n# c\n\nd # slots=7\nb:1\n"
    assert parse_hostfile(text) == {"a": 2, "b": 4, "d": 1}


def test_names_of_pods():
    text = "train-worker-0.train.default.svc slots=4\ntrain-worker-1.train.default.svc slots=4\n"
    assert parse_hostfile(text) == {f"train-worker-{i}.train.default.svc": 4 for i in range(2)}
