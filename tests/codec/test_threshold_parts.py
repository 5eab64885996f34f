"""Messages that are split into parts, and joined again."""

import numpy as np
import pytest

from hvdx.codec import Threshold
from hvdx.errors import ConfigError, WireError


def encoded(seed, parts, part, **options):
    """Return the codec, the messages of some updates, and their sums."""
    random = np.random.default_rng(seed)
    codec = Threshold(part=part, **options)
    state, messages, sums = codec.init([parts * part]), [], []
    for _ in range(3):
        update = random.standard_t(2, size=parts * part).astype(np.float32)
        update[part : 2 * part] *= seed % 2  # a part without entries
        message, state = codec.encode([update], state)
        messages.append(message)
        out = np.zeros(parts * part, np.float32)
        codec.decode([message], [out])
        sums.append(out)
    return codec, messages, sums


@pytest.mark.parametrize("coding", ["rice", "none"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("seed", "parts", "part", "density"),
    [(0, 4, 64, 0.1), (1, 7, 640, 0.02), (2, 3, 1 << 19, 0.01), (3, 16, 4096, 1e-4), (5, 2, 1 << 14, 0.9)],
)
def test_parts_hold_the_entries_of_the_whole(seed, parts, part, density, threads, coding):
    codec, messages, sums = encoded(seed, parts, part, target_density=density, threads=threads, index_coding=coding)
    for message, whole in zip(messages, sums, strict=True):
        pieces = codec.split(message, parts * part)
        assert len(pieces) == parts
        for number, piece in enumerate(pieces):
            out = np.zeros(part, np.float32)
            codec.decode([piece], [out])
            np.testing.assert_array_equal(out, whole[number * part : (number + 1) * part])
        out = np.zeros(parts * part, np.float32)
        codec.decode([codec.join(pieces, part)], [out])
        np.testing.assert_array_equal(out, whole)


def test_parts_change_no_entry_of_a_message():
    """A part is a matter of tiles alone: values and residuals are those of a message that is not split."""
    values = np.random.default_rng(1).normal(size=5 * 128).astype(np.float32)
    outs, residuals = [], []
    for part in (None, 128):
        codec = Threshold(tau=0.7, part=part)
        message, state = codec.encode([values], codec.init([values.size]))
        out = np.zeros_like(values)
        codec.decode([message], [out])
        outs.append(out)
        residuals.append(state.residual)
    np.testing.assert_array_equal(*outs)
    np.testing.assert_array_equal(*residuals)


def test_joined_parts_keep_their_own_taus():
    first, second = (Threshold(tau=tau) for tau in (0.5, 2.0))
    update = [np.full(64, 2.0, np.float32)]
    pieces = [codec.encode(update, codec.init([64]))[0] for codec in (first, second)]
    out = np.zeros(128, np.float32)
    first.decode([first.join(pieces, 64)], [out])
    np.testing.assert_array_equal(out, 2.0)


def test_tiles_of_two_parts_are_not_split():
    codec, plain = Threshold(tau=0.5, part=64), Threshold(tau=0.5)
    message, _ = plain.encode([np.ones(128, np.float32)], plain.init([128]))
    with pytest.raises(ValueError, match="entries of two parts"):
        codec.split(message, 128)


def test_damaged_part_is_named():
    codec, messages, _ = encoded(1, 4, 640, target_density=0.1)
    pieces = codec.split(messages[0], 4 * 640)
    for cut in range(len(pieces[2])):
        with pytest.raises(WireError, match="rank 2"):
            codec.join([*pieces[:2], pieces[2][:cut], pieces[3]], 640)
    with pytest.raises(WireError, match="rank 0"):
        codec.join([pieces[0]], 704)


@pytest.mark.parametrize("options", [{"part": 100}, {"part": 0}])
def test_wrong_parts_are_refused(options):
    with pytest.raises(ConfigError, match="part"):
        Threshold(**options)
