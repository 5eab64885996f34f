"""Figures of `jobs/benchmarks/predict.py`, from records and cases made by hand."""

from pathlib import Path

import numpy as np
import pytest

from hvdx.jobs.benchmarks import predict
from hvdx.report.lines import COLUMNS
from hvdx.report.records import RankRecord, Run


def run_of(seconds):
    steps = {name: np.zeros(len(seconds)) for name in COLUMNS}
    steps |= {
        "step": np.arange(1.0, len(seconds) + 1),
        "seconds": np.array(seconds),
        "sent": np.full(len(seconds), 8.0),
    }
    return Run(Path("demo"), {0: RankRecord({"size": 1}, steps)})


def test_step_is_a_median_or_a_mean_over_whole_periods():
    assert predict.step_of(run_of([9.0, 9.0, 1.0, 1.0, 5.0]), 1)["step"] == 1.0
    # The first two steps compile; two periods of three steps follow.
    found = predict.step_of(run_of([9.0, 9.0, 1.0, 1.0, 4.0, 1.0, 1.0, 4.0]), 3)
    assert found["step"] == pytest.approx(2.0)
    assert found["bytes"] == 8.0


def test_summary_counts_errors_and_right_choices():
    cases = {
        "mlp 2 1gbit a": {"predicted": 1.0, "measured": {"step": 1.0}},
        "mlp 2 1gbit b": {"predicted": 1.5, "measured": {"step": 3.0}},
        "mlp 2 1gbit c": {"measured": {"failed": "no answer"}},
    }
    text = predict.summary(cases)
    assert "1e+03 (1.00)  3e+03 (0.50)" in text
    assert "median error 25%; within 30 %: 1 of 2 (50%)" in text
    assert "measured first in 1 of 1 settings" in text
    assert predict.summary({}) == "no finished cases"
