"""Files of which each rank reads its own: the code of the guide."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx import comm as world
from tests.launch import ROOT
from tests.ranks import models

# Records of each file: their numbers differ, and their sum is no multiple of a step.
LENGTHS = (60, 30, 20, 40, 30)


@pytest.fixture(autouse=True)
def seed():
    """Seed all ranks alike, in place of the fixture of this folder: `hvdx.shard` compares seeds of datasets."""
    keras.utils.set_random_seed(0)


@pytest.fixture
def folder(tmp_path):
    """Return a folder of this rank with the same files on all ranks, whose records have the number of their file."""
    for number, length in enumerate(LENGTHS):
        path = tmp_path / "data" / f"train-{number}.tfrecord"
        path.parent.mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(str(path)) as writer:
            for _ in range(length):
                writer.write(np.float32(number).tobytes())
    return tmp_path


@pytest.mark.graph
def test_files_are_divided_as_the_guide_says(folder, monkeypatch):
    page = (ROOT / "docs" / "guide.md").read_text()
    code = re.search(
        r"^### Files that each worker reads alone\n.*?^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    )[1]
    monkeypatch.chdir(folder)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def parse(record):
        return tf.reshape(tf.io.decode_raw(record, tf.float32), [1]), 0.0

    here = {"hvdx": hvdx, "tf": tf, "model": model, "parse": parse, "samples": sum(LENGTHS)}
    exec(code, here)
    assert int(model.optimizer.iterations) == 10 * (sum(LENGTHS) // (64 * hvdx.size()))
    models.assert_identical(model)

    # The ranks are in different passes after `fit`, so the passes that are compared are those of new shares.
    exec(code.partition("training =")[0], here)
    own = [[name.decode()[-10] for name in here["files"].as_numpy_iterator()] for _ in range(6)]
    everyone = world.start().all_gather_object(own, "names of files")
    passes = [[name for rank in everyone for name in rank[i]] for i in range(6)]
    each = len(LENGTHS) // hvdx.size()
    assert all(len(rank[i]) == each for rank in everyone for i in range(6))
    assert all(len(set(found)) == each * hvdx.size() for found in passes)
    # The file that a pass leaves out is in another.
    assert {name for found in passes for name in found} == {str(number) for number in range(len(LENGTHS))}
    assert len({tuple(found) for found in passes}) > 1
