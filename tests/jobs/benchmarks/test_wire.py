"""The benchmarks of the codec run, and the bits on the wire meet their goals."""

# Tests: hvdx/cli/bench.py, hvdx/cli/common/options.py, jobs/benchmarks/kernels.py

import json

import numpy as np
import pytest

from hvdx.cli.main import main
from hvdx.codec import Threshold
from hvdx.jobs.benchmarks import kernels, wire


def report(capsys, *words):
    """Run `hvdx bench`; return its exit code and JSON document."""
    code = main(["bench", *words, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_wire_meets_its_goals(capsys):
    code, document = report(capsys, "wire", "--sizes", "10000000")
    assert [r["density"] for r in document["independent"]] == list(wire.DENSITIES)
    for r in document["independent"]:
        assert r["ratio"] <= 1.02, r
        assert r["bits"] < r["elias_fano"] < r["deeplearning4j"]
    for r in document["recorded"]["all"]:
        assert r["ratio"] < 1.00, r
    assert code == 0
    assert document["goals_missed"] == 0


def test_wire_says_which_goal_is_missed(monkeypatch, capsys):
    monkeypatch.setattr(wire, "GOAL_REAL", 0.5)
    assert main(["bench", "wire", "--sizes", "1000", "--densities", "0.1"]) == 1
    assert "3 missed" in capsys.readouterr().out


def test_entropies_equal_published_values():
    known = {0.1: 5.69, 1 / 16: 6.40, 1e-2: 9.08, 1e-3: 12.41, 1e-4: 15.73}
    assert {p: round(wire.entropy(p), 2) for p in known} == known
    # Elias-Fano: 2 + log2(n / entries) bits, at most, and the sign.
    assert wire.elias_fano(10, 10 * 64) == pytest.approx(6 + 2 + 0.1 + 1)


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


def test_goals_apply_to_the_calls_of_a_training_step(monkeypatch):
    """The turns are steps of an exchange: with a lookahead, with many arrays, with the messages of all workers."""
    turns, called = {}, []

    def record_turns(measured, *_):
        turns.update(measured)
        return {name: [1.0] for name in measured}

    class Recorder(Threshold):
        def encode(self, update, state, lookahead=0.0):
            called.append((len(update), lookahead(np.nan) if callable(lookahead) else lookahead))
            return super().encode(update, state, lookahead)

        def decode_sum(self, messages, out, scale=1.0):
            called.append((len(messages), len(out)))
            super().decode_sum(messages, out, scale)

    monkeypatch.setattr(kernels, "take_turns", record_turns)
    monkeypatch.setattr(kernels, "ARRAYS", 7)
    monkeypatch.setattr("hvdx.codec.Threshold", Recorder)
    figure = kernels.measure(kernels.Case(1000, 0.1), threads=1, rounds=1)
    called.clear()
    for name in ("encode", "encode_ahead", "encode_arrays", "decode"):
        turns[name]()
    assert called == [(1, 0.0), (1, kernels.LOOKAHEAD), (7, kernels.LOOKAHEAD), (kernels.MESSAGES, 1)]
    missed = kernels.shortfalls(figure | {"density": 1e-2, "ratios": {"encode": [0.5] * 3, "encode_ahead": [0.6] * 3}})
    assert missed[0] == "encode at density 0.01, lookahead 0, 1 thread(s): 0.50, not 0.55"


def test_kernels_take_little_memory():
    n = 1 << 24
    for density in (1e-3, 0.1):
        extra = kernels.extra_memory(kernels.Case(n, density), threads=2)
        if extra is None:
            pytest.skip("this system does not report a process's peak memory")
        assert extra <= 2 * n * density + 0.01 * 4 * n


def test_recorded_update_is_complete():
    with np.load(wire.RECORDED) as saved:
        assert len(saved["densities"]) == 3
        assert len(saved["sizes"]) == 6
        for i in range(3):
            assert (np.abs(saved[f"values{i}"]) >= saved[f"tau{i}"]).all()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["wire", "--update", "/nowhere.npz"], "expected a file that jobs/benchmarks/record_update.py wrote"),
        (["wire", "--sizes", "0"], "--sizes of at least 1"),
        (["wire", "--densities", "1"], "between 0 and 1"),
        (["wire", "--sizes", "100", "--densities", "0.1", "--json", "/nowhere/wire.json"], "folder that exists"),
        (["kernels", "--rounds", "0"], "at least 1 element, round and thread"),
    ],
)
def test_bad_options_are_named(words, text, capsys):
    assert main(["bench", *words]) == 2
    assert text.lower() in capsys.readouterr().err.lower()


def test_wire_reports_only_measured_goals(capsys):
    main(["bench", "wire", "--sizes", "1000", "--densities", "0.1"])
    assert "10,000,000" not in capsys.readouterr().out
