import pytest

import hvdx
from hvdx import codec
from hvdx.errors import ConfigError
from hvdx.strategies import names, parse, resolve


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all_reduce", "AllReduce()"),
        (" all_reduce : compression = bf16 , op=sum", "AllReduce(op='sum', compression='bf16')"),
        ("all_reduce:groups=4,", "AllReduce(groups=4)"),
        ("all_reduce:engine=mpi", "AllReduce(engine='mpi')"),
        ("parameter_averaging:engine=horovod", "ParameterAveraging(engine='horovod')"),
        ("all_reduce:gradient_predivide_factor=2", "AllReduce(gradient_predivide_factor=2.0)"),
    ],
)
def test_parse_reads_names_and_options(text, expected):
    assert repr(parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "all_reduce"),
        ("allreduce", "did you mean all_reduce"),
        ("all_reduce:compresion=fp16", "did you mean compression"),
        ("all_reduce:fp16", "op=average"),
        ("all_reduce:compression=fp8", "'fp16', 'bf16'"),
        ("all_reduce:groups=many", "expected a number"),
        ("all_reduce:groups=1.5", "whole number"),
        ("all_reduce:groups=true", "expected a number"),
        ("all_reduce:groups=0", "1 or more"),
        ("all_reduce:op=sum,gradient_predivide_factor=2", "predivide"),
        ("threshold:overlap=true", "threshold: option overlap was removed: updates .* Leave it out"),
        ("parameter_server:op=sum", "option op was removed: updates count as their mean"),
        ("threshold:max_staleness=4", "expected 0 or 'inf', got '4'. A bound between them was removed"),
    ],
)
def test_parse_refuses_wrong_spellings_and_lists_right_ones(text, named):
    with pytest.raises(ConfigError, match=named):
        parse(text)


def test_resolve_takes_strategies_names_and_the_environment(monkeypatch):
    strategy = hvdx.AllReduce(op="sum")
    assert resolve(strategy) is strategy
    monkeypatch.delenv("HVDX_STRATEGY", raising=False)
    assert repr(resolve(None)) == "AllReduce()"
    monkeypatch.setenv("HVDX_STRATEGY", "all_reduce:op=sum")
    assert repr(resolve(None)) == "AllReduce(op='sum')"
    assert repr(resolve("all_reduce")) == "AllReduce()"
    with pytest.raises(ConfigError, match="got 3"):
        resolve(3)


def test_names_are_the_registered_ones():
    assert names() == ["all_reduce", "auto", "parameter_averaging", "parameter_server", "threshold"]


MODULE = """
from hvdx.codec import Raw
from hvdx.strategies import AllReduce

class Loud(AllReduce):
    name = "loud"

    def __init__(self, volume=1, op="average"):
        super().__init__(op=op)
        self.volume = volume

class Rare(Raw):
    name, number = "rare", 200
"""
POINTS = "[hvdx.strategies]\nloud = loud_hvdx:Loud\nbroken = loud_hvdx:Rare\n[hvdx.codecs]\nrare = loud_hvdx:Rare\n"


def test_entry_points_of_other_packages_add_strategies_and_codecs(tmp_path, monkeypatch):
    (tmp_path / "loud_hvdx.py").write_text(MODULE)
    info = tmp_path / "loud_hvdx-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud-hvdx\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    assert {"loud", "all_reduce"} < set(names())
    assert repr(parse("loud:volume=3,op=sum")) == "Loud(volume=3, op='sum')"
    monkeypatch.setenv("HVDX_STRATEGY", "loud")
    assert repr(resolve(None)) == "Loud()"
    with pytest.raises(ConfigError, match="did you mean volume"):
        parse("loud:volum=3")
    with pytest.raises(ConfigError, match=r"expected a subclass of hvdx.strategies.Strategy at loud_hvdx:Rare"):
        parse("broken")
    assert type(codec.make("rare")).__name__ == "Rare"
    assert repr(hvdx.ParameterServer(codec="rare")) == "ParameterServer(codec='rare')"
