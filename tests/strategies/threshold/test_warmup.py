import itertools

import pytest

from hvdx.errors import ConfigError
from hvdx.strategies.threshold.warmup import DEFAULT_STEPS, Warmup, parse


def test_density_falls_to_its_target_and_stays():
    warmup = parse("density:10")
    densities = [warmup.density(step, 0.001) for step in range(12)]
    assert densities[0] == 1 / 8
    assert densities[10:] == [0.001, 0.001]
    assert all(a > b for a, b in itertools.pairwise(densities[:11]))
    assert warmup.density(0, 0.5) == 0.5


def test_budget_falls_to_its_target_and_stays():
    shares = [parse("density:10").overhead(step, 0.1) for step in range(12)]
    assert shares[0] == 1.0
    assert shares[10:] == [0.1, 0.1]
    assert all(a > b for a, b in itertools.pairwise(shares[:11]))
    assert [parse(text).overhead(0, 0.1) for text in ("auto", "none", "lookahead:5")] == [0.1, 0.1, 0.1]


def test_auto_depends_on_the_optimizer():
    assert parse("auto").for_optimizer(divides=True) == Warmup("lookahead", DEFAULT_STEPS["lookahead"])
    assert parse("auto").for_optimizer(divides=True, extrapolates=False) == Warmup("density", DEFAULT_STEPS["density"])
    assert parse("auto").for_optimizer(divides=False) == Warmup()
    assert parse("lookahead:5").for_optimizer(divides=False) == parse("lookahead:5")


def test_spellings():
    assert str(parse("auto")) == "auto"
    assert parse("none") == Warmup()
    for kind, steps in DEFAULT_STEPS.items():
        assert parse(kind) == Warmup(kind, steps)
    assert str(parse("lookahead:7")) == "lookahead:7"
    for wrong in (
        "",
        "none:3",
        "dense:50",
        "density:",
        "density:-1",
        "density:1.5",
        "density:x",
        "sparse",
        "workers:9",
    ):
        with pytest.raises(ConfigError, match="warmup"):
            parse(wrong)
