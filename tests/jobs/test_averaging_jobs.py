"""Short runs of the jobs about averaging networks."""

# Tests: jobs/benchmarks/averaging_question.py

import json

from tests.launch import run


def test_comparison_separates_period_1_from_longer_periods(tmp_path):
    figures = tmp_path / "question.json"
    small = ["--data", "digits", "--hidden", "32", "--steps", "16", "--periods", "1,8", "--optimizers", "sgd"]
    done = run(2, ["jobs/benchmarks/averaging_question.py", *small, "--json", str(figures)], timeout=400)
    assert done.code == 0, done
    rows = {(r["optimizer"], r["way"]): r for r in json.loads(figures.read_text())["rows"]}
    assert rows["sgd", "every 1"]["from_dense"] < 1e-5 < 1e-3 < rows["sgd", "every 8"]["from_dense"]
    assert rows["sgd", "every 1"]["divergence"] < rows["sgd", "every 8"]["divergence"]
    assert "gradients, rounded otherwise" in done.out


def test_main_job_averages_networks_under_the_variable():
    strategy = "parameter_averaging:period=1@0/8@20,weighted=true"
    done = run(2, ["jobs/fashion_mnist.py", "--epochs", "2", "--quiet", "--digest"], 240, {"HVDX_STRATEGY": strategy})
    assert done.code == 0, done
    words = done.out.split()
    assert len({words[i + 1] for i, word in enumerate(words[:-1]) if word in ("0:", "1:")}) == 1, done
    assert "ParameterAveraging(period=((0, 1), (20, 8)), weighted=True)" in done.out
    assert "averages of the weights" in done.out
