"""Writer of tiles on a CPU, from the gaps, signs and multiples of entries."""

import numpy as np
from numba import njit

from hvdx.kernels import simd
from hvdx.kernels.tiles import BLOCK, ESCAPE, K_MAX, SWITCH, TILE_MAX

#: Upper bound of an entry's bytes: a gap code of at most 7 + 2 * 31 + 31 bits, a sign, an m of 69 and a run of 62 bits.
ENTRY_BYTES = 32
#: Upper bound of a header's bytes, plus 8 because a store of a whole word at its end reaches beyond it.
HEADER_BYTES = 4 * 9 + 8
#: Largest number of bits that `put` appends.
PUT_MAX = 56

# If a variable starts as a literal, Numba compiles the functions that take it once more for this literal.
_u64, _i64 = np.uint64, np.int64


@njit(nogil=True, error_model="numpy")
def first_parameter(skipped, entries):
    """Return the Rice parameter at the start of a tile."""
    return min(max(simd.bit_length(_u64(skipped // entries)) - 1, 0), K_MAX)


@njit(nogil=True, error_model="numpy")
def code_length(x, k):
    """Return the number of bits of x in the gap code with parameter k."""
    q = x >> k
    if q < ESCAPE:
        return q + 1 + k
    return ESCAPE + 2 * simd.bit_length(_u64(q - ESCAPE + 1)) - 1 + k


@njit(nogil=True, error_model="numpy")
def choose_parameter(gaps, length, before):
    """Return the Rice parameter of a block of gaps, and the bits that the block takes with it.

    `gaps` is the address of 64 gaps, with zeros from `length` on. `before` is the parameter of the block before.
    """
    middle = min(simd.bit_lengths(gaps) // length, K_MAX - 1)
    padding = BLOCK - length
    best, bits, keep = 0, 1 << 60, 1 << 60
    for k in range(max(middle - 2, 0), middle + 2):
        cost = simd.code_lengths(gaps, k) - padding + k * length
        if cost < bits:
            best, bits = k, cost
        if k == before:
            keep = cost
    if before < middle - 2 or before > middle + 1:
        keep = simd.code_lengths(gaps, before) - padding + before * length
    if keep <= bits + SWITCH:
        return before, keep + 1
    return best, bits + 1 + 5


@njit(nogil=True, error_model="numpy")
def put_varint(address, value):
    """Write a LEB128 number at an address, and return the address of its end. The 7 bytes after it are overwritten."""
    while value >= 0x80:
        simd.store_word(address, _u64(value & 0x7F | 0x80))
        value >>= 7
        address += 1
    simd.store_word(address, _u64(value))
    return address + 1


@njit(nogil=True, error_model="numpy")
def put(address, held, number, value, length):
    """Append up to 56 bits to the `number` < 8 bits `held` at an address; return the new address, held and number."""
    held |= _u64(value) << _u64(number)
    simd.store_word(address, held)
    number += length
    return address + (number >> 3), held >> _u64(number & ~7), number & 7


@njit(nogil=True, error_model="numpy")
def put_code(address, held, number, x, k):
    """Append x in the gap code with parameter k; return the new address, held and number."""
    q = x >> k
    if q < ESCAPE:
        address, held, number = put(address, held, number, (1 << q) - 1, q + 1)
    else:
        z = simd.bit_length(_u64(q - ESCAPE + 1)) - 1
        address, held, number = put(address, held, number, (1 << ESCAPE + z) - 1, ESCAPE + z + 1)
        address, held, number = put(address, held, number, q - ESCAPE + 1 - (1 << z), z)
    return put(address, held, number, x & (1 << k) - 1, k)


@njit(nogil=True, error_model="numpy")
def run_bits(signs, times, count, larger):
    """Return the parameter of the runs between multiples, and the bits that runs and multiples take."""
    k = first_parameter(count - larger, larger + 1)
    bits, since, t = _i64(5), _i64(0), _i64(0)
    for i in range(count):
        if signs[i] & 2:
            bits += code_length(i - since, k) + code_length(_i64(times[t]) - 2, _i64(0))
            since, t = i + 1, t + 1
    return k, bits + code_length(count - since, k)


@njit(nogil=True, error_model="numpy")
def put_multiple(address, held, number, m, signs, count, run, k_run):
    """Append m of entry `run`, and the distance to the next multiple.

    Returns the new address, held and number, and the number of the next multiple, or `count` if there is none.
    """
    none, after = _i64(0), run + 1
    while after < count and not signs[after] & 2:
        after += 1
    address, held, number = put_code(address, held, number, _i64(m) - 2, none)
    address, held, number = put_code(address, held, number, after - run - 1, k_run)
    return address, held, number, after


@njit(nogil=True, error_model="numpy")
def put_entries(address, gaps, signs, times, count, k, k_run, parameters, larger):
    """Write the payload of an entropy-coded tile; return the address of its end.

    Each of the `larger` multiples is followed by its m and by the number of entries up to the next multiple.
    """
    held, number, t, run = _u64(0), _i64(0), _i64(0), count
    one, five = _i64(1), _i64(5)
    words, sizes = np.empty(BLOCK // 2, np.uint64), np.empty(BLOCK // 2, np.uint64)
    if larger:
        run = _i64(0)
        while not signs[run] & 2:
            run += 1
        address, held, number = put(address, held, number, k_run, five)
        address, held, number = put_code(address, held, number, run, k_run)
    address, held, number = put(address, held, number, _i64(signs[0] & 1), one)
    if run == 0:
        address, held, number, run = put_multiple(address, held, number, times[t], signs, count, run, k_run)
        t += 1
    for first in range(1, count - 1, BLOCK):
        chosen, stop = _i64(parameters[first // BLOCK]), min(first + BLOCK, count - 1)
        address, held, number = put(address, held, number, _i64(chosen != k), one)
        if chosen != k:
            address, held, number = put(address, held, number, chosen, five)
        k = chosen
        if run >= stop:
            longest = simd.code_entries(
                gaps.ctypes.data + 4 * (first - 1), signs.ctypes.data + first, k, stop - first, words.ctypes.data,
                sizes.ctypes.data,
            )  # fmt: skip
            if 2 * longest <= PUT_MAX:
                for i in range((stop - first + 1) >> 1):
                    address, held, number = put(address, held, number, words[i], _i64(sizes[i]))
                continue
        for i in range(first, stop):
            x, sign = _i64(gaps[i - 1]), _i64(signs[i] & 1)
            q = x >> k
            if q < ESCAPE:
                code = (1 << q) - 1 | (x & (1 << k) - 1) << q + 1 | sign << q + 1 + k
                address, held, number = put(address, held, number, code, q + 2 + k)
            else:
                address, held, number = put_code(address, held, number, x, k)
                address, held, number = put(address, held, number, sign, one)
            if i == run:
                address, held, number, run = put_multiple(address, held, number, times[t], signs, count, run, k_run)
                t += 1
    if count > 1:
        address, held, number = put(address, held, number, _i64(signs[count - 1] & 1), one)
        if run == count - 1:
            address, held, number, run = put_multiple(address, held, number, times[t], signs, count, run, k_run)
    if number:
        simd.store_word(address, held)
        address += 1
    return address


@njit(nogil=True, error_model="numpy")
def put_words(address, gaps, signs, times, count, larger, width):
    """Write the payload of a tile of plain positions; return the address of its end."""
    back, t = width, 0
    for i in range(count):
        simd.store_word(address + 4 * i, _u64(back | _i64(signs[i] & 1) << 31))
        if i < count - 1:
            back -= _i64(gaps[i]) + 1
    address += 4 * count
    if larger:
        for i in range(count):
            m = _i64(1)
            if signs[i] & 2:
                m = _i64(times[t])
                t += 1
            simd.store_word(address + 4 * i, _u64(m))
        address += 4 * count
    return address


@njit(nogil=True, error_model="numpy")
def put_tile(address, room, gap, gaps, signs, times, count, rice):
    """Write a tile at an address; return the address of its end, or 0 if it might not fit into `room` bytes.

    `gap` is the number of elements before the first entry, or -1 to omit this number. gaps[i] is the gap between
    entries i and i + 1. signs[i] has bit 0 for a negative entry, and bit 1 for a multiple. `times` are the m of the
    multiples.
    """
    if room < HEADER_BYTES:
        return 0
    skipped = larger = _i64(0)
    for i in range(count - 1):
        skipped += _i64(gaps[i])
    for i in range(count):
        larger += _i64(signs[i] >> 1)
    k_run, k = _i64(0), first_parameter(skipped, count)
    parameters = np.empty(TILE_MAX // BLOCK + 1, np.uint8)
    if rice:
        inner, bits, now = max(count - 2, 0), count, k
        # The last gap is not in the payload, and padding must not count: both are set to 0 for the choice.
        last = gaps[inner]
        gaps[inner : inner + BLOCK] = 0
        for b in range(0, inner, BLOCK):
            now, more = choose_parameter(gaps.ctypes.data + 4 * b, min(BLOCK, inner - b), now)
            parameters[b // BLOCK] = now
            bits += more
        gaps[inner] = last
        if larger:
            k_run, more = run_bits(signs, times, count, larger)
            bits += more
        payload = (bits + 7) >> 3
    else:
        payload = 4 * count * (2 if larger else 1)
    if room < HEADER_BYTES + payload:
        return 0
    if gap >= 0:
        address = put_varint(address, gap)
    address = put_varint(address, count << 1 | (larger > 0))
    address = put_varint(address, skipped)
    address = put_varint(address, payload)
    if rice:
        return put_entries(address, gaps, signs, times, count, k, k_run, parameters, larger)
    return put_words(address, gaps, signs, times, count, larger, skipped + count - 1)
