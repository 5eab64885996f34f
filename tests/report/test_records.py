"""Records of runs: lines that were cut off, several fits, later schemas, and the figures of a `Run`."""

import json

import numpy as np
import pytest

from hvdx.errors import ConfigError
from hvdx.report.lines import SCHEMA, Writer
from hvdx.report.records import OUTCOME, read


def write(folder, rank=0, size=1, end=True, **header):
    """Write the record of one fit: 4 calls in two lines, the third after a change of the strategy, and an epoch."""
    writer = Writer(folder, rank)
    writer.write("fit", schema=SCHEMA, rank=rank, size=size, strategy="AllReduce()", **header)
    writer.write("steps", step=[2, 4], time=[5.0, 5.2], seconds=[5.0, 0.2], sent=[100, 100], exchanging=[0.1, 0.1])
    writer.write("strategy", step=4, time=5.3, strategy="Threshold()")
    writer.write("steps", step=np.array([6, 8]), time=[7.3, 7.7], seconds=[2.0, 0.4], sent=[10, 10])
    writer.write("epoch", epoch=1, step=8, time=8.0, logs={"loss": float("nan"), "accuracy": np.float32(0.5)})
    if end:
        writer.write("end", time=8.5, steps=8, reason="done", counters={})
    writer.close()
    return folder / f"rank-{rank}.jsonl"


def test_figures_leave_out_calls_that_compile(tmp_path):
    write(tmp_path)
    (run,) = read(tmp_path)
    assert run.complete
    assert (run.strategy, run.header["chosen"], run.seconds) == ("one worker", "Threshold()", 8.5)
    # Calls of 2 steps; the first call and that after the change of the strategy are left out.
    assert run.step_seconds() == pytest.approx(0.15)
    assert run.parts()["exchanging"] == pytest.approx(0.1 / 4)
    assert run.parts()["other"] == pytest.approx((0.6 - 0.1) / 4)
    assert run.bytes_per_step() == 220 / 8
    assert run.curve("accuracy") == [(1, 8.0, 0.5)]
    assert run.curve("loss") == [(1, 8.0, None)]


def test_nan_is_null_on_disk(tmp_path):
    path = write(tmp_path)
    values = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert values[4]["logs"] == {"loss": None, "accuracy": 0.5}


def test_record_of_a_killed_job_is_read_and_continued(tmp_path):
    path = write(tmp_path, end=False)
    path.write_bytes(path.read_bytes() + b'{"kind":"steps","step":[9')
    write(tmp_path)
    first, second = read(tmp_path)
    assert (first.complete, second.complete) == (False, True)
    assert first.ranks[0].steps["step"].tolist() == [2, 4, 6, 8]
    assert path.read_text().count("\n\n") == 0


def test_fits_of_the_ranks_are_matched_by_their_id(tmp_path):
    """Rank 1 was killed before the first line of the first fit."""
    write(tmp_path, 0, 2, end=False, id="a", time=1.0)
    write(tmp_path, 0, 2, id="b", time=2.0)
    write(tmp_path, 1, 2, id="b", time=2.1)
    first, second = read(tmp_path)
    assert (sorted(first.ranks), sorted(second.ranks)) == ([0], [0, 1])
    assert (first.complete, second.complete) == (False, True)


def test_nested_folders_are_runs_with_outcomes(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / "runs" / name)
    (tmp_path / "runs" / "a" / OUTCOME).write_text('{"seed": 3}')
    assert [(run.folder.name, run.outcome.get("seed")) for run in read(tmp_path)] == [("a", 3), ("b", None)]


def test_later_schema_and_empty_folder_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="expected records"):
        read(tmp_path)
    Writer(tmp_path, 0).write("fit", schema=SCHEMA + 1)
    with pytest.raises(ConfigError, match=rf"got {SCHEMA + 1}\. Read it with"):
        read(tmp_path)


def test_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a folder that can be written"):
        Writer(tmp_path / "file" / "folder", 0)
