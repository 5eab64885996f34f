"""Damaged records: a damaged line is left out with a warning that names file and line, and the rest is reported."""

# Tests: hvdx/report/lines.py, hvdx/foreign.py

import json
import os

import pytest

from hvdx.cli.main import main
from hvdx.report.lines import decode
from hvdx.report.records import read

FIT = {"kind": "fit", "schema": 1, "rank": 0, "size": 1, "id": "a", "time": 1.0, "strategy": "AllReduce()"}
STEPS = {"kind": "steps", "step": [1, 2, 3], "time": [0.1, 0.2, 0.3], "seconds": [0.1, 0.1, 0.1], "sent": [1, 1, 1]}
EPOCH = {"kind": "epoch", "epoch": 1, "step": 3, "time": 0.4, "logs": {"loss": 1.0, "val_loss": 2.0}}
EPOCH |= {"begin": 0.0, "spans": [["flush", 0.3, 0.31], ["evaluation", 0.31, 0.4]]}
END = {"kind": "end", "time": 0.5, "steps": 3, "reason": "done", "counters": {"skipped": 0}}
CLOCK = {"kind": "clock", "time": 0.4, "offset": -3.0, "error": 1e-5}
GOOD = [FIT, STEPS, EPOCH, END, CLOCK]

HUGE = 10**400
ODD = ([], {}, "x", -1, True, float("inf"), float("nan"), HUGE)
# Which line, its field, and values that are damage there.
DAMAGED = {
    (0, "schema"): (*ODD, None, 0.5),
    (0, "size"): (*ODD, None, 0),
    (0, "id"): ([], {}, None),
    (0, "time"): (*ODD[:3], None, HUGE),
    (1, "step"): (*ODD, None, [1, "a", 2], [[1], [2], [3]], [None] * 3, [HUGE] * 3, [3, 2, 1], [0, 0, 0]),
    (1, "seconds"): (*ODD, None, [1, "a", 2], [1, 2], [None] * 3, [HUGE] * 3, [float("inf")] * 3),
    (1, "sent"): (*ODD, None, [1, "a", 2], [1, 2], [HUGE] * 3),
    (2, "epoch"): (*ODD, None),
    (2, "time"): (*ODD[:3], None, HUGE),
    (2, "logs"): ([], "x", None, 3, {"loss": "x"}, {"loss": [1]}, {"loss": HUGE}),
    (2, "begin"): (*ODD[:3], None, HUGE),
    (2, "spans"): (
        None,
        1,
        {},
        "x",
        ["flush"],
        [["flush", 1.0]],
        [[1, 1.0, 2.0]],
        [["flush", "x", 2.0]],
        [["a", 1, HUGE]],
    ),
    (3, "time"): (*ODD[:3], None, HUGE),
    (3, "counters"): ([], "x", None),
    (4, "time"): (*ODD[:3], None, HUGE),
    (4, "offset"): (*ODD[:3], None, HUGE),
    (4, "error"): (*ODD[:3], None, HUGE),
}
RAW = {
    "an array": b"[1, 2]",
    "a number": b"1",
    "text": b"hello\nworld",
    "binary": bytes(range(256)) * 20,
    "nested": b"[" * 100_000,
    "digits": b'{"kind":"end","time":' + b"9" * 5000 + b"}",
    "UTF-16": json.dumps(EPOCH).encode("utf-16"),
    "no kind": b'{"time": 1}',
}


def report(tmp_path, content):
    """Return the exit code of `hvdx report` on a record with this content, in bytes or as objects."""
    folder = tmp_path / "run"
    folder.mkdir()
    if not isinstance(content, bytes):
        content = "".join(json.dumps(line) + "\n" for line in content).encode()
    (folder / "rank-0.jsonl").write_bytes(content)
    return main(["report", "--text", str(folder)])


def test_lines_that_hvdx_writes_are_valid():
    assert [decode(json.dumps(line), 0)[2] for line in GOOD] == [""] * 5
    assert decode(json.dumps(STEPS | {"density": [None, 0.5, 1e-3]}), 0)[2] == ""
    assert decode(json.dumps(STEPS), 3)[2] == "step: expected numbers that grow from 3, got [1, 2, 3]"


@pytest.mark.parametrize(("place", "values"), DAMAGED.items(), ids=[f"{GOOD[i]['kind']}.{name}" for i, name in DAMAGED])
def test_damaged_fields_are_found(place, values):
    line, name = place
    for value in values:
        _, _, problem = decode(json.dumps(GOOD[line] | {name: value}), 0)
        assert problem.startswith(f"{name}: expected"), value


@pytest.mark.parametrize(
    ("line", "name"), [(1, "step"), (2, "epoch"), (2, "step"), (2, "time"), (3, "time"), (4, "offset")]
)
def test_missing_fields_are_found(line, name):
    _, _, problem = decode(json.dumps({k: v for k, v in GOOD[line].items() if k != name}), 0)
    assert name in problem


@pytest.mark.parametrize("what", RAW)
def test_damaged_lines_are_left_out_with_a_warning(tmp_path, what, capsys):
    good = [json.dumps(line).encode() for line in GOOD]
    assert report(tmp_path, b"\n".join([*good[:2], RAW[what], *good[2:], b""])) == 0
    shown = capsys.readouterr()
    assert f"{tmp_path / 'run' / 'rank-0.jsonl'}: line 3: " in shown.err
    assert "left out" in shown.err
    assert "AllReduce" in shown.out or "one worker" in shown.out


@pytest.mark.parametrize("line", range(5))
def test_report_goes_on_without_a_line(tmp_path, line, capsys):
    """Without its first line, there is no fit; the error is one line."""
    damaged = [dict(each) for each in GOOD]
    damaged[line]["time"] = "soon"
    assert report(tmp_path, damaged) == (2 if line == 0 else 0)
    assert f"rank-0.jsonl: line {line + 1}: time: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", json.dumps(STEPS).encode(), json.dumps(FIT | {"schema": 99}).encode()]
)
def test_record_without_a_fit_is_an_error_in_one_line(tmp_path, content, capsys):
    assert report(tmp_path, content) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "nothing"])
def test_record_that_cannot_be_read_is_named(kind, tmp_path, capsys):
    path = tmp_path / "rank-0.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
        os.mkfifo(tmp_path / "outcome.json")
        os.mkfifo(tmp_path / "compare.json")
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "missing")
    assert main(["report", "--text", str(tmp_path)]) == 2
    said = "No such file" if kind == "nothing" else "not a regular file"
    assert f"rank-0.jsonl: expected a record, got: {said}" in capsys.readouterr().err


def test_line_that_is_too_long_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hvdx.foreign.LARGEST", 10_000)
    long = '{"kind":"epoch","logs":{"' + "x" * 30_000 + '":1}}\n'
    (tmp_path / "rank-0.jsonl").write_text(long.join(json.dumps(line) + "\n" for line in GOOD))
    assert [len(run.ranks[0].epochs) for run in read(tmp_path)] == [1]
    assert "got 'a line of more than 10000 bytes'" in capsys.readouterr().err


def test_control_codes_of_a_record_do_not_reach_the_terminal(tmp_path, capsys):
    (tmp_path / "rank-0.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in GOOD).replace("loss", "lo\\u001b[2Jss")
    )
    assert main(["report", "--text", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "lo\\x1b[2Jss" in out


def test_lines_of_a_fit_without_its_first_line_count_for_no_other_fit(tmp_path, capsys):
    later = [FIT | {"schema": "x"}, EPOCH | {"epoch": 2, "logs": {"loss": 9.0}}, END | {"reason": "stopped"}]
    written = [*GOOD, *later, FIT | {"id": "b"}, *GOOD[1:]]
    (tmp_path / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    found = [(len(run.ranks[0].epochs), run.ranks[0].end["reason"]) for run in read(tmp_path)]
    assert found == [(1, "done"), (1, "done")]
    assert f"line {len(GOOD) + 1}" in capsys.readouterr().err
