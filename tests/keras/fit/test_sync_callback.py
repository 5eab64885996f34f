"""Remarks on learning-rate schedules that N ranks do not finish."""

import keras
import pytest

from hvdx.comm.local import virtual_world
from hvdx.keras.fit.sync_callback import remark, tell

S = keras.optimizers.schedules


@pytest.mark.parametrize(
    ("schedule", "end"),
    [
        (S.CosineDecay(0.1, 1000), 1000),
        (S.CosineDecay(0.0, 900, warmup_target=0.1, warmup_steps=100), 1000),
        (S.CosineDecay(0.1, 1000, warmup_steps=100), 1000),
        (S.CosineDecayRestarts(0.1, 1000), 1000),
        (S.PiecewiseConstantDecay([300, 1000], [0.1, 0.01, 0.001]), 1000),
        (S.PolynomialDecay(0.1, 1000), 1000),
        (S.ExponentialDecay(0.1, 1000, 0.9), 1000),
    ],
)
def test_schedule_that_the_number_of_ranks_cuts_off_is_named(schedule, end):
    text = remark(schedule, 250, 4)
    assert type(schedule).__name__ in text
    assert f"counts {end:,} steps" in text
    assert "250 steps on each of 4 ranks" in text
    assert "hvdx.size()" in text
    # It ends in time, or one process would not have finished it either.
    assert remark(schedule, 1000, 4) == remark(schedule, 249, 4) == remark(schedule, 999, 1) == ""


def test_rank_0_tells_before_the_first_of_several_fits(capsys):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(S.CosineDecay(0.1, 1000)), "mse")
    world = virtual_world(4)
    tell(model, 250, world[1])
    assert capsys.readouterr().err == ""
    tell(model, 250, world[0])
    assert "CosineDecay (decay_steps=1,000)" in capsys.readouterr().err
    model.optimizer.iterations.assign(250)
    tell(model, 250, world[0])
    assert capsys.readouterr().err == ""


class Unknown(S.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


def test_schedule_of_unknown_length_gets_no_remark():
    assert remark(Unknown(), 250, 4) == ""
