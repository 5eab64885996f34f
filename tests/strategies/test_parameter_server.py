"""What `ParameterServer` is told, and what it says of itself."""

import numpy as np
import pytest

from hvdx.comm.local import LocalComm, virtual_world
from hvdx.errors import ConfigError
from hvdx.strategies import ParameterServer, TensorSpec, parse
from hvdx.strategies.serving.messages import Plan

SPECS = [TensorSpec("a", (100, 10), 4), TensorSpec("b", (), 4), TensorSpec("c", (0, 3), 4)]


def test_by_default_one_rank_serves_and_nobody_waits():
    strategy = ParameterServer()
    assert (strategy.servers, strategy.dedicated, strategy.staleness, strategy.bound) == (1, 1, "none", None)
    assert (strategy.collect, strategy.codec, strategy.power) == (1, "none", 1.0)
    assert repr(strategy) == "ParameterServer()"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parameter_server", "ParameterServer()"),
        ("parameter_server:op=sum", "ParameterServer(op='sum')"),
        ("parameter_server:servers=3", "ParameterServer(servers=3)"),
        (
            "parameter_server:servers=colocated:2,staleness=scale",
            "ParameterServer(servers='colocated:2', staleness='scale')",
        ),
        (
            "parameter_server:servers=colocated,staleness=bound,bound=0,collect=4",
            "ParameterServer(servers='colocated', staleness='bound', bound=0, collect=4)",
        ),
        (
            "parameter_server:staleness=scale+bound,power=0.5,bound=2",
            "ParameterServer(staleness='scale+bound', power=0.5, bound=2)",
        ),
        ("parameter_server:codec=threshold:0.003", "ParameterServer(codec='threshold:0.003')"),
        ("parameter_server:codec=bf16,power=2", "ParameterServer(power=2.0, codec='bf16')"),
        ("parameter_server:staleness=bound,bound=4", "ParameterServer(staleness='bound')"),
        ("parameter_server:bound=none,servers= 2", "ParameterServer(servers=2)"),
    ],
)
def test_one_line_spelling_and_repr_agree(text, expected):
    strategy = parse(text)
    assert repr(strategy) == expected
    assert repr(eval(expected, {"ParameterServer": ParameterServer})) == expected
    assert repr(parse(strategy.spelling)) == expected


def test_a_strategy_says_how_it_is_spelled():
    assert ParameterServer().spelling == "parameter_server:servers=1"
    assert ParameterServer("colocated", collect=2).spelling == "parameter_server:servers=colocated,collect=2"


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
        ({"op": "average"}, "op: expected one of 'mean', 'sum'"),
        ({"power": 0}, "power: expected a number above 0"),
        ({"power": -1.0}, "power: "),
        ({"power": 11}, "power: .*10 at most"),
        ({"power": float("nan")}, "power: "),
        ({"power": True}, "power: "),
        ({"power": "1"}, "power: "),
        ({"staleness": "bound", "bound": -1}, "bound: expected a number from 0 on, got -1"),
        ({"staleness": "bound", "bound": 1.0}, "bound: "),
        ({"staleness": "bound", "bound": False}, "bound: "),
        ({"bound": 3}, "bound=3 is for staleness='bound' or 'scale.bound', got 'none'"),
        ({"staleness": "scale", "bound": 0}, "bound=0 is for"),
        ({"collect": 0}, "collect: expected a number from 1 on, got 0"),
        ({"collect": "2"}, "collect: "),
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
        ("parameter_server:collect=2.5", "whole number"),
        ("parameter_server:power=much", "expected a number"),
        ("parameter_server:staleness=bound,bound=x", "bound: expected a number from 0 on, got 'x'"),
    ],
)
def test_spelling_mistakes_are_explained(text, match):
    with pytest.raises(ConfigError, match=match):
        parse(text)


def test_a_bound_has_a_default_where_there_is_one():
    assert ParameterServer(staleness="bound").bound == ParameterServer(staleness="scale+bound").bound == 4
    assert ParameterServer(staleness="scale").bound is None
    assert ParameterServer(staleness="bound", bound=0).bound == 0


def test_servers_are_told_the_rule():
    assert ParameterServer().plan(4, 10, "float32") == Plan(4, 10, share=0.25)
    assert ParameterServer(op="sum").plan(4, 10, "float32") == Plan(4, 10)
    strategy = ParameterServer(staleness="scale+bound", power=0.5, bound=2, collect=3, codec="fp16")
    plan = strategy.plan(8, 5, "float64")
    assert plan == Plan(8, 5, "float64", "fp16", collect=3, share=plan.share, power=0.5, bound=2)
    # A power that is not asked for counts for nothing.
    assert ParameterServer(staleness="bound", power=2.0).plan(2, 1, "float32").power == 0


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("workers", "collect"), [(8, 1), (8, 3), (8, 8), (4, 2), (1, 1)])
def test_a_scaled_update_of_the_usual_staleness_counts_one_of_n(workers, collect, power):
    plan = ParameterServer(staleness="scale", power=power, collect=collect).plan(workers, 1, "float32")
    usual = workers / collect
    assert plan.share * usual**-plan.power == pytest.approx(1 / workers)
    if power == 1:
        assert plan.share == 1 / collect


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
        (ParameterServer(1, collect=4), 3, 1, "collect: expected at most 3, the number of workers, got 4"),
    ],
    ids=str,
)
def test_ranks_that_do_not_fit_are_refused_on_all(strategy, workers, serving, match):
    for comm in virtual_world(workers, serving)[:workers]:
        with pytest.raises(ConfigError, match=match) as caught:
            strategy.server_ranks(comm)
        assert caught.value.collective


@pytest.mark.parametrize("codec", ["none", "fp16", "threshold"])
def test_what_codecs_without_a_residual_saved_is_dealt_out_as_nothing(codec):
    saved = [{"apart": np.ones((), np.int8)}] * 4
    assert ParameterServer("colocated", codec=codec).merge(saved, 0, 2) == {}
