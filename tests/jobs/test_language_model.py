"""The language model: the same training on one process, on two, and with split layers; and under every strategy."""

import json
import re
import zipfile

import numpy as np
import pytest

from hvdx.jobs import data, language_model
from tests.launch import ROOT, run

JOB = str(ROOT / "jobs" / "language_model.py")
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "12", "--characters", "20000"]
# 21 windows in batches of 8: two workers have different numbers of batches.
TRAINING = [*TINY, "--held-out", "21", "--steps", "12", "--epochs", "2", "--rate", "0.01", "--quiet", "--digest"]


def digests(out):
    return re.findall(r"weights of rank \d+: ([0-9a-f]{16})", out)


def train(ranks, folder, *options):
    """Run the job; return its output and its losses."""
    file = folder / "history.json"
    done = run(ranks, [JOB, *TRAINING, "--batch", str(16 // ranks), "--history", str(file), *options])
    assert done.code == 0, done
    assert len(digests(done.out)) == ranks, done
    assert len(set(digests(done.out))) == 1, done
    return done.out, json.loads(file.read_text())


@pytest.mark.long
def test_two_workers_and_split_layers_have_the_losses_of_one_process(tmp_path):
    out, alone = train(1, tmp_path)
    assert re.search(r"text: \d+ files, 20,000 characters; \d+ files, [\d,]+ characters held out", out)
    assert "6,705 parameters on each of 1 worker(s), 12 steps an epoch" in out
    assert f"held-out loss, nats per character  {alone['val_loss'][-1]:.4f}" in re.sub("  +", "  ", out)
    # A model that knows nothing has a loss of log(97) = 4.57.
    assert alone["loss"][0] < 4.2
    assert alone["val_loss"][1] < alone["val_loss"][0] - 0.1
    _, together = train(2, tmp_path)
    model = tmp_path / "model.keras"
    out, split = train(2, tmp_path, "--split", "2", "--save", str(model))
    assert "5,649 parameters on each of 2 worker(s)" in out
    for kind in ("loss", "val_loss"):
        np.testing.assert_allclose(together[kind], alone[kind], rtol=1e-5)
        np.testing.assert_allclose(split[kind], alone[kind], rtol=1e-5)
    with zipfile.ZipFile(model) as archive:
        assert "hvdx" not in archive.read("config.json").decode()


STRATEGIES = [
    "all_reduce:compression=fp16",
    "threshold:target_density=0.1",
    "threshold:target_density=0.1,max_staleness=inf",
    "auto",
    "parameter_averaging:period=2",
    "parameter_server:servers=colocated",
]
EVERY = """
import sys
import tensorflow as tf
from hvdx.jobs import language_model
tf.config.run_functions_eagerly(True)
for strategy in sys.argv[1].split():
    print("STRATEGY", strategy, language_model.main([*sys.argv[2:], "--strategy", strategy]), flush=True)
"""


@pytest.mark.long
def test_every_strategy_trains_and_leaves_identical_weights():
    options = [*TINY, "--steps", "2", "--epochs", "1", "--batch", "2", "--held-out", "4", "--quiet", "--digest"]
    done = run(2, ["-c", EVERY, " ".join(STRATEGIES), *options])
    assert done.code == 0, done
    found = dict.fromkeys(STRATEGIES, 0)
    for strategy, code in re.findall(r"STRATEGY (\S+) (\d)", done.out):
        found[strategy] += code == "0"
    assert set(found.values()) == {2}, done
    # Two workers end with the same weights, and no two strategies do.
    pairs = digests(done.out)
    assert len(pairs) == 2 * len(set(pairs)) == 2 * len(STRATEGIES), done
    losses = re.findall(r"held-out loss, nats per character +([\d.]+)", done.out)
    assert len(losses) == len(STRATEGIES), done
    assert all(4 < float(loss) < 4.8 for loss in losses), done


def test_every_tenth_file_is_held_out(tmp_path):
    for i in range(60):
        (tmp_path / f"module{i:02}.py").write_text(f"{i:02}é\t~")
    (tmp_path / "notes.txt").write_text("other")
    text = data.load_text(str(tmp_path))
    assert (text.files, text.held_out_files) == (54, 6)
    np.testing.assert_array_equal(text.held_out, data.encode("\n".join(f"{i:02}é\t~" for i in range(9, 60, 10))))
    np.testing.assert_array_equal(text.train, data.encode("\n".join(f"{i:02}é\t~" for i in range(60) if i % 10 != 9)))
    assert set(text.train.tolist()) == {data.VOCABULARY - 1, data.VOCABULARY - 2, 94, *range(16, 25)}
    np.testing.assert_array_equal(data.load_text(str(tmp_path), 7).train, text.train[:7])


def test_missing_files_and_wrong_options_are_errors(tmp_path, capsys):
    for i in range(49):
        (tmp_path / f"module{i}.py").write_text("pass")
    with pytest.raises(FileNotFoundError, match=r"at least 50 Python files in .*, got 49\. Install .* --folder"):
        data.load_text(str(tmp_path))
    code = "import sys; from hvdx.jobs import language_model; sys.exit(language_model.main(sys.argv[1:]))"
    done = run(2, ["-c", code, "--folder", str(tmp_path)])
    assert done.code == 2, done
    assert done.out.count("language_model: text: expected at least 50 Python files") == 1
    with pytest.raises(SystemExit):
        language_model.arguments(["--width", "10", "--heads", "4"])
    assert "--width: expected a multiple of --heads (4), got 10" in capsys.readouterr().err
