"""The helpers of the benchmarks."""

# Tests: jobs/benchmarks/scale.py

import json
import sys

import pytest

from hvdx.cli.common.processes import run
from hvdx.costs.types import Codec, Machine
from hvdx.errors import ConfigError
from hvdx.jobs.benchmarks import harness, scale
from tests.launch import ROOT, environment

BENCHMARK = """
import os, sys
from hvdx.jobs.benchmarks import harness

def compare(options):
    ended = harness.launch(__file__, {"number": 3, "fails": options.fails}, ranks=2, env={"MINE": "1"})
    harness.write(options.json, {"rows": ended.ranks})
    return 0

def work(setting):
    if setting.fails:
        sys.exit("a worker failed")
    return {"number": setting.number, "mine": os.environ["MINE"], "strategy": os.environ.get("HVDX_STRATEGY")}

parser = harness.parser(None)
parser.add_argument("--fails", action="store_true")
sys.exit(harness.run(parser, compare, work))
"""


@pytest.fixture
def benchmark(tmp_path):
    """Return a function that runs a benchmark of two workers with options."""
    file = tmp_path / "benchmark.py"
    file.write_text(BENCHMARK)
    env = environment({"HVDX_STRATEGY": "threshold"})
    return lambda *options: run([sys.executable, str(file), *options], 60, env)


def test_workers_report_by_rank(benchmark, tmp_path):
    done = benchmark("--json", str(tmp_path / "figures.json"))
    assert done.code == 0, done
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["rows"] == [{"number": 3, "mine": "1", "strategy": None}] * 2
    assert figures["command"].endswith("figures.json")


def test_failed_workers_end_the_benchmark_with_their_output(benchmark):
    done = benchmark("--fails")
    assert done.code == 1
    assert "a worker failed" in done.err


def test_time_limit_ends_the_benchmark(tmp_path):
    file = tmp_path / "benchmark.py"
    file.write_text("import time; time.sleep(60)")
    with pytest.raises(SystemExit, match="no answer within the time limit"):
        harness.launch(str(file), {}, limit=0.5)


def test_recorded_figures_are_compact():
    files = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
    assert len(files) > 10
    for file in files:
        assert file.read_text() == harness.dump(json.loads(file.read_text())), file


def test_finished_rows_are_those_of_the_same_options(tmp_path):
    file = str(tmp_path / "figures.json")
    assert harness.finished(file, elements=3) == harness.finished(None) == []
    harness.write(file, {"elements": 3, "rows": [{"workers": 4}]})
    assert harness.finished(file, elements=3) == [{"workers": 4}]
    with pytest.raises(ConfigError, match="rows of a call with"):
        harness.finished(file, elements=4)
    with pytest.raises(ConfigError, match="expected the rows"):
        harness.finished(file, density=0.1)


# Each term of a prediction takes time.
MACHINE = Machine(codec=Codec(1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9))


def test_scale_simulates_no_case_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale, "measure_machine", lambda elements, copies: MACHINE)
    words = ["--workers", "4", "--elements", "20k", "--steps", "6", "--json", str(tmp_path / "scale.json")]
    assert scale.main(words) == 0
    first = capsys.readouterr()
    assert "4 workers, sharded" in first.err
    monkeypatch.setattr(scale, "simulate", None)
    assert scale.main(words) == 0
    assert capsys.readouterr().out == first.out
