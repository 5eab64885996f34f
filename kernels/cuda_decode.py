"""CUDA kernels of the decoder: check tiles, read them in blocks of entries, and add the entries to the output.

The position of a code depends on all codes before it, so one thread checks a tile from its begin to its end. It
computes no values, and sets marks, the states before each block of BLOCK entries. From them one thread a block then
reads the tile in parallel. Each kernel reads the tiles of all messages, so the number of launches does not depend on
the number of messages.

One kernel scales and stores the values, and another one adds them, so that no compiler can contract the multiplication
and the addition.
"""

import numpy as np
from numba import cuda

from hvdx.kernels.cuda_device import SIMULATED, address_of, load, store
from hvdx.kernels.cuda_encode import amount
from hvdx.kernels.cuda_tiles import first_parameter
from hvdx.kernels.pieces import END
from hvdx.kernels.table import ENTRIES, FIRST, LAST, LENGTH, MULTIPLE, START
from hvdx.kernels.tiles import BLOCK, ESCAPE, M_MAX, N_MAX

#: Threads in a block, and in a block of the kernels that read tiles: fewer, because their threads diverge.
THREADS, READERS = (2, 2) if SIMULATED else (256, 32)

#: Additional columns of a table of tiles on the device: position of a tile's entries in the output, number of its
#: message, and number of its first mark.
OUT, MESSAGE, MARK = 6, 7, 8
ROW = 9

#: Columns of the table of messages: first run and end of its runs, first entry and end of its entries.
FIRST_RUN, LAST_RUN, BEGIN, STOP = range(4)

#: Columns of a mark: position in bits, index of the entry before, Rice parameter, next entry with m above 1, Rice
#: parameter of runs.
AT, WHERE, K, LARGER, K_RUN = range(5)
MARKS = 5

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
def check_rice(words, row, marks):
    """Check an entropy-coded tile, and set the marks of its blocks; return an error code or 0."""
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
    set_mark(marks, row[MARK], at, where, k, larger, k_run)
    for i in range(entries):
        if i >= 1 and i < entries - 1:
            if i % BLOCK == 1:
                if i > 1:
                    set_mark(marks, row[MARK] + i // BLOCK, at, where, k, larger, k_run)
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
        elif i > 1 and i % BLOCK == 1:
            set_mark(marks, row[MARK] + i // BLOCK, at, where, k, larger, k_run)
        if at + 1 > stop:
            return MISSING
        at += 1
        if i == larger:
            m, at, error = take_code(words, at, stop, np.int64(0))
            if error != 0:
                return error
            if m + 2 > M_MAX:
                return MANY
            skipped, at, error = take_code(words, at, stop, k_run)
            if error != 0:
                return error
            larger = i + 1 + skipped
            if larger > entries:
                return RUN
    if stop - at >= 8 or take(words, at, stop - at) != 0:
        return AFTER
    return 0


@cuda.jit(device=True)
def set_mark(marks, number, at, where, k, larger, k_run):
    """Keep the state before a block of entries. The first entry belongs to the first block, which has one more."""
    marks[number, AT] = at
    marks[number, WHERE] = where
    marks[number, K] = k
    marks[number, LARGER] = larger
    marks[number, K_RUN] = k_run


@cuda.jit(device=True)
def check_plain(words, row):
    """Check a tile of plain positions; return an error code or 0."""
    at, entries, multiple = 8 * row[START], row[ENTRIES], row[MULTIPLE]
    if row[LENGTH] != 4 * entries * (1 + multiple):
        return SIZE
    most, m, before = np.int64(1), np.int64(1), row[FIRST] - 1
    for i in range(entries):
        where = row[LAST] - (peek(words, at + 32 * i) & 0x7FFFFFFF)
        if where <= before or (i == 0 and where != row[FIRST]):
            return ORDER
        before = where
        if multiple == 1:
            m = peek(words, at + 32 * (entries + i))
        if m < 1 or m > M_MAX:
            return TIMES
        most = max(most, m)
    if before != row[LAST]:
        return ORDER
    if (most > 1) != (multiple == 1):
        return TIMES
    return 0


@cuda.jit(device=True)
def read_rice(words, row, mark, begin, end, final, run, ends, taus, scale, index, value):
    """Read entries [begin, end) of an entropy-coded tile that was checked, from its mark on."""
    at, where, k, larger, k_run = mark[AT], mark[WHERE], mark[K], mark[LARGER], mark[K_RUN]
    stop, entries = 8 * (row[START] + row[LENGTH]), row[ENTRIES]
    for i in range(begin, end):
        if i >= 1 and i < entries - 1:
            if i % BLOCK == 1:
                at += 1
                if take(words, at - 1, np.int64(1)) == 1:
                    k = take(words, at, np.int64(5))
                    at += 5
            skipped, at, _ = take_code(words, at, stop, k)
            where += skipped + 1
        elif i >= 1:
            where = row[LAST]
        negative = take(words, at, np.int64(1)) == 1
        at += 1
        m = np.int64(1)
        if i == larger:
            m, at, _ = take_code(words, at, stop, np.int64(0))
            m += 2
            skipped, at, _ = take_code(words, at, stop, k_run)
            larger = i + 1 + skipped
        run = run_of(ends, run, final, where)
        put(row[OUT] + i, where, negative, amount(m, taus[run]), scale, index, value)


@cuda.jit(device=True)
def read_plain(words, row, begin, end, final, run, ends, taus, scale, index, value):
    """Read entries [begin, end) of a tile of plain positions that was checked."""
    at = 8 * row[START]
    for i in range(begin, end):
        word = peek(words, at + 32 * i)
        where = row[LAST] - (word & 0x7FFFFFFF)
        m = np.int64(1)
        if row[MULTIPLE] == 1:
            m = peek(words, at + 32 * (row[ENTRIES] + i))
        run = run_of(ends, run, final, where)
        put(row[OUT] + i, where, word > 0x7FFFFFFF, amount(m, taus[run]), scale, index, value)


@cuda.jit(device=True)
def run_of(ends, run, final, where):
    """Return the run of an element, which is `run` or a later one below `final`."""
    if ends[run] <= where:
        low, high = run + 1, final - 1
        while low < high:
            middle = (low + high) >> 1
            if ends[middle] > where:
                high = middle
            else:
                low = middle + 1
        run = low
    return run


@cuda.jit(device=True)
def put(at, where, negative, size, scale, index, value):
    """Store one entry."""
    scaled = size * scale
    index[at] = where
    value[at] = -scaled if negative else scaled


@cuda.jit
def check_tiles(words, rows, marks, status, rice):
    """Check tiles, one per thread, set their marks, and set status[0] to the first error."""
    for tile in range(cuda.grid(1), rows.shape[0], cuda.gridsize(1)):
        row = rows[tile]
        error = check_rice(words, row, marks) if rice else check_plain(words, row)
        if error != 0:
            cuda.atomic.min(status, 0, np.int64(tile) * _KINDS + error)


@cuda.jit
def read_blocks(words, rows, marks, messages, ends, taus, scale, index, value, status, rice):
    """Read blocks of entries, one per thread, unless there is an error."""
    if status[0] != NO_ERROR:
        return
    for number in range(cuda.grid(1), marks.shape[0], cuda.gridsize(1)):
        low, high = 0, rows.shape[0] - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if rows[middle, MARK] <= number:
                low = middle
            else:
                high = middle - 1
        row = rows[low]
        block, entries = np.int64(number) - row[MARK], row[ENTRIES]
        begin = BLOCK * block + 1 if block > 0 else np.int64(0)
        end = min(BLOCK * (block + 1) + 1, entries)
        run, final = messages[row[MESSAGE], FIRST_RUN], messages[row[MESSAGE], LAST_RUN]
        if rice:
            read_rice(words, row, marks[number], begin, end, final, run, ends, taus, scale, index, value)
        else:
            read_plain(words, row, begin, end, final, run, ends, taus, scale, index, value)


@cuda.jit(device=True)
def lower_bound(index, low, high, least):
    """Return the first position from `low` to `high` in an increasing part of an array with at least `least`."""
    while low < high:
        middle = (low + high) >> 1
        if index[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit
def add(pieces, messages, index, value, span, status):
    """Add the entries of all messages to an output, unless there is an error.

    A block has `span` elements at a time for itself, and adds the messages one after another, so each element gets them
    in their order.
    """
    if status[0] != NO_ERROR:
        return
    borders = cuda.shared.array((THREADS, 2), np.int64)
    tid = cuda.threadIdx.x
    n = pieces[pieces.shape[0] - 1, END]
    for turn in range(cuda.blockIdx.x, (n + span - 1) // span, cuda.gridDim.x):
        first = np.int64(turn) * span
        for some in range(0, messages.shape[0], THREADS):
            if some + tid < messages.shape[0]:
                begin, stop = messages[some + tid, BEGIN], messages[some + tid, STOP]
                begin = lower_bound(index, begin, stop, first)
                borders[tid, 0] = begin
                borders[tid, 1] = lower_bound(index, begin, stop, first + span)
            cuda.syncthreads()
            for message in range(min(messages.shape[0] - some, THREADS)):
                for i in range(borders[message, 0] + tid, borders[message, 1], THREADS):
                    address = address_of(pieces, index[i])
                    store(address, load(address) + value[i])
                cuda.syncthreads()
