"""Reference threshold kernels in plain NumPy and Python: the specification that `cpu` and `cuda` match to the byte.

They are written for readers and are slow. `docs/wire-format.md` describes the same bytes in prose.
"""

from collections.abc import Sequence

import numpy as np

from hvdx.kernels.arrays import BoolArray, Float32Array, Int64Array, UInt8Array
from hvdx.kernels.tiles import (
    BLOCK,
    ESCAPE,
    K_MAX,
    LAYOUT,
    LINE,
    M_MAX,
    N_MAX,
    SWITCH,
    TILE_MAX,
    Encoded,
    Layout,
    Malformed,
    Runs,
    factors,
    limit,
    plan,
)


def amount(m: Int64Array, tau: Float32Array) -> Float32Array:
    """Return the value of an entry, float32(m * tau), with the product computed in float64."""
    return (np.asarray(m, np.float64) * np.asarray(tau, np.float64)).astype(np.float32)


def check(update: Sequence[Float32Array], runs: Runs) -> int:
    """Return the index of the first element that cannot be sent (NaN, infinity, above `limit`), or -1.

    Args:
        update: float32 arrays, read as one vector.
        runs: lengths and taus of the runs.
    """
    bad = np.flatnonzero(~(np.abs(vector(update)) <= np.repeat(limit(runs.taus), runs.lengths)))
    return int(bad[0]) if bad.size else -1


def encode(
    update: Sequence[Float32Array],
    residual: Float32Array,
    runs: Runs,
    rice: bool = True,
    layout: Layout = LAYOUT,
    lookahead: float = 0.0,
) -> Encoded:
    """Add an update to a residual, and move the multiples of tau from the sum into entries.

    Args:
        update: float32 arrays, read as one vector of n elements.
        residual: float32[n], changed in place unless there is a fault. Each absolute value is at most `limit`.
        runs: lengths and taus of the runs.
        rice: True for entropy-coded gaps, False for plain 32-bit positions.
        layout: borders of tiles.
        lookahead: add (1 + lookahead) * update, and when the entries are found, subtract lookahead * update again.

    Returns:
        The tiles and the counts.
    """
    scale, back = factors(lookahead)
    with np.errstate(over="ignore", invalid="ignore"):
        added = vector(update) * scale
    fault = check([added], runs)
    if fault >= 0:
        return Encoded.of_fault(fault, len(runs.taus))
    tau = np.repeat(runs.taus, runs.lengths)
    total = residual + added
    size = np.abs(total)
    index = np.flatnonzero(size >= tau)
    m = np.trunc(size[index].astype(np.float64) / tau[index].astype(np.float64)).astype(np.int64)
    # float32(m * tau) may round down so far that tau still fits into the remainder.
    m += size[index] - amount(m, tau[index]) >= tau[index]
    # An update and a residual of 2**30 tau each reach one more.
    m = np.minimum(m, M_MAX)
    left, negative = size[index] - amount(m, tau[index]), np.signbit(total[index])
    residual[:] = total
    residual[index] = np.where(negative, -left, left)
    tiles = write(index, negative, m, len(tau), rice, layout)
    sent = np.diff(np.searchsorted(index, np.cumsum(runs.lengths)), prepend=0)
    if back:
        residual -= added * back
    return Encoded(tiles, sent, -1)


def sample(update: Sequence[Float32Array], residual: Float32Array, lines: Int64Array) -> Float32Array:
    """Copy some lines of an update and of a residual, float32[2, elements]; see `cpu.sample`."""
    both = np.stack([vector(update), residual])
    return both[:, np.isin(np.arange(both.shape[1]) // LINE, lines)]


def vector(arrays: Sequence[Float32Array]) -> Float32Array:
    """Return the elements of float32 arrays as one vector."""
    return np.concatenate([a.reshape(-1) for a in arrays]) if arrays else np.zeros(0, np.float32)


def write(
    index: Int64Array, negative: BoolArray, m: Int64Array, n: int, rice: bool = True, layout: Layout = LAYOUT
) -> np.ndarray:
    """Return entries as tiles, uint8[bytes].

    Args:
        index: int64[e], increasing, below n.
        negative: bool[e].
        m: int64[e], 1 to M_MAX.
        n: number of elements of the update.
        rice: True for entropy-coded gaps, False for plain positions.
        layout: borders of tiles.
    """
    regions = np.bincount(index // layout.region, minlength=-(-n // layout.region))
    parts, first, last = bytearray(), 0, -1
    for length in plan(regions, layout):
        chosen = slice(first, first + length)
        parts += tile(index[chosen], negative[chosen], m[chosen], last, rice)
        first, last = first + length, int(index[first + length - 1])
    return np.frombuffer(bytes(parts), np.uint8)


def tile(index: Int64Array, negative: BoolArray, m: Int64Array, last: int, rice: bool) -> bytes:
    """Return one tile: header and payload. `last` is the index of the last entry before it, -1 for the first tile.

    Only the first number of the header depends on the tiles before.
    """
    entries = len(index)
    skipped = int(index[-1] - index[0]) + 1 - entries
    multiple = bool((m > 1).any())
    if rice:
        payload = rice_payload(np.diff(index)[:-1] - 1, negative, m, skipped, multiple)
    else:
        words = (index[-1] - index).astype(np.uint32) | negative.astype(np.uint32) << np.uint32(31)
        payload = words.astype("<u4").tobytes() + (m.astype("<u4").tobytes() if multiple else b"")
    header = varint(int(index[0]) - last - 1), varint(entries << 1 | multiple), varint(skipped), varint(len(payload))
    return b"".join(header) + payload


def varint(value: int) -> bytes:
    """Return a number in LEB128: seven bits per byte, the lowest first; the top bit is 1 if another byte follows."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


class Bits:
    """Writer of bits. The first bit becomes the lowest bit of the first byte."""

    def __init__(self) -> None:
        self.value = self.length = 0

    def put(self, value: int, length: int) -> None:
        """Append the `length` lowest bits of `value`, lowest first."""
        self.value |= value << self.length
        self.length += length

    def code(self, x: int, k: int) -> None:
        """Append x in the gap code with parameter k."""
        q = x >> k
        if q < ESCAPE:
            self.put((1 << q) - 1, q + 1)
        else:
            z = (q - ESCAPE + 1).bit_length() - 1
            self.put((1 << ESCAPE + z) - 1, ESCAPE + z + 1)
            self.put(q - ESCAPE + 1 - (1 << z), z)
        self.put(x & (1 << k) - 1, k)

    def to_bytes(self) -> bytes:
        return self.value.to_bytes(-(-self.length // 8), "little")


def code_length(x: int, k: int) -> int:
    """Return the number of bits of x in the gap code with parameter k."""
    q = x >> k
    if q < ESCAPE:
        return q + 1 + k
    return ESCAPE + 2 * (q - ESCAPE + 1).bit_length() - 1 + k


def first_parameter(skipped: int, entries: int) -> int:
    """Return the Rice parameter at the start of a tile."""
    return min(max((skipped // entries).bit_length() - 1, 0), K_MAX)


def choose_parameter(gaps: list[int], before: int) -> int:
    """Choose the Rice parameter of a block.

    It is the cheapest of four near the mean bit length, or `before` if that costs at most SWITCH bits more.
    """
    middle = min(sum(gap.bit_length() for gap in gaps) // len(gaps), K_MAX - 1)
    near = [k for k in range(middle - 2, middle + 2) if k >= 0]
    cost = {k: sum(code_length(gap, k) for gap in gaps) for k in [*near, before]}
    best = min(near, key=lambda k: (cost[k], k))
    return before if cost[before] <= cost[best] + SWITCH else best


def rice_payload(gaps: Int64Array, negative: BoolArray, m: Int64Array, skipped: int, multiple: bool) -> bytes:
    """Return the payload of an entropy-coded tile.

    `gaps` lacks the gap before the last entry, because the header gives the index of the first and of the last entry.
    """
    bits = Bits()
    gap, larger, entries = gaps.tolist(), np.flatnonzero(m > 1).tolist(), len(m)
    k = first_parameter(skipped, entries)
    if multiple:
        k_run = first_parameter(entries - len(larger), len(larger) + 1)
        bits.put(k_run, 5)
        bits.code(larger[0], k_run)
    for i in range(entries):
        if 1 <= i < entries - 1:
            if i % BLOCK == 1:
                chosen = choose_parameter(gap[i - 1 : i - 1 + BLOCK], k)
                bits.put(chosen != k, 1)
                if chosen != k:
                    bits.put(chosen, 5)
                k = chosen
            bits.code(gap[i - 1], k)
        bits.put(int(negative[i]), 1)
        if multiple and m[i] > 1:
            after = larger[larger.index(i) + 1 :] or [entries]
            bits.code(int(m[i]) - 2, 0)
            bits.code(after[0] - i - 1, k_run)
    return bits.to_bytes()


class Reader:
    """Reader of the bits that `Bits` wrote. It raises Malformed if bits are missing."""

    def __init__(self, payload: bytes) -> None:
        self.value, self.left = int.from_bytes(payload, "little"), 8 * len(payload)

    def take(self, length: int) -> int:
        """Read the next `length` bits as a number."""
        if length > self.left:
            raise Malformed("a payload ends in the middle of an entry")
        taken = self.value & (1 << length) - 1
        self.value >>= length
        self.left -= length
        return taken

    def code(self, k: int) -> int:
        """Read the next number in the gap code with parameter k."""
        ones = 0
        while self.take(1):
            ones += 1
            if ones - ESCAPE + k > N_MAX.bit_length():
                raise Malformed("a gap longer than any update")
        z = ones - ESCAPE
        q = ones if z < 0 else (1 << z) + self.take(z) + ESCAPE - 1
        return q << k | self.take(k)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the LEB128 number at offset `at`; return it and the offset of its end."""
    value = shift = 0
    while at < len(data) and shift < 63:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            if byte == 0 and shift > 7:
                raise Malformed("a number with a superfluous byte")
            return value, at
    raise Malformed("a number that does not end")


def read(tiles: UInt8Array, n: int, rice: bool = True) -> tuple[Int64Array, BoolArray, Int64Array]:
    """Read the entries of tiles for n elements: index int64[e], negative bool[e], m int64[e].

    Raises:
        Malformed: if the bytes are not tiles for n elements.
    """
    data, at, last = tiles.tobytes(), 0, -1
    index: list[int] = []
    negative: list[bool] = []
    times: list[int] = []
    while at < len(data):
        gap, at = read_varint(data, at)
        packed, at = read_varint(data, at)
        skipped, at = read_varint(data, at)
        length, at = read_varint(data, at)
        entries = packed >> 1
        if not 1 <= entries <= TILE_MAX:
            raise Malformed(f"a tile of {entries} entries")
        if entries == 1 and skipped:
            raise Malformed("a tile of one entry with different first and last indices")
        first = last + 1 + gap
        last = first + skipped + entries - 1
        if last >= n:
            raise Malformed("an entry outside the update")
        if at + length > len(data):
            raise Malformed("a tile longer than the message")
        payload = data[at : at + length]
        (read_rice if rice else read_plain)(payload, entries, first, last, bool(packed & 1), index, negative, times)
        at += length
    return np.array(index, np.int64), np.array(negative, bool), np.array(times, np.int64)


def read_rice(
    payload: bytes, entries: int, first: int, last: int, multiple: bool,
    index: list[int], negative: list[bool], times: list[int],
) -> None:  # fmt: skip
    """Append the entries of an entropy-coded tile to the three lists. `first` and `last` are from its header."""
    bits = Reader(payload)
    k = first_parameter(last - first + 1 - entries, entries)
    run, where = entries, first
    if multiple:
        k_run = bits.take(5)
        run = bits.code(k_run)
        if run >= entries:
            raise Malformed("a tile without the multiple it announces")
    for i in range(entries):
        if 1 <= i < entries - 1:
            if i % BLOCK == 1 and bits.take(1):
                k = bits.take(5)
            where += bits.code(k) + 1
            if where > last - (entries - 1 - i):
                raise Malformed("a tile that passes its end")
        elif i:
            where = last
        index.append(where)
        negative.append(bool(bits.take(1)))
        times.append(1)
        if i == run:
            times[-1] = bits.code(0) + 2
            if times[-1] > M_MAX:
                raise Malformed("an entry with m above its limit")
            run = i + 1 + bits.code(k_run)
            if run > entries:
                raise Malformed("a run that passes the end of its tile")
    if bits.left >= 8 or bits.value:
        raise Malformed("bytes after the last entry of a tile")


def read_plain(
    payload: bytes, entries: int, first: int, last: int, multiple: bool,
    index: list[int], negative: list[bool], times: list[int],
) -> None:  # fmt: skip
    """Append the entries of a tile of plain positions to the three lists."""
    if len(payload) != 4 * entries * (1 + multiple):
        raise Malformed("a payload whose length does not match its entries")
    words = np.frombuffer(payload, "<u4").astype(np.int64)
    where = last - (words[:entries] & 0x7FFFFFFF)
    if (np.diff(where) < 1).any() or where[0] != first or where[-1] != last:
        raise Malformed("positions out of order")
    m = words[entries:] if multiple else np.ones(entries, np.int64)
    if m.min() < 1 or m.max() > M_MAX or multiple != (m.max() > 1):
        raise Malformed("an entry with m outside its limits, or no m above 1 in a tile that announces one")
    index += where.tolist()
    negative += (words[:entries] >> 31 == 1).tolist()
    times += m.tolist()


def decode(
    messages: Sequence[tuple[UInt8Array, Runs]], scale: float, out: Sequence[Float32Array], rice: bool = True
) -> None:
    """Add messages to `out`, one after another: out[i] += +-float32(m * tau) * scale, each step rounded to float32.

    Args:
        messages: (tiles, runs) of each message, in the order of the additions.
        scale: float32 factor.
        out: float32 arrays, read as one vector; changed in place.
        rice: True if gaps are entropy-coded, False for plain positions.

    Raises:
        Malformed: if a message is invalid. `out` is unchanged.
    """
    entries = [read(tiles, int(runs.lengths.sum()), rice) for tiles, runs in messages]
    total = vector(out)
    for (index, negative, m), (_, runs) in zip(entries, messages, strict=True):
        value = amount(m, np.repeat(runs.taus, runs.lengths)[index]) * np.float32(scale)
        total[index] += np.where(negative, -value, value)
    first = 0
    for o in out:
        o.reshape(-1)[:] = total[first : first + o.size]
        first += o.size
