"""The job with split layers."""

import json
import re

import pytest

from hvdx.jobs.benchmarks import harness, split
from tests.launch import ROOT, run

JOB = str(ROOT / "jobs" / "hybrid.py")
SMALL = {
    "cnn": ("--data", "digits", "--width", "768", "--channels", "8"),
    "embedding": ("--rows", "400", "--columns", "8", "--classes", "50", "--length", "4", "--draw", "whole"),
}


def train(ranks, *options):
    done = run(ranks, [JOB, "--steps", "6", "--batch", "8", *options], timeout=240)
    assert done.code == 0, done
    return done.out


def number_after(words, out):
    return float(re.search(rf"{words}\s+([\d.]+)", out).group(1))


@pytest.mark.parametrize("model", SMALL)
def test_split_training_has_the_loss_of_whole_layers_and_holds_less(model, tmp_path):
    whole = train(2, "--model", model, *SMALL[model])
    split = train(2, "--model", model, *SMALL[model], "--split", "2", "--summary", "--save", str(tmp_path / "m.keras"))
    loss = "training loss, mean of all steps"
    assert number_after(loss, split) == pytest.approx(number_after(loss, whole), abs=1e-4)
    held = "weights and optimiser, this worker"
    assert number_after(held, split) < 0.8 * number_after(held, whole)
    assert number_after("bytes sent a step, split layers", whole) == 0
    assert number_after("bytes sent a step, split layers", split) > 0
    assert "2 ranks in groups of 2, batches of 8" in split
    alone = "import sys, keras; m = keras.models.load_model(sys.argv[1]); print(len(m.layers), 'hvdx' in sys.modules)"
    assert run(1, ["-c", alone, str(tmp_path / "m.keras")]).out.strip().endswith("False")


def test_missing_images_are_an_error(tmp_path):
    done = run(1, [JOB, "--folder", str(tmp_path)])
    assert done.code == 2, done
    assert "apt install dataset-fashion-mnist" in done.out


def test_recorded_figures_meet_the_goals():
    """A split step takes at most a tenth of AllReduce's, and the link carries the bytes of the formula."""
    document = json.loads((ROOT / "docs" / "benchmarks" / "split.json").read_text())
    rows = {row["way"]: row for row in document["rows"]}
    for way in ("pair", "single"):
        assert rows[way]["milliseconds"] <= 0.1 * rows["all_reduce"]["milliseconds"]
        assert rows[way]["payload"] == pytest.approx(rows[way]["formula"], rel=0.05)
        assert rows[way]["layers_sent"] + rows[way]["strategy_sent"] == pytest.approx(rows[way]["formula"], rel=1e-3)
    assert len(harness.table(document["rows"], split.COLUMNS).splitlines()) == 2 + len(rows)
