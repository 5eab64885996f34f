"""A short run of a job under averaging of networks."""

# Tests: jobs/fashion_mnist.py

from tests.launch import run


def test_main_job_averages_networks_under_the_variable():
    strategy = "parameter_averaging:period=1@0/8@20,weighted=true"
    done = run(2, ["jobs/fashion_mnist.py", "--epochs", "2", "--quiet", "--digest"], 240, {"HVDX_STRATEGY": strategy})
    assert done.code == 0, done
    words = done.out.split()
    assert len({words[i + 1] for i, word in enumerate(words[:-1]) if word in ("0:", "1:")}) == 1, done
    assert "ParameterAveraging(period=((0, 1), (20, 8)), weighted=True)" in done.out
    assert "averages of the weights" in done.out
