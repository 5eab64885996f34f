"""Tests of the dense codecs that are not in the battery."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hvdx.codec import Bfloat16, Float16, Raw, frame
from hvdx.errors import UpdateError, WireError
from hvdx.kernels import varint
from tests.kernels.strategies import fixed

CODECS = [Raw(), Float16(), Bfloat16()]
finite = arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(-65504, 65504, width=32))


def round_trip(codec, values):
    message, _ = codec.encode([values], codec.init([values.size]))
    out = np.zeros_like(values)
    codec.decode([message], [out])
    return out


@fixed
@given(finite)
def test_raw_and_float16_round_as_numpy_does(values):
    np.testing.assert_array_equal(round_trip(Raw(), values), values)
    np.testing.assert_array_equal(round_trip(Float16(), values), values.astype(np.float16).astype(np.float32))


@fixed
@given(finite)
def test_bfloat16_rounds_to_the_nearest_and_ties_to_even(values):
    got = round_trip(Bfloat16(), values)
    bits = got.view(np.uint32)
    assert (bits & 0xFFFF == 0).all()
    for neighbour in (bits + np.uint32(0x10000), bits - np.uint32(0x10000)):
        other = neighbour.view(np.float32).astype(np.float64)
        here, there = np.abs(values - got.astype(np.float64)), np.abs(values - other)
        closer = here < there
        tie = (here == there) & (bits >> 16 & 1 == 0)
        assert (closer | tie | np.isnan(other) | (got == 0)).all()


def test_largest_numbers_are_sent_or_refused():
    assert round_trip(Float16(), np.array([65519], np.float32)) == 65504
    with pytest.raises(UpdateError, match=r"element 1 is 65520.0, which fp16 cannot send. Its largest .* bf16 has"):
        round_trip(Float16(), np.array([0, 65520], np.float32))
    largest = np.array([0x7F7F0000], np.uint32).view(np.float32)
    assert round_trip(Bfloat16(), largest) == largest
    with pytest.raises(UpdateError, match=r"element 0 is 3.40.*e.38, which bf16 cannot send"):
        round_trip(Bfloat16(), np.array([np.finfo(np.float32).max]))


def test_the_element_is_counted_within_its_array():
    """The index is also right in an array that is converted in several chunks."""
    update = [np.zeros(3, np.float32), np.zeros(100_000, np.float32)]
    update[1][70_001] = np.nan
    for codec in CODECS:
        with pytest.raises(UpdateError) as caught:
            codec.encode(update, codec.init([3, 100_000]))
        assert (caught.value.variable, caught.value.element) == (1, 70_001)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("stated", [0, 4, 6, 2**40, 2**63 - 1])
def test_decode_refuses_another_number_of_elements(codec, stated):
    """The body has the bytes of 5 elements and the output has 5, but the message states another number."""
    width = 4 if codec.name == "none" else 2
    body = varint.put(stated) + bytes(5 * width)
    message = frame.seal(np.frombuffer(bytes(frame.SIZE) + body, np.uint8).copy(), codec.number)
    out = np.ones(5, np.float32)
    with pytest.raises(WireError, match=f"expected 5 elements, got {stated}"):
        codec.decode([message], [out])
    assert (out == 1).all()
