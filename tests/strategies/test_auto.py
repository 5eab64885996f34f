import numpy as np
import pytest

from hvdx.costs.model import Situation
from hvdx.costs.types import Codec, Link
from hvdx.strategies import AllReduce, Auto, Threshold, auto
from tests.strategies.virtual import SPECS, on_all

SHARED_MEMORY = Link(5e-5, 3e9)
GIGABIT = Link(2e-4, 125e6)
SLOW = Link(3e-4, 12.5e6)
BASE = Situation(2, (26_122,), 0.001, Link(1e-3, 1.25e6))


def decide(network, size=2, elements=2_000_000, computing=0.02):
    return Auto().decide(Situation(size, (elements,), computing, network))


def test_slow_network_gets_compression_and_the_reason(monkeypatch):
    monkeypatch.setattr(auto, "codec_speed", lambda *_: Codec())
    strategy, reason = decide(SLOW)
    assert isinstance(strategy, Threshold)
    assert "100 Mbit/s" in reason
    # 640 ms of transfer, and 2 ms of copies
    assert "642 ms in float32" in reason
    assert reason.endswith("training with Threshold().")


def test_fast_network_trains_dense_and_says_so():
    strategy, reason = decide(SHARED_MEMORY)
    assert repr(strategy) == "AllReduce()"
    assert "Threshold compression does not pay here: training with AllReduce()" in reason


def test_large_model_on_a_fast_network_takes_fp16(monkeypatch):
    """Half the bytes save enough time, and a slow codec does not."""
    monkeypatch.setattr(auto, "codec_speed", lambda *_: Codec(encode_element=2e-9))
    strategy, reason = decide(Link(5e-5, 1e9), size=2, elements=200_000_000, computing=3.0)
    assert isinstance(strategy, AllReduce)
    assert strategy.compression == "fp16"
    assert "Threshold compression does not pay here: training with AllReduce(compression='fp16')" in reason


def test_compression_pays_for_many_workers_too(monkeypatch):
    """The bytes of an all-gather grow with the number of workers, those of a ring and of shards do not."""
    monkeypatch.setattr(auto, "codec_speed", lambda *_: Codec(decode_entry=1e-6))
    few = decide(GIGABIT, size=4, elements=2_000_000, computing=0.0005)[0]
    many = decide(Link(1e-5, 125e6), size=20_000, elements=2_000_000, computing=0.0005)[0]
    assert isinstance(few, Threshold)
    assert isinstance(many, Threshold)
    situation = Situation(20_000, (2_000_000,), 0.0005, Link(1e-5, 125e6))
    gathered, chosen = (
        Threshold(target_density=0.01, exchange=kind).predict(situation).seconds for kind in ("all_gather", "auto")
    )
    assert gathered > 10 * chosen


def test_least_bad_strategy_and_one_worker_where_no_exchange_is_fast_enough():
    """The network of jobs/fashion_mnist.py on digits, on a long link of 10 Mbit/s, and one a thousand times larger."""
    strategy, reason = decide(Link(5e-2, 1.25e6), elements=26_122, computing=0.0005)
    assert isinstance(strategy, Threshold)
    assert "One worker alone would be as fast: 2 workers take" in reason
    _, reason = decide(Link(1e-3, 1.25e6), elements=26_122_000, computing=0.001)
    assert "One worker alone would be as fast: at so low a density" in reason
    assert "2 workers take 0.023 times" in Auto()._declined(BASE, AllReduce().predict(BASE))
    assert "One worker" not in decide(Link(1e-3, 1.25e6), size=1, elements=26_122, computing=0.0005)[1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_trial_averages(size):
    def run(comm):
        exchange = Auto().open(comm, SPECS)
        tensors = [np.full(s.shape, comm.rank + 1.0, np.float32) for s in SPECS]
        got = [exchange.step(tensors) for _ in range(3)][-1]
        assert len(exchange.computed) == 2
        assert exchange.network.bandwidth > 0
        return [a.copy() for a in got]

    for got in on_all(size, run):
        for array, spec in zip(got, SPECS, strict=True):
            np.testing.assert_array_equal(array, np.full(spec.shape, (size + 1) / 2, np.float32))
