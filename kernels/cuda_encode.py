"""CUDA kernels of the encoder over all elements: find faults, accumulate, count entries, and plan the tiles.

A GPU must round like NumPy, but `cuda.jit` has no switch that forbids contracting a multiplication and an addition into
one rounding. So in no kernel does the result of a multiplication go directly into an addition.
"""

import numpy as np
from numba import cuda

from hvdx.kernels.tiles import M_MAX, SHARES

#: Threads in a block. Tests in the simulator patch these five constants, to reach borders with few elements.
THREADS = 256
#: Elements that a thread has in flight, which hides the latency of loads.
UNROLL = 8
#: Elements of one iteration of a block: THREADS * UNROLL, a multiple of 32.
SPAN = 2048
#: 32-bit words of an iteration's mask, SPAN // 32, and of the two halves of the buffer for masks.
WORDS = 64
BANK = 128

#: Elements for each prefix sum; gcd(CHUNK, region) is used, so that a region has a whole number of them.
CHUNK = 2048

#: Columns of a tile on the device: position of its first entry among all entries, number of entries, first and last
#: region, indices of the first and the last entry, offset of its bytes, length of the payload in bytes, and number of
#: entries with m above 1.
RANK, ENTRIES, FROM, TO, FIRST, LAST, START, PAYLOAD, LARGER = range(9)
COLUMNS = 9

#: Positions in the summary that the host reads. From TALLIES on it has, for each run, the number of entries and the
#: numbers of residuals that reach each of SHARES.
BYTES, TILES, FAULT = range(3)
TALLIES = 4
PER_RUN = 1 + len(SHARES)

#: Value of the summary's FAULT if there is no fault. It is above every index.
NO_FAULT = 2**62

_M_MAX = np.float64(M_MAX)
_SHARE_0, _SHARE_1, _SHARE_2, _SHARE_3 = (np.float32(share) for share in SHARES)


@cuda.jit(device=True)
def bit_length(x):
    """Return the number of bits of x without leading zeros, for 0 <= x < 2**62."""
    if x < 0x80000000:
        return 32 - cuda.clz(np.int32(x))
    return 63 - cuda.clz(np.int32(x >> 31))


@cuda.jit(device=True)
def amount(m, tau):
    """Return the value of an entry, float32(m * tau), with the product computed in float64."""
    return np.float32(np.float64(m) * np.float64(tau))


@cuda.jit(device=True)
def multiples(size, tau):
    """Return m of a sum with the absolute value `size`, which reaches tau."""
    # The bound matters only if the caller passed a wrong `trusted`.
    m = np.int64(min(np.float64(size) / np.float64(tau), _M_MAX))
    if size - amount(m, tau) >= tau:
        m += 1
    return m


@cuda.jit(device=True)
def varint_length(value):
    """Return the number of bytes of a number in a tile's header."""
    return (max(bit_length(value), 1) + 6) // 7


@cuda.jit(device=True)
def scan(sums, value):
    """Return the sum of `value` over the block's threads up to this one; sums[-1] is the sum over all threads.

    Synchronise the threads before the next call.
    """
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
    """Set summary[FAULT] to the lowest index of an element above the limit or NaN; `update` begins at index `first`."""
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
    """Add an update of one run to residual[first:], set the mask bits of entries, and count from summary[tally] on.

    An element that reaches tau keeps its whole sum until its tile is written, but the counts are those of the residual
    after that.
    If there is a fault, nothing is changed.
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
    # Iterations begin at multiples of SPAN among all elements, so that each word of the masks belongs to one iteration.
    head = first % SPAN
    turns = (head + update.size + SPAN - 1) // SPAN
    side = 0
    for turn in range(cuda.blockIdx.x, turns, cuda.gridDim.x):
        begin = np.int64(turn) * SPAN - head
        whole = begin >= 0 and begin + SPAN <= update.size
        # All loads come before the first store, because the compiler must assume that a store aliases later loads.
        # Unsigned indices need no test for negative ones, which would count from the end.
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
                # A word that begins before this piece already has bits of the pieces before.
                if start >= 0:
                    masks[(first + start) >> 5] = bits
                else:
                    masks[(first + start) >> 5] |= bits
                bank[side * WORDS + w] = np.uint32(0)
        # The next iteration fills the other half, so one barrier per iteration is enough.
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
def scale(values, out, factor):
    """Set `out` to the values times a factor."""
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        out[i] = values[i] * factor


@cuda.jit
def subtract(values, out, first):
    """Subtract the values from `out`, from its index `first` on."""
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        out[first + i] -= values[i]


@cuda.jit
def count(masks, prefixes, summary, region, chunk):
    """Set prefixes[r * (chunks + 1) + c] to the number of entries of region r before its chunk c.

    With c = chunks this is the number of all entries of the region.
    """
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
    """Write one tile of the plan to the table of tiles."""
    tiles[tile, RANK] = rank
    tiles[tile, ENTRIES] = entries
    tiles[tile, FROM] = first
    tiles[tile, TO] = final


@cuda.jit
def plan_tiles(prefixes, starts, tiles, summary, chunks, tile_max, tile_min, group, group_regions):
    """Plan the tiles like `tiles.plan`, and set starts[r] to the position of region r's first entry. Launch one block.

    Each step of the plan depends on the region before, so one thread computes it; all threads load the counts.
    """
    counts = cuda.shared.array(THREADS, np.int64)
    tid = cuda.threadIdx.x
    if cuda.blockIdx.x > 0 or summary[FAULT] != NO_FAULT:
        return
    tile = rank = waiting = regions = np.int64(0)
    # Position and region of the first entry that waits for a shared tile.
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
    """Return the number of elements between the last entry of the tile before and a tile's first entry."""
    before = tiles[tile - 1, LAST] if tile > 0 else np.int64(-1)
    return tiles[tile, FIRST] - before - 1


@cuda.jit(device=True)
def skipped_inside(tiles, tile):
    """Return the number of elements without an entry between a tile's first and last entry."""
    return tiles[tile, LAST] - tiles[tile, FIRST] + 1 - tiles[tile, ENTRIES]


@cuda.jit
def place(tiles, summary):
    """Set the offset of each tile's bytes, and the number of all bytes in the summary. Launch one block."""
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
            # The flag for multiples is the lowest bit, so it does not change the length of this number.
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
