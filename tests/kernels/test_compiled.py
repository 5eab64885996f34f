"""Tests of the cache of compiled kernels: it is never stale or incomplete, and kernels work without it.

Most tests use a package of two small kernels, because the real ones take 15 s to compile.
"""

# Tests: hvdx/cache.py

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.launch import ROOT, environment

LIMIT = 120

INNER = """
from numba import njit

@njit
def inner(x):
    return x + 1
"""
OUTER = """
import sys, json, time
from pathlib import Path
from toy import compiled
from toy.inner import inner

@compiled.entry
def outer(x):
    return 10 * inner(x)

@compiled.entry
def other(x):
    return x - 1

def call_all():
    outer(1), other(1)
    if "sleep" in sys.argv:
        print("compiling", flush=True)
        time.sleep(60)

ready = compiled.prepare(Path(sys.argv[1]), call_all)
value = outer(1)
compiled_here = sum(sum(d.stats.cache_misses.values()) for d in (outer, other))
print(json.dumps([ready.outcome, ready.why, value, compiled_here, str(ready.path)]))
"""


@pytest.fixture
def toy(tmp_path):
    """Folder with the small package; compiled kernels go to its subfolder `kept`."""
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(INNER)
    (package / "outer.py").write_text(OUTER)
    (package / "compiled.py").write_text((ROOT / "kernels" / "compiled.py").read_text())
    return tmp_path


def start(toy, *words, folder="kept", **env):
    """Start a process that uses the small package."""
    command = [sys.executable, "-B", "-m", "toy.outer", str(toy / folder), *words]
    return subprocess.Popen(command, cwd=toy, env=os.environ | env, stdout=subprocess.PIPE, text=True)


def finish(process, limit=LIMIT):
    """Return the output of a process: (outcome, why, value, number of kernels that it compiled, path of the file)."""
    try:
        out = process.communicate(timeout=limit)[0]
    finally:
        process.kill()
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def use(toy, *words, **env):
    return finish(start(toy, *words, **env))


def test_second_process_compiles_nothing(toy):
    assert use(toy)[:4] == ["compiled", "", 20, 2]
    assert use(toy)[:4] == ["loaded", "", 20, 0]


def test_change_in_another_file_is_compiled_again(toy):
    before = use(toy)
    (toy / "toy" / "inner.py").write_text(INNER.replace("x + 1", "x + 2"))
    after = use(toy)
    assert after[:4] == ["compiled", "", 30, 2]
    assert after[4] != before[4]
    (toy / "toy" / "inner.py").write_text(INNER)
    assert use(toy)[:4] == ["loaded", "", 20, 0]


def test_another_processor_and_other_settings_have_files_of_their_own(toy):
    files = [use(toy, **env)[4] for env in ({}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""})]
    assert use(toy, NUMBA_OPT="1")[0] == "compiled"
    assert use(toy, NUMBA_CACHE_DIR=str(toy / "of-the-user"))[0] == "loaded"
    assert len(set(files)) == 2
    assert not (toy / "of-the-user").exists()


def test_damaged_file_is_replaced(toy):
    path = Path(use(toy)[4])
    whole = path.read_bytes()
    half = len(whole) // 2
    for damaged in (whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :], whole[:-9], b""):
        path.write_bytes(damaged)
        assert use(toy)[:4] == ["compiled", "", 20, 2]
    assert use(toy)[0] == "loaded"


def test_folder_that_cannot_be_written_to_is_no_error(toy):
    (toy / "kept").write_text("a file where the folder should be")
    outcome, why, value, compiled_here, _ = use(toy)
    assert (outcome, value, compiled_here) == ("not kept", 20, 1)
    assert "kept" in why


def test_code_that_others_can_have_written_is_not_loaded(toy):
    before = os.umask(0o002)
    try:
        path = Path(use(toy)[4])
    finally:
        os.umask(before)
    path.chmod(0o646)
    assert use(toy)[:4] == ["compiled", "", 20, 2]
    path.parent.chmod(0o775)
    outcome, why, value, *_ = use(toy)
    assert (outcome, value) == ("not kept", 20)
    assert "others may write to" in why


def test_full_disk_is_no_error_and_leaves_nothing(toy):
    patch = (
        "import errno, os\ndef full(_):\n    raise OSError(errno.ENOSPC, 'No space left on device')\nos.fsync = full\n"
    )
    (toy / "sitecustomize.py").write_text(patch)
    outcome, why, value, *_ = use(toy, PYTHONPATH=str(toy))
    assert (outcome, value) == ("not kept", 20)
    assert "No space left" in why
    assert {p.name for p in (toy / "kept").rglob("*") if p.is_file()} == {"lock"}


def test_process_that_is_killed_while_it_compiles_blocks_no_other(toy):
    first = start(toy, "sleep")
    assert first.stdout.readline() == "compiling\n"
    second = start(toy)
    time.sleep(3)
    assert second.poll() is None, "it did not wait for the process that compiles"
    first.send_signal(signal.SIGKILL)
    first.wait()
    began = time.monotonic()
    assert finish(second)[:4] == ["compiled", "", 20, 2]
    assert time.monotonic() - began < 30


def test_sources_that_change_while_they_compile_are_not_kept(toy):
    outer = OUTER.replace("    outer(1), other(1)\n", "    outer(1), other(1)\n    open('toy/new.py', 'w')\n")
    (toy / "toy" / "outer.py").write_text(outer)
    outcome, why, *_ = use(toy)
    assert outcome == "not kept"
    assert "changed" in why


def test_python_alone_needs_no_folder(toy):
    outcome, _, value, *_ = finish_without_statistics(toy)
    assert (outcome, value) == ("not kept", 20)
    assert not (toy / "kept").exists()


def finish_without_statistics(toy):
    """Run without compilation: with NUMBA_DISABLE_JIT kernels are plain functions, which have no statistics."""
    path = toy / "toy" / "outer.py"
    path.write_text(OUTER.replace("sum(sum(d.stats.cache_misses.values()) for d in (outer, other))", "0"))
    return use(toy, NUMBA_DISABLE_JIT="1")


FULL = """
import errno, os
def full(_):
    raise OSError(errno.ENOSPC, "No space left on device")
os.fsync = full
"""

REAL = """
import json, sys
import numpy as np
from hvdx import codec
from hvdx.kernels import compiled, cpu
from hvdx.cache import kernels_folder

# On a busy machine, too, a process waits for the one that compiles.
compiled._WAIT_SECONDS = float("inf")
results = []
for options in ({"tau": 0.5}, {"target_density": 0.01}, {"tau": 0.5, "index_coding": "none"}):
    threshold, out = codec.Threshold(**options), [np.zeros(3000, np.float32), np.zeros((5, 4), np.float32)]
    state, random = threshold.init([3000, 20]), np.random.default_rng(1)
    for _ in range(3):
        update = [random.normal(size=o.shape).astype(np.float32) for o in out]
        message, state = threshold.encode(update, state)
        read_only = np.frombuffer(message.tobytes(), np.uint8)
        threshold.decode([message, read_only, message.tobytes()], out, 1 / 3)
    results.append(float(sum(abs(o).sum() for o in out) + abs(state.residual).sum()))
made = {n: sum(d.stats.cache_misses.values()) for n, d in compiled._entries.items()}
print(json.dumps([cpu.prepare(kernels_folder()).outcome, {n: m for n, m in made.items() if m}, results]))
"""


@pytest.mark.long
def test_16_processes_at_once_on_an_empty_folder_all_work_and_one_compiles(tmp_path):
    # These processes have already imported Numba, so all reach the folder at the same time.
    python = warm.command(environment())

    def launch():
        return subprocess.Popen(
            [*python, "-c", REAL], cwd=ROOT, env=os.environ | {"HVDX_CACHE": str(tmp_path)},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    processes = [launch() for _ in range(16)]
    # Each of them waits for 15 s of one core, which other programs may have: only a hang takes longer than this.
    found = [finish(process, limit=1200) for process in processes]
    assert sorted(outcome for outcome, *_ in found) == ["compiled"] + 15 * ["loaded"]
    assert all(not made for outcome, made, _ in found if outcome == "loaded"), "a process compiled a kernel again"
    assert len({json.dumps(results) for *_, results in found}) == 1
    (folder,) = (tmp_path / "kernels").iterdir()
    assert {path.name for path in folder.iterdir()} == {"kernels.bin", "lock"}
    assert finish(launch())[:2] == ["loaded", {}]
