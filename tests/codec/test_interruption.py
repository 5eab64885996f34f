"""Tests of interrupted encoders, of two encoders with one state, and of invalid arguments."""

# Tests: hvdx/codec/threshold.py

import threading

import numpy as np
import pytest

from hvdx.codec import Threshold
from hvdx.errors import ConfigError
from hvdx.kernels import cpu
from hvdx.kernels.tiles import Layout, Runs


def test_interrupted_encoder_does_not_release_its_state(monkeypatch):
    """The residual may hold only a part of the update, so the state must not be used again."""
    codec = Threshold(tau=0.5)
    state = codec.init([8])

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "_join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            codec.encode([np.ones(8, np.float32)], state)
    with pytest.raises(ValueError, match="interrupted, restore a checkpoint"):
        codec.encode([np.ones(8, np.float32)], state)
    with pytest.raises(ValueError, match="interrupted"):
        state.arrays()


def test_one_of_two_threads_gets_a_state():
    codec = Threshold(tau=0.5, threads=1)
    codec.encode([np.ones(1 << 20, np.float32)], codec.init([1 << 20]))
    for _ in range(5):
        state, won, ready = codec.init([1 << 20]), [], threading.Barrier(2)

        def encode(state=state, won=won, ready=ready):
            ready.wait()
            try:
                won.append(codec.encode([np.ones(1 << 20, np.float32)], state))
            except ValueError:
                won.append(None)

        both = [threading.Thread(target=encode) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(30)
        assert won.count(None) == 1


def test_spread_waits_for_its_workers():
    """Tasks use addresses, so none may still run when the caller frees its arrays."""
    begun, go, running = threading.Event(), threading.Event(), []

    def share(i):
        if i == 0:
            assert begun.wait(10)
            threading.Timer(0.2, go.set).start()
            raise KeyboardInterrupt
        running.append(i)
        begun.set()
        assert go.wait(10)
        running.remove(i)

    with pytest.raises(KeyboardInterrupt):
        cpu.spread(share, 2, 2)
    assert running == []


def test_spread_raises_what_a_worker_raises():
    def share(i):
        if i == 2:
            raise OSError("two")

    with pytest.raises(OSError, match="two"):
        cpu.spread(share, 4, 4)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(region=100),
        Layout(region=1 << 31),
        Layout(tile_max=1 << 17),
        Layout(group=1 << 20, tile_min=200_000),
        Layout(tile_min=0),
    ],
)
def test_encode_refuses_a_layout_that_its_buffers_do_not_fit(layout):
    runs = Runs(np.array([64]), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="within the limits that Layout names"):
        cpu.encode([np.zeros(64, np.float32)], np.zeros(64, np.float32), runs, layout=layout)


def test_restore_refuses_a_state_of_another_tau():
    saved = Threshold(tau=0.25).init([4]).arrays()
    with pytest.raises(ConfigError, match=r"made with tau=0.25, this codec has tau=0.5"):
        Threshold(tau=0.5).restore(saved, [4])
