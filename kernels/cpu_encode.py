"""Encoding on a CPU: the Numba functions behind `cpu.encode`. They check nothing; `cpu` does.

A worker goes over its regions chunk by chunk: `accumulate` adds 64 elements at a time and gives bit masks; the masks
that are not empty become entries; a region's entries become tiles as soon as there are enough of them.
"""

import numpy as np
from numba import njit

from hvdx.kernels import simd
from hvdx.kernels.tiles import BLOCK, ESCAPE, K_MAX, SHARES, SWITCH, TILE_MAX

#: Blocks of 64 elements between two looks at the entries: their masks and entries stay in the first cache.
CHUNK = 512
#: Bytes that no entry exceeds: a gap code of at most 7 + 2 * 31 + 31 bits, a sign, an m of 69 and a run of 62 bits.
ENTRY_BYTES = 32
HEAD_BYTES = 4 * 9 + 8
#: Columns of the record of a region.
FIRST, LAST, BYTES, LEFT, LEFT_MULTIPLES = range(5)
#: A worker's place: the region, the block in it, entries and multiples waiting, and whether the region is read.
REGION, AT, WAITING, MULTIPLES, READ, USED = range(6)
_SIGN, _MULTIPLE = np.uint32(1 << 31), np.uint32(1 << 30)
_POSITION = np.uint32((1 << 30) - 1)

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
def first_parameter(skipped, entries):
    """The Rice parameter that holds at the start of a tile."""
    return min(max(simd.bit_length(_u64(skipped // entries)) - 1, 0), K_MAX)


@njit(nogil=True, error_model="numpy")
def code_length(x, k):
    """Bits of x in the gap code with parameter k."""
    q = x >> k
    if q < ESCAPE:
        return q + 1 + k
    return ESCAPE + 2 * simd.bit_length(_u64(q - ESCAPE + 1)) - 1 + k


@njit(nogil=True, error_model="numpy")
def choose_parameter(gaps, length, before):
    """The Rice parameter of the 64 gaps at an address, those past `length` being 0, and the bits they take."""
    middle = min(simd.bit_lengths(gaps) // length, K_MAX - 1)
    padding = BLOCK - length
    best, bits = 0, 1 << 60
    for k in range(max(middle - 2, 0), middle + 2):
        cost = simd.code_lengths(gaps, k) - padding + k * length
        if cost < bits:
            best, bits = k, cost
    keep = simd.code_lengths(gaps, before) - padding + before * length
    if keep <= bits + SWITCH:
        return before, keep + 1
    return best, bits + 1 + 5


@njit(nogil=True, error_model="numpy")
def put_varint(address, value):
    """Write a LEB128 number at an address: where it ends. It may write 8 bytes."""
    while value >= 0x80:
        simd.store_word(address, _u64(value & 0x7F | 0x80))
        value >>= 7
        address += 1
    simd.store_word(address, _u64(value))
    return address + 1


@njit(nogil=True, error_model="numpy")
def put(address, held, number, value, length):
    """Append up to 56 bits to the `number` < 8 bits `held` at an address: the three anew."""
    held |= _u64(value) << _u64(number)
    simd.store_word(address, held)
    number += length
    return address + (number >> 3), held >> _u64(number & ~7), number & 7


@njit(nogil=True, error_model="numpy")
def put_code(address, held, number, x, k):
    """Append x in the gap code with parameter k."""
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
    """The parameter for the runs between multiples, and the bits that runs and multiples take."""
    k = first_parameter(count - larger, larger + 1)
    bits, since, t = _i64(5), _i64(0), _i64(0)
    for i in range(count):
        if signs[i] & 2:
            bits += code_length(i - since, k) + code_length(_i64(times[t]) - 2, _i64(0))
            since, t = i + 1, t + 1
    return k, bits + code_length(count - since, k)


@njit(nogil=True, error_model="numpy")
def put_with_multiples(address, gaps, signs, times, count, k, k_run, parameters):
    """`put_entries` for a tile that has multiples: between them run lengths, after each its m."""
    held, number, t = _u64(0), _i64(0), _i64(0)
    none, one, five = _i64(0), _i64(1), _i64(5)
    run = _i64(0)
    while not signs[run] & 2:
        run += 1
    address, held, number = put(address, held, number, k_run, five)
    address, held, number = put_code(address, held, number, run, k_run)
    for i in range(count):
        sign = _i64(signs[i] & 1)
        if 1 <= i < count - 1:
            if i % BLOCK == 1:
                chosen = _i64(parameters[i // BLOCK])
                address, held, number = put(address, held, number, _i64(chosen != k), one)
                if chosen != k:
                    address, held, number = put(address, held, number, chosen, five)
                k = chosen
            x = _i64(gaps[i - 1])
            q = x >> k
            if q < ESCAPE:
                word = (1 << q) - 1 | (x & (1 << k) - 1) << q + 1 | sign << q + 1 + k
                address, held, number = put(address, held, number, word, q + 2 + k)
            else:
                address, held, number = put_code(address, held, number, x, k)
                address, held, number = put(address, held, number, sign, one)
        else:
            address, held, number = put(address, held, number, sign, one)
        if i == run:
            run += 1
            while run < count and not signs[run] & 2:
                run += 1
            address, held, number = put_code(address, held, number, _i64(times[t]) - 2, none)
            address, held, number = put_code(address, held, number, run - i - 1, k_run)
            t += 1
    if number:
        simd.store_word(address, held)
        address += 1
    return address


@njit(nogil=True, error_model="numpy")
def put_entries(address, gaps, signs, count, k, parameters):
    """Write the payload of an entropy-coded tile without multiples, which most are."""
    one, five = _i64(1), _i64(5)
    address, held, number = put(address, _u64(0), _i64(0), _i64(signs[0]), one)
    for block in range(0, count - 2, BLOCK):
        chosen = _i64(parameters[block // BLOCK])
        address, held, number = put(address, held, number, _i64(chosen != k), one)
        if chosen != k:
            address, held, number = put(address, held, number, chosen, five)
        k = chosen
        low = (_i64(1) << k) - 1
        for i in range(block, min(block + BLOCK, count - 2)):
            x, sign = _i64(gaps[i]), _i64(signs[i + 1])
            q = x >> k
            if q < ESCAPE:
                word = (_i64(1) << q) - 1 | (x & low) << q + 1 | sign << q + 1 + k
                address, held, number = put(address, held, number, word, q + 2 + k)
            else:
                address, held, number = put_code(address, held, number, x, k)
                address, held, number = put(address, held, number, sign, one)
    if count > 1:
        address, held, number = put(address, held, number, _i64(signs[count - 1]), one)
    if number:
        simd.store_word(address, held)
        address += 1
    return address


@njit(nogil=True, error_model="numpy")
def put_words(address, gaps, signs, times, count, larger, width):
    """Write the payload of a tile of plain positions."""
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
    """Write a tile at an address: where it ends, or 0 if it might not fit.

    `gap` is what lies before its first entry, -1 to leave that number out; gaps[i] lies between entries i and i + 1;
    signs[i] has bit 0 for a negative entry and bit 1 for a multiple; times are the multiples.
    """
    if room < HEAD_BYTES:
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
        # The last of them is in the head, and padding must not count.
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
    if room < HEAD_BYTES + payload:
        return 0
    if gap >= 0:
        address = put_varint(address, gap)
    address = put_varint(address, count << 1 | (larger > 0))
    address = put_varint(address, skipped)
    address = put_varint(address, payload)
    if rice and not larger:
        return put_entries(address, gaps, signs, count, k, parameters)
    if rice:
        return put_with_multiples(address, gaps, signs, times, count, k, k_run, parameters)
    return put_words(address, gaps, signs, times, count, larger, skipped + count - 1)


@njit(nogil=True, error_model="numpy")
def unpack(entries, begin, count, gaps, signs, at):
    """Split packed entries into gaps and signs, from place `at` on."""
    for i in range(count):
        word = entries[begin + i]
        signs[at + i] = word >> np.uint32(31) | (word >> np.uint32(29)) & np.uint32(2)
    for i in range(count - 1):
        gaps[at + i] = (entries[begin + i + 1] & _POSITION) - (entries[begin + i] & _POSITION) - np.uint32(1)


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
                word |= _MULTIPLE
                times[multiples] = m
                multiples += 1
            entries[waiting] = word
            waiting += 1
            hit &= hit - _u64(1)
    return waiting, multiples


@njit(nogil=True, error_model="numpy")
def drop(entries, waiting, times, multiples, count):
    """Forget the first `count` entries: how many multiples stay."""
    gone = _i64(0)
    for i in range(count):
        gone += (entries[i] >> np.uint32(30)) & np.uint32(1)
    for i in range(count, waiting):
        entries[i - count] = entries[i]
    for i in range(gone, multiples):
        times[i - gone] = times[i]
    return multiples - gone


@njit(nogil=True, error_model="numpy")
def encode_regions(
    begin, end, n, layout, rice, residual, pieces, taus, counted, scratch, place, records, left, left_times, out
):
    """Encode the regions from `begin` to `end`, or until `out` is full: whether all are done.

    With `begin` -1 it goes on where `place` stands, with an empty `out`. `out` takes the tiles, the first one of each
    region without its first number.
    """
    region_size, tile_max, tile_min = layout[0], layout[1], layout[2]
    entries, times, where, masks, gaps, signs = scratch
    sent, near = counted[:, 0], counted[:, 1:]
    if begin >= 0:
        place[:] = 0
        place[REGION] = begin
        counted[:] = 0
        records[begin:end] = 0
    place[USED] = 0
    blocks, keep = region_size // 64, tile_min - 1
    while place[REGION] < end:
        region, waiting, multiples = place[REGION], place[WAITING], place[MULTIPLES]
        origin, record = region * region_size, records[region]
        while waiting >= (tile_min if place[READ] else tile_max):
            count = min(waiting, tile_max)
            unpack(entries, 0, count, gaps, signs, 0)
            start = _i64(entries[0] & _POSITION)
            gap = origin + start - record[LAST] - 1 if record[BYTES] else -1
            address = out.ctypes.data + place[USED]
            stop = put_tile(address, out.size - place[USED], gap, gaps, signs, times, count, rice)
            if stop == 0:
                return False
            if record[BYTES] == 0:
                record[FIRST] = origin + start
            record[LAST] = origin + _i64(entries[count - 1] & _POSITION)
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
        found, whole = scan(block + place[AT], block + stop, n, residual, pieces, taus, sent, near, where, masks)
        if whole:
            waiting, multiples = list_multiples(
                found, where, masks, origin, residual, pieces, taus, near, entries, waiting, times, multiples
            )
        else:
            element = 64 * (block + stop)
            p = piece_of(pieces, element)
            ahead = 4 * element + simd.AHEAD
            here, there = _i64(residual.ctypes.data) + ahead, pieces[p, 2] - 4 * pieces[p, 0] + ahead
            blind = 1 if 4 * found < stop - place[AT] else 3
            waiting = list_entries(found, where, masks, origin, residual, entries, waiting, blind, here, there)
        place[AT], place[WAITING], place[MULTIPLES], place[READ] = stop, waiting, multiples, stop == last
    return True


#: Where the joining of tiles stands: the region, bytes of its tiles still to come, whether its head is written, the
#: first region with entries that wait, how many regions and entries wait, the last entry's index, and bytes written.
J_REGION, J_BYTES, J_HEAD, J_FROM, J_REGIONS, J_WAITING, J_LAST, J_USED = range(8)


@njit(nogil=True, error_model="numpy")
def put_shared(place, layout, rice, scratch, records, left, left_times, out):
    """Write the tile of the entries that wait: whether it fitted."""
    _, times, _, _, gaps, signs = scratch
    region_size, keep = layout[0], layout[2] - 1
    count = multiples = _i64(0)
    first = before = _i64(-1)
    for region in range(place[J_FROM], place[J_FROM] + place[J_REGIONS]):
        some, begin = records[region, LEFT], region * keep
        if some:
            start = region * region_size + _i64(left[begin] & _POSITION)
            if count:
                gaps[count - 1] = start - before - 1
            else:
                first = start
            unpack(left, begin, some, gaps, signs, count)
            before = region * region_size + _i64(left[begin + some - 1] & _POSITION)
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


@njit(nogil=True, error_model="numpy")
def join(end, layout, rice, scratch, place, records, left, left_times, source, out):
    """Join tiles of regions in `source` and shared tiles into `out`.

    Ends when the regions up to `end` are done (1), when `source` is used up (0), or when `out` is full (-1).
    """
    group, group_regions = layout[3], layout[4]
    taken = _i64(0)
    while place[J_REGION] < end:
        record = records[place[J_REGION]]
        if record[BYTES] and not place[J_HEAD]:
            if place[J_WAITING] and not put_shared(place, layout, rice, scratch, records, left, left_times, out):
                return -1, taken
            if out.size - place[J_USED] < HEAD_BYTES + record[BYTES]:
                return -1, taken
            address = out.ctypes.data + place[J_USED]
            place[J_USED] += put_varint(address, record[FIRST] - place[J_LAST] - 1) - address
            place[J_HEAD], place[J_BYTES], place[J_LAST] = 1, record[BYTES], record[LAST]
            place[J_REGIONS] = 0
        if place[J_BYTES]:
            some = min(place[J_BYTES], source.size - taken)
            # A slice's assignment would compile the text of its error.
            for i in range(some):
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
        place[J_HEAD] = 0
    if place[J_WAITING] and not put_shared(place, layout, rice, scratch, records, left, left_times, out):
        return -1, taken
    return 1, taken


@njit(nogil=True, error_model="numpy")
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


@njit(nogil=True, error_model="numpy")
def add_histogram(values, bins):
    """Count the sizes of uint32 patterns of float32: the exponent and three bits of the fraction are the bin."""
    for i in range(values.size):
        bins[(values[i] >> np.uint32(20)) & np.uint32(0x7FF)] += 1
