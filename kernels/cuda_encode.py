"""CUDA kernels of the encoder over all elements: find faults, accumulate, count entries, and plan the tiles.

A GPU must round like NumPy, but `cuda.jit` has no switch that forbids contracting a multiplication and an addition into
one rounding. So in no kernel does the result of a multiplication go directly into an addition, except that of
`product`.

The update may have any number of arrays. A table of pieces gives the address of each element, so that the number of
launches does not depend on it. No kernel divides in float64, which takes many GPUs hundreds of cycles.
"""

import numpy as np
from numba import cuda

from hvdx.kernels.cuda_device import SIMULATED, address_in, address_of, float_bits, load, piece_of, product
from hvdx.kernels.pieces import END, RUN
from hvdx.kernels.tiles import LINE, M_MAX

#: Threads in a block, and elements that a thread has in flight, which hides the latency of loads. A thread of the
#: simulator is one of Python, so there are few; tests then reach borders between blocks with few elements.
THREADS, UNROLL = (4, 16) if SIMULATED else (256, 8)
#: Elements of one iteration of a block, a multiple of 32.
SPAN = THREADS * UNROLL
#: 32-bit words of an iteration's mask, at most THREADS, and of the two halves of the buffer for masks.
WORDS = SPAN // 32
BANK = 2 * WORDS

#: Elements for each prefix sum; gcd(CHUNK, region) is used, so that a region has a whole number of them.
CHUNK = 2048

#: Columns of a tile on the device: position of its first entry among all entries, number of entries, first and last
#: region, indices of the first and the last entry, offset of its bytes, length of the payload in bytes, and number of
#: entries with m above 1.
RANK, ENTRIES, FROM, TO, FIRST, LAST, START, PAYLOAD, LARGER = range(9)
COLUMNS = 9

#: Positions in the summary that the host reads. From TALLIES on it has the number of entries of each run.
BYTES, TILES, FAULT = range(3)
TALLIES = 4

#: Value of the summary's FAULT if there is no fault. It is above every index.
NO_FAULT = 2**62


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
    """Return m of a sum with the absolute value `size`, which reaches tau.

    Like `reference.encode` it is the quotient, rounded to float64 and cut off, and one more if tau fits once more.
    """
    ratio = size / tau
    if ratio < 2:
        return np.int64(1)
    if ratio < 4194304:
        # Rounded to float32 the quotient is too large by less than 1, and the product below is exact.
        m = np.int64(ratio)
        if np.float64(m) * np.float64(tau) > np.float64(size):
            m -= 1
    else:
        m = long_division(size, tau)
    # An update and a residual of 2**30 tau each reach one more than M_MAX.
    if size - amount(m, tau) >= tau and m < M_MAX:
        m += 1
    return m


@cuda.jit(device=True)
def long_division(size, tau):
    """Return size / tau, rounded to float64 and cut off, at most M_MAX. The quotient is at least 2**21."""
    above, below = float_bits(size), float_bits(tau)
    shift = (above >> 23) - (below >> 23)
    # The bound matters only if the caller passed a wrong `trusted`.
    if shift > 31:
        return np.int64(M_MAX)
    above = ((above & 0x7FFFFF) | 0x800000) << shift
    below = (below & 0x7FFFFF) | 0x800000
    m = above // below
    # A quotient of e + 1 bits before the point rounds up to m + 1 if less than half of the last of 53 bits is missing.
    if (below - (above - m * below)) << (54 - bit_length(m)) <= below:
        m += 1
    return min(m, np.int64(M_MAX))


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
def find_fault(pieces, limits, summary, factor):
    """Set summary[FAULT] to the lowest index of an element whose product with `factor` is above the limit or NaN."""
    n = pieces[pieces.shape[0] - 1, END]
    for turn in range(cuda.blockIdx.x, (n + SPAN - 1) // SPAN, cuda.gridDim.x):
        start = np.int64(turn) * SPAN
        row = piece_of(pieces, start)
        bad = False
        if start + SPAN <= pieces[row, END]:
            address = address_in(pieces, row, start + cuda.threadIdx.x)
            most = limits[pieces[row, RUN]]
            for j in range(UNROLL):
                bad |= not (abs(product(load(address + 4 * THREADS * j), factor)) <= most)
        else:
            bad = True
        if bad:
            for i in range(start + cuda.threadIdx.x, min(start + SPAN, n), THREADS):
                row = piece_of(pieces, i)
                if not (abs(product(load(address_in(pieces, row, i)), factor)) <= limits[pieces[row, RUN]]):
                    cuda.atomic.min(summary, FAULT, i)


@cuda.jit
def accumulate(pieces, ends, taus, residual, masks, summary, factor, back):
    """Add `factor` times an update to the residual, set the mask bits of entries, and count from summary[TALLIES] on.

    An element that reaches tau keeps its whole sum until its tile is written. From the others, `back` times what was
    added is subtracted again. If there is a fault, nothing is changed.
    """
    if summary[FAULT] != NO_FAULT:
        return
    bank = cuda.shared.array(BANK, np.uint32)
    sums = cuda.shared.array(1, np.int64)
    added = cuda.local.array(UNROLL, np.float32)
    total = cuda.local.array(UNROLL, np.float32)
    tid = cuda.threadIdx.x
    for w in range(tid, BANK, THREADS):
        bank[w] = np.uint32(0)
    if tid == 0:
        sums[0] = 0
    cuda.syncthreads()
    n = residual.size
    turns = (n + SPAN - 1) // SPAN
    sent = np.uint32(0)
    side = 0
    for turn in range(cuda.blockIdx.x, turns, cuda.gridDim.x):
        begin = np.int64(turn) * SPAN
        end = min(begin + SPAN, n)
        row = piece_of(pieces, begin)
        first, last = pieces[row, RUN], pieces[piece_of(pieces, end - 1), RUN]
        # One piece holds the whole span, so one run does too.
        whole = begin + SPAN <= pieces[row, END]
        for run in range(first, last + 1):
            tau = taus[run]
            low = ends[run - 1] if run > first else begin
            high = min(ends[run], end)
            # Elements of this thread that it still has to read: bits for `whole`, else indices from `low` on.
            reach = np.uint32(0)
            if whole:
                # All loads come before the first store, because the compiler must assume that a store aliases later
                # loads. Unsigned indices need no test for negative ones, which would count from the end.
                address = address_in(pieces, row, begin + tid)
                here = np.uint64(begin + tid)
                for j in range(UNROLL):
                    added[j] = product(load(address + 4 * THREADS * j), factor)
                    total[j] = added[j] + residual[here + np.uint64(j * THREADS)]
                for j in range(UNROLL):
                    size = abs(total[j])
                    if size >= tau:
                        reach = np.uint32(reach | np.uint32(1 << j))
                    elif back != 0:
                        total[j] -= product(added[j], back)
                    residual[here + np.uint64(j * THREADS)] = total[j]
            # Elements that reach tau are few, so they are read again, in a loop that keeps nothing in registers.
            i = low + tid
            while reach != 0 or (not whole and i < high):
                value = np.float32(0)
                if whole:
                    i = begin + (cuda.ffs(reach) - 1) * THREADS + tid
                    reach = np.uint32(reach & np.uint32(reach - np.uint32(1)))
                    value = residual[i]
                else:
                    more = product(load(address_of(pieces, i)), factor)
                    value = more + residual[i]
                    left = value
                    if back != 0 and not abs(value) >= tau:
                        left -= product(more, back)
                    residual[i] = left
                if abs(value) >= tau:
                    sent = np.uint32(sent + np.uint32(1))
                    k = i - begin
                    cuda.atomic.or_(bank, side * WORDS + (k >> 5), np.uint32(1 << (k & 31)))
                i += THREADS
            # The count goes to the summary where the block leaves the run.
            ahead = np.int64(turn) + cuda.gridDim.x
            if run < last or ahead >= turns or ahead * SPAN >= ends[run]:
                cuda.atomic.add(sums, 0, np.int64(sent))
                sent = np.uint32(0)
                cuda.syncthreads()
                if tid == 0:
                    cuda.atomic.add(summary, TALLIES + run, sums[0])
                    sums[0] = 0
                cuda.syncthreads()
        cuda.syncthreads()
        if tid < WORDS and begin + 32 * tid < n:
            masks[np.uint64(begin >> 5) + np.uint64(tid)] = bank[side * WORDS + tid]
            bank[side * WORDS + tid] = np.uint32(0)
        # The next iteration fills the other half, so one barrier per iteration is enough.
        side = 1 - side


@cuda.jit
def sample(pieces, residual, lines, out):
    """Copy the elements of some lines, and those of the residual; see `cpu.sample`."""
    for i in range(cuda.grid(1), out.shape[1], cuda.gridsize(1)):
        element = lines[i // LINE] * LINE + i % LINE
        out[0, i] = load(address_of(pieces, element))
        out[1, i] = residual[element]


@cuda.jit
def subtract(values, out):
    """Subtract the values from `out`."""
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        out[i] -= values[i]


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
def full_tiles(entries, tile_max, tile_min):
    """Return the number of tiles that a region has for itself."""
    return (entries - tile_min) // tile_max + 1 if entries >= tile_min else np.int64(0)


@cuda.jit(device=True)
def waiting(entries, tile_max, tile_min):
    """Return the number of a region's entries that go into a shared tile."""
    return max(entries - full_tiles(entries, tile_max, tile_min) * tile_max, np.int64(0))


@cuda.jit(device=True)
def above(sums, from_, value):
    """Return the first position from `from_` on in an array that never falls with a number above `value`, or its size.

    The array has a row for each region.
    """
    low, high = np.int64(from_), np.int64(sums.shape[0])
    while low < high:
        middle = (low + high) >> 1
        if sums[middle] > value:
            high = middle
        else:
            low = middle + 1
    return low


@cuda.jit(device=True)
def emit(tiles, tile, rank, entries, first, final):
    """Write one tile of the plan to the table of tiles."""
    tiles[tile, RANK] = rank
    tiles[tile, ENTRIES] = entries
    tiles[tile, FROM] = first
    tiles[tile, TO] = final


@cuda.jit
def plan_tiles(prefixes, starts, shared, large, next_, other, chosen, tiles, summary, chunks, tile_max, tile_min, group,
               group_regions):  # fmt: skip
    """Plan the tiles like `tiles.plan`, and set starts[r] to the position of region r's first entry. Launch one block.

    Sums over the regions give the end of the shared tile that begins in a region, and so the region in which the next
    one begins, for all regions at once. From the first region, jumps of 1, 2, 4, ... shared tiles then find those that
    the plan has.

    Args:
        prefixes: numbers of entries, see `count`.
        starts: int64[regions].
        shared, large, next_, other, chosen: int64[regions], scratch: sums of waiting entries, sums of regions with
            tiles of their own, regions in which the next shared tile begins (twice), and 1 where one begins.
        tiles: table of tiles.
        summary: see TILES.
        chunks: number of chunks in a region.
        tile_max, tile_min, group, group_regions: see `tiles.Layout`.
    """
    sums = cuda.shared.array(THREADS, np.int64)
    tid = cuda.threadIdx.x
    if cuda.blockIdx.x > 0 or summary[FAULT] != NO_FAULT:
        return
    regions = starts.size
    ranks = waits = larges = np.int64(0)
    for begin in range(0, regions, THREADS):
        r = begin + tid
        entries = prefixes[r * (chunks + 1) + chunks] if r < regions else np.int64(0)
        upto = scan(sums, entries)
        if r < regions:
            starts[r] = ranks + upto - entries
        ranks += sums[cuda.blockDim.x - 1]
        cuda.syncthreads()
        upto = scan(sums, waiting(entries, tile_max, tile_min))
        if r < regions:
            shared[r] = waits + upto
        waits += sums[cuda.blockDim.x - 1]
        cuda.syncthreads()
        upto = scan(sums, np.int64(entries >= tile_min))
        if r < regions:
            large[r] = larges + upto
        larges += sums[cuda.blockDim.x - 1]
        cuda.syncthreads()
    for r in range(tid, regions, cuda.blockDim.x):
        end = end_of_group(shared, large, r, group, group_regions)
        next_[r] = above(shared, end + 1, shared[end])
        chosen[r] = 0
    cuda.syncthreads()
    if tid == 0 and waits > 0:
        chosen[above(shared, np.int64(0), np.int64(0))] = 1
    cuda.syncthreads()
    jump = np.int64(1)
    while jump < regions:
        for r in range(tid, regions, cuda.blockDim.x):
            # A region that another thread has just chosen may pass the choice on in the same round. That does no harm,
            # because it is one of the plan's too.
            if chosen[r] != 0 and next_[r] < regions:
                chosen[next_[r]] = 1
            other[r] = next_[next_[r]] if next_[r] < regions else np.int64(regions)
        cuda.syncthreads()
        for r in range(tid, regions, cuda.blockDim.x):
            next_[r] = other[r]
        cuda.syncthreads()
        jump *= 2
    before = np.int64(0)
    for begin in range(0, regions, THREADS):
        r = begin + tid
        entries = prefixes[r * (chunks + 1) + chunks] if r < regions else np.int64(0)
        whole = full_tiles(entries, tile_max, tile_min)
        begins = r < regions and chosen[r] != 0
        tile = before + scan(sums, whole + np.int64(begins)) - whole - np.int64(begins)
        before += sums[cuda.blockDim.x - 1]
        cuda.syncthreads()
        rank, left = starts[r] if r < regions else np.int64(0), entries
        for _ in range(whole):
            some = min(left, tile_max)
            emit(tiles, tile, rank, some, r, r)
            tile += 1
            rank += some
            left -= some
        if begins:
            end = end_of_group(shared, large, r, group, group_regions)
            emit(tiles, tile, rank, shared[end] - shared[r] + left, r, end)
    if tid == 0:
        summary[TILES] = before


@cuda.jit(device=True)
def end_of_group(shared, large, r, group, group_regions):
    """Return the last region of the shared tile that begins in region r."""
    before = shared[r - 1] if r > 0 else np.int64(0)
    # It ends where it has `group` entries, before a region with tiles of its own, or after `group_regions` regions.
    full = above(shared, np.int64(r), before + group - 1)
    own = above(large, np.int64(r), large[r]) - 1
    last = min(np.int64(r) + group_regions, np.int64(shared.shape[0])) - 1
    return min(full, own, last)


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
