"""The encoder's kernels that see every element: find faults, accumulate, count what crosses, and plan the tiles.

No multiplication's result goes straight into an addition in any kernel, so that no compiler can contract the two into
one rounding: a GPU must round as NumPy does, and there is no switch of `cuda.jit` that forbids the contraction.
"""

import numpy as np
from numba import cuda

from hvdx.kernels.tiles import M_MAX, SHARES

#: Threads in a block. Tests in the simulator patch these five to meet borders with few elements.
THREADS = 256
#: Elements that a thread has in flight, so that the loads of one hide behind those of the others.
UNROLL = 8
#: Elements of one turn of a block: THREADS * UNROLL, a multiple of 32.
SPAN = 2048
#: 32-bit words of a turn's mask, SPAN // 32, and twice as many.
WORDS = 64
BANK = 128

#: Elements under one prefix sum; a region holds a multiple of gcd(CHUNK, region).
CHUNK = 2048

#: Columns of a tile on the device: rank of its first entry among all, how many, its first and last region, the indices
#: of its first and last entry, where its bytes start, the length of its payload in bytes, and how many of its entries
#: are of more than one tau.
RANK, ENTRIES, FROM, TO, FIRST, LAST, START, PAYLOAD, LARGER = range(9)
COLUMNS = 9

#: Places in the summary that the host reads; per run follow the entries sent and those near each of SHARES.
BYTES, TILES, FAULT = range(3)
TALLIES = 4
PER_RUN = 1 + len(SHARES)

#: Stands for "no fault": above every index.
NO_FAULT = 2**62

_M_MAX = np.float64(M_MAX)
_SHARE_0, _SHARE_1, _SHARE_2, _SHARE_3 = (np.float32(share) for share in SHARES)


@cuda.jit(device=True)
def bit_length(x):
    """Bits of x, for 0 <= x < 2**62."""
    if x < 0x80000000:
        return 32 - cuda.clz(np.int32(x))
    return 63 - cuda.clz(np.int32(x >> 31))


@cuda.jit(device=True)
def amount(m, tau):
    """What m times tau stands for: rounded once, from float64."""
    return np.float32(np.float64(m) * np.float64(tau))


@cuda.jit(device=True)
def multiples(size, tau):
    """How many tau are sent of a size that reaches tau."""
    # The bound is of no use but where the caller's `trusted` was not true.
    m = np.int64(min(np.float64(size) / np.float64(tau), _M_MAX))
    if size - amount(m, tau) >= tau:
        m += 1
    return m


@cuda.jit(device=True)
def varint_length(value):
    """Bytes of a number in a tile's head."""
    return (max(bit_length(value), 1) + 6) // 7


@cuda.jit(device=True)
def scan(sums, value):
    """The sum of `value` over the block's threads up to this one; sums[-1] is that of all. Sync before the next."""
    tid = cuda.threadIdx.x
    sums[tid] = value
    cuda.syncthreads()
    step = 1
    while step < cuda.blockDim.x:
        other = np.int64(0)
        if tid >= step:
            other = sums[tid - step]
        cuda.syncthreads()
        sums[tid] += other
        cuda.syncthreads()
        step *= 2
    return sums[tid]


@cuda.jit
def find_fault(update, summary, first, limit):
    """summary[FAULT] = the lowest index of an element above the limit or NaN; those of `update` begin at `first`."""
    for turn in range(cuda.blockIdx.x, (update.size + SPAN - 1) // SPAN, cuda.gridDim.x):
        begin = np.int64(turn) * SPAN + cuda.threadIdx.x
        bad = False
        if begin - cuda.threadIdx.x + SPAN <= update.size:
            for j in range(UNROLL):
                bad |= not (abs(update[np.uint64(begin) + np.uint64(j * THREADS)]) <= limit)
        else:
            for i in range(begin, update.size, THREADS):
                bad |= not (abs(update[i]) <= limit)
        if bad:
            for i in range(begin, min(begin + SPAN, update.size), THREADS):
                if not (abs(update[i]) <= limit):
                    cuda.atomic.min(summary, FAULT, first + i)


@cuda.jit
def accumulate(update, residual, masks, summary, tally, first, tau):
    """residual[first:] += update, of one tau; bits in `masks` where it crosses, and counts from summary[tally] on.

    Crossing elements keep their whole sum until their tile is written, but are counted as they will be then. Where
    there is a fault, nothing is done.
    """
    if summary[FAULT] != NO_FAULT:
        return
    bank = cuda.shared.array(BANK, np.uint32)
    sums = cuda.shared.array(PER_RUN, np.int64)
    total = cuda.local.array(UNROLL, np.float32)
    tid = cuda.threadIdx.x
    for w in range(tid, BANK, THREADS):
        bank[w] = np.uint32(0)
    if tid == 0:
        for j in range(PER_RUN):
            sums[j] = 0
    cuda.syncthreads()
    level_0, level_1, level_2, level_3 = _SHARE_0 * tau, _SHARE_1 * tau, _SHARE_2 * tau, _SHARE_3 * tau
    sent = near_0 = near_1 = near_2 = near_3 = np.uint32(0)
    # Turns begin at multiples of SPAN among all elements, so that each word of the masks belongs to one.
    head = first % SPAN
    turns = (head + update.size + SPAN - 1) // SPAN
    side = 0
    for turn in range(cuda.blockIdx.x, turns, cuda.gridDim.x):
        begin = np.int64(turn) * SPAN - head
        whole = begin >= 0 and begin + SPAN <= update.size
        # All loads come before the first store, which might alias them for all the compiler knows. Unsigned indices
        # need no test for those that count from the end.
        if whole:
            here, there = np.uint64(begin + tid), np.uint64(first + begin + tid)
            for j in range(UNROLL):
                total[j] = update[here + np.uint64(j * THREADS)] + residual[there + np.uint64(j * THREADS)]
        else:
            for j in range(UNROLL):
                i = begin + j * THREADS + tid
                total[j] = np.float32(0)
                if i >= 0 and i < update.size:
                    total[j] = update[i] + residual[first + i]
        for j in range(UNROLL):
            i = begin + j * THREADS + tid
            size = abs(total[j])
            if size >= tau:
                sent = np.uint32(sent + np.uint32(1))
                k = j * THREADS + tid
                cuda.atomic.or_(bank, side * WORDS + (k >> 5), np.uint32(1 << (k & 31)))
                size = abs(size - amount(multiples(size, tau), tau))
            near_0 = np.uint32(near_0 + np.uint32(size >= level_0))
            near_1 = np.uint32(near_1 + np.uint32(size >= level_1))
            near_2 = np.uint32(near_2 + np.uint32(size >= level_2))
            near_3 = np.uint32(near_3 + np.uint32(size >= level_3))
            if whole:
                residual[np.uint64(first + begin + tid) + np.uint64(j * THREADS)] = total[j]
            elif i >= 0 and i < update.size:
                residual[first + i] = total[j]
        cuda.syncthreads()
        for w in range(tid, WORDS, THREADS):
            start = begin + 32 * w
            if start > -32 and start < update.size:
                bits = bank[side * WORDS + w]
                # A word that begins before this piece holds bits of the pieces before it.
                if start >= 0:
                    masks[(first + start) >> 5] = bits
                else:
                    masks[(first + start) >> 5] |= bits
                bank[side * WORDS + w] = np.uint32(0)
        # The next turn fills the other half, so that one barrier a turn is enough.
        side = 1 - side
    cuda.atomic.add(sums, 0, np.int64(sent))
    cuda.atomic.add(sums, 1, np.int64(near_0))
    cuda.atomic.add(sums, 2, np.int64(near_1))
    cuda.atomic.add(sums, 3, np.int64(near_2))
    cuda.atomic.add(sums, 4, np.int64(near_3))
    cuda.syncthreads()
    if tid == 0:
        for j in range(PER_RUN):
            cuda.atomic.add(summary, tally + j, sums[j])


@cuda.jit
def count(masks, prefixes, summary, region, chunk):
    """prefixes[r * (chunks + 1) + c] = the entries before chunk c of region r; for c = chunks, all of the region's."""
    sums = cuda.shared.array(THREADS, np.int64)
    tid = cuda.threadIdx.x
    chunks = region // chunk
    if summary[FAULT] != NO_FAULT:
        return
    for r in range(cuda.blockIdx.x, prefixes.size // (chunks + 1), cuda.gridDim.x):
        before = np.int64(0)
        for begin in range(0, chunks, THREADS):
            c = begin + tid
            found = np.int64(0)
            if c < chunks:
                word = (r * region + c * chunk) >> 5
                for w in range(word, min(word + (chunk >> 5), masks.size)):
                    found += cuda.popc(masks[w])
            upto = scan(sums, found)
            if c < chunks:
                prefixes[r * (chunks + 1) + c] = before + upto - found
            before += sums[cuda.blockDim.x - 1]
            cuda.syncthreads()
        if tid == 0:
            prefixes[r * (chunks + 1) + chunks] = before


@cuda.jit(device=True)
def emit(tiles, tile, rank, entries, first, final):
    """Write one tile of the plan."""
    tiles[tile, RANK] = rank
    tiles[tile, ENTRIES] = entries
    tiles[tile, FROM] = first
    tiles[tile, TO] = final


@cuda.jit
def plan_tiles(prefixes, starts, tiles, summary, chunks, tile_max, tile_min, group, group_regions):
    """The tiles that `tiles.plan` makes, and starts[r], the rank of each region's first entry. One block does it.

    The plan is a chain from region to region, so one thread follows it; the others fetch what it is about to need.
    """
    counts = cuda.shared.array(THREADS, np.int64)
    tid = cuda.threadIdx.x
    if cuda.blockIdx.x > 0 or summary[FAULT] != NO_FAULT:
        return
    tile = rank = waiting = regions = np.int64(0)
    # Of what waits to share a tile: the rank of its first entry, and its region.
    wait_rank = wait_from = np.int64(0)
    for begin in range(0, starts.size, THREADS):
        if begin + tid < starts.size:
            counts[tid] = prefixes[(begin + tid) * (chunks + 1) + chunks]
        cuda.syncthreads()
        if tid == 0:
            for r in range(begin, min(begin + THREADS, starts.size)):
                left = counts[r - begin]
                starts[r] = rank
                if left >= tile_min and waiting > 0:
                    emit(tiles, tile, wait_rank, waiting, wait_from, r - 1)
                    tile += 1
                    waiting = regions = np.int64(0)
                while left >= tile_min:
                    entries = min(left, tile_max)
                    emit(tiles, tile, rank, entries, r, r)
                    tile += 1
                    rank += entries
                    left -= entries
                if left > 0 and waiting == 0:
                    wait_rank, wait_from = rank, np.int64(r)
                waiting += left
                rank += left
                regions = regions + 1 if waiting > 0 else np.int64(0)
                if waiting >= group or regions >= group_regions:
                    if waiting > 0:
                        emit(tiles, tile, wait_rank, waiting, wait_from, r)
                        tile += 1
                    waiting = regions = np.int64(0)
        cuda.syncthreads()
    if tid == 0:
        if waiting > 0:
            emit(tiles, tile, wait_rank, waiting, wait_from, starts.size - 1)
            tile += 1
        summary[TILES] = tile


@cuda.jit(device=True)
def gap_before(tiles, tile):
    """Elements between a tile's first entry and the last one of the tile before it."""
    before = tiles[tile - 1, LAST] if tile > 0 else np.int64(-1)
    return tiles[tile, FIRST] - before - 1


@cuda.jit(device=True)
def skipped_inside(tiles, tile):
    """Elements between a tile's first entry and its last that are no entries."""
    return tiles[tile, LAST] - tiles[tile, FIRST] + 1 - tiles[tile, ENTRIES]


@cuda.jit
def place(tiles, summary):
    """Find where each tile's bytes start, and how many there are in all. One block does it."""
    sums = cuda.shared.array(THREADS, np.int64)
    tid = cuda.threadIdx.x
    if cuda.blockIdx.x > 0:
        return
    before = np.int64(0)
    for begin in range(0, summary[TILES], THREADS):
        tile = begin + tid
        size = np.int64(0)
        if tile < summary[TILES]:
            size = tiles[tile, PAYLOAD] + varint_length(tiles[tile, PAYLOAD])
            size += varint_length(gap_before(tiles, tile)) + varint_length(skipped_inside(tiles, tile))
            # The bit for multiples of tau does not lengthen the number that it shares with the entries.
            size += varint_length(tiles[tile, ENTRIES] << 1)
        upto = scan(sums, size)
        if tile < summary[TILES]:
            tiles[tile, START] = before + upto - size
        before += sums[cuda.blockDim.x - 1]
        cuda.syncthreads()
    if tid == 0:
        summary[BYTES] = before


@cuda.jit
def clear(words):
    """Set all words to zero."""
    for i in range(cuda.grid(1), words.size, cuda.gridsize(1)):
        words[i] = np.uint32(0)
