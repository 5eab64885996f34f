"""Encoder of `Threshold` by itself: its default order, and samples of gradients."""

import numpy as np
import pytest

from hvdx.comm import LocalComm
from hvdx.strategies import StepInput, TensorSpec, Threshold
from hvdx.strategies.threshold.encoder import ThresholdEncoder
from hvdx.strategies.threshold.lookahead import Lookahead
from hvdx.strategies.threshold.noise import GatheredSample

SPECS = [TensorSpec("a", (2,), 4), TensorSpec("b", (3,), 4)]


@pytest.fixture
def encoder():
    return ThresholdEncoder(Threshold(tau=1.0).options, LocalComm(), SPECS, Lookahead())


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
