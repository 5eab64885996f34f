"""Tests that docs/wire-format.md, the decoder that was written from it, and hvdx agree about every message."""

# Tests: hvdx/codec/floats.py, hvdx/codec/threshold.py, hvdx/codec/frame.py, kernels/varint.py

import math
import re
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hvdx.codec import Bfloat16, Float16, Raw, Threshold, frame
from hvdx.errors import WireError
from hvdx.kernels import cpu, reference, varint
from hvdx.kernels.tiles import K_MAX, M_MAX, N_MAX, TILE_MAX, Layout, Malformed, Runs
from tests.codec import foreign_decoder as foreign

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire-format.md").read_text()
CODECS = {
    0: Raw(),
    1: Float16(),
    2: Bfloat16(),
    3: Threshold(threads=1),
    4: Threshold(index_coding="none", threads=1),
}
SMALL = Layout(region=256, tile_max=8, tile_min=4, group=5, group_regions=8)
RULES = 24


# The page


def section(heading):
    """Return the page's text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading!r}"
    return found[1]


def tables(text):
    """Return the tables in a text: lists of rows without the table's header, each row a list of cells."""
    found, inside = [], False
    for line in text.splitlines():
        if re.fullmatch(r"\|[-|]+\|", line):
            found.append([])
            inside = True
        elif inside and line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        else:
            inside = False
    return found


def example(heading):
    """Return the bytes in the first table under a heading; the offset of each row must be right."""
    message = b""
    for offset, cell, _ in tables(section(heading))[0]:
        assert int(offset) == len(message), f"{heading}: offset {offset}"
        message += bytes.fromhex(cell.strip("`"))
    return message


def to_bits(data):
    """Return bytes as text of bits, in the order of reading."""
    return "".join(f"{byte:08b}"[::-1] for byte in data)


def from_bits(bits):
    """Return text of bits as bytes, padded with 0."""
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def three_tiles():
    """Return the update, the runs and the sent values of the example of three tiles."""
    (rows,) = tables(section("Example: three tiles"))
    update, sent = np.zeros(600, np.float32), {}
    for index, value, what in rows:
        update[int(index)], sent[int(index)] = float(value), float(what)
    return update, Runs(np.array([310, 290]), np.float32([0.5, 0.25])), sent


# Messages


class Bits:
    """Writer of bits and of numbers in the gap code, including those that hvdx would not write."""

    def __init__(self):
        self.text = ""

    def put(self, value, length):
        self.text += f"{value:0{length}b}"[::-1] if length else ""
        return self

    def code(self, x, k):
        q = x >> k
        if q < 8:
            self.text += "1" * q + "0"
        else:
            z = (q - 7).bit_length() - 1
            self.text += "1" * (8 + z) + "0"
            self.put(q - 7 - (1 << z), z)
        return self.put(x & (1 << k) - 1, k)


# Two decoders


def seal(body, codec):
    """Return the message of a body."""
    return frame.seal(np.frombuffer(bytes(8) + bytes(body), np.uint8).copy(), codec)


def canonical(values):
    """Return the bits of float32 values, with the same bits for every NaN."""
    values = np.asarray(values, np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def compare(messages, n, codec, scale=1.0, out=None):
    """Decode with hvdx and with the foreign decoder, which must agree; return the broken rule or None."""
    ours = np.zeros(n, np.float32) if out is None else out.copy()
    theirs, before = ours.tolist(), ours.copy()
    scale = float(np.float32(scale))
    rule = None
    try:
        foreign.add([bytes(message) for message in messages], codec, theirs, scale)
    except foreign.Refused as refused:
        rule = refused.rule
    try:
        # A damaged dense body may hold any values.
        with np.errstate(all="ignore"):
            CODECS[codec].decode(messages, [ours[: n // 3], ours[n // 3 :]], scale)
    except WireError as error:
        if rule is None:
            raise AssertionError("hvdx alone refuses a message") from error
        np.testing.assert_array_equal(ours.view(np.uint32), before.view(np.uint32))
    else:
        assert rule is None, f"the foreign decoder alone refuses: rule {rule}"
    np.testing.assert_array_equal(canonical(ours), canonical(theirs))
    return rule


def runs_bytes(runs):
    """Return the bytes of the runs at the front of a body."""
    numbers = [len(runs.lengths), *runs.lengths.tolist()]
    return b"".join(varint.put(number) for number in numbers) + runs.taus.astype("<f4").tobytes()


def encode_small(update, runs, rice, layout=SMALL, residual=None):
    """Return a message with the tiles of a layout of few entries."""
    residual = np.zeros(len(update), np.float32) if residual is None else residual
    tiles = reference.encode([update], residual.copy(), runs, rice, layout).tiles
    np.testing.assert_array_equal(cpu.encode([update], residual, runs, rice, layout, threads=1).tiles, tiles)
    return seal(runs_bytes(runs) + tiles.tobytes(), 3 if rice else 4)


def draw(n, density, seed, several=0.05, tau=0.5):
    """Return an update of which about a share `density` reaches tau, some many times over, in clusters and alone."""
    rng = np.random.default_rng(seed)
    weight = np.repeat(rng.exponential(size=-(-n // 50)), 50)[:n]
    sizes = tau * rng.uniform(1, 1.99, n) * np.where(rng.random(n) < several, rng.geometric(0.02, n), 1)
    sizes = np.where(rng.random(n) < density * weight, sizes, rng.uniform(0, 0.3 * tau, n))
    return (sizes * rng.choice([-1, 1], n)).astype(np.float32)


# Examples


def test_example_of_a_dense_body():
    codec = Bfloat16()
    message = codec.encode([np.float32([1, -0.1])], codec.init([2]))[0]
    assert message.tobytes() == example("Example: two elements")
    assert foreign.decode(message.tobytes(), 2, 2) == [(0, 1.0), (1, -0.10009765625)]
    assert compare([message], 2, 2) is None


def test_example_of_three_tiles():
    update, runs, sent = three_tiles()
    message = example("The bytes in codec 3")
    assert encode_small(update, runs, True).tobytes() == message
    assert foreign.decode(message, 600, 3) == list(sent.items())
    out = np.zeros(600, np.float32)
    CODECS[3].decode([np.frombuffer(message, np.uint8)], [out])
    assert {int(i): float(out[i]) for i in np.flatnonzero(out)} == sent


def test_example_of_payloads_bit_by_bit():
    payloads = tables(section("The bytes in codec 3"))[1:]
    for rows, payload in zip(payloads, ("02 c1 ff 5f 05", "20 62 2b 01"), strict=True):
        bits = "".join("".join(re.findall("`([01]+)`", cell)) for cell, _ in rows)
        assert bits == to_bits(bytes.fromhex(payload))
        assert f"`{payload}`" in section("The bytes in codec 3")


def test_example_of_plain_positions():
    codec, update = Threshold(tau=1.0, index_coding="none"), np.zeros(10, np.float32)
    update[[2, 7]] = 1, -3.5
    message = codec.encode([update], codec.init([10]))[0]
    assert message.tobytes() == example("The bytes in codec 4")
    assert foreign.decode(message.tobytes(), 10, 4) == [(2, 1.0), (7, -3.0)]
    assert compare([message], 10, 4) is None


def test_code_words_of_the_gap_code():
    (rows,) = tables(section("The gap code"))
    for x, *words in rows:
        for k, word in zip((0, 2), words, strict=True):
            written = reference.Bits()
            written.code(int(x), k)
            assert to_bits(written.to_bytes())[: written.length] == Bits().code(int(x), k).text == word.strip("`")
            assert foreign.Bits(from_bits(word.strip("`"))).code(k) == int(x)


def test_checksum_of_an_empty_body():
    assert seal(b"", 0)[4:].tobytes() == bytes.fromhex("d6 00 2c a1")
    assert "0xa12c00d6, stored as `d6 00 2c a1`" in PAGE


def test_limits_and_rules():
    (rows,) = tables(section("Limits"))
    assert [size for _, size, _ in rows] == ["2^48", "4096", "2^31 - 1", "31", "36"]
    assert (N_MAX, TILE_MAX, M_MAX, K_MAX) == (2**48, 4096, 2**31 - 1, 31)
    rules = re.findall(r"^(\d+)\. ", section("What a decoder must check"), re.MULTILINE)
    assert [int(rule) for rule in rules] == list(range(1, RULES + 1))


def test_table_of_sizes():
    n = 1 << 22
    for density, entries, entropy, bits_per_entry in tables(section("Sizes"))[1]:
        rng, p = np.random.default_rng(0), float(density)
        chosen = rng.random(n) < p
        codec = Threshold(tau=1.0)
        update = np.where(chosen, rng.choice(np.float32([-1, 1]), n), np.float32(0))
        message = codec.encode([update], codec.init([n]))[0]
        assert np.count_nonzero(chosen) == int(entries)
        assert f"{((1 - p) * math.log2(1 / (1 - p)) + p * math.log2(1 / p)) / p + 1:.2f}" == entropy
        assert f"{8 * message.size / int(entries):.2f}" == bits_per_entry


# Updates


@pytest.mark.parametrize("codec", [0, 1, 2])
@pytest.mark.parametrize("n", [0, 1, 5, 1000, 70_001])
def test_dense_messages(codec, n):
    rng = np.random.default_rng(n)
    messages = []
    for _ in range(3):
        update = (rng.standard_normal(n) * 10.0 ** rng.uniform(-9 if codec == 1 else -44, 4, n)).astype(np.float32)
        update[rng.random(n) < 0.1] = rng.choice([0.0, -0.0])
        messages.append(CODECS[codec].encode([update], CODECS[codec].init([n]))[0])
    assert compare(messages, n, codec, 1 / 3, rng.standard_normal(n).astype(np.float32)) is None
    assert compare(messages[:1], n, codec) is None


@pytest.mark.parametrize("coding", ["rice", "none"])
@pytest.mark.parametrize(
    ("n", "density", "several", "options"),
    [
        (0, 0, 0, {}),
        (1, 1, 0, {"tau": 0.5}),
        (1, 1, 1, {"tau": 0.5}),
        (65, 1, 0.1, {"tau": 0.5}),
        (67, 1, 0.1, {"tau": 0.5}),
        (50_000, 0, 0, {"tau": 0.5}),
        (50_000, 1e-3, 0, {"tau": 0.5}),
        (20_000, 0.6, 0, {"tau": 0.3}),
        (20_000, 0.6, 1, {"tau": 1e-3}),
        (600_000, 8e-3, 0.1, {"tau": 0.37}),
        (800_000, 3e-4, 0.3, {"tau": 0.5}),
        (40_000, 0.02, 0.1, {"target_density": 0.02}),
        (40_000, 0.02, 0.1, {"target_density": 0.1}),
    ],
)
def test_threshold_messages(n, density, several, options, coding):
    codec = Threshold(**options, index_coding=coding)
    sizes = [n // 3, 0, n // 2, n - n // 3 - n // 2]
    states, scale = [codec.init(sizes) for _ in range(2)], np.float32(1 / 3)
    out = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    for step in range(2):
        messages = []
        for rank in range(2):
            update = draw(n, density, 10 * step + rank, several) * np.float32(1 + step)
            message, states[rank] = codec.encode(np.split(update, np.cumsum(sizes)[:-1]), states[rank])
            messages.append(message)
        assert compare(messages, n, codec.number + (coding == "none"), scale, out) is None
    if density:
        assert states[0].sent >= 0.2 * n * density


@pytest.mark.parametrize("rice", [True, False], ids=["rice", "plain"])
@pytest.mark.parametrize("layout", [SMALL, Layout(64, 200, 30, 100, 3), Layout(1024, 70, 1, 1, 1)])
def test_many_tiles_and_runs(layout, rice):
    n = 9_000
    borders = np.r_[0, 1, 2, 64, 700, 701, 4000, 4096, n]
    runs = Runs(np.diff(borders), np.float32([0.5, 0.3, 2**-126, 0.5, 1e-3, 0.7, 0.5, 0.1]))
    for density in (1e-3, 0.02, 0.3, 1):
        update = draw(n, density, 3) * np.repeat(runs.taus, runs.lengths)
        residual = np.repeat(runs.taus, runs.lengths) * np.float32(0.4)
        message = encode_small(update, runs, rice, layout, residual)
        assert compare([message] * 3, n, 3 if rice else 4, -0.7, update) is None


# The encoder's choices


def encode_by_the_page(update, residual, runs, rice):
    """Return a body by the rules of "How hvdx encodes", without hvdx' kernels; changes the residual in place."""
    taus = np.repeat(runs.taus, runs.lengths)
    total = update + residual
    residual[:] = total
    regions, waiting, covered, tiles = [[] for _ in range(-(-total.size // 2**18))], [], 0, []
    for i in np.flatnonzero(np.abs(total) >= taus).tolist():
        size, tau = abs(total[i]), taus[i]
        m = int(float(size) / float(tau))
        if size - np.float32(float(m) * float(tau)) >= tau:
            m += 1
        left = size - np.float32(float(m) * float(tau))
        residual[i] = -left if total[i] < 0 else left
        regions[i // 2**18].append((i, int(total[i] < 0), m))
    for region in regions:
        if len(region) >= 512 and waiting:
            tiles.append(waiting)
            waiting, covered = [], 0
        rest = region
        while len(rest) >= 512:
            tiles.append(rest[:4096])
            rest = rest[4096:]
        waiting = waiting + rest
        covered = covered + 1 if waiting else 0
        if len(waiting) >= 2048 or covered >= 4096:
            tiles.append(waiting)
            waiting, covered = [], 0
    body, last = bytearray(runs_bytes(runs)), -1
    for tile in [*tiles, *([waiting] if waiting else [])]:
        first, before, last = tile[0][0], last, tile[-1][0]
        skipped = last - first + 1 - len(tile)
        multiple = any(m > 1 for _, _, m in tile)
        payload = rice_payload(tile, skipped) if rice else plain_payload(tile, multiple)
        body += made(first - before - 1, len(tile), multiple, skipped, payload)
    return bytes(body)


def rice_payload(tile, skipped):
    """Return the payload of a tile of codec 3."""
    entries, bits, larger = len(tile), Bits(), [i for i, (_, _, m) in enumerate(tile) if m > 1]
    gaps = [b[0] - a[0] - 1 for a, b in pairwise(tile)]
    k = foreign.start(skipped, entries)
    if larger:
        k_run = foreign.start(entries - len(larger), len(larger) + 1)
        bits.put(k_run, 5).code(larger[0], k_run)
    for i, (_, negative, m) in enumerate(tile):
        if 0 < i < entries - 1:
            if i % 64 == 1:
                block = gaps[i - 1 : min(i + 63, entries - 2)]
                middle = min(sum(gap.bit_length() for gap in block) // len(block), 30)
                near = [j for j in range(middle - 2, middle + 2) if j >= 0]
                cost = {j: sum(len(Bits().code(gap, j).text) for gap in block) for j in {*near, k}}
                best = min(near, key=lambda j, cost=cost: (cost[j], j))
                change = cost[k] > cost[best] + 5
                bits.put(change, 1)
                if change:
                    k = best
                    bits.put(k, 5)
            bits.code(gaps[i - 1], k)
        bits.put(negative, 1)
        if m > 1:
            bits.code(m - 2, 0).code(next((j for j in larger if j > i), entries) - i - 1, k_run)
    return from_bits(bits.text)


def plain_payload(tile, multiple):
    """Return the payload of a tile of codec 4."""
    words = [tile[-1][0] - i | negative << 31 for i, negative, _ in tile]
    return struct.pack(f"<{len(words)}I", *words) + (struct.pack(f"<{len(words)}I", *(m for *_, m in tile)) * multiple)


@pytest.mark.parametrize("rice", [True, False], ids=["rice", "plain"])
def test_hvdx_encodes_by_the_rules_of_the_page(rice):
    counts = [0, 3, 511, 500, 490, 511, 200, 512, 0, 5000, 1, 511, 4096, 0, 2, 66]
    n, rng = len(counts) * 2**18 - 1000, np.random.default_rng(7)
    tau = 1e-3
    chosen = np.zeros(n, bool)
    for region, count in enumerate(counts):
        # Clusters of entries make the parameters change.
        places = np.unique((rng.random(8 * count + 8) ** 3 * 261_000).astype(int))
        chosen[region * 2**18 + rng.choice(places, count, False)] = True
    sizes = rng.uniform(tau, 1.9 * tau, n) * np.where(rng.random(n) < 0.01, rng.geometric(1e-3, n), 1)
    update = np.where(chosen, sizes * rng.choice([-1, 1], n), 0).astype(np.float32)
    codec = Threshold(tau=tau, index_coding="rice" if rice else "none")
    lengths = [1_000_003, n - 1_000_003]
    state, residual = codec.init(lengths), np.zeros(n, np.float32)
    for _ in range(2):
        runs = Runs(np.array([n]), np.array([state.tau]))
        message, state = codec.encode(np.split(update, [lengths[0]]), state)
        assert message[8:].tobytes() == encode_by_the_page(update, residual, runs, rice)
        np.testing.assert_array_equal(state.residual, residual)
        update = np.roll(update, 12_345)


# Damage


def damage(body, rng):
    """Return a body with one to three changes, preferably near its front."""
    body = bytearray(body)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = int(rng.integers(len(body)) if rng.random() < 0.6 else rng.integers(min(len(body), 24))) if body else 0
        kind = rng.integers(8)
        if kind <= 2 and body:
            body[at] ^= 1 << rng.integers(8)
        elif kind == 3 and body:
            body[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
        elif kind == 4 and body:
            body[at] = (body[at] + rng.choice([-2, -1, 1, 2])) % 256
        elif kind == 5:
            body[at:at] = rng.integers(256, size=rng.integers(1, 4), dtype=np.uint8).tobytes()
        elif kind == 6:
            del body[at : at + rng.integers(1, 5)]
        elif kind == 7:
            del body[at:]
    return bytes(body)


def victims():
    """Yield (codec, n, message) of several kinds of short messages."""
    for codec in (0, 1, 2):
        update = np.random.default_rng(codec).standard_normal(40).astype(np.float32)
        yield codec, 40, CODECS[codec].encode([update], CODECS[codec].init([40]))[0]
    for rice in (True, False):
        for seed, (n, density, several) in enumerate(
            [(0, 0, 0), (3, 1, 1), (300, 0.3, 0), (300, 0.3, 0.1), (900, 0.02, 0.3)]
        ):
            lengths = np.array([n - n // 3, n // 3] if n else [], np.int64)
            runs = Runs(lengths, np.float32([0.5, 0.3])[: len(lengths)])
            for layout in (SMALL, Layout()):
                yield 3 if rice else 4, n, encode_small(draw(n, density, seed, several), runs, rice, layout)


def test_damaged_messages():
    rng, accepted, broken, total = np.random.default_rng(5), 0, set(), 0
    for codec, n, message in victims():
        out = rng.standard_normal(n).astype(np.float32)
        assert compare([message], n, codec, 0.5, out) is None
        for _ in range(60 if codec < 3 else 260):
            hostile = seal(damage(message[8:], rng), codec)
            rule = compare([hostile], n, codec, 0.5, out)
            total += 1
            accepted += rule is None
            broken.add(rule)
    assert 0.05 * total < accepted < 0.6 * total
    # Random damage never makes a number of the length that rules 16 and 19 need.
    assert broken >= {None, *range(5, RULES + 1)} - {16, 19}


def test_damaged_frames():
    rng = np.random.default_rng(6)
    for codec, n, message in victims():
        for _ in range(10):
            hostile = message.copy()
            hostile[rng.integers(len(message))] ^= np.uint8(1 << rng.integers(8))
            assert compare([hostile], n, codec) in (1, 2, 3, 4)
            assert compare([message, hostile], n, codec) in (1, 2, 3, 4)
        for end in (0, 1, 7, len(message) - 1):
            assert compare([message[:end]], n, codec) in (1, 4)
        assert compare([np.r_[message, np.uint8(0)]], n, codec) == 4
        for other in set(CODECS) - {codec}:
            assert compare([message], n, other) == 3
        other = message.copy()
        other[2] = 2
        assert compare([other], n, codec) == 2


# Crafted messages


def made(gap, entries, multiple, skipped, payload, length=None):
    """Return a tile with these numbers in its header, valid or not."""
    numbers = gap, entries * 2 + multiple, skipped, len(payload) if length is None else length
    return b"".join(varint.put(int(number)) for number in numbers) + bytes(payload)


def front(*lengths, taus=None):
    """Return the bytes of runs of these lengths."""
    return runs_bytes(Runs(np.array(lengths, np.int64), np.float32(taus or [0.5] * len(lengths))))


def bits(*parts):
    """Return a payload of parts: text of bits, (x, k) in the gap code, or (value, "length") as a number."""
    out = Bits()
    for part in parts:
        if isinstance(part, str):
            out.text += part
        elif isinstance(part[1], str):
            out.put(part[0], int(part[1]))
        else:
            out.code(*part)
    return from_bits(out.text)


ONE = made(4, 1, 0, 0, bits("1"))
WORDS = struct.Struct("<3I").pack
HUGE = 2**63 - 1
RICE_CASES = [
    (None, front(10)),
    (None, front(10) + ONE),
    (None, front(1, 9, taus=[2**-126, 2**126]) + ONE),
    (5, b""),
    (5, b"\x80"),
    (5, b"\x81" * 9 + b"\x01" + front(10)),
    (5, b"\x02\x0a"),
    (5, b"\xff" * 8 + b"\x7f"),
    (5, front(10) + b"\x04\x02"),
    (5, front(10) + b"\xff" * 10 + ONE),
    (6, b"\x81\x00" + front(10)[1:]),
    (6, front(10) + b"\x84\x00" + ONE[1:]),
    (9, b"\x00"),
    (9, front(9)),
    (9, front(11)),
    (9, front(10, 0)),
    (9, front(0, 10)),
    (9, front(HUGE, HUGE, 12)),
    (10, front(10)[:-1]),
    (10, front(5, 5)[:-4]),
    *((10, front(10, taus=[tau]) + ONE) for tau in (np.nan, np.inf, -0.5, 0.0, 2**-127, 1.00001 * 2**126)),
    (11, front(10) + made(4, 0, 0, 0, b"")),
    (11, front(10) + made(4, 0, 1, 0, b"\x00")),
    (11, front(10) + made(4, HUGE // 2, 0, 0, b"\x00")),
    (12, front(10) + made(4, 1, 0, 1, bits("1"))),
    (None, front(10) + made(9, 1, 0, 0, bits("1"))),
    (13, front(10) + made(10, 1, 0, 0, bits("1"))),
    (13, front(10) + made(HUGE, 1, 0, 0, bits("1"))),
    (13, front(10) + made(HUGE, 2, 0, HUGE, bits("11"))),
    (13, front(10) + made(2**62, 2, 0, HUGE, bits("11"))),
    (None, front(10) + made(4, 2, 0, 4, bits("10"))),
    (13, front(10) + made(4, 2, 0, 5, bits("10"))),
    (13, front(10) + ONE + made(5, 1, 0, 0, bits("1"))),
    (None, front(10) + ONE + made(4, 1, 0, 0, bits("1"))),
    (14, front(10) + made(4, 1, 0, 0, bits("1"), length=2)),
    (14, front(10) + made(4, 1, 0, 0, bits("1"), length=HUGE)),
    (15, front(10) + made(4, 1, 0, 0, b"")),
    (15, front(10) + made(0, 6, 0, 0, bits("00000000"))),
    (15, front(10) + made(4, 1, 1, 0, bits((31, "5"), "11"))),
    (15, front(10) + made(4, 1, 1, 0, b"\xff" * 20)),
    # Three entries from 0 to 9: i = 1 has a bit for a change, and k = start(7, 3) = 1.
    (None, front(10) + made(0, 3, 0, 7, bits("0", "0", (7, 1), "0", "1"))),
    (20, front(10) + made(0, 3, 0, 7, bits("0", "0", (8, 1), "0", "1"))),
    (20, front(10) + made(0, 3, 0, 7, bits("0", "0", (2**49 - 1, 1), "0", "1"))),
    (None, front(10) + made(0, 3, 0, 7, bits("0", "1", (1, "5"), (7, 1), "0", "1"))),
    (None, front(10) + made(0, 3, 0, 7, bits("0", "1", (31, "5"), (7, 31), "0", "1"))),
    (20, front(10) + made(0, 3, 0, 7, bits("0", "1", (0, "5"), "1" * 57 + "0" * 50, "0", "1"))),
    (16, front(10) + made(0, 3, 0, 7, bits("0", "1", (0, "5"), "1" * 58 + "0" * 51, "0", "1"))),
    (20, front(10) + made(0, 3, 0, 7, bits("0", "1", (31, "5"), "1" * 26 + "0" * 50, "0", "1"))),
    (16, front(10) + made(0, 3, 0, 7, bits("0", "1", (31, "5"), "1" * 27 + "0" * 51, "0", "1"))),
    (16, front(10) + made(0, 3, 0, 7, bits("0", "0", "1" * 300 + "0" * 600))),
    # One entry with a multiple: k_run, the number of entries before it, its sign, m - 2, and the run to the end.
    (None, front(10) + made(4, 1, 1, 0, bits((0, "5"), (0, 0), "1", (0, 0), (0, 0)))),
    (None, front(10) + made(4, 1, 1, 0, bits((31, "5"), (0, 31), "1", (5, 0), (0, 31)))),
    (17, front(10) + made(4, 1, 1, 0, bits((0, "5"), (1, 0), "1", (0, 0), (0, 0)))),
    (18, front(10) + made(4, 1, 1, 0, bits((0, "5"), (0, 0), "1", (0, 0), (1, 0)))),
    (None, front(10) + made(4, 2, 1, 4, bits((0, "5"), (0, 0), "1", (0, 0), (1, 0), "0"))),
    (18, front(10) + made(4, 2, 1, 4, bits((0, "5"), (0, 0), "1", (0, 0), (2, 0), "0"))),
    (None, front(10) + made(4, 1, 1, 0, bits((0, "5"), (0, 0), "1", (M_MAX - 2, 0), (0, 0)))),
    (19, front(10) + made(4, 1, 1, 0, bits((0, "5"), (0, 0), "1", (M_MAX - 1, 0), (0, 0)))),
    (None, front(10, taus=[2**126]) + made(4, 1, 1, 0, bits((0, "5"), (0, 0), "1", (M_MAX - 2, 0), (0, 0)))),
    (None, front(10, taus=[0.1]) + made(4, 1, 1, 0, bits((0, "5"), (0, 0), "1", (2**30 + 12_345, 0), (0, 0)))),
    (21, front(10) + made(4, 1, 0, 0, bits("1") + b"\x00")),
    (21, front(10) + made(4, 1, 0, 0, bits("10000001"))),
    (21, front(10) + made(4, 1, 0, 0, bits("11"))),
]
PLAIN_CASES = [
    (None, front(10)),
    (None, front(10) + made(0, 3, 0, 7, WORDS(9, 2**31 + 4, 0))),
    (None, front(10) + made(0, 3, 1, 7, WORDS(9, 4, 2**31) + WORDS(1, 2, M_MAX))),
    (11, front(10) + made(0, 0, 0, 0, b"")),
    (12, front(10) + made(4, 1, 0, 1, bytes(4))),
    (13, front(10) + made(0, 3, 0, 8, WORDS(10, 4, 0))),
    (14, front(10) + made(0, 3, 0, 7, WORDS(9, 4, 0)[:-1], length=12)),
    (22, front(10) + made(0, 3, 0, 7, WORDS(9, 4, 0)[:-1])),
    (22, front(10) + made(0, 3, 0, 7, WORDS(9, 4, 0) + bytes(1))),
    (22, front(10) + made(0, 3, 0, 7, WORDS(9, 4, 0) + WORDS(1, 1, 2))),
    (22, front(10) + made(0, 3, 1, 7, WORDS(9, 4, 0))),
    (23, front(10) + made(0, 3, 0, 7, WORDS(8, 4, 0))),
    (23, front(10) + made(0, 3, 0, 7, WORDS(9, 4, 1))),
    (23, front(10) + made(0, 3, 0, 7, WORDS(9, 9, 0))),
    (23, front(10) + made(0, 3, 0, 7, WORDS(9, 0, 0))),
    (23, front(10) + made(0, 3, 0, 7, WORDS(9, 10, 0))),
    (23, front(10) + made(0, 3, 0, 7, WORDS(9, 2**31 - 1, 0))),
    (24, front(10) + made(0, 3, 1, 7, WORDS(9, 4, 0) + WORDS(1, 1, 1))),
    (24, front(10) + made(0, 3, 1, 7, WORDS(9, 4, 0) + WORDS(0, 1, 2))),
    (24, front(10) + made(0, 3, 1, 7, WORDS(9, 4, 0) + WORDS(1, 2, 2**31))),
]
DENSE_CASES = [
    (None, 0, b"\x00"),
    (5, 0, b""),
    (6, 0, b"\x80\x00"),
    (7, 1, b"\x00"),
    (7, 1, b"\x02" + bytes(8)),
    (8, 1, b"\x01" + bytes(3)),
    (8, 1, b"\x01" + bytes(1)),
    (8, 1, b"\x01" + bytes(5)),
    (8, 0, b"\x00\x00"),
]


@pytest.mark.parametrize(
    ("codec", "rule", "n", "body"),
    [
        *((codec, *case) for codec in (0, 1, 2) for case in DENSE_CASES),
        *((3, rule, 10, body) for rule, body in RICE_CASES),
        *((4, rule, 10, body) for rule, body in PLAIN_CASES),
        (3, None, 0, b"\x00"),
        (4, None, 0, b"\x00"),
        (3, 13, 0, b"\x00" + ONE),
        (3, None, 4097, front(4097) + made(0, 4096, 0, 0, bits("0", "000" + "00" * 4000, "0" * (63 + 187 + 1)))),
        (3, 11, 4097, front(4097) + made(0, 4097, 0, 0, bytes(1033))),
        (4, None, 4097, front(4097) + made(1, 4096, 0, 0, np.arange(4095, -1, -1).astype("<u4").tobytes())),
        (4, 11, 4097, front(4097) + made(0, 4097, 0, 0, np.arange(4096, -1, -1).astype("<u4").tobytes())),
    ],
)
def test_borders_of_every_rule(codec, rule, n, body):
    message = seal(body, codec)
    assert compare([message], n, codec) == rule
    assert compare([message] * 2, n, codec, -1 / 3, np.linspace(-1, 1, n, dtype=np.float32)) == rule


def test_unusual_messages_that_break_no_rule():
    # The checksum is valid, so NaN and infinity in a dense body are added.
    assert compare([seal(b"\x03" + struct.pack("<3f", math.nan, math.inf, -math.inf), 0)], 3, 0) is None
    assert compare([seal(b"\x03" + struct.pack("<3e", math.nan, math.inf, -math.inf), 1)], 3, 1) is None


@pytest.mark.parametrize("rice", [True, False], ids=["rice", "plain"])
def test_tiles_for_the_largest_number_of_elements(rice):
    rng, accepted = np.random.default_rng(8), 0
    for trial in range(300):
        n = N_MAX - int(rng.integers(3))
        span = int(2.0 ** rng.uniform(8, 47.9 if rice else 30.9))
        index = np.unique(np.r_[rng.integers(0, span, rng.integers(1, 200)), span - 1])
        index += n - span if trial % 2 else int(rng.integers(2**47))
        m = rng.choice([1, 1, 1, 2, M_MAX], index.size)
        tiles = reference.tile(index, rng.random(index.size) < 0.5, m, -1, rice)
        if trial % 3:
            tiles = damage(tiles, rng)
        expected = None
        try:
            expected = foreign.read_tiles(foreign.Bytes(tiles), n, 3 if rice else 4)
        except foreign.Refused:
            with pytest.raises(Malformed):
                reference.read(np.frombuffer(tiles, np.uint8), n, rice)
            with pytest.raises(Malformed):
                cpu.inspect(np.frombuffer(tiles, np.uint8), n, rice, 1)
        else:
            accepted += 1
            got = reference.read(np.frombuffer(tiles, np.uint8), n, rice)
            assert expected == list(zip(*(column.astype(np.int64).tolist() for column in got), strict=True))
            cpu.inspect(np.frombuffer(tiles, np.uint8), n, rice, 1)
        if trial % 3 == 0:
            assert expected is not None
    assert accepted < 300
