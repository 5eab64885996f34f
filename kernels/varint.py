"""LEB128: whole numbers in the fewest bytes of seven bits each, the lowest bits first.

The top bit of a byte is 1 if another byte follows.
"""


def put(value: int) -> bytes:
    """Return a number as LEB128 bytes.

    Example:
        >>> put(300).hex()
        'ac02'
    """
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def get(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of at most 63 bits at offset `at`; return it and the offset of its end.

    Raises:
        ValueError: if the number does not end, or has a superfluous byte.

    Example:
        >>> get(bytes.fromhex("ac02"), 0)
        (300, 2)
    """
    value = shift = 0
    while at < len(data) and shift < 63:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            if byte == 0 and shift > 7:
                break
            return value, at
    raise ValueError("a number that does not end, or has a superfluous byte")
