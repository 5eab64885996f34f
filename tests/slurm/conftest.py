"""The cluster that this folder's tests share, and its logs in reports of failures."""

import contextlib

import pytest

from tests.slurm.cluster import Cluster, ClusterError, obstacle


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Start a Slurm of three nodes, hvdx1 to hvdx3, for the whole session; see `Cluster`."""
    why = obstacle()
    if why is not None:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(Cluster(tmp_path_factory.mktemp("slurm")))
        except ClusterError as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield running


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Add the daemons' logs to the report of a failed test."""
    report = (yield).get_result()
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(running, Cluster):
        report.sections.append(("Slurm", running.logs()))
