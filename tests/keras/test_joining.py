"""AutoGraph and the functions of hvdx."""

import tempfile

import keras
import numpy as np
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx.log import Log


def test_functions_of_hvdx_are_not_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hvdx.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    @tf.function
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = hvd.allreduce(tf.reduce_sum(model(x)))
        return tape.gradient(loss, model.trainable_variables)

    step(tf.ones((4, 3)))
    for _ in hvdx.shard(np.ones((8, 3), "float32"), 4):
        pass
    converted = [path.read_text() for path in tmp_path.glob("__autograph_generated_file*")]
    assert len(converted) == 1
    assert "def tf__step(x)" in converted[0]


def test_messages_of_a_function_that_is_traced(capfd):
    hvdx.init()
    say = Log("hvdx.test")

    @tf.function
    def step(x):
        say.info("text")
        return x

    capfd.readouterr()
    step(tf.ones(1))
    assert capfd.readouterr().err == "hvdx: text\n"
