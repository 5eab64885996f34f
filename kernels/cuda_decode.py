"""CUDA kernels of the decoder: read and check tiles, one per thread, then add their entries.

One kernel scales and stores the values, and another one adds them, so that no compiler can contract the multiplication
and the addition.
"""

import numpy as np
from numba import cuda

from hvdx.kernels.cuda_encode import amount
from hvdx.kernels.cuda_tiles import first_parameter
from hvdx.kernels.table import ENTRIES, FIRST, LAST, LENGTH, MULTIPLE, START
from hvdx.kernels.tiles import BLOCK, ESCAPE, M_MAX, N_MAX

#: Threads in a block, and in a block of `read_tiles`: fewer, because its threads diverge. Tests in the simulator patch
#: both.
THREADS = 256
READERS = 32

#: Additional columns of a table of tiles on the device: position of a tile's entries in the output, and number of its
#: message.
OUT, MESSAGE = 6, 7
ROW = 8

ERRORS = (
    "",
    "a payload ends in the middle of an entry",
    "a gap longer than any update",
    "a tile without the multiple it announces",
    "a tile that passes its end",
    "an entry with m above its limit",
    "a run that passes the end of its tile",
    "bytes after the last entry of a tile",
    "a payload whose length does not match its entries",
    "positions out of order",
    "an entry with m outside its limits, or no m above 1 in a tile that announces one",
)
MISSING, LONG, NO_MULTIPLE, PASSES, MANY, RUN, AFTER, SIZE, ORDER, TIMES = range(1, 11)
#: Status if there is no error. It is above every error, which is (row of the tile) * len(ERRORS) + error code.
NO_ERROR = 2**62

_KINDS = len(ERRORS)
_LONGEST = N_MAX.bit_length()


@cuda.jit(device=True)
def peek(words, at):
    """Return the 32 bits from bit `at` on."""
    word = at >> 5
    # An int64 holds 63 bits without a sign. The shift by at most 31 needs no more.
    pair = np.int64(words[word]) | ((np.int64(words[word + 1]) & 0x7FFFFFFF) << 32)
    return (pair >> (at & 31)) & 0xFFFFFFFF


@cuda.jit(device=True)
def take(words, at, length):
    """Return the next `length` bits, 62 at most, without checking the end of the payload."""
    low = peek(words, at)
    if length > 32:
        low |= peek(words, at + 32) << 32
    return low & ((np.int64(1) << length) - 1)


@cuda.jit(device=True)
def take_code(words, at, end, k):
    """Read the next number in the gap code with parameter k: (number, position of its end, error code or 0)."""
    ones = np.int64(0)
    while True:
        if at + ones >= end:
            return np.int64(0), at, MISSING
        zeros = peek(words, at + ones) ^ 0xFFFFFFFF
        if zeros != 0:
            ones += cuda.ffs(zeros) - 1
            break
        ones += 32
        if ones - ESCAPE + k > _LONGEST:
            return np.int64(0), at, LONG
    if ones - ESCAPE + k > _LONGEST:
        return np.int64(0), at, LONG
    at += ones + 1
    z = max(ones - ESCAPE, np.int64(0))
    # This is checked before the bits are read, because memory ends after the padding.
    if at + z + k > end:
        return np.int64(0), at, MISSING
    q = ones
    if ones >= ESCAPE:
        q = (np.int64(1) << z) + take(words, at, z) + ESCAPE - 1
    at += z
    return (q << k) | take(words, at, k), at + k, 0


@cuda.jit(device=True)
def read_rice(words, row, out, first, final, ends, taus, scale, index, value):
    """Read the entries of an entropy-coded tile; return an error code or 0."""
    at = 8 * row[START]
    stop = at + 8 * row[LENGTH]
    entries, where, last, multiple = row[ENTRIES], row[FIRST], row[LAST], row[MULTIPLE] == 1
    k = first_parameter(last - where + 1 - entries, entries)
    k_run, larger, error, m = np.int64(0), entries, 0, np.int64(1)
    if multiple:
        if at + 5 > stop:
            return MISSING
        k_run = take(words, at, np.int64(5))
        larger, at, error = take_code(words, at + 5, stop, k_run)
        if error != 0:
            return error
        if larger >= entries:
            return NO_MULTIPLE
    run = first
    for i in range(entries):
        if i >= 1 and i < entries - 1:
            if i % BLOCK == 1:
                if at + 1 > stop:
                    return MISSING
                at += 1
                if take(words, at - 1, np.int64(1)) == 1:
                    if at + 5 > stop:
                        return MISSING
                    k = take(words, at, np.int64(5))
                    at += 5
            skipped, at, error = take_code(words, at, stop, k)
            if error != 0:
                return error
            where += skipped + 1
            if where > last - (entries - 1 - i):
                return PASSES
        elif i >= 1:
            where = last
        if at + 1 > stop:
            return MISSING
        negative = take(words, at, np.int64(1)) == 1
        at += 1
        m = np.int64(1)
        if i == larger:
            m, at, error = take_code(words, at, stop, np.int64(0))
            if error != 0:
                return error
            m += 2
            if m > M_MAX:
                return MANY
            skipped, at, error = take_code(words, at, stop, k_run)
            if error != 0:
                return error
            larger = i + 1 + skipped
            if larger > entries:
                return RUN
        run = store(out + i, where, negative, m, run, final, ends, taus, scale, index, value)
    if stop - at >= 8 or take(words, at, stop - at) != 0:
        return AFTER
    return 0


@cuda.jit(device=True)
def read_plain(words, row, out, first, final, ends, taus, scale, index, value):
    """Read the entries of a tile of plain positions; return an error code or 0."""
    at, entries, multiple = 8 * row[START], row[ENTRIES], row[MULTIPLE]
    if row[LENGTH] != 4 * entries * (1 + multiple):
        return SIZE
    run, most, m, before = first, np.int64(1), np.int64(1), row[FIRST] - 1
    for i in range(entries):
        word = peek(words, at + 32 * i)
        where = row[LAST] - (word & 0x7FFFFFFF)
        if where <= before or (i == 0 and where != row[FIRST]):
            return ORDER
        before = where
        if multiple == 1:
            m = peek(words, at + 32 * (entries + i))
        if m < 1 or m > M_MAX:
            return TIMES
        most = max(most, m)
        run = store(out + i, where, word > 0x7FFFFFFF, m, run, final, ends, taus, scale, index, value)
    if before != row[LAST]:
        return ORDER
    if (most > 1) != (multiple == 1):
        return TIMES
    return 0


@cuda.jit(device=True)
def store(at, where, negative, m, run, final, ends, taus, scale, index, value):
    """Store one entry; return its run, which is `run` or a later one below `final`."""
    if ends[run] <= where:
        low, high = run + 1, final - 1
        while low < high:
            middle = (low + high) >> 1
            if ends[middle] > where:
                high = middle
            else:
                low = middle + 1
        run = low
    scaled = amount(m, taus[run]) * scale
    index[at] = where
    value[at] = -scaled if negative else scaled
    return run


@cuda.jit
def read_tiles(words, rows, spans, ends, taus, scale, index, value, status, rice):
    """Read tiles, one per thread, and set status[0] to the first error.

    `spans` has the first run and the end of the runs of each message.
    """
    for tile in range(cuda.grid(1), rows.shape[0], cuda.gridsize(1)):
        row = rows[tile]
        first, final = spans[row[MESSAGE], 0], spans[row[MESSAGE], 1]
        if rice:
            error = read_rice(words, row, row[OUT], first, final, ends, taus, scale, index, value)
        else:
            error = read_plain(words, row, row[OUT], first, final, ends, taus, scale, index, value)
        if error != 0:
            cuda.atomic.min(status, 0, np.int64(tile) * _KINDS + error)


@cuda.jit(device=True)
def lower_bound(index, least):
    """Return the first position in an increasing array with a number of at least `least`."""
    low, high = np.int64(0), np.int64(index.size)
    while low < high:
        middle = (low + high) >> 1
        if index[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit
def add(out, index, value, first):
    """Add one message's entries to an array whose elements begin at index `first`."""
    begin = lower_bound(index, first)
    end = lower_bound(index, first + out.size)
    for i in range(begin + cuda.grid(1), end, cuda.gridsize(1)):
        out[index[i] - first] += value[i]
