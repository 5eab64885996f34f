"""Encoder on a CPU: the Numba functions of `cpu.encode`. They do not check their arguments; `cpu` does.

A thread processes its regions chunk by chunk, and writes the entries of a region as tiles when there are enough. The
remaining entries of the regions are joined into shared tiles when all threads are done.
"""

import numpy as np
from numba import njit

from hvdx.kernels import simd
from hvdx.kernels.compiled import entry
from hvdx.kernels.cpu_scan import CHUNK, POSITION, list_entries, list_multiples, piece_of, scan
from hvdx.kernels.cpu_tiles import HEADER_BYTES, put_tile, put_varint
from hvdx.kernels.denormals import keep_denormals, restore_mode
from hvdx.kernels.simd import AHEAD

#: Columns of the record of a region: indices of the first and last entry in its own tiles, bytes of these tiles, and
#: numbers of remaining entries and multiples.
FIRST, LAST, BYTES, LEFT, LEFT_MULTIPLES = range(5)
#: Progress of a thread: the region, the block in it, numbers of waiting entries and multiples, 1 if the region is read
#: to its end, bytes used in the output, and 1 if some element cannot be sent.
REGION, AT, WAITING, MULTIPLES, READ, USED, FAULT = range(7)

_i64 = np.int64


@njit(nogil=True, error_model="numpy")
def unpack(entries, begin, count, gaps, signs, at):
    """Split packed entries into gaps and signs, which are written from index `at` on. Up to 16 more are written."""
    first = _i64(entries.ctypes.data) + 4 * begin
    simd.unpack_entries(first, count, gaps.ctypes.data + 4 * at, signs.ctypes.data + at)


@njit(nogil=True, error_model="numpy")
def drop(entries, waiting, times, multiples, count):
    """Remove the first `count` entries and their multiples; return the remaining number of multiples."""
    gone = _i64(0)
    if multiples:
        for i in range(count):
            gone += (entries[i] >> np.uint32(30)) & np.uint32(1)
    for i in range(count, waiting):
        entries[i - count] = entries[i]
    for i in range(gone, multiples):
        times[i - gone] = times[i]
    return multiples - gone


@entry
def encode_regions(
    begin,
    end,
    n,
    layout,
    rice,
    residual,
    pieces,
    taus,
    limits,
    scale,
    back,
    sent,
    scratch,
    place,
    records,
    left,
    left_times,
    out,
):
    """Encode the regions from `begin` to `end`, or until `out` is full; return True if all are done.

    With `begin` -1 it resumes from `place`, with an empty `out`. The tiles are written to `out`, the first tile of each
    region without the first number of its header.
    """
    mode = keep_denormals()
    region_size, tile_max, tile_min = layout[0], layout[1], layout[2]
    entries, times, marks, row, gaps, signs = scratch
    if begin >= 0:
        place[:] = 0
        place[REGION] = begin
        sent[:] = 0
        records[begin:end] = 0
    place[USED] = 0
    blocks, keep = region_size // 64, tile_min - 1
    while place[REGION] < end:
        region, waiting, multiples = place[REGION], place[WAITING], place[MULTIPLES]
        origin, record = region * region_size, records[region]
        while waiting >= (tile_min if place[READ] else tile_max):
            count = min(waiting, tile_max)
            unpack(entries, 0, count, gaps, signs, 0)
            start = _i64(entries[0] & POSITION)
            gap = origin + start - record[LAST] - 1 if record[BYTES] else -1
            address = out.ctypes.data + place[USED]
            stop = put_tile(address, out.size - place[USED], gap, gaps, signs, times, count, rice)
            if stop == 0:
                restore_mode(mode)
                return False
            if record[BYTES] == 0:
                record[FIRST] = origin + start
            record[LAST] = origin + _i64(entries[count - 1] & POSITION)
            record[BYTES] += stop - address
            place[USED] += stop - address
            multiples = drop(entries, waiting, times, multiples, count)
            waiting -= count
            place[WAITING], place[MULTIPLES] = waiting, multiples
        if place[READ]:
            for i in range(waiting):
                left[region * keep + i] = entries[i]
            for i in range(multiples):
                left_times[region * keep + i] = times[i]
            record[LEFT], record[LEFT_MULTIPLES] = waiting, multiples
            place[REGION] += 1
            place[AT] = place[WAITING] = place[MULTIPLES] = place[READ] = 0
            continue
        last = min(blocks, (n - origin + 63) // 64)
        stop = min(place[AT] + CHUNK, last)
        block = region * blocks
        found, whole, fault = scan(
            block + place[AT], block + stop, n, residual, pieces, taus, limits, scale, back, sent, marks, row
        )
        place[FAULT] |= fault
        if whole:
            waiting, multiples = list_multiples(
                found, marks, origin, residual, pieces, taus, limits, scale, back, entries, waiting, times, multiples
            )
        else:
            element = 64 * (block + stop)
            p = piece_of(pieces, element)
            ahead = 4 * element + AHEAD
            here, there = _i64(residual.ctypes.data) + ahead, pieces[p, 2] - 4 * pieces[p, 0] + ahead
            blind = 1 if 4 * found < stop - place[AT] else 3
            waiting = list_entries(found, marks, origin, entries, waiting, blind, here, there)
        place[AT], place[WAITING], place[MULTIPLES], place[READ] = stop, waiting, multiples, stop == last
    restore_mode(mode)
    return True


#: Progress of `join`: the region, bytes of its tiles that are not copied yet, 1 if its first number is written, the
#: first region with waiting entries, numbers of waiting regions and entries, index of the last entry, and bytes used.
J_REGION, J_BYTES, J_HEADER, J_FROM, J_REGIONS, J_WAITING, J_LAST, J_USED = range(8)


@njit(nogil=True, error_model="numpy")
def put_shared(place, layout, rice, scratch, records, left, left_times, out):
    """Write the shared tile of the waiting entries; return True if it fits."""
    _, times, _, _, gaps, signs = scratch
    region_size, keep = layout[0], layout[2] - 1
    count = multiples = _i64(0)
    first = before = _i64(-1)
    for region in range(place[J_FROM], place[J_FROM] + place[J_REGIONS]):
        some, begin = records[region, LEFT], region * keep
        if some:
            start = region * region_size + _i64(left[begin] & POSITION)
            if count:
                gaps[count - 1] = start - before - 1
            else:
                first = start
            unpack(left, begin, some, gaps, signs, count)
            before = region * region_size + _i64(left[begin + some - 1] & POSITION)
            count += some
        for i in range(records[region, LEFT_MULTIPLES]):
            times[multiples] = left_times[begin + i]
            multiples += 1
    address = out.ctypes.data + place[J_USED]
    room = out.size - place[J_USED]
    stop = put_tile(address, room, first - place[J_LAST] - 1, gaps, signs, times, count, rice)
    if stop:
        place[J_USED] += stop - address
        place[J_LAST] = before
        place[J_REGIONS] = place[J_WAITING] = 0
    return stop != 0


@entry
def join(end, layout, rice, scratch, place, records, left, left_times, source, out):
    """Join the regions' tiles in `source` and the shared tiles into `out`.

    Returns a state and the number of bytes taken from `source`. The state is 1 if the regions up to `end` are done, 0
    if `source` is used up, and -1 if `out` is full.
    """
    group, group_regions = layout[3], layout[4]
    taken = _i64(0)
    while place[J_REGION] < end:
        record = records[place[J_REGION]]
        if record[BYTES] and not place[J_HEADER]:
            if place[J_WAITING] and not put_shared(place, layout, rice, scratch, records, left, left_times, out):
                return -1, taken
            if out.size - place[J_USED] < HEADER_BYTES + record[BYTES]:
                return -1, taken
            address = out.ctypes.data + place[J_USED]
            place[J_USED] += put_varint(address, record[FIRST] - place[J_LAST] - 1) - address
            place[J_HEADER], place[J_BYTES], place[J_LAST] = 1, record[BYTES], record[LAST]
            place[J_REGIONS] = 0
        if place[J_BYTES]:
            some = min(place[J_BYTES], source.size - taken)
            # A slice assignment would compile the code of its error message.
            origin, target, words = source.ctypes.data + taken, out.ctypes.data + place[J_USED], some // 8
            for i in range(words):
                simd.store_word(target + 8 * i, simd.load_word(origin + 8 * i))
            for i in range(8 * words, some):
                out[place[J_USED] + i] = source[taken + i]
            place[J_USED] += some
            place[J_BYTES] -= some
            taken += some
            if place[J_BYTES]:
                return 0, taken
        if record[LEFT] and not place[J_WAITING]:
            place[J_FROM], place[J_REGIONS] = place[J_REGION], 0
        full = place[J_WAITING] + record[LEFT] >= group or place[J_REGIONS] + 1 >= group_regions
        if place[J_WAITING] + record[LEFT]:
            place[J_WAITING] += record[LEFT]
            place[J_REGIONS] += 1
            if full and not put_shared(place, layout, rice, scratch, records, left, left_times, out):
                place[J_WAITING] -= record[LEFT]
                place[J_REGIONS] -= 1
                return -1, taken
        place[J_REGION] += 1
        place[J_HEADER] = 0
    if place[J_WAITING] and not put_shared(place, layout, rice, scratch, records, left, left_times, out):
        return -1, taken
    return 1, taken
