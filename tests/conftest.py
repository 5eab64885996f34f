"""Setup of all tests: a faster start of Keras, and kernels loaded from the cache."""

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.quick_start import sitecustomize  # noqa: F401

# Folders whose tests call kernels directly; code that uses a codec loads the kernels itself.
_CALL_KERNELS = ("kernels", "codec", "strategies", "jobs")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run tests marked `long` too, and in tests/ranks all cases")


def pytest_collection_modifyitems(config, items):
    """Without --all, deselect long tests, unless they are named by their ids."""
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(autouse=True)
def root_logger():
    """Remove handlers that libraries have given the root logger; they would take the lines of hvdx in later tests."""
    before = [*logging.root.handlers]
    yield
    logging.root.handlers[:] = before


@pytest.fixture(autouse=True, scope="module")
def launchers_folders():
    """Remove what killed launchers leave: an mpirun with the process id of one that was killed cannot start."""
    for folder in Path(tempfile.gettempdir()).glob("ompi.*"):
        pid = folder.name.rpartition(".")[2]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_finish(session):
    """Load the compiled kernels, so that no test has to compile them."""
    if any(item.path.relative_to(session.config.rootpath / "tests").parts[0] in _CALL_KERNELS
           for item in session.items if item.path.is_relative_to(session.config.rootpath / "tests")):  # fmt: skip
        from hvdx.cache import kernels_folder
        from hvdx.kernels import cpu

        cpu.prepare(kernels_folder())
