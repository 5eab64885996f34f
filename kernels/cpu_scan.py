"""Scan of the elements on a CPU: add an update to a residual, and find the sums that reach tau.

`scan` adds blocks of 64 elements, and stores a bit mask for each block with a sum that reaches tau. `list_entries`
converts the masks to entries. An entry is packed into 32 bits: its position in the region, a flag for its sign, and a
flag for m above 1.
"""

import numpy as np
from numba import njit

from hvdx.kernels import simd
from hvdx.kernels.compiled import entry
from hvdx.kernels.tiles import SHARES

#: Number of blocks of 64 elements that are scanned before their entries are listed. Masks and entries stay in the
#: caches.
CHUNK = 512
#: Flags and position of a packed entry.
SIGN, MULTIPLE = np.uint32(1 << 31), np.uint32(1 << 30)
POSITION = np.uint32((1 << 30) - 1)

# If a variable starts as a literal, Numba compiles the functions that take it once more for this literal.
_u64, _i64 = np.uint64, np.int64


@njit(nogil=True, error_model="numpy")
def amount(m, tau):
    """Return the value of an entry, float32(m * tau)."""
    return np.float32(np.float64(m) * np.float64(tau))


@njit(nogil=True, error_model="numpy")
def multiple_of(size, tau):
    """Return m of a sum with the absolute value `size`."""
    m = _i64(np.float64(size) / np.float64(tau))
    # float32(m * tau) may round down so far that tau still fits into the remainder.
    if size - amount(m, tau) >= tau:
        m += 1
    return m


@njit(nogil=True, error_model="numpy")
def piece_of(pieces, element):
    """Return the number of the piece of an element."""
    low, high = 0, pieces.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        if pieces[middle, 1] > element:
            high = middle
        else:
            low = middle + 1
    return low


@njit(nogil=True, error_model="numpy")
def scan_mixed(block, n, residual, pieces, taus, near):
    """Do the work of `accumulate` for one block that crosses the border of a piece or the end of the update.

    Returns its mask, and 1 if a sum is stored whole.
    """
    hit, more, first = _u64(0), 0, 64 * block
    p = piece_of(pieces, first)
    for lane in range(min(64, n - first)):
        element = first + lane
        if element >= pieces[p, 1]:
            p += 1
        run = pieces[p, 3]
        tau = taus[run]
        total = residual[element] + simd.load_float(pieces[p, 2] + 4 * (element - pieces[p, 0]))
        rest = left = abs(total)
        if left >= tau:
            rest = left - tau
            hit |= _u64(1) << _u64(lane)
            if rest >= tau:
                more = 1
            else:
                left = rest
        residual[element] = np.float32(np.copysign(left, total))
        for j, share in enumerate(SHARES):
            near[run, j] += rest >= np.float32(share) * tau
    return hit, more


@njit(nogil=True, error_model="numpy")
def scan(begin, end, n, residual, pieces, taus, sent, near, where, masks):
    """Accumulate the blocks from `begin` to `end`; return the number of masks, and 1 if some sum is stored whole."""
    found, whole, block = _i64(0), 0, begin
    address = residual.ctypes.data
    while block < end:
        p = piece_of(pieces, 64 * block)
        run, entries = pieces[p, 3], found
        stop = min(end, pieces[p, 1] // 64)
        if stop <= block:
            hit, more = scan_mixed(block, n, residual, pieces, taus, near)
            masks[found], where[found] = hit, block
            while hit:
                element = 64 * block + simd.trailing_zeros(hit)
                sent[pieces[piece_of(pieces, element), 3]] += 1
                hit &= hit - _u64(1)
            found += masks[found] != 0
            stop = block + 1
        else:
            found, more = simd.accumulate(
                address, pieces[p, 2] - 4 * pieces[p, 0], block, stop, found, taus[run],
                masks.ctypes.data, where.ctypes.data, near[run].ctypes.data,
            )  # fmt: skip
            number = _i64(0)
            for i in range(entries, found):
                number += simd.population(masks[i])
            sent[run] += number
        whole |= more
        block = stop
    return found, whole


@njit(nogil=True, error_model="numpy")
def list_entries(found, where, masks, origin, residual, entries, waiting, blind, next_residual, next_update):
    """Append the entries of masks without multiples to the `waiting` entries; return the new number of entries.

    Meanwhile the elements at `next_residual` and `next_update` are prefetched.

    `blind` entries of each mask are written without a test. This covers most masks, so the processor mispredicts few
    branches. Entries beyond those of the mask are overwritten by the next ones.
    """
    for i in range(found):
        simd.prefetch(next_residual + 128 * i)
        simd.prefetch(next_update + 128 * i)
        hit, base = masks[i], np.uint32((where[i] << 6) - origin)
        address = residual.ctypes.data + 256 * where[i]
        after = waiting + simd.population(hit)
        for _ in range(blind):
            lane = simd.trailing_zeros(hit) & 63
            entries[waiting] = base | np.uint32(lane) | simd.load_sign(address + 4 * lane)
            waiting += 1
            hit &= hit - _u64(1)
        while waiting < after:
            lane = simd.trailing_zeros(hit)
            entries[waiting] = base | np.uint32(lane) | simd.load_sign(address + 4 * lane)
            waiting += 1
            hit &= hit - _u64(1)
        waiting = after
    return waiting


@njit(nogil=True, error_model="numpy")
def list_multiples(found, where, masks, origin, residual, pieces, taus, near, entries, waiting, times, multiples):
    """Do the work of `list_entries` if some sums are stored whole; subtract m * tau from those.

    Returns the new numbers of entries and of multiples.
    """
    for i in range(found):
        hit = masks[i]
        while hit:
            element = (where[i] << 6) + simd.trailing_zeros(hit)
            total = residual[element]
            word = np.uint32(element - origin) | np.uint32(np.signbit(total)) << np.uint32(31)
            run = pieces[piece_of(pieces, element), 3]
            tau = taus[run]
            if abs(total) >= tau:
                m = multiple_of(abs(total), tau)
                left = abs(total) - amount(m, tau)
                for j, share in enumerate(SHARES):
                    near[run, j] -= abs(left) < np.float32(share) * tau
                residual[element] = -left if np.signbit(total) else left
                word |= MULTIPLE
                times[multiples] = m
                multiples += 1
            entries[waiting] = word
            waiting += 1
            hit &= hit - _u64(1)
    return waiting, multiples


@entry
def find_fault(begin, end, pieces, limits):
    """Return the first element from `begin` to `end` with an absolute value above its limit, or NaN; -1 if none."""
    element = begin
    while element < end:
        p = piece_of(pieces, element)
        address, limit = pieces[p, 2] - 4 * pieces[p, 0], limits[pieces[p, 3]]
        stop = min(end, pieces[p, 1])
        while element + 64 <= stop:
            mask = simd.beyond(address + 4 * element, limit)
            if mask:
                return element + simd.trailing_zeros(mask)
            element += 64
        while element < stop:
            if not abs(simd.load_float(address + 4 * element)) <= limit:
                return element
            element += 1
    return _i64(-1)


@entry
def add_histogram(values, bins):
    """Count the bits of float32, given as uint32: the exponent and three bits of the fraction select the bin."""
    for i in range(values.size):
        bins[(values[i] >> np.uint32(20)) & np.uint32(0x7FF)] += 1
