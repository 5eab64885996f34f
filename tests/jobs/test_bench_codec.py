"""The benchmarks of the codec: that they run, and that the bits on the wire meet their goals."""

import json

import numpy as np
import pytest

from hvdx.cli.main import main
from hvdx.jobs import bench_kernels, bench_wire


def report(capsys, *words):
    """Exit code and JSON document of `hvdx bench`."""
    code = main(["bench", *words, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_wire_meets_its_goals(capsys):
    code, document = report(capsys, "wire", "--sizes", "10000000")
    assert [r["density"] for r in document["independent"]] == list(bench_wire.DENSITIES)
    for r in document["independent"]:
        assert r["ratio"] <= 1.02, r
        assert r["bits"] < r["elias_fano"] < r["deeplearning4j"]
    for r in document["recorded"]["all"]:
        assert r["ratio"] < 1.00, r
    assert code == 0
    assert document["goals_missed"] == 0


def test_wire_says_which_goal_is_missed(monkeypatch, capsys):
    monkeypatch.setattr(bench_wire, "GOAL_REAL", 0.5)
    assert main(["bench", "wire", "--sizes", "1000", "--densities", "0.1"]) == 1
    assert "3 missed" in capsys.readouterr().out


def test_entropies_are_those_of_the_literature():
    known = {0.1: 5.69, 1 / 16: 6.40, 1e-2: 9.08, 1e-3: 12.41, 1e-4: 15.73}
    assert {p: round(bench_wire.entropy(p), 2) for p in known} == known
    # Elias-Fano: 2 + log2(n / entries) bits, at most, and the sign.
    assert bench_wire.elias_fano(10, 10 * 64) == pytest.approx(6 + 2 + 0.1 + 1)


def test_kernels_reports_every_density_and_thread(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    words = ["--elements", "300000", "--rounds", "1", "--densities", "0.001", "0.01", "--threads", "1", "2"]
    main(["bench", "kernels", *words, "--json", str(path)])
    document = json.loads(path.read_text())
    assert [(f["density"], f["threads"]) for f in document["figures"]] == [(0.001, 1), (0.001, 2), (0.01, 1), (0.01, 2)]
    text = capsys.readouterr().out
    assert "of np.add" in text
    for missed in document["goals_missed"]:
        assert missed in text


def test_kernels_take_little_memory():
    n = 1 << 24
    for density in (1e-3, 0.1):
        case = bench_kernels.Case(n, density)
        case.reset()
        message = len(bench_kernels.cpu.encode([case.update], case.residual, case.runs, threads=2).tiles)
        extra = bench_kernels.extra_memory(case, threads=2)
        if extra is None:
            pytest.skip("this system does not count a process's peak memory")
        assert extra <= message + 0.01 * 4 * n


def test_recorded_update_is_whole():
    with np.load(bench_wire.RECORDED) as saved:
        assert len(saved["densities"]) == 3
        assert len(saved["sizes"]) == 6
        for i in range(3):
            assert (np.abs(saved[f"values{i}"]) >= saved[f"tau{i}"]).all()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["wire", "--update", "/nowhere.npz"], "expected a file that jobs/record_update.py wrote"),
        (["wire", "--sizes", "0"], "--sizes of at least 1"),
        (["wire", "--densities", "1"], "between 0 and 1"),
        (["wire", "--sizes", "100", "--densities", "0.1", "--json", "/nowhere/wire.json"], "folder that exists"),
        (["kernels", "--rounds", "0"], "at least 1 element, round and thread"),
    ],
)
def test_bad_options_are_named(words, text, capsys):
    assert main(["bench", *words]) == 2
    assert text.lower() in capsys.readouterr().err.lower()


def test_wire_claims_no_goal_that_it_did_not_measure(capsys):
    main(["bench", "wire", "--sizes", "1000", "--densities", "0.1"])
    assert "10,000,000" not in capsys.readouterr().out
