import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdx.kernels import reference, varint
from hvdx.kernels.tiles import Malformed
from tests.kernels.strategies import fixed


@fixed
@given(st.one_of(st.integers(0, 2**63 - 1), st.integers(0, 2**15)), st.binary(max_size=3), st.binary(max_size=3))
def test_get_reads_what_put_wrote(value, before, after):
    written = varint.put(value)
    assert len(written) == max(-(-value.bit_length() // 7), 1)
    assert varint.get(before + written + after, len(before)) == (value, len(before) + len(written))


@fixed
@given(st.binary(max_size=12), st.integers(0, 12))
def test_get_agrees_with_the_specification(data, at):
    try:
        want = reference.read_varint(data, at)
    except Malformed:
        with pytest.raises(ValueError, match="superfluous"):
            varint.get(data, at)
    else:
        assert varint.get(data, at) == want


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "00"), (127, "7f"), (128, "8001"), (16383, "ff7f"), (16384, "808001"), (2**63 - 1, "ffffffffffffffff7f")],
)
def test_put_writes_these_bytes(value, written):
    assert varint.put(value).hex() == written


@pytest.mark.parametrize("data", ["", "80", "ffffffffffffffffff", "ffffffffffffffffff01", "8000", "ff8000", "808080"])
def test_get_refuses(data):
    with pytest.raises(ValueError, match="does not end, or has a superfluous byte"):
        varint.get(bytes.fromhex(data), 0)
