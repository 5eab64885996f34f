"""Recorded positions of a rank, and the diagnosis of a stall from the reports of several ranks."""

import threading
import time

import pytest

from hvdx.comm import progress, waiting
from hvdx.comm.progress import Report, diagnose, message
from hvdx.comm.watchdog import stall_limit
from hvdx.errors import ConfigError


@pytest.fixture(autouse=True)
def reset_progress():
    yield
    progress.step("")
    waiting.leave()
    progress.serve(False)


def waits(collective="the updates", place="step 5 of epoch 1", order=(0, 4), **more):
    return Report("a", place, order, collective, idle=60.0, **more)


def trains(step, idle=60.0, **more):
    return Report("b", f"step {step} of epoch 1", (0, step - 1), idle=idle, **more)


def test_here_reports_step_collective_and_line():
    progress.step("step 3 of epoch 2", (1, 2))
    assert not progress.here().collective
    waiting.enter("the updates")
    found = progress.here()
    assert (found.place, found.order, found.collective) == ("step 3 of epoch 2", (1, 2), "the updates")
    assert 0 <= found.idle < 1
    assert any(line.startswith("test_progress.py:") for line in found.lines), found
    waiting.leave()
    assert not progress.here().collective


def test_every_record_restarts_the_idle_time():
    records = (lambda: progress.step("a"), lambda: waiting.enter("b"), waiting.leave)
    for record in records:
        time.sleep(0.05)
        assert progress.idle() >= 0.05
        record()
        assert progress.idle() < 0.05


def test_threads_wait_side_by_side():
    arrived, go = threading.Event(), threading.Event()

    def work():
        waiting.enter("the updates")
        arrived.set()
        go.wait(10)
        waiting.leave()

    thread = threading.Thread(target=work)
    thread.start()
    assert arrived.wait(10)
    waiting.enter("a flag")
    waiting.leave()
    assert progress.busy()
    assert progress.here().collective == "the updates"
    go.set()
    thread.join(10)
    assert not progress.busy()


def load_from_a_slow_disk(go):
    go.wait(10)


def test_line_of_another_thread_is_reported():
    go = threading.Event()
    thread = threading.Thread(target=load_from_a_slow_disk, args=(go,))
    thread.start()
    try:
        assert any("in load_from_a_slow_disk (in a thread)" in line for line in progress.here().lines)
    finally:
        go.set()
        thread.join(10)


def test_step_that_an_exception_left_behind_is_no_stall():
    progress.step("step 3 of epoch 2")
    assert not progress.busy(), "Keras is not in this stack"


def test_report_is_small_and_survives_a_message():
    progress.step("x" * 5000, (1, 2))
    report = progress.here()
    assert len(str(report.as_json())) < 1500
    assert Report.of_json({**report.as_json(), "lines": list(report.lines), "order": [1, 2]}) == report


@pytest.mark.parametrize(
    ("reports", "gone", "ranks"),
    [
        ([waits(), waits(), trains(4)], [], [2]),
        ([trains(4), waits(), trains(4)], [], [0, 2]),
        ([waits(), waits(), None], [], [2]),
        ([waits(), None, trains(4)], [], [1, 2]),
        ([waits(), None, waits()], [1], [1]),
        ([waits(), waits(), Report("c")], [], [2]),
        ([waits(), trains(4), Report("c", serves=True)], [], [1]),
        ([waits(), waits(), waits("a flag")], [], [2]),
        ([waits(), waits("a flag")], [], []),
        ([waits(), waits()], [], []),
        ([trains(5), trains(4), trains(5)], [], [1]),
        ([trains(1), trains(1)], [], []),
        ([trains(5), None], [], [1]),
        ([trains(3, idle=0.2), trains(5), trains(8, idle=1.0)], [], [1]),  # no rank waits for another
        ([trains(5), Report("c", "the end of epoch 1", idle=60.0)], [], []),
    ],
)
def test_diagnosis_names_the_missing_ranks(reports, gone, ranks):
    assert diagnose(dict(enumerate(reports)), gone)[0] == ranks


def test_message_has_a_line_for_each_rank():
    text = message({0: waits(), 1: trains(4, lines=("train.py:42 in load",)), 2: None}, [], 60.4, "abc")
    assert text.splitlines() == [
        "no progress for 60 s: ranks 1 (b), 2 (c) have not reached the updates.",
        "  rank 0 (a): waits in the updates, step 5 of epoch 1, for 60 s",
        "  rank 1 (b): step 4 of epoch 1, for 60 s; at train.py:42 in load",
        "  rank 2 (c): does not answer: its process is stopped or gone, or a library blocks Python",
    ]


def test_message_names_no_missing_rank_if_all_wait():
    text = message({0: waits(), 1: waits(), 2: Report("b", serves=True)}, [], 60)
    assert text.startswith("no progress for 60 s: all workers wait in the updates, and none is missing.")
    assert "rank 2 (b): serves the others" in text


def compiles(idle=60.0, what="the training step", **more):
    return Report("c", "step 1 of epoch 1", (0, 0), idle=idle, compiling=what, **more)


def test_compiling_ranks_are_reported_and_not_called_missing():
    text = message({0: waits(), 1: compiles(what="the kernels of Threshold"), 2: waits()}, [], 60)
    assert text == "rank 1 (c) has been compiling the kernels of Threshold for 60 s, which takes long only once."
    text = message({0: compiles(), 1: compiles()}, [], 120)
    assert text.startswith("ranks 0 (c), 1 (c) have been compiling the training step for 120 s")


@pytest.mark.parametrize(
    ("reports", "gone", "ranks"),
    [
        ([waits(), compiles(), trains(4)], [], "ranks 1 (c), 2 (b) have"),  # one of the missing ranks trains
        ([compiles(), trains(1), compiles()], [], "rank 1 (b) has"),
        ([compiles(), None], [], "rank 1 has"),
        ([compiles(), waits()], [1], "all ranks are at"),
    ],
)
def test_stall_is_reported_although_other_ranks_compile(reports, gone, ranks):
    assert message(dict(enumerate(reports)), gone, 60).startswith(f"no progress for 60 s: {ranks}")


def test_here_names_the_object_that_is_compiled():
    with progress.compiling("the kernels of Threshold"):
        assert progress.here().compiling == "the kernels of Threshold"
        assert "compiles the kernels of Threshold" in progress.here().describe()
    assert progress.here().compiling == ""


def test_here_reports_tracing_and_the_first_run_of_a_function():
    tf = pytest.importorskip("tensorflow")
    seen = []

    def look():
        seen.append(progress.here().compiling)
        return 0.0

    @tf.function
    def step(x):
        look()
        return tf.py_function(look, [], tf.float32) + x

    try:
        progress.step("step 1 of epoch 1", (0, 0))
        progress.first_step(True)
        step(1.0)
        progress.first_step(False)
        step(1.0)
    finally:
        progress.first_step(False)
    traced, first, later = seen
    assert traced == "the training step"
    assert later == ""
    # `look` runs in a thread of TensorFlow, while the main thread runs the function.
    assert first == "the training step"


def test_message_about_many_ranks_lists_the_missing_ones():
    reports = {r: waits() for r in range(500)} | {499: trains(4)}
    lines = message(reports, [], 60).splitlines()
    assert len(lines) < 20
    assert any(line.startswith("  rank 499 (b): step 4") for line in lines)
    assert lines[-1] == "  and 484 more ranks, none of which is missing"


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_stall_limit_refuses_invalid_times(monkeypatch, text):
    monkeypatch.setenv("HVDX_STALL_WARNING", text)
    with pytest.raises(ConfigError, match="HVDX_STALL_WARNING: expected seconds"):
        stall_limit()


@pytest.mark.parametrize(("text", "limit"), [("", 60.0), ("0", 0.0), ("2.5", 2.5)])
def test_stall_limit_is_a_number_of_seconds(monkeypatch, text, limit):
    monkeypatch.setenv("HVDX_STALL_WARNING", text)
    assert stall_limit() == limit
