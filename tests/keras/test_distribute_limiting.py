"""The end of a fit at its limit, on virtual ranks, with stand-ins for the other parts."""

from types import SimpleNamespace

import pytest

from hvdx.comm import LocalComm
from hvdx.errors import ConfigError
from hvdx.keras.distribute import Limiting
from hvdx.keras.fit.limits import parse
from hvdx.strategies import resolve
from tests.strategies.virtual import on_all


def limiting(comm, limit, strategy="all_reduce", steps=0):
    """Return the part, its limit, and the list of the calls of other parts."""
    seen, limit = [], parse(limit)
    counting = SimpleNamespace(steps_of_fit=steps, ended=False, end_steps=lambda: seen.append("counting"))
    attachment = SimpleNamespace(strategy=resolve(strategy), end_steps=lambda: seen.append("attachment"))
    costs = SimpleNamespace(finish=lambda: seen.append("costs"))
    made = Limiting(comm, limit, counting, attachment, costs, SimpleNamespace(end=seen.append))
    made.set_model(SimpleNamespace(stop_training=False))
    made.on_train_begin()
    return made, limit, seen


def test_process_ends_after_its_steps_and_what_they_cost_is_recorded_before(capfd):
    part, limit, seen = limiting(LocalComm(), "steps:3", steps=2)
    part.on_train_batch_end(1)
    assert seen == []
    part, limit, seen = limiting(LocalComm(), "steps:3", steps=3)
    with pytest.raises(SystemExit) as ended:
        part.on_train_batch_end(2)
    assert ended.value.code == 0
    assert limit.reached
    assert seen == ["counting", "attachment", "costs", "limit"]
    assert "HVDX_LIMIT=steps:3: the process ends after 3 steps" in capfd.readouterr().err


@pytest.mark.parametrize(("limits", "ends"), [(("epochs:1", "epochs:9"), True), (("epochs:9", "epochs:1"), False)])
def test_limit_of_rank_0_ends_the_fit_on_all_ranks(limits, ends, capfd):
    def run(comm):
        part, limit, _ = limiting(comm, limits[comm.rank])
        part.on_epoch_end(0)
        return part.model.stop_training, limit.reached

    assert on_all(2, run) == [(ends, ends)] * 2
    assert capfd.readouterr().err.count("the fit ends after epoch 1") == ends


def test_steps_of_asynchronous_workers_are_no_limit():
    def run(comm):
        with pytest.raises(ConfigError, match="expected epochs or minutes"):
            limiting(comm, "steps:3", "parameter_server")

    on_all(2, run)
    limiting(LocalComm(), "steps:3", "parameter_server")
