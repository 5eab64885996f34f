"""`hvdx compare` with a script that writes records and does not train."""

# Tests: hvdx/cli/comparing/guard.py, hvdx/cli/comparing/runner.py, hvdx/cli/comparing/plan.py
# Tests: hvdx/cli/comparing/plan.py, hvdx/cli/comparing/runner.py, hvdx/cli/comparing/runner.py

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hvdx.cli.advising.script import Training
from hvdx.cli.comparing.plan import Plan, Single
from hvdx.cli.comparing.runner import command, environment
from hvdx.cli.main import main
from hvdx.costs.types import Machine
from hvdx.errors import LaunchError
from hvdx.strategies.registry import resolve

FAKE = """
import os, sys, time
if os.environ.get("FAKE_SLEEP_AT") == os.environ["HVDX_SEED"] + os.environ.get("HVDX_STRATEGY", ""):
    open(os.environ["FAKE_MARK"], "w").write(str(os.getpid()))
    time.sleep(60)
asked, seed = os.environ.get("HVDX_STRATEGY", ""), int(os.environ["HVDX_SEED"])
size = int(os.environ.get("FAKE_SIZE", 1))
mode = sys.argv[1] if len(sys.argv) > 1 else ""
if mode == "fail" and asked == "threshold":
    sys.exit("ValueError: it went wrong")
if mode == "plain":
    sys.exit(0)
from hvdx.report.lines import Writer
made = {"all_reduce": "AllReduce()", "threshold": "Threshold()", "": "AllReduce()"}[asked]
made = "ParameterAveraging(4)" if mode == "own" else made
second = {"all_reduce": 2.0, "threshold": 1.0, "": 3.0}[asked] * (1 + seed / 100)
for rank in range(size):
    writer = Writer(os.environ["HVDX_RECORD"], rank)
    writer.write("fit", schema=1, rank=rank, size=size, strategy=made, seed=seed, spelling=asked)
    for e in range(1, 4):
        logs = {"val_accuracy": 0.5 + e / 10 + seed / 1000, "loss": 1 / e + seed / 1000}
        writer.write("epoch", epoch=e, step=10 * e, time=second * e, logs=logs)
    writer.write("end", time=3 * second, steps=30, reason="done", counters={})
"""


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Return a function that compares in this process: its options and the script's words, then the exit code."""
    script = tmp_path / "train.py"
    script.write_text(FAKE)

    def call(*options, words=(), strategies="all_reduce;threshold", seeds=3):
        grid = ["--strategies", strategies, "--seeds", str(seeds), "--output", str(tmp_path / "out")]
        launcher = ["--launcher", "env FAKE_SIZE={n}"]
        return main(["compare", *grid, *launcher, *options, "--", sys.executable, str(script), *words])

    call.folder = tmp_path / "out"
    call.script = script
    return call


def outcomes(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/*/outcome.json")}


def test_comparison_runs_all_and_prints_the_verdict(compare, capsys):
    assert compare("--target", "val_accuracy=0.65") == 0
    printed = capsys.readouterr()
    assert "1 of 9: one worker, seed 0 ... " in printed.err
    assert "2 of 9: all_reduce, 2 workers, seed 0 ... " in printed.err
    assert "val_accuracy 0.8; about" in printed.err
    assert ": time to val_accuracy 0.65: 6.06 s on one worker, 2.02 s with threshold." in printed.out
    assert "Fastest of several workers, seconds an epoch: threshold, 1.01 s, 2.00 times as fast as all_r" in printed.out
    found = outcomes(compare.folder)
    assert len(found) == 9
    assert found["threshold_2w_seed1"] | {"seconds": 0} == {
        "asked": "threshold", "workers": 2, "bandwidth": None, "hosts": None, "seed": 1, "exit_code": 0, "reason": "",
        "seconds": 0,
    }  # fmt: skip
    assert json.loads((compare.folder / "compare.json").read_text())["target"] == {
        "metric": "val_accuracy",
        "value": 0.65,
    }

    # The same command has nothing left to do; a further strategy or seed is added; another program is refused.
    before = (compare.folder / "runs/threshold_2w_seed1/outcome.json").stat().st_mtime_ns
    assert compare("--target", "val_accuracy=0.65") == 0
    assert "9 of 9 runs have ended before" in capsys.readouterr().err
    assert (compare.folder / "runs/threshold_2w_seed1/outcome.json").stat().st_mtime_ns == before
    assert compare(words=["other"]) == 2
    error = capsys.readouterr().err
    assert "runs of another command" in error
    assert "--output" in error
    compare.script.write_text(FAKE + "\n")
    assert compare() == 2
    assert "earlier" in capsys.readouterr().err


def test_missing_packages_of_the_page_are_named_before_the_first_run(compare, capsys, monkeypatch):
    monkeypatch.setattr("hvdx.cli.compare.find_spec", lambda name: None)
    assert compare(seeds=1) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        "hvdx compare: the verdict will have no page, because matplotlib and jinja2 are not installed. "
        "Do: pip install matplotlib jinja2"
    )


def test_failing_strategy_is_kept_and_told(compare, capsys):
    assert compare(words=["fail"], seeds=1) == 0
    printed = capsys.readouterr()
    assert "failed: ValueError: it went wrong" in printed.err
    assert "threshold, 2 workers: 1 of 1 runs failed, and count as the worst." in printed.out
    assert outcomes(compare.folder)["threshold_2w_seed0"]["exit_code"] == 1


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        (["plain"], [], "the script has no Distribute. Do: add callbacks=[hvdx.keras.Distribute()]"),
        (["own"], [], "expected the strategy AllReduce(), got ParameterAveraging(4): the script names its own"),
        ([], ["--target", "val_auc=0.9"], "--target: expected one of the metrics of the script (loss, val_accuracy)"),
    ],
)
def test_script_that_cannot_be_compared_stops_after_the_first_run(compare, capsys, words, options, told):
    assert compare(*options, words=words) == 2
    assert told in capsys.readouterr().err
    assert len(outcomes(compare.folder)) == (words == ["own"])


def test_nobody_reaches_the_target(compare, capsys):
    assert compare("--target", "val_accuracy=0.99", seeds=1, strategies="threshold") == 0
    assert "Time to val_accuracy 0.99: no winner; no run with several workers reached it." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--strategies", "treshold"], "did you mean threshold?"),
        (["--seeds", "0"], "--seeds: expected 1 or more, got 0"),
        (["-n", "0"], "-n: expected numbers of workers"),
        (["--target", "high"], "--target: expected a metric and a number"),
        (["--minutes", "-1"], "--minutes: expected a number above 0"),
        (["--bandwidth", "fast"], "expected --hosts or --bandwidth, got both"),
        (["--hosts", "a:x"], "compare: --hosts: expected HOST:N,HOST:N with N of 1 or more, got 'a:x'"),
        (["--launcher", "srun 'x"], "compare: --launcher: expected a command, got"),
    ],
)
def test_wrong_options_are_errors_before_anything_starts(tmp_path, capsys, options, told):
    both = ["--hosts", "a"] if "--bandwidth" in options else []
    assert main(["compare", "--output", str(tmp_path / "out"), *options, *both, "--", sys.executable, "x.py"]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_comparison_keeps_its_runs_and_goes_on(compare, tmp_path, number):
    mark, asked = tmp_path / "mark", "threshold"
    words = [
        "-m",
        "hvdx",
        "compare",
        "--strategies",
        "all_reduce;threshold",
        "--seeds",
        "1",
        "--output",
        compare.folder,
    ]
    words += ["--launcher", "env FAKE_SIZE={n}", "--", sys.executable, compare.script]
    env = os.environ | {"FAKE_MARK": str(mark), "FAKE_SLEEP_AT": f"0{asked}"}
    # A job in the background of a shell ignores SIGINT, and so would its children.
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    end = time.monotonic() + 30
    while not (mark.exists() and mark.read_text()) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    error = process.communicate(timeout=30)[1]
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert ("To go on: hvdx compare" in error) == (number != signal.SIGKILL)
    script = int(mark.read_text())
    while os.path.exists(f"/proc/{script}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{script}"), "the run goes on without its comparison"
    kept = outcomes(compare.folder)
    assert sorted(kept) == ["all_reduce_2w_seed0", "one-worker_1w_seed0"]
    assert compare(seeds=1) == 0
    assert outcomes(compare.folder).items() > kept.items()


def test_time_limit_ends_a_run(compare, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("FAKE_SLEEP_AT", "0threshold")
    assert compare("--timeout", "2", seeds=1, strategies="threshold") == 0
    assert "failed: it reached the time limit of 2 s" in capsys.readouterr().err


def test_predictions_are_written_beside_the_measured_steps(compare, monkeypatch, capsys):
    asked = []

    def copies(program, folder, count, timeout):
        asked.append(count)
        return [Training(0.01, 0.0, 20, (1000,), batch=8, slots=1.0)] * count

    monkeypatch.setattr("hvdx.cli.advising.script.run_copies", copies)
    monkeypatch.setattr("hvdx.cli.advising.machine.measure", lambda elements, count: Machine())
    assert compare(seeds=1) == 0
    found = outcomes(compare.folder)
    assert "prediction" not in found["one-worker_1w_seed0"]
    assert found["all_reduce_2w_seed0"]["prediction"]["ms"] > 10
    assert compare(seeds=1) == 0
    assert asked == [2], "predictions that exist were made again"

    def fails(*_):
        raise LaunchError("advise: the script failed")

    monkeypatch.setattr("hvdx.cli.advising.script.run_copies", fails)
    assert compare(seeds=2) == 0
    assert "no predictions: advise: the script failed" in capsys.readouterr().err


# --- plan and start


def test_runs_are_interleaved_and_one_worker_runs_once_for_each_seed(tmp_path):
    plan = Plan(["true"], tmp_path, ["a", "b"], [1, 2], ["10mbit", "1gbit"], seeds=2)
    names = [single.slug for single in plan.runs()]
    assert names[:5] == ["one-worker_1w_seed0", *(f"{s}_2w_{b}_seed0" for b in ("10mbit", "1gbit") for s in "ab")]
    assert len(names) == len(set(names)) == 10
    assert [single.seed for single in plan.runs()] == [0] * 5 + [1] * 5


def test_slugs_of_different_strategies_differ():
    assert len({Single(name, 2, None, 0).slug for name in ("a:b=1,c=2", "a:b=1-c=2", "a-b=1-c=2", "a:b=1")}) == 4


def test_workers_are_started_by_what_fits(tmp_path, monkeypatch):
    single, alone = Single("threshold", 2, None, 3), Single("one worker", 1, None, 3)
    plan = Plan(["true", "--seed={seed}"], tmp_path, epochs=2)
    program = plan.program(3)
    assert program[1] == "--seed=3"
    hvdx = [sys.executable, "-m", "hvdx"]
    assert command(plan, alone, {}) == program
    assert command(plan, single, {}) == [*hvdx, "run", "-n", "2", "--", *program]
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/bin/{name}")
    assert command(plan, single, {"SLURM_JOB_ID": "1"})[:2] == ["srun", "--mpi=pmix"]
    plan.hosts = "a:2"
    assert command(plan, alone, {})[3:7] == ["run", "--hosts", "a:1", "--"]
    plan.hosts = "a:2,b:2"
    assert command(plan, single, {})[3:7] == ["run", "--hosts", "a:1,b:1", "--"]
    plan.hosts, plan.launcher = "", "srun -n {n}"
    assert command(plan, alone, {})[:3] == ["srun", "-n", "1"]
    plan.launcher = ""
    lab = command(plan, Single("threshold", 2, "10mbit", 3), {})
    assert lab[3:8] == ["lab", "-n", "2", "--bandwidth", "10mbit"]
    monkeypatch.setenv("HVDX_LIMIT", "steps:1")
    found = environment(plan, single)
    assert (found["HVDX_STRATEGY"], found["HVDX_SEED"], found["HVDX_LIMIT"]) == ("threshold", "3", "epochs:2")
    plan.epochs = None
    assert "HVDX_LIMIT" not in environment(plan, single)


def test_default_strategies_exist():
    assert len({repr(resolve(name)) for name in Plan(["true"], None).strategies}) == 5
