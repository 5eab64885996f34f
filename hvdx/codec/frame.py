"""The frame: the first eight bytes of every message, with the codec's number and a checksum.

offset  bytes  content
0       2      "hx"
2       1      version of the format
3       1      codec
4       4      lowest 32 bits of XXH64 over the bytes from 8 on, with bytes 0 to 3 as the seed, little-endian
"""

import struct

import numpy as np
import xxhash

from hvdx.errors import WireError

MAGIC, VERSION, SIZE = b"hx", 1, 8


def seal(message: np.ndarray, codec: int) -> np.ndarray:
    """Write the frame into a message that is otherwise complete, and return the message.

    Args:
        message: uint8[bytes], contiguous.
        codec: number of the codec.

    Example:
        >>> seal(np.zeros(9, np.uint8), 0)[:4].tobytes()
        b'hx\\x01\\x00'
    """
    start = MAGIC + bytes([VERSION, codec])
    message[:SIZE] = np.frombuffer(start + struct.pack("<I", _checksum(start, message)), np.uint8)
    return message


def unseal(message: np.ndarray | bytes | bytearray | memoryview, codec: int, name: str, rank: int) -> np.ndarray:
    """Check the frame of a message, and return a view of the body.

    Args:
        message: untrusted uint8[bytes] or bytes.
        codec: number of the expected codec.
        name: name of the expected codec, for errors.
        rank: rank that sent the message, for errors.

    Raises:
        WireError: if the message is cut short, altered, of another codec or of another version.
    """
    if isinstance(message, bytes | bytearray | memoryview):
        message = np.frombuffer(message, np.uint8)
    if not isinstance(message, np.ndarray) or message.dtype != np.uint8 or message.ndim != 1:
        raise TypeError(f"message of rank {rank}: expected uint8[bytes], got {type(message).__name__}.")
    message = np.ascontiguousarray(message)
    start = message[:4].tobytes()
    if len(message) < SIZE or start[:2] != MAGIC:
        raise WireError(f"{len(message)} bytes that are not an hvdx message.", rank)
    if start[2] != VERSION:
        raise WireError(
            f"expected version {VERSION} of the format, got {start[2]}. Run the same version of hvdx on every rank.",
            rank,
        )
    if start[3] != codec:
        raise WireError(
            f"expected one of codec {codec} ({name}), got codec {start[3]}. "
            "Give every rank the same codec and options.",
            rank,
        )
    if struct.unpack("<I", message[4:SIZE].tobytes())[0] != _checksum(start, message):
        raise WireError("its checksum is wrong; it was cut short or altered in transit.", rank)
    body = message[SIZE:]
    body.setflags(write=False)
    return body


def _checksum(start: bytes, message: np.ndarray) -> int:
    return xxhash.xxh64_intdigest(message[SIZE:].data, seed=int.from_bytes(start, "little")) & 0xFFFFFFFF
