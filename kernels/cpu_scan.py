"""Elements on a CPU: adding an update to a residual, and finding the sums that reach tau.

`scan` adds 64 elements at a time and keeps a bit mask of each 64 in which a sum reaches tau; `list_entries` makes
entries of the masks. An entry is packed into 32 bits: its place in the region, and flags for its sign and for more than
one tau.
"""

import numpy as np
from numba import njit

from hvdx.kernels import simd
from hvdx.kernels.compiled import entry
from hvdx.kernels.tiles import SHARES

#: Blocks of 64 elements between two looks at the entries: their masks and entries stay in the caches.
CHUNK = 512
#: The flags of a packed entry, and its place.
SIGN, MULTIPLE = np.uint32(1 << 31), np.uint32(1 << 30)
POSITION = np.uint32((1 << 30) - 1)

# Where a variable begins as a plain number, Numba compiles what it is passed to once more for that very number.
_u64, _i64 = np.uint64, np.int64


@njit(nogil=True, error_model="numpy")
def amount(m, tau):
    """What an entry of m times tau stands for."""
    return np.float32(np.float64(m) * np.float64(tau))


@njit(nogil=True, error_model="numpy")
def multiple_of(size, tau):
    """m of a sum of this size."""
    m = _i64(np.float64(size) / np.float64(tau))
    # float32(m * tau) may be so far below that tau still fits into what is left.
    if size - amount(m, tau) >= tau:
        m += 1
    return m


@njit(nogil=True, error_model="numpy")
def piece_of(pieces, element):
    """The piece that an element lies in."""
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
    """`accumulate` for a block that more than one piece, or the end, lies in: its mask, and 1 if a sum stays whole."""
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
    """Accumulate the blocks of 64 from `begin` to `end`: masks that are not empty, and whether some sum stays whole."""
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
    """Append the entries in masks, none of them a multiple: how many then wait.

    Meanwhile memory goes on with the elements at `next_residual` and `next_update`.

    `blind` entries of each mask are written whether they are there or not: what most masks hold, so that the processor
    has no branch to guess wrong.
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
    """`list_entries` where some sums are whole: takes m * tau from those."""
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
    """The first element from `begin` to `end` that is larger than its limit, or NaN; -1 if there is none."""
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
    """Count the sizes of uint32 patterns of float32: the exponent and three bits of the fraction are the bin."""
    for i in range(values.size):
        bins[(values[i] >> np.uint32(20)) & np.uint32(0x7FF)] += 1
