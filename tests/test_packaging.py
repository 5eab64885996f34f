"""A wheel contains one top-level package with all modules and templates, and an sdist what the wheel is made of."""

import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.launch import ROOT


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a clean copy of the checkout."""
    copy = tmp_path_factory.mktemp("source") / "hvdx"
    copy.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("hvdx", "kernels", "jobs", "tests"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def build_wheel(source):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", source, source]
    subprocess.run(command, check=True, timeout=120)
    return zipfile.ZipFile(next(source.glob("*.whl")))


@pytest.fixture(scope="module")
def sdist(source):
    """Build an sdist, and unpack it; before the wheel, whose build leaves files in the source."""
    code = "from setuptools import build_meta; build_meta.build_sdist('sdist')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=source, stdout=subprocess.DEVNULL)
    with tarfile.open(next((source / "sdist").glob("*.tar.gz"))) as archive:
        archive.extractall(source / "sdist", filter="data")
    return next(path for path in (source / "sdist").iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(source, sdist):
    """Build a wheel."""
    return build_wheel(source)


def test_sdist_makes_the_same_wheel(sdist, wheel):
    assert {"CHANGELOG.md", "LICENSE", "hvdx"} <= {path.name for path in sdist.iterdir()}
    assert not (sdist / "tests").exists()
    made = build_wheel(sdist)
    assert {name: made.getinfo(name).CRC for name in made.namelist() if "RECORD" not in name} == {
        name: wheel.getinfo(name).CRC for name in wheel.namelist() if "RECORD" not in name
    }


def test_editable_install_wins_over_a_folder_beside_the_script(source, wheel, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=source, stdout=subprocess.DEVNULL)
    made = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    (pth,) = (name for name in made.namelist() if "/" not in name)
    assert made.read(pth).decode().strip() == str(source)


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
