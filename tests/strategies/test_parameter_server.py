"""Options, spelling and configuration of `ParameterServer`."""

import numpy as np
import pytest

from hvdx.comm.local import LocalComm, virtual_world
from hvdx.errors import ConfigError
from hvdx.strategies import ParameterServer, TensorSpec, parse
from hvdx.strategies.serving.messages import SessionConfig

SPECS = [TensorSpec("a", (100, 10), 4), TensorSpec("b", (), 4), TensorSpec("c", (0, 3), 4)]


def test_by_default_one_rank_serves_and_no_worker_waits():
    strategy = ParameterServer()
    assert (strategy.servers, strategy.dedicated, strategy.staleness, strategy.max_staleness) == (1, 1, "none", None)
    assert (strategy.aggregate, strategy.codec, strategy.staleness_exponent) == (1, "none", 1.0)
    assert repr(strategy) == "ParameterServer()"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parameter_server", "ParameterServer()"),
        ("parameter_server:servers=3", "ParameterServer(servers=3)"),
        (
            "parameter_server:servers=colocated:2,staleness=scale",
            "ParameterServer(servers='colocated:2', staleness='scale')",
        ),
        (
            "parameter_server:servers=colocated,staleness=bound,max_staleness=0,aggregate=4",
            "ParameterServer(servers='colocated', staleness='bound', max_staleness=0, aggregate=4)",
        ),
        (
            "parameter_server:staleness=scale+bound,staleness_exponent=0.5,max_staleness=2",
            "ParameterServer(staleness='scale+bound', staleness_exponent=0.5, max_staleness=2)",
        ),
        ("parameter_server:codec=threshold:0.003", "ParameterServer(codec='threshold:0.003')"),
        ("parameter_server:codec=bf16,staleness_exponent=2", "ParameterServer(staleness_exponent=2.0, codec='bf16')"),
        ("parameter_server:staleness=bound,max_staleness=4", "ParameterServer(staleness='bound')"),
        ("parameter_server:max_staleness=none,servers= 2", "ParameterServer(servers=2)"),
    ],
)
def test_one_line_spelling_and_repr_agree(text, expected):
    strategy = parse(text)
    assert repr(strategy) == expected
    assert repr(eval(expected, {"ParameterServer": ParameterServer})) == expected
    assert repr(parse(strategy.spelling)) == expected


def test_spelling_is_the_value_of_the_environment_variable():
    assert ParameterServer().spelling == "parameter_server:servers=1"
    assert ParameterServer("colocated", aggregate=2).spelling == "parameter_server:servers=colocated,aggregate=2"


@pytest.mark.parametrize(
    "servers", [0, -1, "0", "-2", "", "colocated:", "colocated:0", "colocated:x", "two", 1.5, True, None, [1]]
)
def test_other_servers_are_refused(servers):
    with pytest.raises(ConfigError, match=r"servers: expected a positive number, 'colocated' or 'colocated:2', got"):
        ParameterServer(servers)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"staleness": "bounded"},
            r"staleness: expected one of 'none', 'scale', 'bound', 'scale\+bound', got 'bounded'",
        ),
        ({"staleness": None}, "staleness: expected one of"),
        ({"staleness_exponent": 0}, "staleness_exponent: expected a number above 0"),
        ({"staleness_exponent": -1.0}, "staleness_exponent: "),
        ({"staleness_exponent": 11}, "staleness_exponent: .*at most 10"),
        ({"staleness_exponent": float("nan")}, "staleness_exponent: "),
        ({"staleness_exponent": True}, "staleness_exponent: "),
        ({"staleness_exponent": "1"}, "staleness_exponent: "),
        ({"staleness": "bound", "max_staleness": -1}, "max_staleness: expected 0 or more, got -1"),
        ({"staleness": "bound", "max_staleness": 1.0}, "max_staleness: "),
        ({"staleness": "bound", "max_staleness": False}, "max_staleness: "),
        ({"max_staleness": 3}, "max_staleness=3 is for staleness='bound' or 'scale.bound', got 'none'"),
        ({"staleness": "scale", "max_staleness": 0}, "max_staleness=0 is for"),
        ({"aggregate": 0}, "aggregate: expected 1 or more, got 0"),
        ({"aggregate": "2"}, "aggregate: "),
        ({"codec": "zip"}, "codec: expected 'none', 'fp16', 'bf16', 'threshold'"),
        ({"codec": "threshold:1.5"}, "codec: .*1.5"),
        ({"codec": "threshold:much"}, "codec: .*much"),
        ({"codec": None}, "codec: "),
    ],
    ids=str,
)
def test_other_options_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        ParameterServer(**options)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("parameter_server:server=2", "did you mean servers"),
        ("parameter_server:aggregate=2.5", "whole number"),
        ("parameter_server:staleness_exponent=much", "expected a number"),
        ("parameter_server:staleness=bound,max_staleness=x", "max_staleness: expected 0 or more, got 'x'"),
    ],
)
def test_spelling_mistakes_are_explained(text, match):
    with pytest.raises(ConfigError, match=match):
        parse(text)


def test_max_staleness_has_a_default_for_bound():
    assert (
        ParameterServer(staleness="bound").max_staleness == ParameterServer(staleness="scale+bound").max_staleness == 4
    )
    assert ParameterServer(staleness="scale").max_staleness is None
    assert ParameterServer(staleness="bound", max_staleness=0).max_staleness == 0


def test_session_config_holds_the_options():
    assert ParameterServer().config(4, 10, "float32") == SessionConfig(4, 10, share=0.25)
    strategy = ParameterServer(
        staleness="scale+bound", staleness_exponent=0.5, max_staleness=2, aggregate=3, codec="fp16"
    )
    config = strategy.config(8, 5, "float64")
    assert config == SessionConfig(
        8, 5, "float64", "fp16", aggregate=3, share=config.share, staleness_exponent=0.5, max_staleness=2
    )
    # Without "scale" the exponent is not used.
    assert ParameterServer(staleness="bound", staleness_exponent=2.0).config(2, 1, "float32").staleness_exponent == 0


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("workers", "aggregate"), [(8, 1), (8, 3), (8, 8), (4, 2), (1, 1)])
def test_a_scaled_update_of_mean_staleness_counts_one_nth(workers, aggregate, exponent):
    config = ParameterServer(staleness="scale", staleness_exponent=exponent, aggregate=aggregate).config(
        workers, 1, "float32"
    )
    mean = workers / aggregate
    assert config.share * mean**-config.staleness_exponent == pytest.approx(1 / workers)
    if exponent == 1:
        assert config.share == 1 / aggregate


@pytest.mark.parametrize(
    ("servers", "workers", "serving", "ranks"),
    [
        (1, 3, 1, [3]),
        (2, 3, 2, [3, 4]),
        ("colocated", 3, 0, [0, 1, 2]),
        ("colocated:1", 3, 0, [0]),
        ("colocated:2", 3, 0, [0, 1]),
        ("colocated:3", 3, 0, [0, 1, 2]),
    ],
)
def test_servers_come_last_or_are_the_first_workers(servers, workers, serving, ranks):
    assert ParameterServer(servers).server_ranks(virtual_world(workers, serving)[0]) == ranks


def test_a_process_alone_serves_itself():
    assert ParameterServer(3).server_ranks(LocalComm()) == [0]
    assert ParameterServer("colocated").server_ranks(LocalComm()) == [0]


@pytest.mark.parametrize(
    ("strategy", "workers", "serving", "match"),
    [
        (ParameterServer(1), 2, 0, "all ranks were made workers.*hvdx.init.*HVDX_STRATEGY=parameter_server:servers=1"),
        (ParameterServer(2), 3, 1, "1 of the ranks only serve"),
        (ParameterServer("colocated"), 3, 1, "1 of the ranks only serve"),
        (ParameterServer("colocated:4"), 3, 0, "servers: expected at most 3, the number of workers, got 'colocated:4'"),
        (ParameterServer(1, aggregate=4), 3, 1, "aggregate: expected at most 3, the number of workers, got 4"),
    ],
    ids=str,
)
def test_ranks_that_do_not_fit_are_refused_on_all(strategy, workers, serving, match):
    for comm in virtual_world(workers, serving)[:workers]:
        with pytest.raises(ConfigError, match=match) as caught:
            strategy.server_ranks(comm)
        assert caught.value.collective


@pytest.mark.parametrize("codec", ["none", "fp16", "threshold"])
def test_merge_is_empty_for_codecs_without_a_residual(codec):
    saved = [{"0.other": np.ones((), np.int8)}] * 4
    assert ParameterServer("colocated", codec=codec).merge(saved, 0, 2) == {}
