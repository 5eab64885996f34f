"""Decoder in plain Python, written from docs/wire-format.md alone, without NumPy and hvdx.

Rule numbers are those of the section "What a decoder must check".
"""

import itertools
import math
import struct

import xxhash

NONE, FP16, BF16, RICE, PLAIN = range(5)
TILE_MAX, M_MAX, N_MAX = 4096, 2**31 - 1, 2**48


class Refused(Exception):  # noqa: N818
    """A message that breaks a rule."""

    def __init__(self, rule, what):
        super().__init__(f"rule {rule}: {what}")
        self.rule = rule


def f32(x):
    """Return x rounded to float32."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def start(s, e):
    """Return the first Rice parameter for s skipped elements among e entries."""
    return min(max((s // e).bit_length() - 1, 0), 31)


class Bytes:
    """Reader of the body of a message."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def left(self):
        return len(self.data) - self.at

    def take(self, length):
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self):
        """Read a number in LEB128."""
        value = 0
        for i in range(9):
            if not self.left():
                break
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << 7 * i
            if not byte & 0x80:
                if byte == 0 and i > 0:
                    raise Refused(6, "a byte that a number does not need")
                return value
        raise Refused(5, "a number without an end")


class Bits:
    """Reader of the bits of a payload."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def bit(self):
        if self.at >= 8 * len(self.data):
            raise Refused(15, "a payload that is too short")
        value = self.data[self.at // 8] >> self.at % 8 & 1
        self.at += 1
        return value

    def number(self, length):
        return sum(self.bit() << i for i in range(length))

    def code(self, k):
        """Read a number in the gap code."""
        t = 0
        while self.bit():
            t += 1
        if t < 8:
            q = t
        else:
            z = t - 8
            if z + k > 49:
                raise Refused(16, "a number that no gap needs")
            q = 7 + 2**z + self.number(z)
        return q * 2**k + self.number(k)

    def finish(self):
        if 8 * len(self.data) - self.at >= 8 or any(self.bit() for _ in range(8 * len(self.data) - self.at)):
            raise Refused(21, "bits after the last entry")


def open_frame(message, codec):
    """Check the frame of a message; return a reader of its body."""
    if len(message) < 8 or message[:2] != b"\x68\x78":
        raise Refused(1, "no message")
    if message[2] != 1:
        raise Refused(2, f"version {message[2]}")
    if message[3] != codec:
        raise Refused(3, f"codec {message[3]}")
    checksum = xxhash.xxh64(message[8:], seed=0x00017868 + codec * 2**24).intdigest() % 2**32
    if struct.unpack("<I", message[4:8])[0] != checksum:
        raise Refused(4, "checksum")
    return Bytes(message[8:])


def read_dense(body, n, codec):
    """Read a dense body: [(index, value)]."""
    if body.number() != n:
        raise Refused(7, "another number of elements")
    if body.left() != n * (4 if codec == NONE else 2):
        raise Refused(8, "another number of values")
    rest = body.take(body.left())
    if codec == NONE:
        values = struct.unpack(f"<{n}f", rest)
    elif codec == FP16:
        values = struct.unpack(f"<{n}e", rest)
    else:
        values = [struct.unpack("<f", bytes(2) + rest[2 * i : 2 * i + 2])[0] for i in range(n)]
    return list(enumerate(values))


def read_runs(body, n):
    """Read the runs: [(end of a run, its tau)]."""
    lengths, rest = [], n
    for _ in range(body.number()):
        lengths.append(body.number())
        if not 1 <= lengths[-1] <= rest:
            raise Refused(9, "a run of no length, or too long")
        rest -= lengths[-1]
    if rest:
        raise Refused(9, "runs that are too short")
    if body.left() < 4 * len(lengths):
        raise Refused(10, "taus are missing")
    runs, end = [], 0
    for length in lengths:
        tau = struct.unpack("<f", body.take(4))[0]
        if not 2.0**-126 <= tau <= 2.0**126:
            raise Refused(10, f"a tau of {tau}")
        end += length
        runs.append((end, tau))
    return runs


def read_tiles(body, n, codec):
    """Read the tiles to the end of a body: [(index, 1 if negative, m)]."""
    entries, last = [], -1
    while body.left():
        gap, packed, skipped, length = body.number(), body.number(), body.number(), body.number()
        number, multiple = packed // 2, packed % 2
        if not 1 <= number <= TILE_MAX:
            raise Refused(11, f"{number} entries")
        if number == 1 and skipped:
            raise Refused(12, "one entry with two indices")
        first = last + 1 + gap
        last = first + skipped + number - 1
        if last >= n:
            raise Refused(13, "an entry outside")
        if length > body.left():
            raise Refused(14, "a payload that is cut short")
        read = read_rice if codec == RICE else read_plain
        entries += read(body.take(length), number, multiple, first, last, skipped)
    return entries


def read_rice(payload, number, multiple, first, last, skipped):
    """Read the entries of a tile of codec 3."""
    bits, entries = Bits(payload), []
    k, following, index = start(skipped, number), number, first
    if multiple:
        k_run = bits.number(5)
        following = bits.code(k_run)
        if following >= number:
            raise Refused(17, "no multiple")
    for i in range(number):
        if i == 0:
            index = first
        elif i == number - 1:
            if index >= last:
                raise Refused(20, "entries that pass the last one")
            index = last
        else:
            if i % 64 == 1 and bits.bit():
                k = bits.number(5)
            index += 1 + bits.code(k)
        negative, m = bits.bit(), 1
        if i == following:
            m = 2 + bits.code(0)
            following = i + 1 + bits.code(k_run)
            if following > number:
                raise Refused(18, "a multiple outside the tile")
            if m > M_MAX:
                raise Refused(19, f"{m} times tau")
        entries.append((index, negative, m))
    bits.finish()
    return entries


def read_plain(payload, number, multiple, first, last, skipped):
    """Read the entries of a tile of codec 4."""
    if len(payload) != (8 if multiple else 4) * number:
        raise Refused(22, "a payload of another length")
    words = struct.unpack(f"<{len(payload) // 4}I", payload)
    back = [word % 2**31 for word in words[:number]]
    if back[0] != last - first or back[-1] != 0 or any(a <= b for a, b in itertools.pairwise(back)):
        raise Refused(23, "positions out of order")
    times = words[number:] if multiple else (1,) * number
    if multiple and not (all(1 <= m <= M_MAX for m in times) and max(times) > 1):
        raise Refused(24, "an m outside its limits, or none above 1")
    return [(last - b, word >> 31, m) for b, word, m in zip(back, words[:number], times, strict=True)]


def decode(message, n, codec):
    """Return [(index, value)] of a message for n elements; each value is a float32."""
    body = open_frame(message, codec)
    if codec in (NONE, FP16, BF16):
        return read_dense(body, n, codec)
    runs = read_runs(body, n)
    values, run = [], 0
    for index, negative, m in read_tiles(body, n, codec):
        while index >= runs[run][0]:
            run += 1
        a = f32(float(m) * runs[run][1])
        values.append((index, -a if negative else a))
    return values


def add(messages, codec, out, scale):
    """Add messages, in rank order, to a list of float32, which is unchanged if one message is refused."""
    decoded = [decode(message, len(out), codec) for message in messages]
    for values in decoded:
        for index, a in values:
            out[index] = f32(out[index] + f32(a * scale))
