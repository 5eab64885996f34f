"""Public names are documented, and the examples in docstrings run."""

# Tests: hvdx/report/counters.py

import doctest
import importlib
import inspect
import pkgutil

import pytest

import hvdx
import hvdx.jobs
import hvdx.keras
import hvdx.strategies

# Scripts without functions, which an import runs.
STARTS_SOMETHING = {"hvdx.__main__", "hvdx.jobs.horovod_keras_digits"}
MODULES = sorted(
    m.name
    for package in (hvdx, hvdx.jobs)
    for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if m.name not in STARTS_SOMETHING
)


@pytest.mark.parametrize("module", [hvdx, hvdx.keras, hvdx.strategies], ids=lambda m: m.__name__)
def test_all_lists_names_that_exist_and_are_documented(module):
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_top_level_stays_light():
    """`import hvdx` and the command line do not import TensorFlow."""
    from tests.launch import run

    code = (
        "import sys, hvdx, hvdx.cli.main; print([m for m in ('tensorflow', 'keras', 'mpi4py.MPI') if m in sys.modules])"
    )
    assert run(1, ["-c", code], fresh=True).out.strip().endswith("[]")


def test_unknown_names_are_attribute_errors():
    for module in (hvdx, hvdx.keras):
        with pytest.raises(AttributeError, match="nonsense"):
            module.nonsense  # noqa: B018
