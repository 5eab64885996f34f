"""Public functions of the threshold kernels on a CPU. They check arguments; the loops that they call do not.

`reference` specifies the result of each function, to the byte.

Threads are those of Python, which call compiled functions that release the interpreter's lock. Numba's parallel loops
are not used. Their default threading layer ends the process if two Python threads enter it at once, as they do when a
training step overlaps with an exchange.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import numpy as np

from hvdx.kernels import compiled, cpu_scan, cpu_tiles
from hvdx.kernels import cpu_decode as dec
from hvdx.kernels import cpu_encode as enc
from hvdx.kernels.arrays import AnyArray, Float32Array, Int64Array, UInt8Array
from hvdx.kernels.cpu_decode import ADD_EACH, ADD_SUM, SET_SUM
from hvdx.kernels.pieces import (
    Located,
    aligned,
    check_runs,
    frozen,
    gather,
    locate,
    locate_both,
    pieces,
    sampled,
    whole_pieces,
)
from hvdx.kernels.table import ENTRIES, START, read_runs, table
from hvdx.kernels.tiles import (
    LAYOUT,
    TILE_MAX,
    Encoded,
    Layout,
    Malformed,
    Runs,
    check_layout,
    factors,
    limit,
)

T = TypeVar("T")

#: Least bytes of a thread's buffer for finished tiles, and elements of the update for each byte of these buffers. They
#: hold the tiles of a message at a density of 1e-2.
_BUFFER, _PER_BYTE = 1 << 17, 64
#: Number of elements above which a cleared output is written past the caches. Writing it and reading it again then
#: takes less time in all, even if the caches could hold it.
_CACHED = 1 << 19
#: Bytes below which a message comes from the allocator, and not from mmap.
_SMALL = 1 << 20
# Threads by process and number.
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def prepare(folder: Path) -> compiled.Ready:
    """Load the compiled kernels of this module from a folder, or compile them and write them there.

    Without this call, each process compiles a kernel when it first calls it. Later calls return the first outcome.

    Args:
        folder: folder of compiled kernels of all versions; created if it does not exist.

    Returns:
        The outcome. A folder that cannot be written to is no error.

    Example:
        >>> import tempfile
        >>> prepare(Path(tempfile.mkdtemp())).outcome in ("compiled", "loaded", "not kept")
        True
    """
    return compiled.prepare(folder, _call_all)


def _call_all() -> None:
    """Call each kernel with every combination of argument types. To Numba a read-only array is another type."""
    values = np.array([0, 1, -2.5, 1e-3] * 80, np.float32)
    runs = Runs(np.array([values.size]), np.ones(1, np.float32))
    read_runs([np.array([1, 4, *np.ones(1, np.float32).view(np.uint8)], np.uint8)], 4)
    for update in (values, frozen(values)):
        tiles = encode([update], np.zeros_like(values), runs, threads=1).tiles
        decode([(tiles, runs)], 1.0, [np.zeros_like(values)], threads=1)
        encode([np.where(values, np.float32(np.nan), values)], np.zeros_like(values), runs, threads=1)
        sample([update], np.zeros_like(values), np.arange(2))


def check(update: Sequence[Float32Array], runs: Runs, threads: int | None = None) -> int:
    """Return the index of the first element that cannot be sent (NaN, infinity, above `limit`), or -1.

    Args:
        update: contiguous float32 arrays, read as one vector of n elements.
        runs: lengths and taus of the runs.
        threads: number of threads; `default_threads()` if None.

    Raises:
        TypeError: if an array is not float32.
        ValueError: if an array is not contiguous, or `runs` do not fit.

    Example:
        >>> check([np.array([1, np.nan], np.float32)], Runs(np.array([2]), np.ones(1, np.float32)))
        1
    """
    arrays = locate(update, "update")
    runs = check_runs(runs, arrays.size, "update")
    return _find_fault(arrays.size, pieces(arrays.table, runs), runs, np.float32(1), threads or default_threads())


def _find_fault(n: int, where: Int64Array, runs: Runs, scale: np.float32, threads: int) -> int:
    """Return the result of `check` for `scale` times an update with the table of pieces `where`."""
    limits, borders = frozen(limit(runs.taus)), cut(n, threads if n > 1 << 16 else 1)
    found = spread(
        lambda i: cpu_scan.find_fault(borders[i], borders[i + 1], where, limits, scale), len(borders) - 1, threads
    )
    return next((fault for fault in found if fault >= 0), -1)


def encode(
    update: Sequence[Float32Array] | Located,
    residual: Float32Array | Located,
    runs: Runs,
    rice: bool = True,
    layout: Layout = LAYOUT,
    threads: int | None = None,
    header: bytes = b"",
    workspace: "Workspace | None" = None,
    lookahead: float = 0.0,
) -> Encoded:
    """Add an update to a residual, and move the multiples of tau from the sum into entries, in one pass.

    The pass checks the update too. If it finds a fault after it has changed the residual, it takes the update back.
    This leaves a rounding error in each element of the residual, at most 2**-20 of the larger absolute value of the
    residual and of (1 + lookahead) * update. The error is the same for any number of threads.

    Args:
        update: contiguous float32 arrays, read as one vector of n elements.
        residual: float32[n]; changed in place, unless there is a fault. Each absolute value is at most `limit`.
        runs: lengths and taus of the runs.
        rice: True for entropy-coded gaps, False for plain 32-bit positions.
        layout: borders of tiles.
        threads: number of threads; `default_threads()` if None. The bytes do not depend on it.
        header: bytes before the tiles.
        workspace: scratch memory that is kept between calls, with a layout and threads, which then count; a new one is
            used if it does not fit.
        lookahead: add (1 + lookahead) * update, and when the entries are found, subtract lookahead * update again.

    Returns:
        The tiles, after the header, and the counts.

    Raises:
        TypeError: if an array is not float32.
        ValueError: if an array is not contiguous or has another size, or if `runs` do not fit.

    Example:
        >>> residual = np.zeros(4, np.float32)
        >>> update = [np.array([0.5, -2.5], np.float32), np.array([0, 1], np.float32)]
        >>> encode(update, residual, Runs(np.array([4]), np.ones(1, np.float32))).sent
        array([2])
        >>> residual
        array([ 0.5, -0.5,  0. ,  0. ], dtype=float32)
    """
    arrays, kept = locate_both(update, residual, writable=True)
    n = arrays.size
    runs = check_runs(runs, n, "update")
    where, taus = pieces(arrays.table, runs), runs.taus
    if workspace is not None:
        layout, threads = workspace.layout, workspace.threads
    threads = threads or default_threads()
    if workspace is None or workspace.fits != (n, len(taus), layout, threads):
        workspace = Workspace(n, len(taus), layout, threads)
    work, vector, limits = workspace, kept.arrays[0].reshape(-1), limit(taus)
    limits.setflags(write=False)
    scale, back = factors(lookahead)

    def encode_share(i: int) -> list[UInt8Array]:
        place, out, filled, done = work.places[i], work.buffers[i], [], False
        begin = work.borders[i]
        while not done:
            done = enc.encode_regions(
                begin, work.borders[i + 1], n, work.numbers, rice, vector, where, taus, limits, scale, back,
                work.counted[i], work.scratch[i], place, work.records, work.left, work.times, out,
            )  # fmt: skip
            filled.append(out[: place[enc.USED]])
            begin = -1
            if not done:
                out = _mapped(_BUFFER if place[enc.USED] else 2 * out.size)
        return filled

    shares = spread(encode_share, len(work.borders) - 1, threads)
    filled = [buffer for share in shares for buffer in share]
    del shares
    tiles = _join(filled, work, rice, header)
    if any(place[enc.FAULT] for place in work.places):
        decode([(tiles[len(header) :], runs)], 1.0, [vector], rice, threads)
        borders = cut(n, threads)
        spread(
            lambda i: cpu_scan.roll_back(borders[i], borders[i + 1], vector, where, limits, scale, back),
            threads, threads,
        )  # fmt: skip
        return Encoded.of_fault(_find_fault(n, where, runs, scale, threads), len(taus))
    total = work.counted[0].copy() if len(work.counted) == 1 else np.add.reduce(work.counted)
    return Encoded(tiles, total, -1)


def sample(
    update: Sequence[Float32Array] | Located, residual: Float32Array | Located, lines: Int64Array
) -> Float32Array:
    """Copy some lines of LINE neighbours, and those of the residual.

    Args:
        update: contiguous float32 arrays, read as one vector of n elements.
        residual: float32[n].
        lines: int64[lines], numbers of lines, increasing. The last one may have fewer elements.

    Returns:
        float32[2, elements]: elements of the update, and of the residual.

    Raises:
        TypeError: if an array is not float32.
        ValueError: if an array is not contiguous or has another size, or if there is no such line.

    Example:
        >>> sample([np.arange(50, dtype=np.float32)], np.zeros(50, np.float32), np.array([0, 3]))[0, 14:]
        array([14., 15., 48., 49.], dtype=float32)
    """
    arrays, kept = locate_both(update, residual)
    out = np.empty((2, sampled(arrays.size, lines)), np.float32)
    if out.size:
        gather(whole_pieces(arrays), kept.arrays[0].reshape(-1), lines, out)
    return out


class Workspace:
    """Scratch memory of `encode`, kept between calls. Its size is at most one per cent of the update's.

    Without one, `encode` allocates its own. Two calls must not use one at the same time.
    """

    def __init__(self, n: int, runs: int, layout: Layout = LAYOUT, threads: int | None = None) -> None:
        check_layout(layout)
        threads = threads or default_threads()
        self.threads = threads
        self.layout, self.fits = layout, (n, runs, layout, threads)
        regions = -(-n // layout.region)
        self.numbers = np.array(layout, np.int64)
        self.borders = cut(regions, min(threads, max(regions, 1)))
        self.records = np.zeros((regions, 5), np.int64)
        # Entries are unpacked by 16, with the entry after them.
        self.left = np.empty(regions * (layout.tile_min - 1) + 17, np.uint32)
        self.times = np.empty(len(self.left), np.int32)
        self.joined = np.zeros(8, np.int64)
        self.scratch = [_scratch(layout) for _ in self.borders[1:]]
        self.places = [np.zeros(7, np.int64) for _ in self.scratch]
        self.counted = [np.zeros(runs, np.int64) for _ in self.scratch]
        room = max(_BUFFER, n // (_PER_BYTE * len(self.scratch)))
        self.buffers = [np.empty(room, np.uint8) for _ in self.scratch]


def _scratch(layout: Layout) -> tuple[AnyArray, ...]:
    """Return the scratch arrays of one thread: entries, multiples, records of blocks, one block, gaps, signs."""
    most = max(TILE_MAX, layout.tile_max) + 64 * cpu_scan.CHUNK + 8
    return (
        np.empty(most, np.uint32),
        np.empty(most, np.int32),
        np.empty((cpu_scan.CHUNK + 1, 4), np.uint64),
        np.empty(64, np.float32),
        np.empty(TILE_MAX + 128, np.uint32),
        np.empty(TILE_MAX + 128, np.uint8),
    )


def _mapped(size: int) -> UInt8Array:
    """Return uint8[size] of which only the written pages take memory. The system gets the memory back when it is freed.

    An allocator would keep freed memory, and may return memory that was advised to use pages of 2 MiB. But an allocator
    is faster for small messages, because the system clears each new page.
    """
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _join(buffers: list[UInt8Array], work: Workspace, rice: bool, header: bytes) -> UInt8Array:
    """Join the header, the threads' tiles and the shared tiles of remaining entries, in order; free each buffer."""
    records = work.records
    most_left = 3 * int(records[:, enc.LEFT].sum()) + cpu_tiles.HEADER_BYTES * (len(records) + 1)
    size = len(header) + sum(map(len, buffers)) + most_left
    out = np.empty(size, np.uint8) if size < _SMALL else _mapped(size)
    out[: len(header)] = np.frombuffer(header, np.uint8)
    place = work.joined
    place[:] = 0
    place[enc.J_LAST], place[enc.J_USED] = -1, len(header)
    source, done = out[:0], 0
    while done != 1:
        done, taken = enc.join(
            len(records), work.numbers, rice, work.scratch[0], place, records, work.left, work.times, source, out
        )
        source = source[taken:]
        if done == 0:
            source = buffers.pop(0)
        elif done < 0:
            larger = _mapped(out.size + out.size // 2 + cpu_tiles.ENTRY_BYTES * TILE_MAX)
            larger[: place[enc.J_USED]] = out[: place[enc.J_USED]]
            out = larger
    return out[: place[enc.J_USED]]


#: Texts of the error codes of `cpu_decode`.
_ERRORS = (
    "",
    "a tile without the multiple it announces",
    "entries outside their tile",
    "an entry with m outside its limits",
    "a run that passes the end of its tile",
    "a payload too short or too long for its entries",
    "bits after the last entry",
)


def inspect(message: UInt8Array, n: int, rice: bool = True, threads: int | None = None) -> Int64Array:
    """Check an untrusted message to its last bit, and return the table of its tiles (see `table.table`).

    Args:
        message: uint8[bytes], the tiles one after another.
        n: number of elements of the update.
        rice: True if gaps are entropy-coded, False for plain positions.
        threads: number of threads; `default_threads()` if None.

    Raises:
        Malformed: if the bytes are not a message for n elements.
        TypeError: if the message is not uint8[bytes].
        ValueError: if the message is not contiguous.
    """
    rows = table(message, n)
    _check_tiles(message, rows, rice, threads or default_threads())
    return rows


def _check_tiles(message: UInt8Array, rows: Int64Array, rice: bool, threads: int) -> None:
    """Raise Malformed if a tile of a message with the table `rows` is invalid."""
    borders = cut(len(rows), min(threads, max(len(rows) // 8, 1)), 8)
    depth, message = _depth(rows), frozen(message)
    faults = spread(
        lambda i: dec.check_tiles(borders[i], borders[i + 1], rows, message, rice, depth), len(borders) - 1, threads
    )
    for tile, error in faults:
        if error:
            raise Malformed(f"{_ERRORS[error]}, in the tile with its payload at byte {rows[tile, START]}")


def _depth(rows: Int64Array) -> int:
    """Return the largest number of entries of a tile."""
    return int(rows[:, ENTRIES].max(initial=1))


def decode(
    messages: Sequence[tuple[UInt8Array, Runs]],
    scale: float,
    out: Sequence[Float32Array] | Located,
    rice: bool = True,
    threads: int | None = None,
    way: int = ADD_EACH,
) -> None:
    """Add messages to `out`, one after another: out[i] += +-float32(m * tau) * scale, each step rounded to float32.

    Args:
        messages: (tiles as uint8[bytes], runs) of each message, in the order of the additions.
        scale: float32 factor.
        out: contiguous float32 arrays, read as one vector; changed in place.
        rice: True if gaps are entropy-coded, False for plain positions.
        threads: number of threads; `default_threads()` if None. The sums do not depend on it.
        way: `ADD_EACH`; or add the messages to zeros, whose sum replaces `out` (`SET_SUM`) or is added to it
            (`ADD_SUM`). This takes less time than to clear an array before the call, and each message is read only
            once.

    Raises:
        Malformed: if a message is invalid; the error's `message` is the message's position. `out` is unchanged, or with
            another way than `ADD_EACH` undefined.
        TypeError: if `out` is not float32.
        ValueError: if `out` is not contiguous, or if `runs` do not fit.

    Example:
        >>> runs, out = Runs(np.array([3]), np.ones(1, np.float32)), np.zeros(3, np.float32)
        >>> tiles = encode([np.array([0, -2, 0], np.float32)], np.zeros(3, np.float32), runs).tiles
        >>> decode([(tiles, runs), (tiles, runs)], 0.5, [out])
        >>> out
        array([ 0., -2.,  0.], dtype=float32)
    """
    arrays = locate(out, "out", writable=True)
    n, where, threads = arrays.size, whole_pieces(arrays), threads or default_threads()
    checked = [(message, check_runs(runs, n, "out")) for message, runs in messages]
    prepared = []
    for i, (message, runs) in enumerate(checked):
        try:
            prepared.append((message, table(message, n), runs))
        except Malformed as error:
            raise Malformed(str(error), i) from None
    if way == ADD_EACH:
        _check_all(prepared, rice, threads)
    elif way == ADD_SUM and len(prepared) > dec.TOGETHER:
        total = aligned(n)
        decode(messages, scale, [total], rice, threads, SET_SUM)
        at = 0
        for array in arrays.arrays:
            np.add(array, total[at : at + array.size].reshape(array.shape), out=array)
            at += array.size
        return
    borders = cut(n, threads if n > 1 << 12 else 1, 64)
    for first in range(0, max(len(prepared), 1), dec.TOGETHER):
        once = ADD_EACH if first else way
        if not _add(prepared[first : first + dec.TOGETHER], scale, where, borders, rice, once, threads):
            _check_all(prepared, rice, threads)
            raise Malformed("it changed while it was decoded", first)


def _add(
    messages: list[tuple[UInt8Array, Int64Array, Runs]],
    scale: float,
    where: Int64Array,
    borders: list[int],
    rice: bool,
    way: int,
    threads: int,
) -> bool:
    """Add messages of (tiles, table of tiles, runs) to the pieces `where`; return False if a tile is invalid.

    `borders` are the shares of threads. The other arguments are those of `decode`.
    """
    heads, tiles, ends, taus = _joined(messages)
    factor, depth, stream = np.float32(scale), _depth(tiles), borders[-1] > _CACHED

    def add_share(i: int) -> bool:
        share = borders[i], borders[i + 1]
        return bool(dec.add_messages(*share, where, heads, tiles, rice, ends, taus, factor, depth, way, stream))

    return all(spread(add_share, len(borders) - 1, threads))


def _check_all(messages: list[tuple[UInt8Array, Int64Array, Runs]], rice: bool, threads: int) -> None:
    """Raise Malformed for the first of (tiles, table of tiles, runs) with an invalid tile."""
    for i, (message, rows, _) in enumerate(messages):
        try:
            _check_tiles(message, rows, rice, threads)
        except Malformed as error:
            raise Malformed(str(error), i) from None


def _joined(
    messages: list[tuple[UInt8Array, Int64Array, Runs]],
) -> tuple[Int64Array, Int64Array, Int64Array, Float32Array]:
    """Return the tables of messages for `dec.add_messages`: messages, tiles, ends and taus of runs."""
    counts = np.array([(len(rows), len(runs.taus)) for _, rows, runs in messages], np.int64).reshape(-1, 2)
    ends = counts.cumsum(0)
    heads = np.empty((len(messages), 5), np.int64)
    for i, (message, _, _) in enumerate(messages):
        heads[i, [dec.ADDRESS, dec.BYTES]] = message.ctypes.data, message.size
    heads[:, dec.NEXT], heads[:, dec.END] = ends[:, 0] - counts[:, 0], ends[:, 0]
    heads[:, dec.RUN] = ends[:, 1] - counts[:, 1]
    return (
        heads,
        np.concatenate([np.empty((0, 6), np.int64), *(rows for _, rows, _ in messages)]),
        np.concatenate([np.empty(0, np.int64), *(np.cumsum(runs.lengths) for _, _, runs in messages)]),
        np.concatenate([np.empty(0, np.float32), *(runs.taus for _, _, runs in messages)]),
    )


def default_threads() -> int:
    """Return the default number of threads: OMP_NUM_THREADS if it is set, else the number of the process's cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(setting), 1024) if setting.isdecimal() and int(setting) > 0 else len(os.sched_getaffinity(0))


def spread(function: Callable[[int], T], tasks: int, threads: int) -> list[T]:
    """Call function(0) ... function(tasks - 1) on `threads` threads; return the results in order."""
    if threads == 1 or tasks == 1:
        return [function(i) for i in range(tasks)]
    # A fork does not copy threads, so each process has its own pools.
    key = os.getpid(), threads
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads - 1, thread_name_prefix="hvdx-kernel")
    rest: list[Future[T]] = []
    try:
        for i in range(1, tasks):
            rest.append(_pools[key].submit(function, i))
        return [function(0), *(future.result() for future in rest)]
    finally:
        # After any interruption no task may still run: tasks use addresses of arrays that the caller may free.
        _wait_for_all(rest)


def _wait_for_all(futures: list[Future[T]]) -> None:
    """Wait until no future runs, and only then raise an exception that interrupted the wait."""
    interrupted = None
    for future in futures:
        while not future.done():
            try:
                future.cancel()
                wait([future])
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted


def cut(total: int, parts: int, unit: int = 1) -> list[int]:
    """Return the borders of `parts` even shares of range(total). All but the last are multiples of `unit`.

    Example:
        >>> cut(10, 2, 4)
        [0, 4, 10]
    """
    units = -(-total // unit)
    return [min(total, units * i // parts * unit) for i in range(parts + 1)]
