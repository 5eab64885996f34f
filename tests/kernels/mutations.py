"""Hostile bytes for tests of decoders: valid messages, and mutations of them."""

from random import Random
from typing import NamedTuple

import numpy as np

from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import LAYOUT, TILE_MAX, Layout, Runs
from tests.kernels.strategies import make_runs, noise

SMALL = Layout(256, 64, 8, 32, 4)


class Message(NamedTuple):
    """Tiles for n elements, valid or invalid."""

    n: int
    runs: Runs
    rice: bool
    tiles: bytes


def corpus() -> list[Message]:
    """Return valid messages of all kinds: no to many tiles, shared tiles, multiples, escapes, long gaps, many runs."""
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
    """Return a message with gaps that need 64 bits in the headers."""
    index = np.array([7, n // 4, n // 4 + 1, n // 2, n // 2 + 90, n - 1])
    signs, m = index % 2 == 0, np.array([1, 2, 1, 1, 2**31 - 1, 1])
    layout = Layout(2**26, 128, 16, 32, 8)
    return Message(n, make_runs((n, 0.5)), rice, reference.write(index, signs, m, n, rice, layout).tobytes())


def escapes(rice: bool) -> Message:
    """Return a message of one tile with small gaps and one long gap, whose code escapes."""
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
    """Set a range to ones or zeros: codes without an end, or the shortest codes."""
    at = rng.randrange(len(data))
    length = min(rng.randint(1, 40), len(data) - at)
    data[at : at + length] = rng.choice((b"\xff", b"\x00")) * length


BLIND = (flip_bits, flip_bits, change_bytes, truncate, insert, delete, duplicate, fill)


def headers(tiles: bytes) -> list[tuple[list[int], bytes]]:
    """Return (the four numbers of the header, payload) of each tile of a valid message."""
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
    """Return a number near a limit of the format, or near the old number."""
    border = rng.choice((0, 1, n, 2 * TILE_MAX, 2**31, 2**32, 2**48, 2**49, 2**56, 2**62, 2**63 - 1, was, was, was))
    return max(border + rng.choice((-2, -1, 0, 1, 2)), 0)


def put_number(rng: Random, value: int) -> bytes:
    """Return a LEB128 number, sometimes with a superfluous byte or without an end."""
    way = rng.randrange(20)
    if way == 0:
        return bytes([value & 0x7F | 0x80, 0x80, 0])
    if way == 1:
        return bytes([0xFF] * rng.randint(8, 12))
    return reference.varint(value)


def rewrite_header(rng: Random, message: Message) -> bytes:
    """Write extreme numbers into the header of a tile, and sometimes cut or extend its payload to match."""
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
    """Alter one payload without changing its length: such messages pass a decoder's first checks."""
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
    """Join the start of one message and the end of another."""
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]


def mutate_bytes(rng: Random, data: bytes, other: bytes) -> bytes:
    """Alter bytes at random, regardless of their meaning."""
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
    """Return a message that is probably invalid."""
    message = rng.choice(messages)
    way = rng.random()
    if message.tiles and way < 0.25:
        return message._replace(tiles=rewrite_header(rng, message))
    if message.tiles and way < 0.55:
        return message._replace(tiles=rewrite_payload(rng, message))
    return message._replace(tiles=mutate_bytes(rng, message.tiles, rng.choice(messages).tiles))
