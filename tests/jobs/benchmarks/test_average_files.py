"""The benchmark of averaging files runs, and its figures are consistent."""

import json

import pytest

from hvdx.jobs.benchmarks import average_files


def test_figures_of_small_files(tmp_path, capsys):
    out = tmp_path / "figures.json"
    words = ["--formats", "safetensors,params", "--size", "0.02", "--rounds", "1", "--json", str(out)]
    assert average_files.main([*words, "--folder", str(tmp_path)]) in (0, 1)
    facts = json.loads(out.read_text())
    assert [row["format"] for row in facts["rows"]] == ["safetensors", "params"]
    for row in facts["rows"]:
        assert 0 < row["no_sync_s"] <= row["average_s"]
        assert row["ratio"] == pytest.approx(row["read_whole_s"] / row["average_s"], rel=1e-5)
        assert 0 < row["memory_MB"] < average_files.GOALS["memory_MB"]
    assert sorted(tmp_path.iterdir()) == [out]
    assert "of the speed of plain reads" in capsys.readouterr().out


def test_unknown_format_is_an_error():
    with pytest.raises(SystemExit, match="expected some of safetensors, pt"):
        average_files.main(["--formats", "docx"])
