"""Encoder of `Threshold` by itself: its default order, and samples of gradients."""

import numpy as np
import pytest

from hvdx.comm import LocalComm
from hvdx.strategies import StepInput, TensorSpec, Threshold
from hvdx.strategies.threshold.encoder import ThresholdEncoder
from hvdx.strategies.threshold.gradient_noise import GatheredSample

SPECS = [TensorSpec("a", (2,), 4), TensorSpec("b", (3,), 4)]


@pytest.fixture
def encoder():
    return ThresholdEncoder(Threshold(tau=1.0).options, LocalComm(), SPECS)


def test_elements_are_in_the_order_of_the_tensors_by_default(encoder):
    encoded = encoder.encode(StepInput([np.float32([3, 0.5]), np.float32([0, 0, -1])]), 0)
    out = np.zeros(5, np.float32)
    encoded.codec.decode([encoded.message], [out])
    assert out.tolist() == [3, 0, 0, 0, -1]
    assert encoder.read_residual().tolist() == [0, 0.5, 0, 0, 0]
    assert (encoded.entries, encoded.tau) == (2, 1.0)


def test_samples_of_an_unknown_kind_are_refused(encoder):
    encoder.observe_sample(None)
    encoder.observe_sample(GatheredSample(np.array([[1.0, -1.0], [-1.0, 1.0]]), 1))
    assert encoder.noise.state[0] == 1
    with pytest.raises(TypeError, match="sample: expected GatheredSample or SummedSample, got ndarray"):
        encoder.observe_sample(np.ones(3))


def test_lookahead_follows_the_lag_and_is_saved():
    """Most elements of updates that drift wait, and the messages stay less than three steps behind."""
    options, random = Threshold(target_density=0.05, warmup="none").options, np.random.default_rng(0)
    encoder, behind = ThresholdEncoder(options, LocalComm(), [TensorSpec("a", (4000,), 4)]), []
    drift = random.normal(size=4000)
    for step in range(120):
        update = (drift + random.normal(size=4000)).astype(np.float32)
        encoder.encode(StepInput([update]), step)
        behind.append(np.dot(encoder.read_residual(), drift) / np.dot(drift, drift))
    saved = encoder.arrays()
    assert 0.5 < saved["lookahead"] < 5
    assert behind[-1] < 3
    again = ThresholdEncoder(options, LocalComm(), [TensorSpec("a", (4000,), 4)])
    again.restore(saved)
    assert again.arrays()["lookahead"] == saved["lookahead"]
