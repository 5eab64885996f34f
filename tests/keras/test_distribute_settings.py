"""Settings of the ranks are compared before a fit, and rank 0 sets its first epoch."""

import keras
import pytest

from hvdx.errors import ReplicaError
from hvdx.keras.distribute import Settings
from hvdx.keras.fit.limits import parse
from hvdx.keras.seams.models import initial_epoch


@pytest.fixture
def settings():
    made, model = Settings(parse("epochs:2")), keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    made.set_model(model)
    made.set_params({"epochs": 4})
    return made


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("epochs", 5, r"epochs differs between ranks: \[4, 5\]"),
        ("steps_per_execution", 8, r"steps_per_execution differs between ranks: \[1, 8\]"),
        ("built", False, r"built differs between ranks: \[True, False\]"),
        ("HVDX_LIMIT", "", r"HVDX_LIMIT differs between ranks: \['epochs:2', ''\]"),
        ("shares", ([], [(-1, -2)]), "different seeds"),
    ],
)
def test_settings_that_differ_are_refused(settings, name, other, said):
    mine = settings.offer()
    settings.agree([mine, mine])
    with pytest.raises(ReplicaError, match=said):
        settings.agree([mine, mine | {name: other}])


def test_first_epoch_is_that_of_rank_0(settings):
    mine = settings.offer()
    settings.agree([mine | {"initial_epoch": 2}, mine])
    assert initial_epoch(settings.model) == 2
