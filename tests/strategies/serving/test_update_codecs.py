"""Decoding of updates at the server."""

import numpy as np
import pytest

from hvdx.errors import ConfigError, WireError
from hvdx.strategies.serving.messages import SessionConfig
from hvdx.strategies.serving.update_codecs import decoder, is_finite, make_codec

CODECS = ["fp16", "bf16", "threshold:0.4"]


def raw(array):
    return np.frombuffer(array.tobytes(), np.uint8).copy()


def encoded(spelling, update):
    codec = make_codec(spelling)
    message, state = codec.encode([update], codec.init([update.size]))
    sent = [np.zeros(update.size, np.float32)]
    codec.decode([message], sent)
    return message, sent[0], state


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_plain_updates_are_added_exactly(dtype):
    update = np.array([1.5, -2.0, 0.1], dtype)
    add = decoder(SessionConfig(2, 3, dtype))(raw(update), 0)
    out = np.ones(3, dtype)
    add(out, 1.0)
    np.testing.assert_array_equal(out, np.ones(3, dtype) + update)


@pytest.mark.parametrize("factor", [0.5, 1 / 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_factor_scales_the_update(dtype, factor):
    update = np.array([1.5, -2.0, 0.1], dtype)
    add = decoder(SessionConfig(2, 3, dtype))(raw(update), 0)
    out = np.ones(3, dtype)
    add(out, factor)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, np.ones(3, dtype) + update * np.dtype(dtype).type(factor))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("spelling", CODECS)
def test_encoded_updates_are_added_as_decoded(spelling, factor, dtype):
    update = np.random.default_rng(0).normal(size=50).astype(np.float32)
    message, sent, _ = encoded(spelling, update)
    assert sent.any()
    out = np.ones(50, dtype)
    decoder(SessionConfig(2, 50, dtype, spelling))(message, 1)(out, factor)
    np.testing.assert_array_equal(out, np.ones(50, dtype) + sent * np.float32(factor))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_plain_updates_that_are_not_finite_are_refused(bad):
    update = np.array([1.0, bad, 2.0], np.float32)
    assert decoder(SessionConfig(2, 3))(raw(update), 0) is None


def test_infinities_of_both_signs_are_not_finite():
    assert not is_finite(np.array([np.inf, -np.inf], np.float32))
    assert is_finite(np.zeros(0, np.float32))


def test_an_empty_part_accepts_empty_updates():
    add = decoder(SessionConfig(2, 0))(np.zeros(0, np.uint8), 0)
    add(np.zeros(0, np.float32), 0.5)


@pytest.mark.parametrize("size", [0, 2, 3, 5, 8])
def test_plain_updates_of_other_sizes_name_the_rank(size):
    with pytest.raises(WireError, match=r"rank 3: expected 16 bytes, got .*same model") as caught:
        decoder(SessionConfig(4, 4))(np.zeros(size, np.uint8), 3)
    assert caught.value.rank == 3


@pytest.mark.parametrize("spelling", CODECS)
def test_damaged_encoded_updates_name_the_rank(spelling):
    update = np.random.default_rng(0).normal(size=50).astype(np.float32)
    message, _, _ = encoded(spelling, update)
    decode = decoder(SessionConfig(4, 50, "float32", spelling))
    for damaged in (message[:-1], message[:3], np.append(message, np.uint8(0)), np.zeros(0, np.uint8)):
        with pytest.raises(WireError, match="update of rank 3") as caught:
            decode(damaged, 3)
        assert caught.value.rank == 3
    altered = message.copy()
    altered[len(altered) // 2] ^= 1
    with pytest.raises(WireError, match="update of rank 2"):
        decode(altered, 2)
    with pytest.raises(WireError):
        decoder(SessionConfig(4, 49, "float32", spelling))(message, 0)
    for other in CODECS:
        if other != spelling:
            with pytest.raises(WireError):
                decoder(SessionConfig(4, 50, "float32", other))(message, 0)


def test_error_has_the_rank_once():
    with pytest.raises(WireError) as caught:
        decoder(SessionConfig(4, 50, "float32", "fp16"))(np.zeros(9, np.uint8), 3)
    assert str(caught.value) == "update of rank 3: 9 bytes that are not an hvdx message."


def test_codecs_have_spellings():
    assert make_codec("none") is None
    assert make_codec("threshold").target_density == 0.01
    assert make_codec("threshold:0.2").target_density == 0.2
    assert [make_codec(name).name for name in ("fp16", "bf16")] == ["fp16", "bf16"]


@pytest.mark.parametrize(
    "spelling", ["", "zip", "threshold:2", "threshold:0", "threshold:x", "fp16:3", "none:1", None, 3]
)
def test_other_spellings_are_refused(spelling):
    with pytest.raises(ConfigError, match="ParameterServer: codec: "):
        make_codec(spelling)
