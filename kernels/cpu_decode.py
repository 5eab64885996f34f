"""Decoder on a CPU: the Numba functions of `cpu.decode`.

`check_tiles` reads untrusted bytes: it reads no byte outside the message, and checks the bounds of every number.
`add_tiles` runs after it on the same bytes, and does not check them.
"""

import numpy as np
from numba import njit

from hvdx.kernels import simd
from hvdx.kernels.compiled import entry
from hvdx.kernels.cpu_scan import amount, piece_of
from hvdx.kernels.cpu_tiles import first_parameter
from hvdx.kernels.denormals import keep_denormals, restore_mode
from hvdx.kernels.table import ENTRIES, FIRST, LAST, LENGTH, MULTIPLE, START
from hvdx.kernels.tiles import BLOCK, ESCAPE, M_MAX

#: Largest z + k of a number in the gap code (see `docs/wire-format.md`): the bit length of N_MAX.
_BITS = 49
#: Number of entries that are decoded before they are added: more loads from memory than a core can have in flight.
_READY = 256
_u64, _i64 = np.uint64, np.int64


@njit(nogil=True, error_model="numpy")
def peek(address, bit, size):
    """Return at least 57 bits from bit `bit` on, of `size` bytes at an address; bits past the end are 0."""
    byte = bit >> 3
    if byte + 8 <= size:
        word = simd.load_word(address + byte)
    else:
        word = _u64(0)
        for i in range(size - byte):
            word |= _u64(simd.load_byte(address + byte + i)) << _u64(8 * i)
    return word >> _u64(bit & 7)


@njit(nogil=True, error_model="numpy")
def take(address, bit, size, length):
    """Read the next `length` < 57 bits; return them and the position of their end."""
    mask = (_u64(1) << _u64(length)) - _u64(1)
    return _i64(peek(address, bit, size) & mask), bit + length


@njit(nogil=True, error_model="numpy")
def take_code(address, bit, size, k):
    """Read the next number in the gap code; return it, or -1 if z + k exceeds _BITS, and the position of its end."""
    ones = simd.trailing_zeros(~peek(address, bit, size))
    bit += ones + 1
    if ones < ESCAPE:
        low, bit = take(address, bit, size, k)
        return ones << k | low, bit
    z = ones - ESCAPE
    if z + k > _BITS:
        return _i64(-1), bit
    more, bit = take(address, bit, size, z)
    low, bit = take(address, bit, size, k)
    return ((1 << z) + more + ESCAPE - 1) << k | low, bit


@njit(nogil=True, error_model="numpy")
def check_rice(address, size, entries, multiple, first, last):
    """Check that a payload of `size` bytes is that of an entropy-coded tile: 0 or an error code."""
    bit, where, run, k_run, bits = _i64(0), first, entries, _i64(0), 8 * size
    none, one, five = _i64(0), _i64(1), _i64(5)
    k = first_parameter(last - first + 1 - entries, entries)
    if multiple:
        k_run, bit = take(address, bit, size, five)
        run, bit = take_code(address, bit, size, k_run)
        if run < 0 or run >= entries:
            return 1
    for i in range(entries):
        if 1 <= i < entries - 1:
            if i % BLOCK == 1:
                changed, bit = take(address, bit, size, one)
                if changed:
                    k, bit = take(address, bit, size, five)
            word = peek(address, bit, size)
            ones = simd.trailing_zeros(~word)
            if ones < ESCAPE:
                gap = ones << k | _i64(word >> _u64(ones + 1) & ((_u64(1) << _u64(k)) - _u64(1)))
                bit += ones + 1 + k
            else:
                gap, bit = take_code(address, bit, size, k)
                if gap < 0:
                    return 2
            where += gap + 1
        bit += 1
        if i == run:
            m, bit = take_code(address, bit, size, none)
            if m < 0 or m > M_MAX - 2:
                return 3
            run, bit = take_code(address, bit, size, k_run)
            if run < 0 or run > entries - i - 1:
                return 4
            run += i + 1
        if bit > bits:
            return 5
    if entries > 1 and where >= last:
        return 2
    if bits - bit >= 8 or (bit & 7 and peek(address, bit, size)):
        return 6
    return 0


@njit(nogil=True, error_model="numpy")
def check_plain(address, size, entries, multiple, first, last):
    """Check that a payload of `size` bytes is that of a tile of plain positions: 0 or an error code."""
    if size != 4 * entries * (2 if multiple else 1):
        return 5
    before, larger = first - 1, False
    for i in range(entries):
        where = last - _i64(simd.load_half(address + 4 * i) & np.uint32(0x7FFFFFFF))
        if where <= before or (i == 0 and where != first):
            return 2
        before = where
        if multiple:
            m = _i64(simd.load_half(address + 4 * (entries + i)))
            if m < 1 or m > M_MAX:
                return 3
            larger |= m > 1
    if before != last:
        return 2
    return 1 if multiple and not larger else 0


@entry
def check_tiles(begin, end, table, message, rice):
    """Check the tiles from `begin` to `end` of a message: (first invalid tile, error code) or (-1, 0)."""
    for t in range(begin, end):
        row = table[t]
        address = _i64(message.ctypes.data) + row[START]
        if rice:
            error = check_rice(address, row[LENGTH], row[ENTRIES], row[MULTIPLE], row[FIRST], row[LAST])
        else:
            error = check_plain(address, row[LENGTH], row[ENTRIES], row[MULTIPLE], row[FIRST], row[LAST])
        if error:
            return t, error
    return -1, 0


@njit(nogil=True, error_model="numpy")
def add_ready(places, values, ready):
    """Add values to the float32 at the addresses `places`, which were prefetched; return 0."""
    for i in range(ready):
        simd.store_float(places[i], simd.load_float(places[i]) + values[i])
    return _i64(0)


@njit(nogil=True, error_model="numpy")
def add_rice(row, message, begin, end, pieces, taus, scale, places, values):
    """Add a tile's entries with indices from `begin` to `end` to the pieces.

    The addresses of entries are far from each other. Entries are prefetched and decoded in batches before they are
    added, which hides the latency of memory.
    """
    ready = _i64(0)
    # Whole words are read, also beyond the end of the tile, but not beyond the message.
    address, size = _i64(message.ctypes.data), message.size
    bit, entries, multiple = 8 * row[START], row[ENTRIES], row[MULTIPLE]
    where, last = row[FIRST], row[LAST]
    k = first_parameter(last - where + 1 - entries, entries)
    run, k_run = entries, _i64(0)
    none, one, five = _i64(0), _i64(1), _i64(5)
    if multiple:
        k_run, bit = take(address, bit, size, five)
        run, bit = take_code(address, bit, size, k_run)
    p = piece_of(pieces, max(where, begin))
    stop, target = pieces[p, 1], pieces[p, 2] - 4 * pieces[p, 0]
    tau = taus[pieces[p, 3]]
    once = tau * scale
    for i in range(entries):
        if 1 <= i < entries - 1:
            if i % BLOCK == 1:
                changed, bit = take(address, bit, size, one)
                if changed:
                    k, bit = take(address, bit, size, five)
            word = peek(address, bit, size)
            ones = simd.trailing_zeros(~word)
            if ones < ESCAPE:
                where += (ones << k | _i64(word >> _u64(ones + 1) & ((_u64(1) << _u64(k)) - _u64(1)))) + 1
                word >>= _u64(ones + 1 + k)
                bit += ones + 2 + k
            else:
                gap, bit = take_code(address, bit, size, k)
                where += gap + 1
                word = peek(address, bit, size)
                bit += 1
        else:
            if i:
                where = last
            word = peek(address, bit, size)
            bit += 1
        if where >= end:
            break
        m = _i64(1)
        if i == run:
            m, bit = take_code(address, bit, size, none)
            run, bit = take_code(address, bit, size, k_run)
            m, run = m + 2, run + i + 1
        if where < begin:
            continue
        while where >= stop:
            p += 1
            stop, target, tau = pieces[p, 1], pieces[p, 2] - 4 * pieces[p, 0], taus[pieces[p, 3]]
            once = tau * scale
        value = once if m == 1 else amount(m, tau) * scale
        places[ready] = simd.fetch(target + 4 * where)
        values[ready] = -value if word & _u64(1) else value
        ready += 1
        if ready == places.size:
            ready = add_ready(places, values, ready)
    add_ready(places, values, ready)


@njit(nogil=True, error_model="numpy")
def add_plain(row, message, begin, end, pieces, taus, scale):
    """Do the work of `add_rice` for a tile of plain positions."""
    address, entries = _i64(message.ctypes.data) + row[START], row[ENTRIES]
    p = piece_of(pieces, max(row[FIRST], begin))
    for i in range(entries):
        half = simd.load_half(address + 4 * i)
        where = row[LAST] - _i64(half & np.uint32(0x7FFFFFFF))
        if where < begin:
            continue
        if where >= end:
            return
        while where >= pieces[p, 1]:
            p += 1
        m = _i64(simd.load_half(address + 4 * (entries + i))) if row[MULTIPLE] else _i64(1)
        value = amount(m, taus[pieces[p, 3]]) * scale
        address_out = pieces[p, 2] + 4 * (where - pieces[p, 0])
        simd.store_float(address_out, simd.load_float(address_out) + (-value if half >> np.uint32(31) else value))


@entry
def add_tiles(begin, end, table, message, rice, pieces, taus, scale):
    """Add the entries of a message with indices from `begin` to `end` to the pieces."""
    mode = keep_denormals()
    places, values = np.empty(_READY, np.int64), np.empty(_READY, np.float32)
    low, high = 0, table.shape[0]
    while low < high:
        middle = (low + high) // 2
        if table[middle, LAST] < begin:
            low = middle + 1
        else:
            high = middle
    for t in range(low, table.shape[0]):
        row = table[t]
        if row[FIRST] >= end:
            break
        if rice:
            add_rice(row, message, begin, end, pieces, taus, scale, places, values)
        else:
            add_plain(row, message, begin, end, pieces, taus, scale)
    restore_mode(mode)
