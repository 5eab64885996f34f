"""`hvdx report`: the text, the page, and the files that it does not overwrite."""

import sys

import pytest

from hvdx.cli.main import main
from tests.report.synthetic import THREE, write_comparison, write_failure, write_run


def test_text_and_page_of_a_comparison(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra: pip install 'hvdx[report]'")
    write_comparison(tmp_path, THREE)
    write_failure(tmp_path / "runs" / "bad", "ParameterServer()", "rank 1 left")
    assert main(["report", str(tmp_path), "--target", "val_accuracy=0.8"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Time to val_accuracy 0.8",
        "ParameterServer(), 2 workers: 1 of 1 runs failed",
        "AllReduce()",
        "####eeee",
        "rank 1 left",
        f"page: {tmp_path / 'report.html'}",
    ):
        assert words in out
    assert "rank 1 left" in (tmp_path / "report.html").read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_text_alone_needs_no_packages_and_writes_nothing(tmp_path, capsys, monkeypatch):
    for package in ("matplotlib", "jinja2"):
        monkeypatch.setitem(sys.modules, package, None)
    write_run(tmp_path / "run", "AllReduce()", outcome=None)
    assert main(["report", str(tmp_path), "--text"]) == 0
    assert "page:" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert main(["report", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "AllReduce()" in captured.out
    assert "pip install matplotlib jinja2" in captured.err


def test_only_a_report_is_overwritten(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra: pip install 'hvdx[report]'")
    write_run(tmp_path / "run", "AllReduce()")
    output = tmp_path / "notes.html"
    output.write_text("my notes")
    command = ["report", str(tmp_path / "run"), "--output", str(output)]
    assert main(command) == 2
    assert "another file" in capsys.readouterr().err
    assert output.read_text() == "my notes"
    assert main([*command, "--force"]) == 0
    assert main(command) == 0
    assert output.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["{}/none"], "which is not a folder"),
        (["{}"], "expected records of runs"),
        (["{}", "--target", "val_accuracy"], "expected a metric and a number, got 'val_accuracy'"),
        (["{}", "--target", "val_accuracy=nan"], "got 'val_accuracy=nan'"),
        (["{}", "--target", "=1"], "got '=1'"),
        (["{}", "--output", "{}/none/page.html"], "expected a folder that can be written"),
        (["{}", "--output", "{}"], "expected a file that can be written"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(options, words, tmp_path, capsys):
    assert main(["report", *(option.format(tmp_path) for option in options)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    text = capsys.readouterr().out
    for words in ("HVDX_RECORD=run1", "hvdx report run1 run2", "pip install 'hvdx[report]'", "--target METRIC=VALUE"):
        assert words in text
