"""Short runs of the jobs about the parameter server, and of the main job under it."""

# Tests: jobs/benchmarks/staleness.py

import json
import re

import numpy as np
import pytest

from hvdx.cli.emulation.namespaces import obstacle
from tests.launch import ROOT, run

MAIN = "jobs/fashion_mnist.py"

# Ten times that of test_fashion_mnist.py, since each worker's step is rounded before the mean is taken.
CURVE_TOLERANCE = 5e-5


@pytest.mark.long
def test_synchronous_main_job_has_the_loss_curve_of_all_reduce(tmp_path):
    synchronous = [
        f"parameter_server:servers={s},staleness=bound,max_staleness=0,aggregate=4"
        for s in ("colocated", "colocated:1")
    ]
    curves = {}
    for strategy in ("all_reduce", *synchronous):
        file = tmp_path / "history.json"
        options = ["--quiet", "--epochs", "3", "--batch", "16", "--strategy", strategy, "--history", str(file)]
        done = run(4, [MAIN, *options], 240)
        assert done.code == 0, done
        curves[strategy] = np.array(json.loads(file.read_text())["loss"])
    for strategy in synchronous:
        difference = float(np.max(np.abs(curves[strategy] / curves["all_reduce"] - 1)))
        print(f"{strategy}: largest relative difference of the loss curve: {difference:.1e}")
        assert difference < CURVE_TOLERANCE


def test_main_job_shows_how_stale_updates_were():
    done = run(3, [MAIN, "--quiet", "--digest"], 240, {"HVDX_STRATEGY": "parameter_server:servers=1,staleness=scale"})
    assert done.code == 0, done
    digests = re.findall(r"weights of rank \d: (\w{16})", done.out)
    assert len(digests) == 2, done
    assert len(set(digests)) == 1
    assert "ParameterServer(staleness='scale')" in done.out
    assert "mean staleness, this worker" in done.out
    # One stop of a worker is enough for rows of two values each.
    assert re.search(r"staleness of this worker's updates\n1(-\d+)? +\d+ +#", done.out)


@pytest.mark.long
def test_slow_worker_delays_synchronous_workers_only(tmp_path):
    figures = tmp_path / "staleness.json"
    small = ["--workers", "2", "--data", "digits", "--hidden", "32", "--steps", "40", "--target", "30", "--pause", "5"]
    small += ["--ways", "all_reduce,plain", "--equal", "plain", "--json", str(figures)]
    # The job must ignore this strategy.
    other = {"HVDX_STRATEGY": "parameter_server:servers=1"}
    done = run(1, ["jobs/benchmarks/staleness.py", *small], 300, other)
    assert done.code == 0, done
    rows = {(row["way"], row["slow"]): row for row in json.loads(figures.read_text())["rows"]}
    assert rows["all_reduce", True]["steps"] == [40, 40]
    first, slow = rows["plain", True]["steps"]
    assert first + slow == 80
    assert slow < first
    assert rows["all_reduce", True]["mean_staleness"] is None
    assert 1.0 <= rows["plain", False]["mean_staleness"] <= 2.5
    for row in rows.values():
        # The last stored weights are those at the end.
        assert row["end"] == row["ends"][0]
        assert (sum(row["steps"]) - 4) / row["updates_per_second"] == pytest.approx(max(row["ends"]), rel=1e-4)
    assert "2 workers, one of them 10 times slower" in done.out


@pytest.mark.long
@pytest.mark.skipif(obstacle() is not None, reason=f"no emulated hosts here: {obstacle()}")
def test_servers_are_timed_between_emulated_hosts(tmp_path):
    figures = tmp_path / "servers.json"
    small = ["--workers", "2", "--servers", "1,2", "--steps", "6", "--hidden", "64", "--bandwidth", "100mbit"]
    done = run(1, ["jobs/benchmarks/servers.py", *small, "--json", str(figures)], 240)
    assert done.code == 0, done
    rows = json.loads(figures.read_text())["rows"]
    assert [row["servers"] for row in rows] == [1, 2]
    for row in rows:
        # With one server, only the worker in another process sends updates; with two, each worker sends half of them.
        parameters = 784 * 64 + 65 * 64 + 64 + 65 * 10
        expected = 4 * parameters * 6 * (1 if row["servers"] == 1 else 0.5)
        assert row["ranks"][1]["sent"] > 0.9 * expected
        assert row["steps_per_second"] > 0


def test_help_of_the_jobs_shows_examples():
    for job in ("staleness", "servers"):
        out = run(1, [str(ROOT / "jobs" / "benchmarks" / f"{job}.py"), "--help"]).out
        assert f"python jobs/benchmarks/{job}.py" in out
