"""`hvdx build-horovod`, without the build itself: no test here compiles Horovod."""

# Tests: hvdx/cli/horovod_build/needs.py, hvdx/cli/horovod_build/source.py, hvdx/cli/horovod_build/wheel.py

import dataclasses
import io
import json
import os
import pwd
import tarfile
import tempfile
from collections.abc import Callable

import pytest

from hvdx.cli import build_horovod
from hvdx.cli.common.mpi_tools import Mpi
from hvdx.cli.horovod_build import needs, source, wheel
from hvdx.cli.horovod_build.wheel import BuildProgress
from hvdx.cli.main import main
from hvdx.errors import ConfigError, HvdxError

KEY = wheel.Key(tensorflow="2.21.0", mpi="Open MPI 5.0.11")
FOUND = needs.Survey((needs.Need("make", "/usr/bin/make", ""),), "2.21.0", Mpi("Open MPI", "5.0.11"), {})


# --- patches


def _source(tmp_path, text):
    (tmp_path / "a.cc").write_text(text)
    return tmp_path


def test_patch_replaces_the_text(tmp_path):
    source.apply_patches(_source(tmp_path, "#if OLD\nrest\n"), [source.Patch("a.cc", "#if OLD", "#if NEW", "why")])
    assert (tmp_path / "a.cc").read_text() == "#if NEW\nrest\n"


@pytest.mark.parametrize("text", ["nothing of it", "#if OLD\n#if OLD\n"])
def test_patch_refuses_text_that_is_absent_or_twice(tmp_path, text):
    with pytest.raises(HvdxError, match=r"a\.cc: expected the text"):
        source.apply_patches(_source(tmp_path, text), [source.Patch("a.cc", "#if OLD", "#if NEW", "why")])
    assert (tmp_path / "a.cc").read_text() == text


def test_patch_refuses_a_missing_file(tmp_path):
    with pytest.raises(HvdxError, match=r"b\.cc: expected it in Horovod's source"):
        source.apply_patches(tmp_path, [source.Patch("b.cc", "x", "y", "why")])


# --- source


def _archive(path, name, content=b"x"):
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return path


def test_altered_archive_is_refused(tmp_path):
    with pytest.raises(HvdxError, match=f"expected sha256 {source.SHA256}"):
        source.check(_archive(tmp_path / "horovod-0.28.1.tar.gz", "horovod-0.28.1/setup.py"))


@pytest.fixture(params=["with filters", "without"])
def tar_filters(request, monkeypatch):
    """Run a test with tar filters and without them, as in Python before 3.11.4."""
    if request.param == "without":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        extract = tarfile.TarFile.extractall
        monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: extract(self, path))


@pytest.mark.usefixtures("tar_filters")
def test_archive_with_an_outside_path_is_refused(tmp_path):
    archive = _archive(tmp_path / "evil.tar.gz", "../outside")
    with pytest.raises(HvdxError, match="expected files below one folder"):
        source.unpack(archive, tmp_path / "in")
    assert not (tmp_path / "outside").exists()


@pytest.mark.usefixtures("tar_filters")
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_archive_with_an_outside_link_is_refused(tmp_path, kind):
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("horovod-0.28.1/x")
        member.type, member.linkname = kind, "../../outside"
        tar.addfile(member)
    with pytest.raises(HvdxError, match="expected files below one folder"):
        source.unpack(archive, tmp_path / "in")


@pytest.mark.usefixtures("tar_filters")
def test_archive_is_unpacked(tmp_path):
    archive = _archive(tmp_path / "good.tar.gz", "horovod-0.28.1/setup.py")
    assert (source.unpack(archive, tmp_path / "in") / "setup.py").read_bytes() == b"x"


# --- key and cache

OTHERS = {
    "tensorflow": "2.20.0",
    "mpi": "MPICH 4.2.1",
    "mpi_home": "/opt/openmpi",
    "gpu": "nccl",
    "gloo": True,
    "settings": {"HOROVOD_CUDA_HOME": "/usr/local/cuda-12"},
    "horovod": "0.28.2",
    "patches": source.REVISION + 1,
    "python": "cpython-312",
    "platform": "linux-aarch64-glibc2.36",
}


def test_every_field_of_the_key_is_varied():
    assert set(OTHERS) == {field.name for field in dataclasses.fields(wheel.Key)}


@pytest.mark.parametrize(("field", "value"), OTHERS.items(), ids=OTHERS)
def test_key_name_changes_with_each_field(field, value):
    assert dataclasses.replace(KEY, **{field: value}).name != KEY.name


def test_key_name_is_readable():
    assert KEY.name.startswith("0.28.1-")
    assert "-tf2.21.0-OpenMPI5.0.11-" in KEY.name
    assert "/" not in dataclasses.replace(KEY, mpi="Odd/MPI").name


def _wheel(tmp_path, content=b"a wheel"):
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(content)
    return path


def test_cache_returns_a_stored_wheel(tmp_path):
    folder = tmp_path / "cache"
    assert wheel.kept(KEY, folder) is None
    kept = wheel.keep(KEY, _wheel(tmp_path), folder)
    assert wheel.kept(KEY, folder) == kept
    assert kept.read_bytes() == b"a wheel"
    assert [entry.name for entry in folder.iterdir()] == [KEY.name]
    metadata = json.loads((folder / KEY.name / "metadata.json").read_text())
    assert metadata["key"]["tensorflow"] == "2.21.0"


@pytest.mark.parametrize("damage", ["truncated", "no metadata", "bad metadata", "no wheel"])
def test_cache_ignores_a_damaged_entry(tmp_path, damage):
    kept = wheel.keep(KEY, _wheel(tmp_path), tmp_path / "cache")
    metadata = kept.parent / "metadata.json"
    actions: dict[str, Callable[[], object]] = {
        "truncated": lambda: kept.write_bytes(b"a wh"),
        "no metadata": metadata.unlink,
        "bad metadata": lambda: metadata.write_text("{"),
        "no wheel": kept.unlink,
    }
    actions[damage]()
    assert wheel.kept(KEY, tmp_path / "cache") is None
    assert wheel.keep(KEY, _wheel(tmp_path, b"again"), tmp_path / "cache").read_bytes() == b"again"


@pytest.mark.parametrize("which", ["wheel", "entry"])
def test_cache_returns_no_wheel_that_others_can_have_written(tmp_path, which, capsys):
    kept = wheel.keep(KEY, _wheel(tmp_path), tmp_path / "cache")
    (kept if which == "wheel" else kept.parent).chmod(0o777)
    assert wheel.kept(KEY, tmp_path / "cache") is None
    assert "the cached wheel is not used, and built again: others may write to" in capsys.readouterr().err
    wheel.keep(KEY, _wheel(tmp_path), tmp_path / "cache")
    assert wheel.kept(KEY, tmp_path / "cache") == kept


def test_cache_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDX_CACHE", str(tmp_path))
    wheel.make_root().chmod(0o775)
    assert wheel.make_root().stat().st_mode & 0o777 == 0o755
    wheel.make_root().chmod(0o777)
    with pytest.raises(ConfigError, match=r"others may write to .*/horovod .* set HVDX_CACHE"):
        wheel.make_root()


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HVDX_CACHE", "/some/where")
    assert str(wheel.root()) == "/some/where/horovod"
    monkeypatch.delenv("HVDX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(wheel.root()) == "/xdg/hvdx/horovod"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container's user may have no entry
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    assert str(wheel.root()) == f"/scratch/hvdx-{os.getuid()}/horovod"


# --- requirements


def test_survey_names_all_missing_requirements_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(needs, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr(needs, "find_mpi", Mpi)
    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: None)
    assert main(["build-horovod"]) == 1
    captured = capsys.readouterr()
    for name, remedy in (
        ("pip", "ensurepip"),
        ("TensorFlow 2.16 to 2.21", "tensorflow-cpu"),
        ("mpicc", "openmpi"),
        ("mpicxx", "openmpi"),
        ("C++ compiler", "g++"),
        ("make", "apt install"),
    ):
        assert name in captured.err
        assert any(name in line and "MISSING" in line and remedy in line for line in captured.out.splitlines())


def test_gpu_build_requires_cuda_and_nccl(monkeypatch, tmp_path):
    monkeypatch.setattr(needs, "_cuda_home", lambda: None)
    monkeypatch.setattr(needs, "_header", lambda home, name: False)
    monkeypatch.setattr(needs, "_tensorflow", lambda gpu: ("2.21.0", needs.Need("TensorFlow", "2.21.0", "")))
    monkeypatch.setattr(needs, "find_mpi", Mpi)
    names = [need.name for need in needs.survey("nccl").missing]
    assert any("nvcc" in name for name in names)
    assert any("NCCL" in name for name in names)


def test_mpirun_of_another_vendor_is_missing(monkeypatch):
    mixed = Mpi("MPICH", "4.2.1", "/a/mpicc", "/a/mpicxx", "/b/mpirun", "Open MPI", "5.0.11")
    assert [need.name for need in needs._mpi(mixed) if not need.found] == ["mpirun of the same MPI"]
    same = dataclasses.replace(mixed, launcher_vendor="MPICH")
    assert all(need.found for need in needs._mpi(same))


@pytest.mark.parametrize(
    ("version", "supported"),
    [("2.15.1", False), ("2.16.0", True), ("2.21.0", True), ("2.21.0-rc1", True), ("2.22.0", False), ("3", False)],
)
def test_supported_tensorflow(version, supported):
    assert needs.is_supported(version) is supported


def test_build_requirements_come_from_the_metadata():
    requirements = needs.build_requirements()
    assert any(line.startswith("cmake") for line in requirements)
    assert not any(line.startswith(("numpy", "pytest")) for line in requirements)


def test_unmet_requirements():
    assert needs.unmet(["pytest", "no-such-package-here", "pytest<1"]) == ["no-such-package-here", "pytest<1"]


# --- the command, with the build and the installation replaced


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Replace downloads, build and installation; return a list that records builds and installations."""
    done = []
    installed = {"digest": ""}

    def build(unpacked, folder, env, jobs, log):
        done.append("build")
        return _wheel(folder, b"built")

    def put_in(file):
        done.append("install")
        installed["digest"] = source.digest(file)

    monkeypatch.setenv("HVDX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(needs, "survey", lambda gpu: FOUND)
    monkeypatch.setattr(needs, "build_environment", lambda root: {})
    monkeypatch.setattr(source, "fetch", lambda folder, env: tmp_path / "archive")
    monkeypatch.setattr(source, "unpack", lambda archive, folder: folder)
    monkeypatch.setattr(source, "apply_patches", lambda folder: None)
    monkeypatch.setattr(wheel, "build", build)
    monkeypatch.setattr(wheel, "install", put_in)
    monkeypatch.setattr(wheel, "installed_digest", lambda: installed["digest"])
    return done


def _run(*arguments):
    return main(["build-horovod", "--no-test", *arguments])


def test_build_runs_once_and_again_with_force(bench, capsys):
    assert _run() == 0
    assert bench == ["build", "install"]
    capsys.readouterr()
    assert _run() == 0
    assert bench == ["build", "install"]
    assert "installed already" in capsys.readouterr().out
    assert _run("--force") == 0
    assert bench == ["build", "install"] * 2


def test_kept_wheel_is_installed_without_a_build(bench, monkeypatch):
    assert _run() == 0
    monkeypatch.setattr(wheel, "installed_digest", lambda: "another wheel's")
    assert _run() == 0
    assert bench == ["build", "install", "install"]


def test_corrupt_kept_wheel_is_built_again(bench):
    assert _run() == 0
    kept = next(wheel.root().glob("*/*.whl"))
    kept.write_bytes(b"buil")
    assert _run() == 0
    assert bench == ["build", "install"] * 2
    assert kept.read_bytes() == b"built"


def test_wheel_only_installs_nothing(bench, tmp_path):
    assert _run("--wheel-only", str(tmp_path / "out")) == 0
    assert bench == ["build"]
    assert len(list((tmp_path / "out").glob("*.whl"))) == 1


def test_failed_build_exits_1_and_keeps_nothing(bench, monkeypatch, capsys):
    def build(*arguments):
        raise wheel.BuildError("building Horovod: expected a wheel, got exit code 1")

    monkeypatch.setattr(wheel, "build", build)
    assert _run() == 1
    assert "expected a wheel" in capsys.readouterr().err
    assert bench == []
    assert not list(wheel.root().glob("*/*.whl"))


def test_failed_proof_exits_1(bench, monkeypatch, capsys):
    def prove(mpi):
        raise wheel.ProofError("the 2-worker all-reduce: expected the sum 3")

    monkeypatch.setattr(wheel, "prove", prove)
    monkeypatch.setattr(needs, "survey", lambda gpu: dataclasses.replace(FOUND, mpi=Mpi(mpirun="/usr/bin/true")))
    assert main(["build-horovod"]) == 1
    assert "expected the sum 3" in capsys.readouterr().err


def test_invalid_jobs_option_is_an_error(bench, capsys):
    assert _run("--jobs", "0") == 2
    assert "--jobs" in capsys.readouterr().err


# --- proof, log, progress


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'HVDX 0 of 1: 1;'; echo 'HVDX 0 of 1: 1;'", "0 of 1: 1, 0 of 1: 1"),
        ("echo 'ImportError: libmpi.so.40' >&2; exit 1", r"ImportError: libmpi\.so\.40"),
    ],
)
def test_proof_fails_on_singletons_and_on_crashes(tmp_path, script, message):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n{script}\n")
    mpirun.chmod(0o755)
    with pytest.raises(wheel.ProofError, match=message):
        wheel.prove(Mpi(mpirun=str(mpirun)))


def test_proof_reads_ranks_on_one_line(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'HVDX 1 of 2: 3;HVDX 0 of 2: 3;'\n")
    mpirun.chmod(0o755)
    assert wheel.prove(Mpi(mpirun=str(mpirun))) == f"{mpirun} -n 2 python"


def test_relevant_lines_begin_at_the_first_error():
    log = "\n".join(
        ["-- Looking for error.h", "/usr/bin/c++ -Werror=x a.cc", "a.cc:2: warning: error-prone"]
        + ["a.cc:3: fatal error: moved.h: No such file or directory"]
        + [f"line {n}" for n in range(100)]
    )
    lines = wheel.relevant_lines(log)
    assert lines[0].startswith("a.cc:3: fatal error")
    assert len(lines) == 30


def test_relevant_lines_of_a_log_without_errors_are_the_last():
    assert wheel.relevant_lines("\n".join(f"line {n}" for n in range(100)))[-1] == "line 99"


@pytest.mark.parametrize(
    ("gpu", "gloo", "name", "value"),
    [
        (None, False, "HOROVOD_WITHOUT_GLOO", "1"),
        (None, True, "HOROVOD_WITH_GLOO", "1"),
        ("nccl", False, "HOROVOD_GPU_OPERATIONS", "NCCL"),
        ("mpi", False, "HOROVOD_GPU_OPERATIONS", "MPI"),
    ],
)
def test_switches(gpu, gloo, name, value):
    chosen = wheel.switches(gpu, gloo)
    assert chosen[name] == value
    assert ("HOROVOD_GPU_OPERATIONS" in chosen) is bool(gpu)
    assert ("HOROVOD_WITHOUT_GLOO" in chosen) is not gloo


def test_build_ignores_horovod_options_of_the_shell():
    stale = {"HOROVOD_WITHOUT_MPI": "1", "HOROVOD_GPU_ALLREDUCE": "NCCL", "HOROVOD_NCCL_LIB": "/opt/nccl", "HOME": "/"}
    chosen = build_horovod._variables(stale, {}, None, False)
    assert "HOROVOD_WITHOUT_MPI" not in chosen
    assert "HOROVOD_GPU_ALLREDUCE" not in chosen
    assert chosen["HOROVOD_NCCL_LIB"] == "/opt/nccl"


def test_progress_follows_the_percentages():
    stream = io.StringIO()
    with BuildProgress("building", stream) as progress:
        progress.feed("[  7%] Building CXX object CMakeFiles/x/common.cc.o")
        progress.feed("note: something else [99%]")
        progress.feed("[ 42%] Building CXX object CMakeFiles/x/mpi_ops.cc.o")
        progress.feed("[ 40%] Built target gloo")
        assert progress.percent == 42
        assert " 42 %" in progress.line()
    assert "\r" not in stream.getvalue()
