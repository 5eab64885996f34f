"""Tests of the threshold codec that are not in the battery: options, errors, state."""

import time

import numpy as np
import pytest

from hvdx.codec import Threshold, frame
from hvdx.codec.threshold import DEFAULT_TAU
from hvdx.errors import ConfigError, UpdateError, WireError
from hvdx.kernels import reference, varint


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tau": 0.5, "target_density": 0.1}, "both tau and target_density are given. Give one"),
        ({"tau": 0}, "tau: expected a positive number"),
        ({"tau": -1.0}, "got -1.0"),
        ({"tau": float("nan")}, "got nan"),
        ({"tau": float("inf")}, "got inf"),
        ({"tau": 1e-39}, "tau: expected"),
        ({"tau": 2.0**127}, "from 2"),
        ({"target_density": 0}, "target_density: expected a share between 0 and 1, got 0"),
        ({"target_density": 1}, "got 1"),
        ({"target_density": float("nan")}, "got nan"),
        ({"index_coding": "huffman"}, "index_coding: expected 'rice' or 'none', got 'huffman'"),
        ({"threads": 0}, "threads: expected at least 1, got 0"),
        ({"device": "gpu"}, "device: expected 'cpu', 'cuda' or 'cuda:NUMBER', got 'gpu'"),
        ({"device": "cuda:x"}, "got 'cuda:x'"),
    ],
)
def test_options_are_checked(options, text):
    with pytest.raises(ConfigError, match=text):
        Threshold(**options)


@pytest.mark.parametrize("options", [{"tau": "small"}, {"target_density": "low"}, {"threads": "all"}, {"tau": 1e39}])
def test_options_of_another_type_are_config_errors(options):
    """A strategy that is written as text may have such options."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        Threshold(**options)


def test_tau_takes_its_whole_range():
    for tau in (2.0**-126, 1e-30, 1, 2.0**126):
        codec = Threshold(tau=tau)
        update = np.array([tau, -tau / 2], np.float32)
        message, state = codec.encode([update], codec.init([2]))
        out = np.zeros(2, np.float32)
        codec.decode([message], [out])
        assert out.tolist() == [np.float32(tau), 0]
        assert state.residual.tolist() == [0, update[1]]


def test_repr_gives_what_is_not_default():
    assert repr(Threshold()) == f"Threshold(tau={DEFAULT_TAU})"
    assert repr(Threshold(target_density=0.1, threads=2)) == "Threshold(target_density=0.1, threads=2)"


def test_state_counts_what_was_sent():
    codec = Threshold(tau=0.5)
    state = codec.init([3, 0, 5])
    assert state.density == 0
    update = [np.array([1, 0, -1], np.float32), np.zeros(0, np.float32), np.array([0, 0, 0, 0, 0.7], np.float32)]
    _, state = codec.encode(update, state)
    assert state.sent == 3
    assert state.density == 3 / 8
    assert state.step == 1
    assert repr(state) == "ThresholdState(step=1, elements=8, tau=0.5)"
    assert codec.init([]).density == 0


def test_tau_of_a_zero_update_is_found_later():
    codec = Threshold(target_density=0.1)
    _, state = codec.encode([np.zeros(1000, np.float32)], codec.init([1000]))
    assert not state.found
    _, state = codec.encode([np.random.default_rng(0).normal(0, 1e-5, 1000).astype(np.float32)], state)
    assert state.found
    assert state.sent == pytest.approx(100, rel=0.3)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_the_first_update_may_hold_what_cannot_be_sent(value):
    """The search for tau ignores elements that are not finite."""
    codec = Threshold(target_density=0.1)
    state = codec.init([4])
    bad = np.array([1, value, 2, 3], np.float32)
    with pytest.raises(UpdateError) as caught:
        codec.encode([bad], state)
    assert caught.value.element == 1
    codec.encode([np.ones(4, np.float32)], state)


def test_numpy_may_raise_on_overflow():
    """A process with np.seterr(all="raise") gets hvdx' error for an update that overflows with the lookahead."""
    codec = Threshold(target_density=0.1, threads=1)
    update = np.array([1, 3e38, 1e-45, -1], np.float32)
    with np.errstate(all="raise"), pytest.raises(UpdateError, match=r"element 1 is 3\.0"):
        codec.encode([update], codec.init([4]), lookahead=3.0)


def test_too_many_tau_are_refused_with_what_to_do():
    codec = Threshold(tau=2.0**-20)
    with pytest.raises(UpdateError, match=r"update\[1\]: element 2 is 2048.0, which is more than 2\*\*30 times tau"):
        codec.encode([np.ones(3, np.float32), np.array([0, 0, 2048], np.float32)], codec.init([3, 3]))


def test_update_may_be_one_array_of_all_elements():
    codec = Threshold(tau=0.5)
    update = [np.array([0, 1, -2], np.float32), np.array([0.7], np.float32), np.array([3, 0.1], np.float32)]
    expected, _ = codec.encode(update, codec.init([3, 1, 2]))
    message, state = codec.encode([np.concatenate(update)], codec.init([3, 1, 2]))
    assert message.tobytes() == expected.tobytes()
    update[2][1] = np.nan
    with pytest.raises(UpdateError, match=r"update\[2\]: element 1 is nan") as caught:
        codec.encode([np.concatenate(update)], state)
    assert (caught.value.variable, caught.value.element) == (2, 1)


def test_streams_are_refused_on_the_host():
    codec, update = Threshold(tau=0.5), [np.ones(3, np.float32)]
    state = codec.init([3])
    with pytest.raises(ValueError, match="stream: expected none for device='cpu'"):
        codec.encode(update, state, stream=7)
    message, _ = codec.encode(update, state)
    with pytest.raises(ValueError, match="stream: expected none for device='cpu'"):
        codec.decode([message], update, stream=7)


def test_message_is_the_frame_the_runs_and_the_tiles():
    """The bytes of a message of one entry are these three parts."""
    codec = Threshold(tau=0.5)
    message, _ = codec.encode([np.array([0, 0, -0.5, 0], np.float32)], codec.init([4]))
    tiles = reference.write(np.array([2]), np.array([True]), np.array([1]), 4)
    assert message[frame.SIZE :].tobytes() == bytes([1, 4, *np.float32(0.5).tobytes()]) + tiles.tobytes()
    plain = Threshold(tau=0.5, index_coding="none")
    assert (message[3], plain.encode([np.zeros(4, np.float32)], plain.init([4]))[0][3]) == (3, 4)


def sealed(body):
    return frame.seal(np.frombuffer(bytes(frame.SIZE) + body, np.uint8).copy(), 3)


HALF = np.float32(0.5).tobytes()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "lengths of its runs"),
        (b"\x80", "lengths of its runs"),
        (bytes([1]), "lengths of its runs"),
        (bytes([100, 1]), "100 runs in 2 bytes"),
        (bytes([0xFF] * 8 + [0x7F]), "runs in 9 bytes"),
        (bytes([2, 0x80, 0, 4, *HALF, *HALF]), "lengths of its runs: a number with a superfluous byte"),
        (bytes([2, 1, *[0xFF] * 9]), "lengths of its runs: a number that does not end"),
        (bytes([2, 4, 0, *HALF, *HALF]), "a run of no elements"),
        (bytes([3, 2, 3, 1, *HALF, *HALF, *HALF]), "of 4 elements, got one of 5 or more"),
        (bytes([1, 3, *HALF]), "of 4 elements, got one of 3"),
        (bytes([2, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F, 1, *HALF, *HALF]), "got one of"),
        (bytes([0]) + bytes(9), "of 4 elements, got one of 0"),
        (bytes([1, 4, *HALF[:3]]), "lengths of its runs|within its taus"),
        (bytes([2, 2, 2, *HALF, *HALF[:3]]), "within its taus"),
        (bytes([1, 4, *np.float32(0).tobytes()]), "a tau of 0.0"),
        (bytes([1, 4, *np.float32(-1).tobytes()]), "a tau of -1.0"),
        (bytes([1, 4, *np.float32(np.nan).tobytes()]), "a tau of nan"),
        (bytes([2, 2, 2, *HALF, *np.float32(np.inf).tobytes()]), "a tau of inf"),
        (bytes([1, 4, *np.float32(2.0**-127).tobytes()]), "a tau of"),
    ],
)
def test_decode_refuses_wrong_runs(body, text):
    out = np.ones(4, np.float32)
    with pytest.raises(WireError, match=text) as caught:
        Threshold().decode([sealed(bytes([1, 4, *HALF])), sealed(body)], [out])
    assert caught.value.rank == 1
    assert (out == 1).all()


def test_lengths_are_checked_while_they_are_read():
    """A message with millions of runs takes no seconds, whether its size is that of the output or not."""
    codec, out = Threshold(), np.zeros(4, np.float32)
    codec.decode([sealed(bytes([1, 4, *HALF]))], [out])
    runs = 2_000_000
    message = sealed(varint.put(runs) + b"\x01" * runs + HALF * runs)
    begin = time.thread_time()
    for n, text in ((4, "of 4 elements, got one of 5 or more"), (3 * runs, f"got one of {runs}. Give")):
        with pytest.raises(WireError, match=text):
            codec.decode([message], [np.zeros(n, np.float32)])
    codec.decode([message], [np.zeros(runs, np.float32)])
    assert time.thread_time() - begin < 0.8


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("lengths", [7]),
        ("lengths", [-1]),
        ("lengths", [2**60]),
        ("taus", [np.nan]),
        ("taus", [0]),
        ("taus", [-1]),
        ("taus", [np.inf]),
        ("residual", [0, 0, 0, 0, 0, 0, 0, np.inf]),
        ("residual", [1e10, 0, 0, 0, 0, 0, 0, 0]),
        ("residual", [np.nan, 0, 0, 0, 0, 0, 0, 0]),
        ("sent", [-1]),
        ("step", -1),
    ],
)
def test_restore_refuses_values_that_no_encoder_has(name, wrong):
    codec = Threshold(target_density=0.5)
    _, state = codec.encode([np.ones(3, np.float32), np.ones(5, np.float32)], codec.init([3, 5]))
    saved = state.arrays()
    with pytest.raises(ConfigError, match=f"saved {name}"):
        codec.restore(saved | {name: np.array(wrong, saved[name].dtype)}, [3, 5])


def test_restore_refuses_a_tau_for_each_variable():
    codec = Threshold()
    with pytest.raises(ConfigError, match="a tau for each variable, which an option did that was removed"):
        codec.restore(codec.init([8]).arrays() | {"lengths": np.array([3, 5])}, [3, 5])
    with pytest.raises(ConfigError, match="lengths"):
        codec.restore({"residual": np.zeros(8, np.float32)}, [3, 5])


def test_restore_copies():
    codec = Threshold(tau=0.5)
    saved = codec.init([3]).arrays()
    codec.encode([np.full(3, 0.4, np.float32)], codec.restore(saved, [3]))
    assert saved["residual"].tolist() == [0, 0, 0]
