import numpy as np
import pytest

from hvdx.codec import frame
from hvdx.errors import WireError


def sealed(body=b"something", codec=7):
    return frame.seal(np.frombuffer(bytes(frame.SIZE) + body, np.uint8).copy(), codec)


def test_unseal_gives_what_was_sealed():
    for body in (b"", b"x", bytes(1000)):
        assert frame.unseal(sealed(body), 7, "seven", 0).tobytes() == body


def test_seal_writes_these_bytes():
    """The bytes are pinned, because builds with another checksum would refuse each other's messages."""
    assert sealed(b"")[:4].tobytes() == b"hx\x01\x07"
    assert sealed(b"something").tobytes().hex() == "68780107fd0e4bf0736f6d657468696e67"


@pytest.mark.parametrize("bit", range(8 * len(sealed())))
def test_unseal_refuses_every_flipped_bit(bit):
    message = sealed()
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError, match="rank 3") as caught:
        frame.unseal(message, 7, "seven", 3)
    assert caught.value.rank == 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m[:7], "7 bytes that are not an hvdx message"),
        (lambda m: m[:0], "0 bytes that are not an hvdx message"),
        (lambda m: m[1:], "not an hvdx message"),
        (lambda m: m[:-1], "checksum is wrong"),
        (lambda m: np.append(m, m[:1]), "checksum is wrong"),
        (lambda m: frame.seal(m, 8), r"expected one of codec 7 \(seven\), got codec 8. Give every rank the same codec"),
        (lambda m: np.concatenate([m[:2], [np.uint8(2)], m[3:]]), "expected version 1 of the format, got 2. Run"),
    ],
)
def test_unseal_says_what_is_wrong(change, text):
    with pytest.raises(WireError, match=text):
        frame.unseal(change(sealed()), 7, "seven", 0)


@pytest.mark.parametrize("message", ["hx", [1, 2], np.zeros(9, np.int8), np.zeros((1, 9), np.uint8), None])
def test_unseal_takes_only_bytes(message):
    with pytest.raises(TypeError, match="rank 0: expected uint8"):
        frame.unseal(message, 7, "seven", 0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_unseal_takes_any_bytes(kind):
    assert frame.unseal(kind(sealed().tobytes()), 7, "seven", 0).tobytes() == sealed()[8:].tobytes()
