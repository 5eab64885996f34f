"""A wheel contains one top-level package with all modules and templates."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.launch import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a clean copy of the checkout."""
    source = tmp_path_factory.mktemp("source") / "hvdx"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("hvdx", "kernels", "jobs", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", source, source]
    subprocess.run(command, check=True, timeout=120)
    return zipfile.ZipFile(next(source.glob("*.whl")))


def test_wheel_holds_one_top_level_package(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hvdx"}


def test_wheel_holds_every_module_of_every_room(wheel):
    expected = set()
    for folder, package in (("hvdx", "hvdx"), ("kernels", "hvdx/kernels"), ("jobs", "hvdx/jobs")):
        for path in (ROOT / folder).rglob("*.py"):
            expected.add(f"{package}/{path.relative_to(ROOT / folder)}")
    assert expected <= set(wheel.namelist())


def test_wheel_holds_the_templates_of_job_scripts(wheel):
    templates = {f"hvdx/jobs/templates/{path.name}" for path in (ROOT / "jobs" / "templates").iterdir()}
    assert "hvdx/jobs/templates/slurm.sh" in templates
    others = {"hvdx/jobs/benchmarks/recorded_update.npz", "hvdx/report/templates/report.html.j2"}
    assert templates | others <= set(wheel.namelist())


def test_wheel_says_that_it_is_typed(wheel):
    assert "hvdx/py.typed" in wheel.namelist()


def test_wheel_installs_the_command(wheel):
    entry_points = next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert b"hvdx = hvdx.cli.main:main" in wheel.read(entry_points)
