"""Table of the tiles of a message. Every decoder first builds it from the tile headers."""

import numpy as np
from numba import njit

from hvdx.kernels.arrays import Int64Array, UInt8Array
from hvdx.kernels.compiled import entry
from hvdx.kernels.tiles import TILE_MAX, Malformed

#: Columns of a table of tiles.
START, LENGTH, ENTRIES, MULTIPLE, FIRST, LAST = range(6)

_ERRORS = (
    "",
    "a number that does not end",
    "a number with a superfluous byte",
    f"a tile with no entries or more than {TILE_MAX}",
    "an entry outside the update",
    "a tile longer than the message",
    "a tile of one entry with different first and last indices",
)


@njit(nogil=True)
def get_varint(data: UInt8Array, at: int) -> tuple[int, int, int]:
    """Read a LEB128 number: (number, offset of its end, 0), or an error code in the third place."""
    value, shift = 0, 0
    while at < data.size and shift < 63:
        byte = np.int64(data[at])
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at, 2 if byte == 0 and shift > 7 else 0
    return value, at, 1


@entry
def _walk(data: UInt8Array, n: int, rows: Int64Array) -> tuple[int, int, int]:
    """Fill `rows`, which may be too short: (number of tiles, error code, offset of the error)."""
    at, last, tiles = 0, -1, 0
    while at < data.size:
        begin = at
        gap, at, error = get_varint(data, at)
        if error:
            return tiles, error, begin
        packed, at, error = get_varint(data, at)
        if error:
            return tiles, error, begin
        skipped, at, error = get_varint(data, at)
        if error:
            return tiles, error, begin
        length, at, error = get_varint(data, at)
        if error:
            return tiles, error, begin
        entries = packed >> 1
        if entries < 1 or entries > TILE_MAX:
            return tiles, 3, begin
        if entries == 1 and skipped:
            return tiles, 6, begin
        if gap >= n or skipped >= n or last + gap + skipped + entries >= n:
            return tiles, 4, begin
        if length > data.size - at:
            return tiles, 5, begin
        if tiles < rows.shape[0]:
            rows[tiles, 0] = at
            rows[tiles, 1] = length
            rows[tiles, 2] = entries
            rows[tiles, 3] = packed & 1
            rows[tiles, 4] = last + 1 + gap
            rows[tiles, 5] = last + gap + skipped + entries
        last += gap + skipped + entries
        at += length
        tiles += 1
    return tiles, 0, at


def table(tiles: UInt8Array, n: int) -> Int64Array:
    """Return the table of the tiles of a message.

    Args:
        tiles: uint8[bytes], untrusted, the tiles one after another.
        n: number of elements of the update.

    Returns:
        int64[tiles, 6]: START and LENGTH of the payload in bytes, ENTRIES, MULTIPLE (1 if some entry has m above 1),
        FIRST and LAST (indices of the first and the last entry).

    Raises:
        Malformed: if the headers are not those of tiles for n elements.

    Example:
        >>> table(np.array([4, 2, 0, 1, 0b1], np.uint8), 10)
        array([[4, 1, 1, 0, 4, 4]])
    """
    rows = np.empty((64, 6), np.int64)
    found, error, at = _walk(tiles, n, rows)
    if error:
        raise Malformed(f"{_ERRORS[error]} at byte {at}")
    if found > len(rows):
        rows = np.empty((found, 6), np.int64)
        _walk(tiles, n, rows)
    return rows[:found]
