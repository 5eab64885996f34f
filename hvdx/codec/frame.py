"""What every message begins with: eight bytes that say whose it is and hold a checksum of the rest.

0  2  "hx"
2  1  version of the format
3  1  codec
4  4  lowest 32 bits of XXH64 over the bytes from 8 on, with bytes 0 to 3 as the seed, little-endian
"""

import struct

import numpy as np
import xxhash

from hvdx.errors import WireError

MAGIC, VERSION, SIZE = b"hx", 1, 8


def seal(message: np.ndarray, codec: int) -> np.ndarray:
    """Fill in the first eight bytes of a message whose rest is complete: the message.

    Args:
        message: uint8[bytes], contiguous.
        codec: the codec's number.

    Example:
        >>> seal(np.zeros(9, np.uint8), 0)[:4].tobytes()
        b'hx\\x01\\x00'
    """
    start = MAGIC + bytes([VERSION, codec])
    message[:SIZE] = np.frombuffer(start + struct.pack("<I", _checksum(start, message)), np.uint8)
    return message


def unseal(message: np.ndarray | bytes | bytearray | memoryview, codec: int, name: str, rank: int) -> np.ndarray:
    """Check the first eight bytes of a message: a view of the rest.

    Args:
        message: uint8[bytes] or bytes, from anywhere.
        codec: the number of the codec it should be of.
        name: that codec's name, for errors.
        rank: the rank it came from, for errors.

    Raises:
        WireError: it is cut short, altered, of another codec or of another version.
    """
    if isinstance(message, bytes | bytearray | memoryview):
        message = np.frombuffer(message, np.uint8)
    if not isinstance(message, np.ndarray) or message.dtype != np.uint8 or message.ndim != 1:
        raise TypeError(f"message of rank {rank}: expected uint8[bytes], got {type(message).__name__}.")
    message = np.ascontiguousarray(message)
    start = message[:4].tobytes()
    if len(message) < SIZE or start[:2] != MAGIC:
        raise WireError(f"message of rank {rank}: {len(message)} bytes that are no message of hvdx.", rank)
    if start[2] != VERSION:
        raise WireError(
            f"message of rank {rank}: expected version {VERSION} of the format, got {start[2]}. "
            "Run the same version of hvdx on every rank.",
            rank,
        )
    if start[3] != codec:
        raise WireError(
            f"message of rank {rank}: expected one of codec {codec} ({name}), got codec {start[3]}. "
            "Give every rank the same codec and options.",
            rank,
        )
    if struct.unpack("<I", message[4:SIZE].tobytes())[0] != _checksum(start, message):
        raise WireError(f"message of rank {rank}: its checksum is wrong; it was cut short or altered on its way.", rank)
    return message[SIZE:]


def _checksum(start: bytes, message: np.ndarray) -> int:
    return xxhash.xxh64_intdigest(message[SIZE:].data, seed=int.from_bytes(start, "little")) & 0xFFFFFFFF
