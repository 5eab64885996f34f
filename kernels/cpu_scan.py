"""Scan of the elements on a CPU: add an update to a residual, and find the sums that reach tau.

`scan` adds blocks of 64 elements, and stores a record of bit masks for each block with a sum that reaches tau.
`list_entries` converts the records to entries. An entry is packed into 32 bits: its position in the region, a flag for
its sign, and a flag for m above 1.

With a lookahead, `scale` times the update is added, and `back` times this is subtracted from what stays in the
residual. Without one, `scale` is 1 and `back` is 0.
"""

import numpy as np
from numba import njit

from hvdx.kernels import simd
from hvdx.kernels.compiled import entry
from hvdx.kernels.denormals import keep_denormals, restore_mode
from hvdx.kernels.tiles import M_MAX

#: Number of blocks of 64 elements that are scanned before their entries are listed. Records and entries stay in the
#: caches.
CHUNK = 512
#: Columns of the record of a block: masks of the sums that reach tau, of the negative sums and of the sums that are
#: stored whole, and the block's number.
HITS, NEGATIVE, WHOLE, BLOCK = range(4)
#: Flags and position of a packed entry.
SIGN, MULTIPLE = np.uint32(1 << 31), np.uint32(1 << 30)
POSITION = np.uint32(simd.POSITION)

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
    # An update and a residual of 2**30 tau each reach one more.
    return min(m, _i64(M_MAX))


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
def scan_mixed(block, n, residual, pieces, taus, limits, scale, back, marks, found):
    """Do the work of `accumulate` for one block with elements of several runs, or with the end of the update."""
    hit, negative, whole, fault, first = _u64(0), _u64(0), _u64(0), 0, 64 * block
    p = piece_of(pieces, first)
    for lane in range(min(64, n - first)):
        element = first + lane
        if element >= pieces[p, 1]:
            p += 1
        run, bit = pieces[p, 3], _u64(1) << _u64(lane)
        tau = taus[run]
        added = simd.load_float(pieces[p, 2] + 4 * (element - pieces[p, 0])) * scale
        if not abs(added) <= limits[run]:
            added, fault = np.float32(-0.0), 1
        total = residual[element] + added
        rest = abs(total)
        if rest >= tau:
            rest -= tau
            hit |= bit
        if np.signbit(total):
            negative |= bit
        if rest >= tau:
            whole |= bit
            residual[element] = total
        else:
            left = np.float32(np.copysign(rest, total))
            residual[element] = left - added * back if back else left
    marks[found, HITS], marks[found, NEGATIVE], marks[found, WHOLE], marks[found, BLOCK] = hit, negative, whole, block
    return found + (hit != 0), _i64(whole != 0), fault


@njit(nogil=True, error_model="numpy")
def gather(row, pieces, p, first):
    """Copy the 64 elements from `first` on into `row` if they are of one run, that of piece p; return whether."""
    at, run = _i64(0), pieces[p, 3]
    while at < 64:
        if p == pieces.shape[0] or pieces[p, 3] != run:
            return False
        stop = min(pieces[p, 1] - first, 64)
        address = pieces[p, 2] + 4 * (first - pieces[p, 0])
        for i in range(at, stop):
            row[i] = simd.load_float(address + 4 * i)
        at, p = stop, p + 1
    return True


@njit(nogil=True, error_model="numpy")
def scan(begin, end, n, residual, pieces, taus, limits, scale, back, sent, marks, row):
    """Accumulate the blocks from `begin` to `end`.

    Returns the number of records in `marks`, 1 if some sum is stored whole, and 1 if some element cannot be sent.
    """
    found, whole, fault, block = _i64(0), _i64(0), _i64(0), begin
    address, p = residual.ctypes.data, _i64(piece_of(pieces, 64 * begin))
    while block < end:
        first = 64 * block
        while pieces[p, 1] <= first:
            p += 1
        run, entries = pieces[p, 3], found
        stop, source = min(end, pieces[p, 1] // 64), pieces[p, 2] - 4 * pieces[p, 0]
        if stop <= block and gather(row, pieces, p, first):
            stop, source = block + 1, row.ctypes.data - 4 * first
        if stop <= block:
            stop = block + 1
            found, more, bad = scan_mixed(block, n, residual, pieces, taus, limits, scale, back, marks, found)
            for i in range(entries, found):
                hit = marks[i, HITS]
                while hit:
                    sent[pieces[piece_of(pieces, first + simd.trailing_zeros(hit)), 3]] += 1
                    hit &= hit - _u64(1)
        else:
            tau, limit = taus[run], limits[run]
            if back:
                found, more, bad = simd.accumulate_ahead(
                    address, source, block, stop, found, tau, limit, scale, back, marks.ctypes.data
                )
            else:
                found, more, bad = simd.accumulate(
                    address, source, block, stop, found, tau, limit, scale, back, marks.ctypes.data
                )
            number = _i64(0)
            for i in range(entries, found):
                number += simd.population(marks[i, HITS])
            sent[run] += number
        whole |= more
        fault |= bad
        block = stop
    return found, whole, fault


@njit(nogil=True, error_model="numpy")
def list_entries(found, marks, origin, entries, waiting, blind, next_residual, next_update):
    """Append the entries of records without multiples to the `waiting` entries; return the new number of entries.

    Meanwhile the elements at `next_residual` and `next_update` are prefetched.

    `blind` entries of each record are written without a test. This covers most records, so the processor mispredicts
    few branches. Entries beyond those of the record are overwritten by the next ones.
    """
    for i in range(found):
        simd.prefetch(next_residual + 128 * i)
        simd.prefetch(next_update + 128 * i)
        hit, negative = marks[i, HITS], marks[i, NEGATIVE]
        base = np.uint32((_i64(marks[i, BLOCK]) << 6) - origin)
        after = waiting + simd.population(hit)
        for _ in range(blind):
            lane = simd.trailing_zeros(hit) & 63
            entries[waiting] = base | np.uint32(lane) | np.uint32(negative >> _u64(lane)) << np.uint32(31)
            waiting += 1
            hit &= hit - _u64(1)
        while hit:
            lane = simd.trailing_zeros(hit)
            entries[waiting] = base | np.uint32(lane) | np.uint32(negative >> _u64(lane)) << np.uint32(31)
            waiting += 1
            hit &= hit - _u64(1)
        waiting = after
    return waiting


@njit(nogil=True, error_model="numpy")
def list_multiples(
    found, marks, origin, residual, pieces, taus, limits, scale, back, entries, waiting, times, multiples
):
    """Do the work of `list_entries` for records with multiples, and subtract them from the sums that were stored whole.

    Returns the new numbers of entries and multiples.
    """
    for i in range(found):
        hit, negative, whole = marks[i, HITS], marks[i, NEGATIVE], marks[i, WHOLE]
        first = _i64(marks[i, BLOCK]) << 6
        while hit:
            lane = simd.trailing_zeros(hit)
            element = first + lane
            word = np.uint32(element - origin) | np.uint32(negative >> _u64(lane)) << np.uint32(31)
            if whole >> _u64(lane) & _u64(1):
                total = residual[element]
                p = piece_of(pieces, element)
                run = pieces[p, 3]
                tau = taus[run]
                m = multiple_of(abs(total), tau)
                left = abs(total) - amount(m, tau)
                left = np.float32(np.copysign(left, total))
                if back:
                    added = simd.load_float(pieces[p, 2] + 4 * (element - pieces[p, 0])) * scale
                    # `scan` has counted an element above the limit as zero.
                    if abs(added) <= limits[run]:
                        left -= added * back
                residual[element] = left
                word |= MULTIPLE
                times[multiples] = m
                multiples += 1
            entries[waiting] = word
            waiting += 1
            hit &= hit - _u64(1)
    return waiting, multiples


@entry
def roll_back(begin, end, residual, pieces, limits, scale, back):
    """Subtract from the residual what `scan` added for the elements from `begin` to `end`, apart from the entries."""
    mode = keep_denormals()
    p = piece_of(pieces, begin)
    for element in range(begin, end):
        while element >= pieces[p, 1]:
            p += 1
        added = simd.load_float(pieces[p, 2] + 4 * (element - pieces[p, 0])) * scale
        if abs(added) <= limits[pieces[p, 3]]:
            residual[element] = residual[element] + added * back - added
    restore_mode(mode)


@entry
def find_fault(begin, end, pieces, limits, scale):
    """Return the first element from `begin` to `end` that, times `scale`, is NaN or above its limit; -1 if none."""
    element = begin
    while element < end:
        p = piece_of(pieces, element)
        address, limit = pieces[p, 2] - 4 * pieces[p, 0], limits[pieces[p, 3]]
        stop = min(end, pieces[p, 1])
        while element + 64 <= stop:
            mask = simd.beyond(address + 4 * element, limit, scale)
            if mask:
                return element + simd.trailing_zeros(mask)
            element += 64
        while element < stop:
            if not abs(simd.load_float(address + 4 * element) * scale) <= limit:
                return element
            element += 1
    return _i64(-1)
