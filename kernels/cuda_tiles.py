"""CUDA kernels of the encoder over all entries: compute the sizes of tiles, then write them. One block makes one tile.

Both passes collect a tile's entries from the masks, which saves scratch memory for the largest possible number of
entries.
"""

import numpy as np
from numba import cuda

from hvdx.kernels.cuda_device import SIMULATED, address_of, load, product
from hvdx.kernels.cuda_encode import (
    ENTRIES,
    FIRST,
    FROM,
    LARGER,
    LAST,
    PAYLOAD,
    RANK,
    START,
    TILES,
    TO,
    amount,
    bit_length,
    gap_before,
    multiples,
    scan,
    skipped_inside,
)
from hvdx.kernels.tiles import BLOCK, ESCAPE, K_MAX, SWITCH, TILE_MAX

#: Threads in a block.
TILE_THREADS = 4 if SIMULATED else 512

#: Blocks of gaps in a tile, each with one Rice parameter.
BLOCKS = TILE_MAX // BLOCK
#: Number of parameters whose costs are computed in parallel for each block of gaps. The first is the mean bit length
#: minus BELOW. The rule of the encoder compares four of them with the parameter before, which is nearly always among
#: the computed ones.
WINDOW = 8
BELOW = 4

_COSTS = BLOCKS * WINDOW


@cuda.jit(device=True)
def code_length(x, k):
    """Return the number of bits of x in the gap code with parameter k."""
    q = x >> k
    if q < ESCAPE:
        return q + 1 + k
    return np.int64(ESCAPE + 2 * bit_length(q - ESCAPE + 1) - 1) + k


@cuda.jit(device=True)
def first_parameter(skipped, entries):
    """Return the Rice parameter at the start of a tile."""
    return np.int64(min(max(bit_length(skipped // entries) - 1, 0), K_MAX))


@cuda.jit(device=True)
def put(words, at, value, length, writing):
    """Write the `length` lowest bits of `value` at bit `at` if `writing`; return the position of their end."""
    end = at + length
    if writing:
        while at < end:
            shift = at & 31
            taken = min(32 - shift, end - at)
            bits = (value & ((np.int64(1) << taken) - 1)) << shift
            # Neighbouring threads and neighbouring tiles may write to the same word.
            if bits != 0:
                cuda.atomic.or_(words, at >> 5, np.uint32(bits))
            value >>= taken
            at += taken
    return end


@cuda.jit(device=True)
def put_code(words, at, x, k, writing):
    """Write x in the gap code with parameter k if `writing`; return the position of its end."""
    if not writing:
        return at + code_length(x, k)
    q = x >> k
    rest = x & ((np.int64(1) << k) - 1)
    one = np.int64(1)
    if q < ESCAPE:
        return put(words, at, ((one << q) - 1) | (rest << (q + 1)), q + 1 + k, True)
    z = np.int64(bit_length(q - ESCAPE + 1) - 1)
    at = put(words, at, (one << (ESCAPE + z)) - 1, ESCAPE + z + 1, True)
    return put(words, at, (q - ESCAPE + 1 - (one << z)) | (rest << z), z + k, True)


@cuda.jit(device=True)
def put_varint(words, at, value, writing):
    """Write a number of the header at a multiple of 8 bits if `writing`; return the position of its end."""
    while value >= 0x80:
        at = put(words, at, (value & 0x7F) | 0x80, np.int64(8), writing)
        value >>= 7
    return put(words, at, value, np.int64(8), writing)


@cuda.jit(device=True)
def put_header(words, tiles, tile, writing):
    """Write a tile's header if `writing`; return the position of its end in bits."""
    at = 8 * tiles[tile, START]
    at = put_varint(words, at, gap_before(tiles, tile), writing)
    at = put_varint(words, at, (tiles[tile, ENTRIES] << 1) | np.int64(tiles[tile, LARGER] > 0), writing)
    at = put_varint(words, at, skipped_inside(tiles, tile), writing)
    return put_varint(words, at, tiles[tile, PAYLOAD], writing)


@cuda.jit(device=True)
def run_of(ends, index):
    """Return the run of the element at `index`; `ends` are the ends of the runs."""
    low, high = 0, ends.size - 1
    while low < high:
        middle = (low + high) >> 1
        if ends[middle] > index:
            high = middle
        else:
            low = middle + 1
    return low


@cuda.jit(device=True)
def collect(masks, prefixes, starts, tiles, tile, region, chunk, places):
    """Set `places` to the positions of a tile's entries, relative to the start of its first region."""
    chunks = region // chunk
    rank, entries, first = tiles[tile, RANK], tiles[tile, ENTRIES], tiles[tile, FROM]
    base = first * region
    for c in range(cuda.threadIdx.x, (tiles[tile, TO] - first + 1) * chunks, cuda.blockDim.x):
        r = first + c // chunks
        at = r * (chunks + 1) + c % chunks
        # Positions within the tile. Entries of tiles before have negative positions.
        before = starts[r] + prefixes[at] - rank
        after = starts[r] + prefixes[at + 1] - rank
        if after > before and after > 0 and before < entries:
            word = (base + c * chunk) >> 5
            for w in range(word, min(word + (chunk >> 5), masks.size)):
                bits = np.int64(masks[w])
                while bits != 0:
                    if before >= 0 and before < entries:
                        places[before] = np.int64(w) * 32 + cuda.ffs(bits) - 1 - base
                    before += 1
                    bits &= bits - 1
    cuda.syncthreads()


@cuda.jit(device=True)
def gap(places, i):
    """Return the number of elements between entry i - 1 and entry i."""
    return np.int64(places[i]) - places[i - 1] - 1


@cuda.jit(device=True)
def find_multiples(residual, ends, taus, base, entries, places, times):
    """Set `times` to +-m of each entry; return the thread's number of entries with m above 1."""
    larger = np.int64(0)
    for i in range(cuda.threadIdx.x, entries, cuda.blockDim.x):
        index = base + places[i]
        total, tau = residual[index], taus[run_of(ends, index)]
        m = multiples(abs(total), tau)
        if m > 1:
            larger += 1
        times[i] = np.int32(-m if total < 0 else m)
    return larger


@cuda.jit(device=True)
def settle(residual, pieces, ends, taus, base, entries, places, times, factor, back):
    """Subtract a tile's entries from the residual, and `back` times what the update had added."""
    for i in range(cuda.threadIdx.x, entries, cuda.blockDim.x):
        index = base + places[i]
        m = np.int64(times[i])
        left = abs(residual[index]) - amount(abs(m), taus[run_of(ends, index)])
        left = -left if m < 0 else left
        if back != 0:
            left -= product(product(load(address_of(pieces, index)), factor), back)
        residual[index] = left


@cuda.jit(device=True)
def cost(places, begin, end, k):
    """Return the number of bits of the gaps before entries [begin, end) with parameter k."""
    bits = np.int64(0)
    for i in range(begin, end):
        bits += code_length(gap(places, i), k)
    return bits


@cuda.jit(device=True)
def choose(places, entries, k, lengths, costs, chosen):
    """Set chosen[b] to the Rice parameter of block b, by the rule of `reference.choose_parameter`; k is the first."""
    tid = cuda.threadIdx.x
    # The payload has the gaps before entries 1 to entries - 2; the header has the first and the last index.
    end = max(entries - 1, 1)
    blocks = (end - 1 + BLOCK - 1) // BLOCK
    for b in range(tid, blocks, cuda.blockDim.x):
        lengths[b] = 0
    cuda.syncthreads()
    for i in range(1 + tid, end, cuda.blockDim.x):
        cuda.atomic.add(lengths, (i - 1) // BLOCK, np.int32(bit_length(gap(places, i))))
    cuda.syncthreads()
    for job in range(tid, blocks * WINDOW, cuda.blockDim.x):
        begin = 1 + job // WINDOW * BLOCK
        stop = min(begin + BLOCK, end)
        tried = lowest(lengths[job // WINDOW], stop - begin) + job % WINDOW
        if tried >= 0 and tried <= K_MAX:
            costs[job] = np.int32(cost(places, begin, stop, tried))
    cuda.syncthreads()
    if tid == 0:
        for b in range(blocks):
            begin = 1 + b * BLOCK
            stop = min(begin + BLOCK, end)
            low = lowest(lengths[b], stop - begin)
            best, least = np.int64(0), np.int64(2**62)
            for j in range(BELOW - 2, BELOW + 2):
                if low + j >= 0 and costs[b * WINDOW + j] < least:
                    best, least = low + j, np.int64(costs[b * WINDOW + j])
            if k >= low and k < low + WINDOW:
                kept = np.int64(costs[b * WINDOW + k - low])
            else:
                kept = cost(places, begin, stop, k)
            if kept > least + SWITCH:
                k = best
            chosen[b] = np.uint8(k)
    cuda.syncthreads()


@cuda.jit(device=True)
def lowest(length, gaps):
    """Return the lowest parameter whose cost is computed in parallel; `length` is the sum of the gaps' bit lengths."""
    return np.int64(min(length // gaps, K_MAX - 1) - BELOW)


@cuda.jit(device=True)
def find_larger(times, begin, end, entries, followers):
    """Set followers[t] to the first entry with m above 1 from the first entry of thread t on, or to `entries`."""
    tid = cuda.threadIdx.x
    i = begin
    while i < end and abs(times[i]) <= 1:
        i += 1
    followers[tid] = i if i < end else entries
    cuda.syncthreads()
    step = 1
    while step < cuda.blockDim.x:
        other = entries
        if tid + step < cuda.blockDim.x:
            other = np.int64(followers[tid + step])
        cuda.syncthreads()
        followers[tid] = min(np.int64(followers[tid]), other)
        cuda.syncthreads()
        step *= 2


@cuda.jit(device=True)
def put_entries(words, at, places, times, entries, begin, end, larger, k, k_run, chosen, followers, writing):
    """Write entries [begin, end) of an entropy-coded tile at bit `at` if `writing`; return their end in bits."""
    tid = cuda.threadIdx.x
    if begin == 0 and larger > 0:
        at = put(words, at, k_run, np.int64(5), writing)
        at = put_code(words, at, np.int64(followers[0]), k_run, writing)
    for i in range(begin, end):
        if i >= 1 and i < entries - 1:
            b = (i - 1) // BLOCK
            now = np.int64(chosen[b])
            if i % BLOCK == 1:
                before = k if b == 0 else np.int64(chosen[b - 1])
                at = put(words, at, np.int64(now != before), np.int64(1), writing)
                if now != before:
                    at = put(words, at, now, np.int64(5), writing)
            at = put_code(words, at, gap(places, i), now, writing)
        at = put(words, at, np.int64(times[i] < 0), np.int64(1), writing)
        m = np.int64(abs(times[i]))
        if m > 1:
            after = np.int64(i + 1)
            while after < end and abs(times[after]) <= 1:
                after += 1
            if after == end:
                after = np.int64(followers[tid + 1]) if tid + 1 < cuda.blockDim.x else entries
            at = put_code(words, at, m - 2, np.int64(0), writing)
            at = put_code(words, at, after - i - 1, k_run, writing)
    return at


@cuda.jit(device=True)
def put_plain(words, at, places, times, entries, larger):
    """Write the payload of a tile of plain positions."""
    for i in range(cuda.threadIdx.x, entries, cuda.blockDim.x):
        word = np.int64(places[entries - 1] - places[i]) | (np.int64(times[i] < 0) << 31)
        put(words, at + 32 * i, word, np.int64(32), True)
        if larger > 0:
            put(words, at + 32 * (entries + i), np.int64(abs(times[i])), np.int64(32), True)


@cuda.jit
def size_tiles(residual, masks, prefixes, starts, ends, taus, tiles, parameters, summary, region, chunk, rice):
    """Set each tile's first and last entry, its Rice parameters, and the length of its payload."""
    places = cuda.shared.array(TILE_MAX, np.int32)
    times = cuda.shared.array(TILE_MAX, np.int32)
    sums = cuda.shared.array(TILE_THREADS, np.int64)
    followers = cuda.shared.array(TILE_THREADS, np.int32)
    lengths = cuda.shared.array(BLOCKS, np.int32)
    costs = cuda.shared.array(_COSTS, np.int32)
    tid = cuda.threadIdx.x
    for tile in range(cuda.blockIdx.x, summary[TILES], cuda.gridDim.x):
        entries, base = tiles[tile, ENTRIES], tiles[tile, FROM] * region
        collect(masks, prefixes, starts, tiles, tile, region, chunk, places)
        scan(sums, find_multiples(residual, ends, taus, base, entries, places, times))
        larger = sums[cuda.blockDim.x - 1]
        cuda.syncthreads()
        payload = 4 * entries * (1 + np.int64(larger > 0))
        if rice:
            k = first_parameter(np.int64(places[entries - 1]) - places[0] + 1 - entries, entries)
            k_run = first_parameter(entries - larger, larger + 1)
            chosen = parameters[tile]
            choose(places, entries, k, lengths, costs, chosen)
            each = (entries + cuda.blockDim.x - 1) // cuda.blockDim.x
            begin = min(tid * each, entries)
            end = min(begin + each, entries)
            if larger > 0:
                find_larger(times, begin, end, entries, followers)
            bits = put_entries(
                masks, np.int64(0), places, times, entries, begin, end, larger, k, k_run, chosen, followers, False
            )
            scan(sums, bits)
            payload = (sums[cuda.blockDim.x - 1] + 7) >> 3
        if tid == 0:
            tiles[tile, FIRST] = base + places[0]
            tiles[tile, LAST] = base + places[entries - 1]
            tiles[tile, LARGER] = larger
            tiles[tile, PAYLOAD] = payload
        cuda.syncthreads()


@cuda.jit
def write_tiles(
    residual, masks, prefixes, starts, ends, taus, tiles, parameters, summary, region, chunk, rice, words, pieces,
    factor, back,
):  # fmt: skip
    """Write the tiles into a message of zeros, and subtract the entries from the residual; see `settle`."""
    places = cuda.shared.array(TILE_MAX, np.int32)
    times = cuda.shared.array(TILE_MAX, np.int32)
    sums = cuda.shared.array(TILE_THREADS, np.int64)
    followers = cuda.shared.array(TILE_THREADS, np.int32)
    tid = cuda.threadIdx.x
    for tile in range(cuda.blockIdx.x, summary[TILES], cuda.gridDim.x):
        entries, base, larger = tiles[tile, ENTRIES], tiles[tile, FROM] * region, tiles[tile, LARGER]
        collect(masks, prefixes, starts, tiles, tile, region, chunk, places)
        find_multiples(residual, ends, taus, base, entries, places, times)
        cuda.syncthreads()
        settle(residual, pieces, ends, taus, base, entries, places, times, factor, back)
        at = put_header(words, tiles, tile, tid == 0)
        if rice:
            k = first_parameter(skipped_inside(tiles, tile), entries)
            k_run = first_parameter(entries - larger, larger + 1)
            chosen = parameters[tile]
            each = (entries + cuda.blockDim.x - 1) // cuda.blockDim.x
            begin = min(tid * each, entries)
            end = min(begin + each, entries)
            if larger > 0:
                find_larger(times, begin, end, entries, followers)
            bits = put_entries(
                words, np.int64(0), places, times, entries, begin, end, larger, k, k_run, chosen, followers, False
            )
            at += scan(sums, bits) - bits
            put_entries(words, at, places, times, entries, begin, end, larger, k, k_run, chosen, followers, True)
        else:
            put_plain(words, at, places, times, entries, larger)
        cuda.syncthreads()
