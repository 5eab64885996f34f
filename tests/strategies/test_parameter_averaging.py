"""What `ParameterAveraging` is told, and what it says of itself."""

import pytest

from hvdx import ParameterAveraging
from hvdx.errors import ConfigError
from hvdx.strategies import TensorSpec, parse


def test_period_may_be_a_number_or_a_schedule():
    assert ParameterAveraging().schedule == ((0, 16),)
    assert ParameterAveraging(4).schedule == ((0, 4),)
    schedule = ((0, 1), (500, 4), (2000, 16))
    assert ParameterAveraging(schedule).schedule == schedule
    assert ParameterAveraging([list(pair) for pair in schedule]).schedule == schedule
    assert ParameterAveraging("1@0/4@500/16@2000").schedule == schedule


@pytest.mark.parametrize(
    "period", [0, -1, 1.5, True, None, "", "x", "4@5", "1@0/4", "1@0/4@9/5@9", [], [(1, 4)], [(0, 0)], [(0, 1, 2)], "0"]
)
def test_other_periods_are_refused(period):
    with pytest.raises(ConfigError, match="period: expected a positive number"):
        ParameterAveraging(period)


@pytest.mark.parametrize(
    "text",
    [
        "parameter_averaging",
        "parameter_averaging:period=8",
        "parameter_averaging:period=1@0/16@300,average_optimizer=false",
        "parameter_averaging:weighted=true",
    ],
)
def test_one_line_spelling_and_repr_agree(text):
    strategy = parse(text)
    again = eval(repr(strategy), {"ParameterAveraging": ParameterAveraging})
    assert (again.schedule, again.average_optimizer, again.weighted) == (
        strategy.schedule,
        strategy.average_optimizer,
        strategy.weighted,
    )


def test_spelling_mistakes_are_explained():
    with pytest.raises(ConfigError, match="did you mean average_optimizer"):
        parse("parameter_averaging:average_optimiser=false")
    with pytest.raises(ConfigError, match="true or false"):
        parse("parameter_averaging:weighted=maybe")


def test_flags_are_flags():
    with pytest.raises(ConfigError, match="average_optimizer: expected one of True, False, got 'false'"):
        ParameterAveraging(average_optimizer="false")


def test_bytes_are_those_of_a_ring_over_the_period():
    specs = [TensorSpec("a", (10, 10), 4), TensorSpec("b", (), 4)]
    strategy = ParameterAveraging(8)
    assert strategy.bytes_per_average(specs, 4) == round(404 * 1.5)
    assert strategy.bytes_per_step(specs, 4) == round(606 / 8)
    assert strategy.bytes_per_step(specs, 1) == 0
