import itertools

import pytest

from hvdx.errors import ConfigError
from hvdx.strategies.threshold.options import DEFAULT_STEPS, Warmup, parse_warmup


def test_density_falls_to_its_target_and_stays():
    warmup = parse_warmup("density:10")
    densities = [warmup.density(step, 0.001) for step in range(12)]
    assert densities[0] == 1 / 8
    assert densities[10:] == [0.001, 0.001]
    assert all(a > b for a, b in itertools.pairwise(densities[:11]))
    assert warmup.density(0, 0.5) == 0.5


def test_auto_lowers_a_density_and_leaves_a_fixed_tau():
    assert parse_warmup("auto") == parse_warmup("density") == parse_warmup("density:200") == Warmup(DEFAULT_STEPS)
    assert parse_warmup("auto", tau=0.5) == parse_warmup("none") == Warmup()
    with pytest.raises(ConfigError, match="lowers a density, and tau is fixed"):
        parse_warmup("density:5", tau=0.5)


def test_what_went_says_why():
    with pytest.raises(ConfigError, match="warmup='lookahead' was removed: the lookahead now follows the lag"):
        parse_warmup("lookahead:600")


def test_spellings():
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
            parse_warmup(wrong)
