"""What stands before the entries of a message: the lengths of its runs, and the headers of its tiles.

A message of a whole update is cut at borders of its tiles, and messages of parts are joined, by the headers alone: no
entry is decoded.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numba import njit

from hvdx.kernels import varint
from hvdx.kernels.arrays import Int64Array, UInt8Array
from hvdx.kernels.compiled import entry
from hvdx.kernels.pieces import frozen
from hvdx.kernels.tiles import TILE_MAX, Malformed, Runs

#: Columns of a table of tiles.
START, LENGTH, ENTRIES, MULTIPLE, FIRST, LAST = range(6)

#: Bytes of the tau of a run. The taus follow the lengths.
_TAU = 4
# Limits of tau.
_LEAST, _MOST = 2.0**-126, 2.0**126
_NUMBERS = ("", "a number that does not end", "a number with a superfluous byte")
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
        TypeError: if `tiles` is not uint8[bytes].
        ValueError: if it is not contiguous.

    Example:
        >>> table(np.array([4, 2, 0, 1, 0b1], np.uint8), 10)
        array([[4, 1, 1, 0, 4, 4]])
    """
    if not isinstance(tiles, np.ndarray) or tiles.dtype != np.uint8 or tiles.ndim != 1:
        raise TypeError(
            f"message: expected uint8[bytes], got {type(tiles).__name__}. Use np.frombuffer(..., np.uint8)."
        )
    if not tiles.flags.c_contiguous:
        raise ValueError("message: expected contiguous uint8[bytes]. Pass np.ascontiguousarray(...) of it.")
    if tiles.flags.writeable:
        tiles = frozen(tiles)
    rows = np.empty((64, 6), np.int64)
    found, error, at = _walk(tiles, n, rows)
    if error:
        raise Malformed(f"{_ERRORS[error]} at byte {at}")
    if found > len(rows):
        rows = np.empty((found, 6), np.int64)
        _walk(tiles, n, rows)
    return rows[:found]


@entry
def _count(data: UInt8Array) -> tuple[int, int, int]:
    """Read the number of runs: (number, offset of its end, 0 or an error code)."""
    return get_varint(data, 0)


@entry
def _read(data: UInt8Array, at: int, n: int, lengths: Int64Array) -> tuple[int, int, int, int]:
    """Fill `lengths`: (number of lengths read, elements of n without a run, offset of the end, 0 or an error code).

    Reading stops after a run of no elements, and after one that exceeds n.
    """
    left = n
    for i in range(lengths.size):
        length, at, error = get_varint(data, at)
        if error:
            return i, left, at, error
        lengths[i] = length
        left -= length
        if length == 0 or left < 0:
            return i + 1, left, at, 0
    return lengths.size, left, at, 0


def read_lengths(data: UInt8Array, n: int) -> tuple[Int64Array, int]:
    """Read the lengths of a message's runs.

    Args:
        data: uint8[bytes], untrusted: the number of runs, their lengths, and the rest of the message.
        n: expected sum of the lengths.

    Returns:
        The lengths, int64[R], and the offset of their end.

    Raises:
        Malformed: if a number is invalid, if `data` is too short for all runs, or if the lengths do not add up to n.

    Example:
        >>> lengths, end = read_lengths(np.array([2, 1, 3, *[0] * 8], np.uint8), 4)
        >>> lengths.tolist(), end
        ([1, 3], 3)
    """
    if data.flags.writeable:
        data = frozen(data)
    count, at, error = _count(data)
    if error:
        raise Malformed(f"the lengths of its runs: {_NUMBERS[error]}")
    if count > data.size // (1 + _TAU):
        raise Malformed(f"the lengths of its runs: {count} runs in {data.size} bytes")
    lengths = np.empty(count, np.int64)
    found, left, at, error = _read(data, at, n, lengths)
    if error:
        raise Malformed(f"the lengths of its runs: {_NUMBERS[error]}")
    if found and lengths[found - 1] == 0:
        raise Malformed("a run of no elements")
    if left:
        more = " or more" if found < count else ""
        raise Malformed(
            f"expected an update of {n} elements, got one of {n - left}{more}. Give every rank the same model"
        )
    return lengths, at


def read_runs(bodies: Sequence[UInt8Array], n: int) -> list[tuple[UInt8Array, Runs]]:
    """Divide messages into their tiles and their runs.

    Args:
        bodies: untrusted uint8[bytes] of each message: its lengths, one tau for each, and its tiles.
        n: number of elements of the update.

    Raises:
        Malformed: if a body does not begin so; the error's `message` is the message's position.

    Example:
        >>> body = np.concatenate([np.array([1, 3], np.uint8), np.ones(1, np.float32).view(np.uint8)])
        >>> read_runs([body], 3)[0][1]
        Runs(lengths=array([3]), taus=array([1.], dtype=float32))
    """
    found = []
    for i, body in enumerate(bodies):
        try:
            lengths, at = read_lengths(body, n)
        except Malformed as error:
            raise Malformed(str(error), i) from None
        end = at + _TAU * len(lengths)
        if end > len(body):
            raise Malformed("it ends within its taus", i)
        taus = body[at:end].view("<f4").astype(np.float32)
        valid = (taus >= _LEAST) & (taus <= _MOST)
        if not valid.all():
            raise Malformed(f"a tau of {taus[np.argmin(valid)]}", i)
        found.append((body[end:], Runs(lengths, taus)))
    return found


def cut_tiles(tiles: np.ndarray, n: int, part: int) -> list[np.ndarray]:
    """Cut the tiles of an update into those of its parts, with indices relative to the part.

    Args:
        tiles: uint8[bytes], tiles of n elements. No tile has entries of two parts.
        n: number of elements.
        part: number of elements of each part; the last one may be shorter.

    Returns:
        uint8[bytes] of each part.

    Raises:
        Malformed: if the headers are not those of tiles for n elements.
        ValueError: if a tile has entries of two parts.

    Example:
        >>> [piece.tolist() for piece in cut_tiles(np.array([4, 2, 0, 1, 1, 2, 2, 0, 1, 1], np.uint8), 10, 5)]
        [[4, 2, 0, 1, 1], [2, 2, 0, 1, 1]]
    """
    rows = table(tiles, n)
    owners = rows[:, FIRST] // part
    if (rows[:, LAST] // part != owners).any():
        raise ValueError(f"tiles: expected none with entries of two parts of {part} elements.")
    ends = rows[:, START] + rows[:, LENGTH]
    borders = np.searchsorted(owners, np.arange(-(-n // part) + 1)).tolist()
    cut = []
    for number, (begin, stop) in enumerate(pairwise(borders)):
        if begin == stop:
            cut.append(tiles[:0])
            continue
        before, at = (int(rows[begin - 1, LAST]), int(ends[begin - 1])) if begin else (-1, 0)
        first = int(rows[begin, FIRST])
        at += len(varint.put(first - before - 1))
        cut.append(_with_gap(first - number * part, tiles[at : ends[stop - 1]]))
    return cut


def join_tiles(pieces: Sequence[tuple[np.ndarray, Runs]]) -> tuple[np.ndarray, Runs]:
    """Join the tiles of parts into those of the whole update; the inverse of `cut_tiles`.

    Args:
        pieces: tiles and runs of each part, in their order.

    Returns:
        uint8[bytes], the tiles, and the runs of all parts.

    Raises:
        Malformed: if the headers of a part are not those of tiles for its elements; its `message` is the part's number.
    """
    joined, origin, last = [], 0, -1
    for number, (tiles, runs) in enumerate(pieces):
        n = int(runs.lengths.sum())
        try:
            rows = table(tiles, n)
        except Malformed as error:
            raise Malformed(str(error), number) from None
        if len(rows):
            first = int(rows[0, FIRST])
            at = len(varint.put(first))
            joined.append(_with_gap(origin + first - last - 1, tiles[at:]))
            last = origin + int(rows[-1, LAST])
        origin += n
    lengths = np.concatenate([runs.lengths for _, runs in pieces])
    taus = np.concatenate([runs.taus for _, runs in pieces])
    return np.concatenate([np.zeros(0, np.uint8), *joined]), Runs(lengths, taus)


def _with_gap(gap: int, tiles: np.ndarray) -> np.ndarray:
    """Return tiles that begin with a number of elements without an entry."""
    return np.concatenate([np.frombuffer(varint.put(gap), np.uint8), tiles])
