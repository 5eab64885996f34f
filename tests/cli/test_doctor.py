"""`hvdx doctor`: its probes, and its conclusions from their findings."""

# Tests: hvdx/cli/diagnosis/checks.py, hvdx/cli/diagnosis/probes.py

import json

import pytest

from hvdx.cli import doctor
from hvdx.cli.common.mpi_tools import Mpi
from hvdx.cli.common.processes import Outcome
from hvdx.cli.diagnosis import checks, probes
from hvdx.cli.diagnosis.checks import Check
from hvdx.cli.diagnosis.probes import Finding
from hvdx.cli.main import main

OPEN_MPI = Mpi("Open MPI", "5.0.11", "/b/mpicc", "/b/mpicxx", "/b/mpirun", "Open MPI", "5.0.11")
GOOD_HOROVOD = {
    "present": True,
    "version": "0.28.1",
    "built_against": "2.21.0",
    "imports": True,
    "parts": ["mpi"],
}
GOOD_FRAMEWORKS = {"numpy": "2.4", "tensorflow": "2.21.0", "keras": "3.15.1", "backend": "tensorflow", "gpus": 0}
GOOD_MPI4PY = {"version": "4.1.2", "library": "Open MPI v5.0.11", "vendor": "Open MPI", "threads": "THREAD_MULTIPLE"}


def _statuses(found):
    return {check.name: check.status for check in found}


# --- probes, in child processes


def _stub(tmp_path, monkeypatch, **packages):
    """Put packages with the given code before the real ones on the search path; return their folder."""
    for name, code in packages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_probe_reads_what_horovod_was_built_against(tmp_path, monkeypatch):
    site = _stub(tmp_path, monkeypatch, horovod="", tensorflow="__version__ = '2.21.0'")
    (site / "horovod" / "metadata.json").write_text('{\n"tensorflow": "2.19.1",\n"dummy": "none"\n}')
    (site / "horovod" / "tensorflow.py").write_text("raise ImportError('undefined symbol: _ZN10tensorflow')")
    found = probes.probe("horovod")
    assert found.facts["built_against"] == "2.19.1"
    assert "undefined symbol" in found.failure
    problems = checks.horovod(found, "2.21.0")
    assert _statuses(problems) == {"Horovod": "problem", "Horovod's TensorFlow": "problem"}
    assert "undefined symbol" in problems[0].value
    assert problems[1].value == "built against TensorFlow 2.19.1, installed is 2.21.0"
    assert all("hvdx build-horovod" in check.remedy for check in problems)


def test_probe_keeps_the_facts_before_a_crash(tmp_path, monkeypatch):
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    _stub(tmp_path, monkeypatch, numpy="__version__ = '2.4'", tensorflow=crash)
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    found = probes.probe("frameworks")
    assert found.facts == {"numpy": "2.4", "backend": "tensorflow", "place": "KERAS_BACKEND"}
    assert found.failure == "crashed with SIGSEGV"
    assert checks.framework(found) == [Check("TensorFlow", "problem", found.failure, checks._INSTALL_TENSORFLOW)]


def test_backend_that_keras_json_chooses_and_nobody_installed_is_a_problem(tmp_path, monkeypatch):
    _stub(
        tmp_path, monkeypatch, numpy="__version__ = '2.4'", jax="raise ModuleNotFoundError(\"No module named 'jax'\")"
    )
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    found = probes.probe("frameworks")
    (check,) = checks.framework(found)
    assert (check.name, check.status) == ("JAX", "problem")
    assert f"{tmp_path / 'keras.json'} chooses it for Keras" in check.value
    assert check.remedy == "pip install 'jax>=0.4.36', or choose another backend there"
    assert checks.keras(found).value == "not tried, as JAX fails"


def test_probe_ends_a_hang(tmp_path, monkeypatch):
    _stub(tmp_path, monkeypatch, numba="import time; time.sleep(60)")
    monkeypatch.setattr(probes, "_TIMEOUT", 3.0)
    found = probes.probe("numba")
    assert found.failure == "no answer within the time limit"
    assert _statuses(checks._numba(found)) == {"Numba": "warning"}


def test_launch_probe_sees_singletons(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\necho \'HVDX {"rank": 0, "size": 1}\'\necho \'HVDX {"rank": 0, "size": 1}\'\n')
    mpirun.chmod(0o755)
    check = checks.two_ranks(*probes.probe_launch(Mpi(mpirun=str(mpirun))))
    assert check.status == "problem"
    assert "each 'rank 0 of 1'" in check.value
    assert "mpi4py" in check.remedy


def test_facts_are_read_from_shared_and_truncated_lines():
    outcome = Outcome(0, 'noise HVDX {"rank": 0}HVDX {"size": 2}\nHVDX {"ra')
    assert probes.read(outcome) == Finding({"rank": 0, "size": 2})


def test_launch_probe_without_mpirun():
    assert checks.two_ranks(*probes.probe_launch(Mpi())).status == "problem"


def test_failure_of_a_probe_is_its_key_line():
    outcome = Outcome(1, 'HVDX {"numpy": "2.4"}\n', "Traceback\n  File\nImportError: libfoo.so: cannot open\n")
    assert probes.read(outcome) == Finding({"numpy": "2.4"}, "ImportError: libfoo.so: cannot open")


# --- checks


def test_horovod_absent_is_a_note_that_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "search_path", lambda: str(tmp_path))
    for check in (*checks.horovod(Finding(), "2.21.0"), checks.horovodrun(OPEN_MPI)):
        assert check.status == "note"
        assert check.remedy.startswith("optional: hvdx build-horovod")


def test_horovod_for_the_installed_tensorflow_is_ok():
    assert _statuses(checks.horovod(Finding(GOOD_HOROVOD), "2.21.0")) == {"Horovod": "ok"}


def test_horovod_for_another_tensorflow_is_a_problem_even_when_it_imports():
    found = checks.horovod(Finding(GOOD_HOROVOD), "2.20.0")
    assert _statuses(found)["Horovod's TensorFlow"] == "problem"


def test_horovod_without_mpi_is_a_problem():
    found = checks.horovod(Finding({**GOOD_HOROVOD, "parts": ["gloo"]}), "2.21.0")
    assert _statuses(found) == {"Horovod": "problem"}


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "ok"),
        ({"keras": "3.6.0"}, "ok"),
        ({"keras": "3.5.0"}, "problem"),
        ({"keras": "2.15.0"}, "problem"),
        ({"keras": "4.0.0"}, "ok"),
        ({"backend": "openvino"}, "problem"),
        ({"backend": "jax", "jax": "0.10.2"}, "ok"),
        ({"backend": "jax", "jax": "0.10.2", "keras": "3.6.0"}, "problem"),
    ],
)
def test_keras(changed, status):
    assert checks.keras(Finding({**GOOD_FRAMEWORKS, **changed})).status == status


def test_tensorflow_outside_the_range_is_a_problem():
    (check,) = checks.framework(Finding({**GOOD_FRAMEWORKS, "tensorflow": "2.15.0"}))
    assert check.status == "problem"


@pytest.mark.parametrize(
    ("backend", "version", "status"),
    [
        ("jax", "0.4.35", "problem"),
        ("jax", "0.4.36", "ok"),
        ("torch", "2.3.1", "problem"),
        ("torch", "2.4.1+cpu", "ok"),
    ],
)
def test_other_backends_have_an_oldest_version(backend, version, status):
    (check,) = checks.framework(Finding({"numpy": "2.4", "backend": backend, backend: version}))
    assert check.status == status


def test_backends_without_tensorflow_are_ok():
    found = Finding({"numpy": "2.4", "backend": "torch", "torch": "2.13.0", "keras": "3.15.1", "gpus": 2})
    checked = [*checks.framework(found), checks.keras(found), checks._gpus(found)]
    assert _statuses(checked) == {"PyTorch": "ok", "Keras": "ok", "GPUs": "ok"}
    assert [c.value for c in checked[1:]] == ["3.15.1 on PyTorch", "2 for PyTorch"]


def test_thread_level_below_multiple_is_a_problem():
    found = checks.mpi4py(Finding({**GOOD_MPI4PY, "threads": "THREAD_SERIALIZED"}))
    assert _statuses(found) == {"mpi4py": "ok", "MPI library": "ok", "MPI threads": "problem"}


def test_mpirun_of_another_vendor_is_a_problem():
    check = checks.mpirun(OPEN_MPI, Finding({**GOOD_MPI4PY, "vendor": "MPICH"}))
    assert check.status == "problem"
    assert "mpi4py uses MPICH" in check.remedy


def test_horovodrun_under_open_mpi_5_shows_the_options(tmp_path, monkeypatch):
    (tmp_path / "horovodrun").write_text("#!/bin/sh\n")
    (tmp_path / "horovodrun").chmod(0o755)
    monkeypatch.setattr(checks, "search_path", lambda: str(tmp_path))
    check = checks.horovodrun(OPEN_MPI)
    assert check.status == "warning"
    assert '--binding-args="--bind-to none --map-by slot"' in check.remedy
    mpich = Mpi("MPICH", "4.2", launcher_vendor="MPICH", launcher_version="4.2")
    assert checks.horovodrun(mpich).status == "ok"


def test_more_threads_than_cores_is_a_warning():
    assert checks.threads(2, {"TF_NUM_INTRAOP_THREADS": "8"}).status == "warning"
    assert checks.threads(2, {"TF_NUM_INTRAOP_THREADS": "1"}).status == "ok"
    assert checks.threads(2, {}).status == "ok"


def test_small_shared_memory_is_a_warning():
    assert checks.shared_memory(64 * 2**20, 32).status == "ok"
    assert checks.shared_memory(64 * 2**20, 33).value == "64 MiB, enough for 32 workers"
    assert checks.shared_memory(0, 1).status == "warning"


# --- the command


@pytest.fixture
def machine(monkeypatch):
    """Replace all probes by findings, which a test may change."""
    findings = {
        "frameworks": Finding(GOOD_FRAMEWORKS),
        "horovod": Finding(GOOD_HOROVOD),
        "mpi4py": Finding(GOOD_MPI4PY),
        "numba": Finding(),
    }
    monkeypatch.setattr(doctor, "find_mpi", lambda: OPEN_MPI)
    monkeypatch.setattr(doctor, "probe_all", lambda mpi: (findings, ([(0, 2), (1, 2)], "")))
    return findings


@pytest.mark.parametrize("found", [Finding(GOOD_HOROVOD), Finding()], ids=["Horovod", "none"])
def test_notes_and_warnings_do_not_fail(machine, capsys, found):
    machine["horovod"] = found
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.rstrip().endswith("Ready to train.")
    assert "\033[" not in text


def test_a_problem_fails_and_the_last_line_names_it(machine, capsys):
    machine["horovod"] = Finding({**GOOD_HOROVOD, "parts": ["gloo"]})
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("Training would not work yet: Horovod.")


def test_json_is_one_document(machine, capsys):
    machine["horovod"], machine["mpi4py"] = Finding(), Finding()
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    for check in document["checks"]:
        assert set(check) == {"name", "status", "value", "remedy"}
        assert check["status"] in ("ok", "note", "warning", "problem")
    assert all(check["remedy"] for check in document["checks"] if check["status"] != "ok")


def test_failed_imports_are_problems_without_a_traceback(machine, capsys):
    for name in machine:
        machine[name] = Finding({}, f"ModuleNotFoundError: No module named '{name}'")
    assert main(["doctor", "--json"]) == 1
    statuses = {check["name"]: check["status"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {statuses[name] for name in ("NumPy", "TensorFlow", "Keras", "mpi4py")} == {"problem"}
    assert statuses["Horovod"] == "note"


def test_colour_only_marks_the_status():
    table = doctor.as_table([Check("Keras", "problem", "3.5", "pip install keras")], colour=True)
    assert "\033[31mproblem" in table
