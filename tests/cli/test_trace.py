"""`hvdx trace`: the file, the fit that it is about, and its errors."""

import json

import pytest

from hvdx.cli.main import main
from tests.report.synthetic import write_run
from tests.report.timeline import check


def test_trace_of_a_record(tmp_path, capsys):
    write_run(tmp_path, "AllReduce()", outcome=None)
    assert main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for words in ("AllReduce(): 2 of 2 ranks", "no measured offsets", f"trace: {tmp_path / 'trace.json'}", "perfetto"):
        assert words in said
    assert len(check(json.loads((tmp_path / "trace.json").read_text()))) == 4
    other = tmp_path / "other.json"
    assert main(["trace", str(tmp_path), "-o", str(other), "--steps", "3:3"]) == 0
    names = [e["name"] for e in check(json.loads(other.read_text()))[1, 2]]
    assert names == ["step 3", "computing", "encoding", "waiting", "exchanging", "decoding"]


def test_one_of_several_fits_is_chosen(tmp_path, capsys):
    for strategy in ("AllReduce()", "Threshold()"):
        write_run(tmp_path / strategy[:-2], strategy, outcome=None)
    assert main(["trace", str(tmp_path)]) == 2
    assert "trace: --fit: expected a number from 1 to 2, got None" in (error := capsys.readouterr().err)
    assert f"2: {tmp_path / 'Threshold'}, Threshold()" in error
    assert main(["trace", str(tmp_path), "--fit", "3"]) == 2
    assert main(["trace", str(tmp_path), "--fit", "2"]) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["strategy"] == "Threshold()"


@pytest.mark.parametrize("steps", ["3", "a:b", "5:2", "0:2", "-1:", ""])
def test_steps_that_are_no_range_are_refused(steps, tmp_path, capsys):
    assert main(["trace", str(tmp_path), f"--steps={steps}"]) == 2
    assert f"--steps: expected FIRST:LAST, got {steps!r}" in capsys.readouterr().err


def test_folders_without_records_and_other_files_are_refused(tmp_path, capsys):
    assert main(["trace", str(tmp_path / "absent")]) == 2
    assert "expected the folder of a record, got" in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 2
    assert "expected records of runs" in capsys.readouterr().err
    write_run(tmp_path, "AllReduce()", outcome=None)
    (tmp_path / "trace.json").write_text("{}")
    assert main(["trace", str(tmp_path)]) == 2
    assert "expected a new file or an earlier trace" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--force"]) == 0
