"""Setup of tests that pass at any number of ranks: `pytest tests/ranks`, `mpirun -n 4 pytest tests/ranks`.

`@pytest.mark.sizes` lists the numbers of ranks at which a test runs; without it, a test runs on 2. On 1 rank the first
case of a parametrised test runs, on more the first and the last; with --all, all cases on 2 ranks.
Functions run eagerly, because tracing takes most of a short training's time. The first case of a test marked `graph` is
traced, as users' functions are, on 2 ranks or if the test is named by its id. A test marked `graph(every=True)` is
traced in all cases and on any number of ranks, and `--traced` traces all tests. The jobs of tests/test_exits.py and
tests/jobs are traced too.
If a test fails on one rank, it fails on all, so the ranks stay in step.
"""

import gc

import keras
import pytest
import tensorflow as tf

import hvdx
from hvdx import comm as world
from hvdx.comm import launcher
from tests import outcomes


def pytest_addoption(parser):
    parser.addoption("--traced", action="store_true", help="trace the functions of all tests of this folder")


def pytest_collection_modifyitems(config, items):
    """Deselect tests for other numbers of ranks; a test that is named by its id always runs."""
    launch = launcher.detect()
    size = launch.size if launch is not None and launch.size else 1
    named = any("::" in argument for argument in config.args)
    here = [item for item in items if item.path.parent == config.rootpath / "tests" / "ranks"]
    cases = {}
    for item in here:
        cases.setdefault((item.path, item.function), []).append(item)
    for item in here:
        first, last = cases[item.path, item.function][0], cases[item.path, item.function][-1]
        chosen = item is first or (item is last and size > 1) or (size == 2 and config.getoption("--all"))
        graph = item.get_closest_marker("graph")
        item.traced = config.getoption("--traced") or (
            graph is not None and ((item is first and (size == 2 or named)) or graph.kwargs.get("every", False))
        )
        marker = item.get_closest_marker("sizes")
        sizes = marker.args if marker else (2,)
        item.runs = named or ((size if size <= 2 else 4) in sizes and chosen)
    left_out = [item for item in here if not item.runs]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def calm_data():
    """Let the iterators of tf.data run without the thread that tunes them.

    Each iterator waits for that thread when it is deleted. If the garbage collector deletes those of a hundred tests
    at once, the other ranks wait for up to 20 s, and the whole folder takes twice as long.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    iterate = tf.data.Dataset.__iter__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.data.Dataset, "__iter__", lambda dataset: iterate(dataset.with_options(options)))
        yield


@pytest.fixture(scope="session", autouse=True)
def comm():
    """Return the communicator of this session."""
    hvdx.init()
    # TensorFlow has millions of objects; collecting garbage among them takes longer than the tests.
    gc.collect()
    gc.freeze()
    return world.start()


@pytest.fixture(autouse=True)
def _traced(request):
    tf.config.run_functions_eagerly(not request.node.traced)


@pytest.fixture(autouse=True)
def seed():
    """Seed each rank differently, so that weights and data differ until hvdx synchronises them."""
    keras.utils.set_random_seed(hvdx.rank())
    keras.config.set_dtype_policy("float32")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        everyone = outcomes.of_all_ranks(item, report)
        failed = [rank for rank, (_, outcome, _) in enumerate(everyone) if outcome == "failed"]
        if failed and report.outcome != "failed":
            report.outcome = "failed"
            report.longrepr = f"failed on ranks {failed}"
    return report
