"""The timeline of a record: its schema, one clock for all ranks, and records that are old or damaged."""

# Tests: hvdx/report/report_file.py

import json

import pytest

from hvdx.report.lines import SCHEMA, Writer
from hvdx.report.records import read
from hvdx.report.report_file import write as write_text
from hvdx.report.timeline import EPOCHS, KIND, STEPS, clock_error, events, write
from tests.report.synthetic import write_run
from tests.report.timeline import check


def record(folder, rank=0, size=2, late=0.0, offsets=(), **header):
    """Write the record of a rank whose fit began `late` seconds before rank 0's: two steps, an epoch, a third step."""
    writer = Writer(folder, rank)
    writer.write(
        "fit", schema=SCHEMA, rank=rank, size=size, strategy="Threshold()", id="a", host=f"node{rank}", **header
    )
    for time, offset, *error in offsets:
        writer.write("clock", time=time, offset=offset, error=(error or [2e-5])[0])
    writer.write(
        "steps",
        **{"step": [1, 3], "time": [late + 1.0, late + 1.5], "seconds": [0.8, 0.5], "density": [0.5, None]},
        **{"computing": [0.4, 0.1], "encoding": [0.1, 0.1], "waiting": [0.1, 0.0], "exchanging": [0.1, 0.2]},
        **{"decoding": [0.1, 0.1], "sent": [700, 800], "received": [70, 80]},
    )
    spans = [["flush", late + 1.5, late + 1.6], ["evaluation", late + 1.7, late + 1.9]]
    logs = {"loss": float("nan"), "accuracy": 0.5}
    writer.write("epoch", epoch=1, step=3, begin=late + 0.1, time=late + 2.0, spans=spans, logs=logs)
    writer.write("steps", step=[4], time=[late + 2.5], seconds=[0.5])
    writer.close()


def drawn(slices, process, thread):
    """Return the names, begins and ends of slices, in milliseconds."""
    return [(e["name"], round(e["ts"] / 1e3, 3), round((e["ts"] + e["dur"]) / 1e3, 3)) for e in slices[process, thread]]


def test_slices_have_the_times_of_the_record(tmp_path):
    record(tmp_path, size=1)
    (run,) = read(tmp_path)
    slices = check({"traceEvents": events(run)})
    # Times count from the beginning of the first epoch.
    assert drawn(slices, 0, EPOCHS) == [("epoch 1", 0, 1900), ("flush", 1400, 1500), ("evaluation", 1600, 1800)]
    assert drawn(slices, 0, STEPS) == [
        ("step 1", 100, 900),
        *(("computing", 100, 500), ("encoding", 500, 600), ("waiting", 600, 700), ("exchanging", 700, 800)),
        *(("decoding", 800, 900), ("steps 2 to 3", 900, 1400)),
        *(("computing", 900, 1000), ("encoding", 1000, 1100), ("exchanging", 1100, 1300), ("decoding", 1300, 1400)),
        ("step 4", 1900, 2400),
    ]
    args = {e["name"]: e["args"] for e in reversed(slices[0, STEPS])}
    assert args["step 1"] == {"sent": 700, "received": 70, "density": 0.5, "compiles": True}
    assert args["encoding"] == {"density": 0.5}
    assert args["exchanging"] == {"sent": 700, "received": 70}
    assert args["steps 2 to 3"] == {"sent": 800, "received": 80}
    assert slices[0, EPOCHS][0]["args"] == {"loss": None, "accuracy": 0.5}


def test_ranks_are_on_one_clock_that_drifts(tmp_path):
    """Rank 1 began 5 s before rank 0, and its clock loses 10 ms until 7 s."""
    record(tmp_path, 0, offsets=[(0.0, 0.0)])
    record(tmp_path, 1, late=5.0, offsets=[(5.0, -5.0), (7.0, -4.99)])
    (run,) = read(tmp_path)
    slices = check({"traceEvents": events(run)})
    ends = [[end for name, _, end in drawn(slices, rank, STEPS) if name.startswith("step")] for rank in (0, 1)]
    assert ends == [[900, 1400, 2400], [905, 1407.5, 2410]]
    assert clock_error(run) == 2e-5


@pytest.mark.parametrize(
    ("offsets", "begins"),
    [
        # Between two others, which say that the clock has lost 10 ms in 2 s: 5 ms late, and not 9.
        ([(5.0, -5.0, 1e-6), (6.0, -4.991, 0.01), (7.0, -4.99, 1e-6)], 1005.0),
        # The line is out of its bounds.
        ([(5.0, -5.0, 1e-6), (6.0, -4.991, 0.001), (7.0, -4.99, 1e-6)], 1008.0),
        # After the others: they lost 5 ms in 0.5 s.
        ([(5.0, -5.0, 1e-6), (5.5, -4.995, 1e-6), (6.0, -4.981, 0.02)], 1010.0),
        # After two that follow each other in a tenth of a second: a clock does not lose 1 ms in it.
        ([(5.0, -5.0, 1e-3), (5.1, -4.999, 1e-3), (6.0, -4.981, 0.02)], 1000.5),
        # One other.
        ([(5.0, -5.0), (6.0, -4.991, 0.02)], 1000.0),
    ],
    ids=["between", "out of bounds", "after", "short", "one"],
)
def test_comparison_on_a_busy_host_follows_the_others(tmp_path, offsets, begins):
    record(tmp_path, 0)
    record(tmp_path, 1, late=5.0, offsets=offsets)
    (run,) = read(tmp_path)
    slices = check({"traceEvents": events(run)})
    # The second computing of rank 1 begins with its second step, at 1 s of rank 0's fit, and rank 0's epoch at 0.1 s.
    (begin,) = (b for n, b, _ in drawn(slices, 1, STEPS) if n == "steps 2 to 3")
    assert begin == pytest.approx(begins - 100, abs=0.05)


def test_record_without_offsets_has_the_time_of_day(tmp_path):
    record(tmp_path, 0, time=1.7e9)
    record(tmp_path, 1, time=1.7e9 + 0.25)
    (run,) = read(tmp_path)
    slices = check({"traceEvents": events(run)})
    assert [drawn(slices, rank, STEPS)[0][1] for rank in (0, 1)] == [100, 350]
    assert clock_error(run) is None


def test_part_of_the_steps_and_the_file(tmp_path):
    write_run(tmp_path, "Threshold()", workers=3, outcome=None)
    (run,) = read(tmp_path)
    write(run, tmp_path / "trace.json", (12, 13))
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = check(trace)
    assert trace["otherData"]["strategy"] == "Threshold()"
    for rank in range(3):
        names = [e["name"] for e in slices[rank, STEPS] if e["name"].startswith("step")]
        assert (names, len(slices[rank, EPOCHS])) == (["step 12", "step 13"], 4)
    write(run, tmp_path / "trace.json")
    assert len(check(json.loads((tmp_path / "trace.json").read_text()))[0, STEPS]) == 40 * 6
    assert KIND.mark in (tmp_path / "trace.json").read_bytes()[:100]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("clock", {"time": 0.5, "offset": -1e90, "error": 1.0}),
        ("steps", {"step": [5, 6], "time": [0.1, 2.0], "seconds": [9.0, 9.0], "waiting": [1e90, None]}),
        ("epoch", {"epoch": 2, "step": 4, "time": -3.0, "begin": 7.0, "spans": [["flush", 9.0, 1.0]], "logs": {}}),
    ],
)
def test_damaged_records_have_a_trace_by_the_schema(tmp_path, kind, values):
    record(tmp_path)
    record(tmp_path, 1, offsets=[(0.0, 0.0)])
    with (tmp_path / "rank-1.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, **values}) + "\n")
    (run,) = read(tmp_path)
    assert len(check({"traceEvents": events(run)})) == 4


def test_empty_record_has_a_trace(tmp_path):
    Writer(tmp_path, 0).write("fit", schema=SCHEMA, rank=0, size=1)
    (run,) = read(tmp_path)
    assert check({"traceEvents": events(run)}) == {}


def test_trace_overwrites_traces_only(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("{}")
    with pytest.raises(Exception, match="trace: --output: expected a new file or an earlier trace, got"):
        write_text("x", path, KIND)
    write_text("x", path, KIND, force=True)
    assert path.read_text() == "x"
