"""The helpers of the benchmarks."""

import json
import sys

import pytest

from hvdx.cli.common.processes import run
from hvdx.jobs.benchmarks import harness
from tests.launch import ROOT, environment

BENCHMARK = """
import os, sys
from hvdx.jobs.benchmarks import harness

def compare(options):
    ended = harness.launch(__file__, {"number": 3, "fails": options.fails}, ranks=2, MINE="1")
    harness.write(options.json, {"rows": ended.ranks})
    return 0

def work(given):
    if given.fails:
        sys.exit("a worker failed")
    return {"number": given.number, "mine": os.environ["MINE"], "strategy": os.environ.get("HVDX_STRATEGY")}

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
