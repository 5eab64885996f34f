"""Tests in this folder are right at any number of ranks: `pytest tests/ranks`, `mpirun -n 4 pytest tests/ranks`.

A test that fails on one rank fails on all, so that the ranks stay in step.
"""

import os

import keras
import pytest

import hvdx
from hvdx import comm as world


@pytest.fixture(scope="session", autouse=True)
def comm():
    """The communicator of this session."""
    hvdx.init()
    return world.start()


@pytest.fixture(autouse=True)
def _time(request):
    """Where a file says which of its tests run AT_ANY_SIZE, the others do on 1 and on 2 ranks."""
    at_any_size = getattr(request.module, "AT_ANY_SIZE", None)
    if hvdx.size() > 2 and at_any_size is not None and request.function.__name__ not in at_any_size:
        pytest.skip("runs on 1 and on 2 ranks")


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
        if any(name != item.nodeid for name, _ in everyone):
            print(f"the ranks are in different tests: {everyone}", flush=True)
            os._exit(3)
        failed = [rank for rank, (_, outcome) in enumerate(everyone) if outcome == "failed"]
        if failed and report.outcome != "failed":
            report.outcome = "failed"
            report.longrepr = f"failed on ranks {failed}"
    return report
