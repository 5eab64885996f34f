"""Decoder on a CPU: the Numba functions of `cpu.decode`.

A message is untrusted. `read_tiles` reads no byte outside it, and checks the bounds of every number. It reads the tiles
of a message in groups of up to 16, and lists their entries. `read_together` reads the tiles of a group at once, with
vectors; a tile that it cannot read, damaged or unusual, is left to `read_rice`, which reads one tile and finds the
error. `add_until` adds the listed entries to the output, and reads the next group when all are added.

A listed entry is a uint32: its distance from the tile's first entry << 2, plus 1 if it is negative and 2 if its m is
above 1. After the last entry of a tile is END_OF_LIST. In a *wide* tile distances have more bits than that, so a second
list has their upper bits.

`add_messages` has three ways. It adds to the output in place, one message after another. Or it adds all messages to a
small block of zeros, which stays in the caches, and then copies this block to the output, or adds it there.
"""

import numpy as np
from numba import njit

from hvdx.kernels import simd
from hvdx.kernels.compiled import entry
from hvdx.kernels.cpu_scan import amount, piece_of
from hvdx.kernels.cpu_tiles import first_parameter
from hvdx.kernels.denormals import keep_denormals, restore_mode
from hvdx.kernels.simd import TILES
from hvdx.kernels.table import ENTRIES, FIRST, LAST, LENGTH, MULTIPLE, START
from hvdx.kernels.tiles import BLOCK, ESCAPE, M_MAX

#: Ways of `add_messages`: add one message after another, set the output to the sum of all, or add the sum.
ADD_EACH, SET_SUM, ADD_SUM = range(3)
#: Columns of the table of messages: address and bytes, rows of the table of tiles, first row of the tables of runs.
ADDRESS, BYTES, NEXT, END, RUN = range(5)
#: Number of messages whose entries are listed at the same time. It bounds the memory.
TOGETHER = 16
#: Elements of the block of zeros. It stays in the second cache; a smaller one costs more calls of `add_until`.
_BLOCK = 1 << 15
#: Number of entries between an addition and the prefetch before it.
_AHEAD = 24
#: Largest z + k of a number in the gap code (see `docs/wire-format.md`): the bit length of N_MAX.
_BITS = 49
#: Largest Rice parameter with which three entries nearly always fit a word.
_K_TRIPLE = 10
#: End of a list of entries. No listed entry is larger.
END_OF_LIST = np.uint32(0xFFFFFFFF)
#: Bits of a listed entry that hold the distance, which they hold in bytes of float32.
_DISTANCE = np.uint32(0xFFFFFFFC)
#: Distance between the first and the last entry from which on a tile is wide.
WIDE = (1 << 30) - 1
#: Rows of the state of `read_together`, with a column for each tile. `simd.read_entries` uses the first five.
_BIT, _WHERE, _K, _NEXT_BIT, _NEXT_WHERE, _RUN, _K_RUN, _FOUND, _LAST_WORD, _EVENT = range(10)
#: Event of a tile that was read.
_NEVER = 1 << 62
#: Columns of the state of `add_until`: tiles of the group and their number; tile, entry and multiple to be added next.
_GROUP, _COUNT, _TILE, _ENTRY, _MULTIPLE = range(5)
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
def list_size(depth):
    """Return the size of the list of a tile of up to `depth` entries: entries are listed by 8, and read ahead."""
    return depth + _AHEAD + TILES


@njit(nogil=True, error_model="numpy")
def lists_size(depth):
    """Return the size of the lists of a group, and of the rows that `read_together` has not copied to them."""
    return TILES * list_size(depth) + TILES * (BLOCK + TILES)


@njit(nogil=True, error_model="numpy")
def put_entry(words, highs, i, offset, flags):
    """List entry i of a tile; `highs` is the address of the second list, or 0 without one."""
    simd.store_half(words + 4 * i, np.uint32(offset << 2 | flags))
    if highs:
        simd.store_half(highs + 4 * i, np.uint32(offset >> 30))


@njit(nogil=True, error_model="numpy")
def read_rice(address, size, entries, multiple, first, last, words, highs, multiples):
    """Check that a payload of `size` bytes is that of an entropy-coded tile, and list its entries.

    Args:
        address, size: the payload.
        entries, multiple, first, last: numbers of the tile's header.
        words, highs: addresses of the lists of entries; `highs` is 0 unless the tile is wide and the list is needed.
        multiples: address of a list of every m above 1, as uint64.

    Returns:
        0 or an error code.
    """
    bit, where, run, k_run, bits = _i64(0), _i64(0), entries, _i64(0), 8 * size
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
            gap, bit = take_code(address, bit, size, k)
            if gap < 0:
                return 2
            where += gap + 1
        elif i:
            if where >= last - first:
                return 2
            where = last - first
        flags = _i64(peek(address, bit, size) & _u64(1))
        bit += 1
        if i == run:
            m, bit = take_code(address, bit, size, none)
            if m < 0 or m > M_MAX - 2:
                return 3
            run, bit = take_code(address, bit, size, k_run)
            if run < 0 or run > entries - i - 1:
                return 4
            run += i + 1
            flags |= 2
            simd.store_word(multiples, _u64(m + 2))
            multiples += 8
        put_entry(words, highs, i, where, flags)
        if bit > bits:
            return 5
    if bits - bit >= 8 or (bit & 7 and peek(address, bit, size)):
        return 6
    return 0


@njit(nogil=True, error_model="numpy")
def read_plain(address, size, entries, multiple, first, last, words, highs, multiples):
    """Do the work of `read_rice` for a tile of plain positions."""
    if size != 4 * entries * (2 if multiple else 1):
        return 5
    before, larger = first - 1, False
    for i in range(entries):
        half = simd.load_half(address + 4 * i)
        where = last - _i64(half & np.uint32(0x7FFFFFFF))
        if where <= before or (i == 0 and where != first):
            return 2
        before, flags = where, _i64(half >> np.uint32(31))
        if multiple:
            m = _i64(simd.load_half(address + 4 * (entries + i)))
            if m < 1 or m > M_MAX:
                return 3
            if m > 1:
                larger = True
                flags |= 2
                simd.store_word(multiples, _u64(m))
                multiples += 8
        put_entry(words, highs, i, where - first, flags)
    if before != last:
        return 2
    return 1 if multiple and not larger else 0


@njit(nogil=True, error_model="numpy")
def take_multiple(address, size, entries, i, words, multiples, state, tile):
    """Read m of entry i, and the number of the next entry with m above 1; return False if they are invalid."""
    none = _i64(0)
    m, bit = take_code(address, state[_BIT, tile], size, none)
    if m < 0 or m > M_MAX - 2:
        return False
    run, bit = take_code(address, bit, size, state[_K_RUN, tile])
    if run < 0 or run > entries - i - 1:
        return False
    word = words + 4 * i
    simd.store_half(word, simd.load_half(word) | np.uint32(2))
    simd.store_word(multiples + 8 * state[_FOUND, tile], _u64(m + 2))
    state[_FOUND, tile] += 1
    state[_BIT, tile], state[_RUN, tile] = bit, run + i + 1
    return True


@njit(nogil=True, error_model="numpy")
def ends_well(address, row, entries, state, tile):
    """Return True if a tile that was read to its last entry ends at the end of its payload."""
    bit, end = state[_BIT, tile], row[START] + row[LENGTH]
    if entries > 1 and state[_WHERE, tile] >= row[LAST] - row[FIRST]:
        return False
    return 0 <= 8 * end - bit < 8 and not (bit & 7 and peek(address, bit, end))


@njit(nogil=True, error_model="numpy")
def read_together(address, size, rows, first, count, words, multiples, depth, state):
    """Do the work of `read_rice` for up to TILES tiles, all at the same entry; return a mask of those not read.

    Wide tiles are not read.

    Between two events (a parameter may change, m is above 1, a tile ends) only `simd.read_entries` reads.

    Args:
        address, size: the message, of at least 8 bytes.
        rows: table of tiles.
        first, count: number of the first tile, and number of tiles.
        words, multiples: addresses of the lists. Those of the next tile are 4 * list_size(depth) and 8 * depth bytes
            further.
        depth: largest number of entries of a tile.
        state: int64[10, TILES], scratch.
    """
    one, five, none, stride = _i64(1), _i64(5), _i64(0), 4 * _i64(list_size(depth))
    lanes, buffer = _i64(state.ctypes.data), words + TILES * stride
    unread, active = _i64(0), (_i64(1) << count) - 1
    for tile in range(TILES):
        # A lane without a tile of its own reads the last one.
        row = first + min(tile, count - 1)
        entries, span, bit = rows[row, ENTRIES], rows[row, LAST] - rows[row, FIRST], 8 * rows[row, START]
        state[_WHERE, tile] = state[_K_RUN, tile] = state[_FOUND, tile] = 0
        state[_RUN, tile], state[_K, tile] = entries, first_parameter(span + 1 - entries, entries)
        if rows[row, MULTIPLE]:
            state[_K_RUN, tile], bit = take(address, bit, size, five)
            state[_RUN, tile], bit = take_code(address, bit, size, state[_K_RUN, tile])
            if state[_RUN, tile] < 0 or state[_RUN, tile] >= entries:
                unread |= one << tile
        if span >= WIDE:
            unread |= one << tile
        sign, state[_BIT, tile] = take(address, bit, size, one)
        put_entry(words + stride * tile, none, none, none, sign)
        state[_EVENT, tile] = 1 if tile < count and not unread >> tile & 1 else _NEVER
    active &= ~unread
    # Entries below i were read.
    i = _i64(1)
    while active:
        for tile in range(count):
            if state[_EVENT, tile] != i:
                continue
            entries, mine, larger = rows[first + tile, ENTRIES], words + stride * tile, multiples + 8 * depth * tile
            right = state[_RUN, tile] != i - 1 or take_multiple(
                address, size, entries, i - 1, mine, larger, state, tile
            )
            if right and i < entries - 1:
                if i % BLOCK == 1:
                    changed, state[_BIT, tile] = take(address, state[_BIT, tile], size, one)
                    if changed:
                        state[_K, tile], state[_BIT, tile] = take(address, state[_BIT, tile], size, five)
                state[_EVENT, tile] = min(i + BLOCK - (i - 1) % BLOCK, entries - 1, state[_RUN, tile] + 1)
                continue
            if right and i == entries - 1:
                sign, state[_BIT, tile] = take(address, state[_BIT, tile], size, one)
                put_entry(mine, none, i, rows[first + tile, LAST] - rows[first + tile, FIRST], sign)
                right = state[_RUN, tile] != i or take_multiple(address, size, entries, i, mine, larger, state, tile)
            active ^= one << tile
            state[_EVENT, tile] = _NEVER
            state[_LAST_WORD, tile] = _i64(simd.load_half(mine + 4 * (entries - 1)))
            if not (right and ends_well(address, rows[first + tile], entries, state, tile)):
                unread |= one << tile
        if active:
            stop, k = _i64(_NEVER), none
            for tile in range(TILES):
                stop, k = min(stop, state[_EVENT, tile]), max(k, state[_K, tile])
            triples = (stop - i) // 3 if k <= _K_TRIPLE else none
            wrong = active & simd.read_entries(address, size - 8, lanes, buffer, triples, stop - i - 3 * triples)
            if wrong and triples:
                wrong = active & simd.read_entries(address, size - 8, lanes, buffer, none, stop - i)
            for tile in range(TILES):
                state[_BIT, tile], state[_WHERE, tile] = state[_NEXT_BIT, tile], state[_NEXT_WHERE, tile]
                if wrong >> tile & 1:
                    state[_EVENT, tile] = _NEVER
            simd.transpose(buffer, words + 4 * i, stride, stop - i)
            unread, active, i = unread | wrong, active & ~wrong, stop
    # Entries were also listed for tiles that had ended.
    for tile in range(count):
        if not unread >> tile & 1:
            last_word = words + stride * tile + 4 * (rows[first + tile, ENTRIES] - 1)
            simd.store_half(last_word, np.uint32(state[_LAST_WORD, tile]))
    return unread


@njit(nogil=True, error_model="numpy")
def read_tiles(address, size, rice, rows, first, count, words, highs, multiples, depth, state):
    """Check up to TILES tiles of a message, and list their entries: (first invalid tile, error code) or (-1, 0).

    The arguments are those of `read_together`; `highs` is the address of the second lists, or 0 if they are not needed.
    """
    unread, stride = (_i64(1) << count) - 1, 4 * _i64(list_size(depth))
    if rice and size >= 8 and count > 1:
        unread = read_together(address, size, rows, first, count, words, multiples, depth, state)
    for tile in range(count):
        row, mine, larger = rows[first + tile], words + stride * tile, multiples + 8 * depth * tile
        if unread >> tile & 1:
            place, length, entries, multiple = address + row[START], row[LENGTH], row[ENTRIES], row[MULTIPLE]
            high = highs + stride * tile if highs and row[LAST] - row[FIRST] >= WIDE else _i64(0)
            if rice:
                error = read_rice(place, length, entries, multiple, row[FIRST], row[LAST], mine, high, larger)
            else:
                error = read_plain(place, length, entries, multiple, row[FIRST], row[LAST], mine, high, larger)
            if error:
                return first + tile, error
        simd.store_half(mine + 4 * row[ENTRIES], END_OF_LIST)
    return -1, 0


@entry
def check_tiles(begin, end, rows, message, rice, depth):
    """Check the tiles from `begin` to `end` of a message: (first invalid tile, error code) or (-1, 0)."""
    words, multiples = np.empty(lists_size(depth), np.uint32), np.empty(depth * TILES, np.uint64)
    state = np.empty((10, TILES), np.int64)
    for first in range(begin, end, TILES):
        tile, error = read_tiles(
            _i64(message.ctypes.data), message.size, rice, rows, first, min(TILES, end - first),
            _i64(words.ctypes.data), _i64(0), _i64(multiples.ctypes.data), depth, state,
        )  # fmt: skip
        if error:
            return tile, error
    return -1, 0


@njit(nogil=True, error_model="numpy")
def distance(words, highs, e):
    """Return the distance of a listed entry from the first of its tile; `highs` is 0 unless the tile is wide."""
    low = _i64(simd.load_half(words + 4 * e) >> np.uint32(2))
    return low | _i64(simd.load_half(highs + 4 * e)) << 30 if highs else low


@njit(nogil=True, error_model="numpy")
def add_near(words, e, multiples, found, bound, target, tau, scale, fetch):
    """Add the listed entries from e on to the float32 at `target` plus their distances; the tile is not wide.

    Returns the number of the first entry with a distance of at least `bound`, and the number of multiples before it.
    """
    # No entry is compared with the number of entries: the end of the list is beyond every bound.
    bound, once = min(bound << 2, _i64(END_OF_LIST)), tau * scale
    word = simd.load_half(words + 4 * e)
    while word < bound:
        value = once
        if word & np.uint32(2):
            value = amount(simd.load_word(multiples + 8 * found), tau) * scale
            found += 1
        simd.add_signed(target + _i64(word & _DISTANCE), word, value)
        e += 1
        word = simd.load_half(words + 4 * e)
        if fetch:
            simd.fetch(target + _i64(simd.load_half(words + 4 * (e + _AHEAD)) & _DISTANCE))
    return e, found


@njit(nogil=True, error_model="numpy")
def add_far(words, highs, e, entries, multiples, found, bound, target, tau, scale):
    """Do the work of `add_near` for a wide tile."""
    while e < entries and distance(words, highs, e) < bound:
        word, value = simd.load_half(words + 4 * e), tau * scale
        if word & np.uint32(2):
            value = amount(simd.load_word(multiples + 8 * found), tau) * scale
            found += 1
        simd.add_signed(target + 4 * distance(words, highs, e), word, value)
        e += 1
    return e, found


@njit(nogil=True, error_model="numpy")
def add_until(
    i, begin, stop, target, messages, rows, rice, ends, taus, scale, words, highs, multiples, depth, places, state,
    fetch,
):  # fmt: skip
    """Add the entries of message i with indices from `begin` to `stop`; return False if a tile is invalid.

    Args:
        i: number of the message; its row in the tables `messages` and `places`.
        begin, stop: the next call begins at the `stop` of this one.
        target: address to which index 0 belongs.
        messages, rows: tables of the messages and of their tiles. The tables are changed as the message is read.
        rice: True if gaps are entropy-coded.
        ends, taus: end and tau of each run.
        scale: factor.
        words, highs, multiples: addresses of this message's lists; `highs` is 0 if no tile is wide.
        depth: largest number of entries of a tile.
        places: state of this function.
        state: scratch of `read_together`.
        fetch: True to prefetch the target.
    """
    group, count, tile = places[i, _GROUP], places[i, _COUNT], places[i, _TILE]
    e, found, run, right = places[i, _ENTRY], places[i, _MULTIPLE], messages[i, RUN], True
    stride = 4 * _i64(list_size(depth))
    while True:
        if tile == count:
            group = messages[i, NEXT]
            tile = count = e = found = _i64(0)
            if group == messages[i, END] or rows[group, FIRST] >= stop:
                break
            count = min(_i64(TILES), messages[i, END] - group)
            messages[i, NEXT] = group + count
            _, error = read_tiles(
                messages[i, ADDRESS], messages[i, BYTES], rice, rows, group, count, words, highs, multiples, depth,
                state,
            )  # fmt: skip
            if error:
                right = False
                break
        first, last, entries = rows[group + tile, FIRST], rows[group + tile, LAST], rows[group + tile, ENTRIES]
        mine, larger = words + stride * tile, multiples + 8 * depth * tile
        high = highs + stride * tile if last - first >= WIDE else _i64(0)
        # The first call of a thread begins within a tile.
        while e < entries and first + distance(mine, high, e) < begin:
            found += _i64(simd.load_half(mine + 4 * e) >> np.uint32(1) & np.uint32(1))
            e += 1
        while e < entries:
            where = first + distance(mine, high, e)
            if where >= stop:
                break
            while where >= ends[run]:
                run += 1
            bound, tau, base = min(stop, ends[run]) - first, taus[run], target + 4 * first
            if high:
                e, found = add_far(mine, high, e, entries, larger, found, bound, base, tau, scale)
            else:
                e, found = add_near(mine, e, larger, found, bound, base, tau, scale, fetch)
        if e < entries:
            break
        tile, e, found = tile + 1, _i64(0), _i64(0)
    places[i, _GROUP], places[i, _COUNT], places[i, _TILE] = group, count, tile
    places[i, _ENTRY], places[i, _MULTIPLE], messages[i, RUN] = e, found, run
    return right


@njit(nogil=True, error_model="numpy")
def move_floats(source, target, number, way):
    """Copy float32 to `target`, or add them there (ADD_SUM), and set them to zero at `source`."""
    for at in range(0, 4 * number, 4):
        value = simd.load_float(source + at)
        if way == ADD_SUM:
            value += simd.load_float(target + at)
        simd.store_float(target + at, value)
        simd.store_float(source + at, np.float32(0))


@njit(nogil=True, error_model="numpy")
def move_block(source, target, number, way, stream):
    """Do the work of `move_floats` for addresses with the same distance from a line."""
    head = min(number, (-target & 63) // 4)
    move_floats(source, target, head, way)
    source, target, number = source + 4 * head, target + 4 * head, number - head
    lines = number // 16
    for at in range(0, 64 * lines, 64):
        if way == ADD_SUM:
            simd.add_line(source + at, target + at)
        elif stream:
            simd.stream_line(source + at, target + at)
        else:
            simd.move_line(source + at, target + at)
    move_floats(source + 64 * lines, target + 64 * lines, number - 16 * lines, way)


@njit(nogil=True, error_model="numpy")
def origin(pieces, p):
    """Return the address to which element 0 would belong if the whole vector were beside piece p."""
    return pieces[p, 2] - 4 * pieces[p, 0]


@njit(nogil=True, error_model="numpy")
def used(words, highs, multiples, zeros, state):
    """Use arrays after the last read of their memory: Numba frees one after its last use, and addresses are none."""
    return words.size + highs.size + multiples.size + zeros.size + state.size > 0


@entry
def add_messages(begin, end, pieces, messages, rows, rice, ends, taus, scale, depth, way, stream):
    """Add the entries with indices from `begin` to `end` of all messages; return False if a tile is invalid.

    Args:
        begin, end: elements.
        pieces: table of the arrays of the output, see `pieces.pieces`.
        messages, rows, rice, ends, taus, scale, depth: see `add_until`.
        way: ADD_EACH, SET_SUM or ADD_SUM. With the last two, the elements are undefined if a tile is invalid.
        stream: True to set the output past the caches.
    """
    mode = keep_denormals()
    messages, lists = messages.copy(), 1 if way == ADD_EACH else messages.shape[0]
    wide = 0
    for i in range(rows.shape[0]):
        wide |= rows[i, LAST] - rows[i, FIRST] >= WIDE
    words = np.empty((lists, lists_size(depth)), np.uint32)
    highs = np.empty((lists, lists_size(depth) if wide else 0), np.uint32)
    multiples = np.empty((lists, depth * TILES), np.uint64)
    listed, larger, higher = _i64(words.ctypes.data), _i64(multiples.ctypes.data), _i64(0)
    if wide:
        higher = _i64(highs.ctypes.data)
    places, state = np.zeros((messages.shape[0], 5), np.int64), np.empty((10, TILES), np.int64)
    for i in range(messages.shape[0]):
        high = messages[i, END]
        while messages[i, NEXT] < high:
            middle = (messages[i, NEXT] + high) // 2
            if rows[middle, LAST] < begin:
                messages[i, NEXT] = middle + 1
            else:
                high = middle
    right = True
    zeros = np.zeros(min(_BLOCK, end - begin) + 32 if way != ADD_EACH else 0, np.float32)
    if way != ADD_EACH:
        room = (_i64(zeros.ctypes.data) + 63) & ~63
        p, at = piece_of(pieces, begin), begin
        while right and at < end:
            target = origin(pieces, p) + 4 * at
            # The block begins at the same distance from a line as the output, and holds pieces of which this is true.
            source = room + (target & 63)
            stop, last = min(end, at + _BLOCK - (target & 63) // 4), p
            while pieces[last, 1] < stop and not (origin(pieces, last + 1) - origin(pieces, p)) & 63:
                last += 1
            stop = min(stop, pieces[last, 1])
            for i in range(messages.shape[0]):
                right &= add_until(
                    i, begin, stop, source - 4 * at, messages, rows, rice, ends, taus, scale,
                    listed + 4 * i * words.shape[1], higher + 4 * i * highs.shape[1],
                    larger + 8 * i * multiples.shape[1], depth, places, state, False,
                )  # fmt: skip
            shift = source - 4 * at
            while at < stop:
                part = min(stop, pieces[p, 1])
                move_block(shift + 4 * at, origin(pieces, p) + 4 * at, part - at, way, stream)
                at = part
                if at == pieces[p, 1]:
                    p += 1
        simd.fence()
    else:
        for i in range(messages.shape[0]):
            p, at = piece_of(pieces, begin), begin
            while right and at < end:
                stop = min(end, pieces[p, 1])
                right &= add_until(
                    i, begin, stop, origin(pieces, p), messages, rows, rice, ends, taus, scale,
                    listed, higher, larger, depth, places, state, True,
                )  # fmt: skip
                at, p = stop, p + 1
    restore_mode(mode)
    return right and used(words, highs, multiples, zeros, state)
