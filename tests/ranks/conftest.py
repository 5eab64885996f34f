"""Tests in this folder are right at any number of ranks: `pytest tests/ranks`, `mpirun -n 4 pytest tests/ranks`.

Each runs at the sizes that it means something at, which `@pytest.mark.sizes` names: 2 ranks where there is no mark.
Functions run eagerly, since tracing takes most of a short training's time; those marked `graph` are traced on 2 ranks,
as users' are, and where they are named by their ids. Of a parametrised test only the first case is traced, unless it
says `graph(every=True)`: those are traced on any number of ranks. What else is traced on 1 and 4 are the jobs of
tests/test_exits.py and tests/jobs. 1 rank runs a test's first case, 2 ranks all, and more the first and the last.
A test that fails on one rank fails on all, so that the ranks stay in step.
"""

import gc
import os

import keras
import pytest
import tensorflow as tf

import hvdx
from hvdx import comm as world
from hvdx.comm import launcher


def pytest_collection_modifyitems(config, items):
    """Leave out what does not mean anything at this number of ranks; a test that is named by its id always runs."""
    launch = launcher.detect()
    size = launch.size if launch is not None and launch.size else 1
    named = any("::" in argument for argument in config.args)
    here = [item for item in items if item.path.parent == config.rootpath / "tests" / "ranks"]
    cases = {}
    for item in here:
        cases.setdefault((item.path, item.function), []).append(item)
    for item in here:
        first, last = cases[item.path, item.function][0], cases[item.path, item.function][-1]
        cases_at = {1: [first], 2: [item], 3: [first, last], 4: [first, last]}
        graph = item.get_closest_marker("graph")
        item.traced = graph is not None and (
            (item is first and (size == 2 or named)) or graph.kwargs.get("every", False)
        )
        marker = item.get_closest_marker("sizes")
        sizes = marker.args if marker else (2,)
        item.runs = named or ((size if size <= 2 else 4) in sizes and item in cases_at[min(size, 4)])
    left_out = [item for item in here if not item.runs]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def comm():
    """The communicator of this session."""
    hvdx.init()
    # TensorFlow's objects are millions; looking through them again and again takes longer than the tests.
    gc.collect()
    gc.freeze()
    return world.start()


@pytest.fixture(autouse=True)
def _traced(request):
    tf.config.run_functions_eagerly(not request.node.traced)


@pytest.fixture(autouse=True)
def seed():
    """Weights and data differ between ranks until something makes them alike."""
    keras.utils.set_random_seed(hvdx.rank())
    keras.config.set_dtype_policy("float32")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    joined = world.current()
    if report.when == "call" and joined is not None and joined.size > 1:
        everyone = joined.all_gather_object((item.nodeid, report.outcome), "outcome of a test")
        if any(not isinstance(said, tuple) or said[0] != item.nodeid for said in everyone):
            print(f"the ranks are in different tests: {everyone}\n{report.longreprtext}", flush=True)
            os._exit(3)
        failed = [rank for rank, (_, outcome) in enumerate(everyone) if outcome == "failed"]
        if failed and report.outcome != "failed":
            report.outcome = "failed"
            report.longrepr = f"failed on ranks {failed}"
    return report
