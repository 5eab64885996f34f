"""Attempts of a job become one run, and failures are seconds that its goodput counts."""

import numpy as np
import pytest

from hvdx.report import overview, page
from hvdx.report.lines import Writer
from hvdx.report.records import Run, read
from hvdx.report.verdict import judge


def _write(folder, number, begun, begin, steps, *, job="3f2a", workers=2, ended=False, per_epoch=4):
    """Write an attempt whose steps take a second, and whose epochs have four."""
    for rank in range(workers):
        writer = Writer(folder, rank)
        model = {"name": "mlp", "tensors": [[3, 4]]}
        writer.write(
            "fit", schema=1, id=f"{job}{number}", time=begun, size=workers, strategy="AllReduce()", epochs=3,
            model=model, begin=list(begin), attempt=[job, str(number)],
        )  # fmt: skip
        epoch, inside = begin
        for step in range(1, steps + 1):
            writer.write("steps", step=[step], time=[float(step)], seconds=[1.0])
            inside += 1
            if inside == per_epoch:
                epoch, inside = epoch + 1, 0
                writer.write("epoch", epoch=epoch, step=step, time=step + 0.5, logs={"loss": 1.0 / epoch})
        if ended:
            writer.write("end", time=steps + 0.75)
        writer.close()


def test_attempts_are_one_run_with_what_is_in_the_result(tmp_path):
    # Killed in step 7 (the third of epoch 2), restored after the first of that epoch; killed again; then with one
    # worker fewer from the end of epoch 2.
    _write(tmp_path, 1, 100.0, (0, 0), 6)
    _write(tmp_path, 2, 110.0, (1, 1), 5)
    _write(tmp_path, 3, 120.0, (2, 0), 4, workers=1, ended=True)
    (run,) = overview.load([tmp_path]).runs
    assert len(read(tmp_path)) == 3
    assert run.complete
    assert run.curve("loss") == [(1, 4.5, 1.0), (2, 13.5, 0.5), (3, 24.5, 1.0 / 3)]
    np.testing.assert_array_equal(run.first.steps["step"], np.arange(1, 13))
    times = [1, 2, 3, 4, 5, 11, 12, 13, 21, 22, 23, 24]
    np.testing.assert_array_equal(run.first.steps["time"], times)
    assert run.seconds == 24.75
    # The first attempt trained 5 s that are in the result, until 5 s of 10; the second 3.5 s.
    assert [(event.time, event.seconds, event.what) for event in run.interruptions] == [
        (6.0, 5.0, "attempt 1 failed"),
        (15.0, 6.5, "attempt 2 failed"),
    ]
    assert run.goodput == pytest.approx(1 - 11.5 / 24.75)
    assert any("goodput is 0.54" in sentence for sentence in judge([run]).sentences)
    # The first call of each attempt compiles.
    assert run.first.traced == [0, 5, 8]


def test_other_jobs_and_fits_that_have_ended_are_runs_of_their_own(tmp_path):
    _write(tmp_path, 1, 100.0, (0, 0), 12, ended=True)
    _write(tmp_path, 2, 200.0, (0, 0), 12, ended=True)
    _write(tmp_path, 1, 300.0, (0, 0), 6, job="other")
    assert [run.restarts for run in overview.load([tmp_path]).runs] == [[], [], []]


def test_deaths_after_which_the_others_train_on(tmp_path):
    for rank in range(3):
        writer = Writer(tmp_path, rank)
        writer.write("fit", schema=1, id="a", time=1.0, size=3, strategy="AllReduce()", epochs=1)
        writer.write("steps", step=[1], time=[1.0], seconds=[1.0])
        if rank:
            writer.write("death", time=1.5, ranks=[0], left=2, seconds=0.5)
            writer.write("epoch", epoch=1, step=2, time=2.0, logs={"loss": 1.0})
            writer.write("epoch", epoch=2, step=2, time=4.0, logs={"loss": 0.5})
            writer.write("end", time=4.0)
    found = overview.load([tmp_path])
    (run,) = found.runs
    assert (run.complete, run.dead, run.header["size"]) == (True, {0}, 3)
    assert len(run.curve("loss")) == 2
    assert run.goodput == pytest.approx(1 - 0.5 / 4)
    text = page.render(found, judge(found.runs))
    assert "rank 0 died, and 2 trained on at 1.5 s" in text
    assert "A cross marks a failure" in text
    # Half of the ranks without an end have not died.
    run.ranks[2].end = None
    assert not Run(run.folder, run.ranks).complete


def test_divisions_of_rows_by_speed_are_told(tmp_path):
    for rank in range(2):
        writer = Writer(tmp_path, rank)
        writer.write("fit", schema=1, id="a", time=1.0, size=2, strategy="AllReduce()", epochs=1)
        writer.write("division", time=0.5, position=[0, 7], rows=[40, 24])
        writer.write("division", time=0.9, position=[0, 18], rows=[42, 22])
        writer.write("steps", step=[1], time=[1.0], seconds=[1.0])
        writer.write("epoch", epoch=1, step=1, time=2.0, logs={"loss": 1.0})
        writer.write("end", time=2.0)
    assert "took 42, 22 of the 64 rows of a step in the end." in judge(overview.load([tmp_path]).runs).text()
