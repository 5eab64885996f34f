"""The noise of the ranks' gradients, and the correction of their updates."""

import numpy as np
import pytest

import hvdx
from hvdx.strategies import StepInput, TensorSpec
from hvdx.strategies.threshold.gradient_noise import NoiseEstimate, common_sample
from tests.strategies.virtual import on_all

N = 4


def samples(signal, noise, steps=50, size=64):
    """Return float[steps, N, size], samples of the gradients of N ranks: signal + noise * (a normal variable)."""
    random = np.random.default_rng(1)
    return signal * random.normal(size=(steps, 1, size)) + noise * random.normal(size=(steps, N, size))


@pytest.mark.parametrize(
    ("signal", "noise", "ranks", "factor"),
    [(0.0, 1.0, 4, 2.0), (0.0, 1.0, 9, 3.0), (1.0, 0.0, 4, 1.0), (1.0, 1.0, 4, 1.6**0.5), (0.0, 1.0, 1, 1.0)],
)
def test_factor_is_the_root_of_the_ratio_of_second_moments(signal, noise, ranks, factor):
    """The signal has another sign in every step, as true gradients may."""
    estimate = NoiseEstimate()
    for sample in samples(signal, noise):
        estimate.observe(sample)
    assert estimate.factor(ranks) == pytest.approx(factor, rel=0.03)


def test_samples_without_information_leave_the_estimate_unchanged():
    estimate = NoiseEstimate()
    for sample in (np.zeros((N, 0)), np.full((N, 2), np.nan), np.array([[np.inf], [1.0]])):
        estimate.observe(sample)
    assert estimate.factor(N) == 1.0
    estimate.observe(np.zeros((N, 3)))
    assert estimate.factor(N) == 1.0
    for sample in samples(0.0, 1.0):
        estimate.observe(sample)
    assert estimate.factor(N) == pytest.approx(2.0, rel=0.03)


def exchange(comm, **options):
    return hvdx.Threshold(tau=1.0, lookahead=0, **options).open(
        comm, [TensorSpec("a", (2,), 4), TensorSpec("b", (), 4)]
    )


def train(opened, rank, signal, noise, steps=50):
    """Send the update (1, 0), (2) in steps with the given samples; return the result of the last step."""
    for step in samples(signal, noise, steps):
        # 64 elements of the first tensor and 3 of the second: the header has a number of whole integers.
        values = StepInput([np.array([1, 0], np.float32), np.array(2, np.float32)], sample=[step[rank], step[rank][:3]])
        result = [r.copy() for r in opened.take(values)]
    return result


def test_exchange_scales_the_sum_by_the_noise_of_the_samples():
    def run(comm):
        opened = exchange(comm)
        first, second = train(opened, comm.rank, 0.0, 1.0)
        return first.tolist(), float(second), opened.encoder.read_residual().tolist(), opened.telemetry

    results = on_all(N, run)
    assert all(result[:3] == results[0][:3] for result in results)
    first, second, residual, telemetry = results[0]
    assert first == pytest.approx([2.0, 0.0], rel=0.03)
    assert second == pytest.approx(4.0, rel=0.03)
    assert residual == [0.0, 0.0, 0.0]
    # A header has 3 integers, 17 for 67 elements of the sample, and the size of the message.
    assert telemetry.sent == (N - 1) * (telemetry.messages + 50 * 8 * (3 + 17 + 1))


def test_exchange_without_a_sample_takes_the_mean():
    def run(comm):
        opened = exchange(comm)
        return [r.tolist() for r in opened.step([np.array([1, 0], np.float32), np.array(2, np.float32)])]

    assert on_all(N, run) == [[[1.0, 0.0], 2.0]] * N


def test_skipped_step_does_not_change_the_estimate():
    def run(comm):
        opened = exchange(comm)
        sample = [np.array([1.0 - 2.0 * (comm.rank % 2)])]
        opened.take(StepInput([np.zeros(2, np.float32), np.array(0, np.float32)], comm.rank != 1, sample=sample))
        return opened.state_dict().get("noise")

    assert on_all(N, run) == [None] * N


def test_estimate_is_saved_and_restored():
    def run(comm):
        opened, again = exchange(comm), exchange(comm)
        train(opened, comm.rank, 0.0, 1.0, steps=5)
        state = opened.state_dict()
        again.load_state_dict(state)
        same = [train(e, comm.rank, 0.0, 1.0, steps=2)[0].tolist() for e in (opened, again)]
        del state["noise"]  # a checkpoint of an earlier version
        again.load_state_dict(state)
        return same, again.state_dict().get("noise")

    for (first, second), noise in on_all(N, run):
        assert first == second
        assert noise is None


@pytest.mark.parametrize("size", [67, 64, 3])
def test_samples_of_hosts_give_the_estimate_of_all_ranks(size):
    """Eight ranks on two hosts: a host sends the mean of its samples and their root mean square, as whole integers."""
    random, alone, hosts = np.random.default_rng(4), NoiseEstimate(), NoiseEstimate()
    for _ in range(20):
        values = random.normal(size=(8, size)) + random.normal(size=(1, size))
        padded = np.pad(values, ((0, 0), (0, -size % 4)))
        alone.observe(padded)
        common = np.stack([common_sample(values[:4]), common_sample(values[4:])])
        hosts.observe(np.pad(common, ((0, 0), (0, -size % 4))), 4)
    np.testing.assert_allclose(hosts.state, alone.state, rtol=1e-12)
