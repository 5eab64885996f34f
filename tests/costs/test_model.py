"""The cost model: formulas by hand-counted examples."""

# Tests: hvdx/costs/types.py

import dataclasses

import pytest

from hvdx.costs.model import Situation, split_layers
from hvdx.costs.types import Codec, Layer, Link, Machine

# Powers of ten, so that each term can be read off; no overhead of messages, and an endless memory.
PLAIN = Machine(memory=1e30, codec=Codec(encode_element=1e-9))
BASE = Situation(4, (1_000_000,), 0.02, Link(1e-3, 1e6), PLAIN, "mpi", batch=32, slots=1.0)


def change(**values):
    return dataclasses.replace(BASE, **values)


def test_ring_and_doubling_are_those_of_mpi():
    # 2 * 3 rounds of a quarter of the bytes, or 2 rounds of all: MPI takes the faster.
    assert BASE.ring(4e6) == pytest.approx({"latency": 6e-3, "transfer": 6.0})
    assert BASE.ring(4e2) == pytest.approx({"latency": 2e-3, "transfer": 8e-4})
    assert change(link=Link(1e-3, 1e6, reducing=0.5)).ring(4e6)["transfer"] == pytest.approx(12.0)


def test_sum_over_mpi_takes_the_bytes_of_a_ring():
    found = BASE.reduction(4, 1_000_000)
    # 3 quarters of the bytes there and back, at a megabyte a second; the two ends of the pipeline.
    assert found["transfer"] == pytest.approx(6.0)
    assert 2e-3 < found["latency"] < 4e-3
    assert BASE.reduction(2, 1_000_000)["transfer"] == pytest.approx(3.0)


def test_sum_on_one_host_only_passes_over_memory():
    found = change(per_host=4, machine=dataclasses.replace(PLAIN, memory=1e9)).reduction(4, 1_000_000)
    # Into shared memory, a piece of 4 vectors and of the sum, and out.
    assert found["copying"] == pytest.approx(4e6 * (2 + 5 / 4 + 2) / 1e9)
    assert found["transfer"] == 0.0


def test_backward_pass_hides_the_transfer_of_all_buckets_but_the_last():
    # Four buckets of 4 MB, each a second of the link. The pass ends after 9 s; one bucket is left then.
    situation = change(workers=2, tensors=(1_000_000,) * 4, computing=9.0, link=Link(0.0, 4e6))
    assert situation.hidden(4, 4.0) == pytest.approx(3.0)
    # The link is busy from the first bucket on: it hides what is left of the pass.
    assert situation.hidden(4, 40.0) == pytest.approx(9.0 - (3.0 + 1.5))
    for other in ({"engine": "horovod"}, {"per_host": 2}, {"tensors": (4_000_000,)}):
        assert dataclasses.replace(situation, **other).hidden(4, 4.0) == pytest.approx(0.0)


def test_link_of_a_host_carries_one_vector():
    alone, shared = (change(workers=w, per_host=k).reduction(4, 1_000_000) for w, k in ((2, 1), (8, 4)))
    assert shared["transfer"] == pytest.approx(alone["transfer"])


def test_split_layers_send_activations():
    wide = Layer("wide", 1000, 1000, 1_000_000)
    found = split_layers(change(layers=(wide,)))
    # Inputs to 3 others; a quarter of the outputs there and back.
    assert found.sent == pytest.approx(3 * 32 * 4 * (1000 + 2 * 250))
    assert found.terms["transfer"] == pytest.approx(found.sent / 1e6)
    assert found.note == "split wide"
    assert found.memory["weights"] == pytest.approx(1e6)
    assert split_layers(change(layers=(dataclasses.replace(wide, parameters=100),))) is None
    assert split_layers(change(layers=(wide,), batch=0)) is None


def test_workers_of_a_host_share_its_link():
    alone, shared = (change(workers=8, per_host=k).all_to_all(1000.0)["transfer"] for k in (1, 4))
    assert alone == pytest.approx(7e-3)
    assert shared == pytest.approx(16e-3)  # each of 4 ranks sends to 4 on the other host
    assert change(per_host=4).network.bandwidth == 1e30


def test_slowest_worker_is_waited_for():
    noisy = change(spread=1e-3)
    assert 0.8e-3 < noisy.slowest < 1.2e-3
    assert change(spread=1e-3, workers=1024).slowest > 3e-3
