"""Messages, and what may become of them on their way: the hostile bytes that decoders are tested with."""

from random import Random
from typing import NamedTuple

import numpy as np

from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import LAYOUT, TILE_MAX, Layout, Runs
from tests.kernels.strategies import make_runs, noise

SMALL = Layout(256, 64, 8, 32, 4)


class Message(NamedTuple):
    """Tiles for n elements, right or wrong."""

    n: int
    runs: Runs
    rice: bool
    tiles: bytes


def corpus() -> list[Message]:
    """Right messages of every kind: none to many tiles, shared ones, multiples, escapes, far gaps, several runs."""
    messages = []
    for rice in (True, False):
        for n, density, layout in (
            (0, 0, SMALL),
            (1, 1, SMALL),
            (2, 1, SMALL),
            (66, 0.5, LAYOUT),
            (300, 0.02, LAYOUT),
            (300, 1, LAYOUT),
            (1500, 0.03, SMALL),
            (1500, 0.3, SMALL),
            (5000, 0.003, SMALL),
            (5000, 0.02, LAYOUT),
        ):
            runs = make_runs((n // 3, 0.5), (n - n // 3, 0.3)) if n > 9 else make_runs(*[(1, 0.5)] * n)
            update, residual = noise(n, np.repeat(runs.taus, runs.lengths), density, n)
            for multiples in (True, False):
                if not multiples:
                    update = np.clip(update, -0.4, 0.4)
                tiles = cpu.encode([update], residual.copy(), runs, rice, layout, threads=1).tiles
                messages.append(Message(n, runs, rice, tiles.tobytes()))
        messages += [far(2**34, rice), far(2**40, rice), escapes(rice)]
    return messages


def far(n: int, rice: bool) -> Message:
    """Entries so far apart that headers need 64 bits."""
    index = np.array([7, n // 4, n // 4 + 1, n // 2, n // 2 + 90, n - 1])
    signs, m = index % 2 == 0, np.array([1, 2, 1, 1, 2**31 - 1, 1])
    layout = Layout(2**26, 128, 16, 32, 8)
    return Message(n, make_runs((n, 0.5)), rice, reference.write(index, signs, m, n, rice, layout).tobytes())


def escapes(rice: bool) -> Message:
    """One tile of a few close entries and one long gap, so that its code escapes."""
    index = np.array([0, 1, 2, 3, 4, 5, 6, 4000, 4001, 4002])
    signs, m = index % 2 == 0, np.array([1, 1, 70, 1, 1, 2**20, 1, 1, 3, 1])
    return Message(4100, make_runs((4100, 0.5)), rice, reference.tile(index, signs, m, -1, rice))


def flip_bits(rng: Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def change_bytes(rng: Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 2, 4))):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def truncate(rng: Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def insert(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randint(1, 9))


def delete(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, 9)]


def duplicate(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    part = data[at : at + rng.randint(1, 200)]
    data[at:at] = part


def fill(rng: Random, data: bytearray) -> None:
    """Set a stretch to all ones or zeros: codes that never end, or are as short as can be."""
    at = rng.randrange(len(data))
    length = min(rng.randint(1, 40), len(data) - at)
    data[at : at + length] = rng.choice((b"\xff", b"\x00")) * length


BLIND = (flip_bits, flip_bits, change_bytes, truncate, insert, delete, duplicate, fill)


def headers(tiles: bytes) -> list[tuple[list[int], bytes]]:
    """(the four numbers of its head, payload) of each tile of a right message."""
    found, at = [], 0
    while at < len(tiles):
        numbers = []
        for _ in range(4):
            value, at = reference.read_varint(tiles, at)
            numbers.append(value)
        found.append((numbers, tiles[at : at + numbers[3]]))
        at += numbers[3]
    return found


def extreme(rng: Random, was: int, n: int) -> int:
    """A number at some border, or beside what was there."""
    border = rng.choice((0, 1, n, 2 * TILE_MAX, 2**31, 2**32, 2**48, 2**49, 2**56, 2**62, 2**63 - 1, was, was, was))
    return max(border + rng.choice((-2, -1, 0, 1, 2)), 0)


def put_number(rng: Random, value: int) -> bytes:
    """A varint, now and then one that is longer than it need be, or does not end."""
    way = rng.randrange(20)
    if way == 0:
        return bytes([value & 0x7F | 0x80, 0x80, 0])
    if way == 1:
        return bytes([0xFF] * rng.randint(8, 12))
    return reference.varint(value)


def rewrite_header(rng: Random, message: Message) -> bytes:
    """Put extreme numbers into the head of a tile; its payload is then sometimes cut or extended to match."""
    tiles = headers(message.tiles)
    chosen = rng.randrange(len(tiles))
    parts = bytearray()
    for i, (numbers, payload) in enumerate(tiles):
        wrong = rng.sample(range(4), rng.choice((1, 1, 2))) if i == chosen else []
        values = [extreme(rng, v, message.n) if j in wrong else v for j, v in enumerate(numbers)]
        parts += b"".join(put_number(rng, v) if i == chosen else reference.varint(v) for v in values)
        fitted = 3 in wrong and values[3] < 1000 and rng.random() < 0.5
        parts += payload[: values[3]].ljust(values[3], rng.choice((b"\0", b"\xff"))) if fitted else payload
    return bytes(parts)


def rewrite_payload(rng: Random, message: Message) -> bytes:
    """Alter a payload only, and keep its length: what reaches deepest into a decoder."""
    tiles = headers(message.tiles)
    chosen = rng.randrange(len(tiles))
    parts = bytearray()
    for i, (numbers, payload) in enumerate(tiles):
        altered = bytearray(payload)
        if i == chosen and payload:
            rng.choice((flip_bits, change_bytes, fill))(rng, altered)
        parts += b"".join(map(reference.varint, numbers)) + altered
    return bytes(parts)


def splice(rng: Random, one: bytes, other: bytes) -> bytes:
    """The start of one and the end of another."""
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]


def mutate_bytes(rng: Random, data: bytes, other: bytes) -> bytes:
    """Alter bytes without knowing what they mean."""
    way = rng.randrange(12)
    if way == 0 or not data:
        return rng.randbytes(rng.choice((0, 1, 3, 8, 40, 300)))
    if way == 1:
        return splice(rng, data, other)
    altered = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if altered:
            rng.choice(BLIND)(rng, altered)
    return bytes(altered)


def mutate(rng: Random, messages: list[Message]) -> Message:
    """A message that is probably wrong."""
    message = rng.choice(messages)
    way = rng.random()
    if message.tiles and way < 0.25:
        return message._replace(tiles=rewrite_header(rng, message))
    if message.tiles and way < 0.55:
        return message._replace(tiles=rewrite_payload(rng, message))
    return message._replace(tiles=mutate_bytes(rng, message.tiles, rng.choice(messages).tiles))
