"""Measurement of this machine: codec, memory, and TCP within it."""

import functools
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from hvdx.costs.types import Codec, Machine

# Largest number of elements on which a speed is timed; the time of more elements is extrapolated.
_TIMED_ELEMENTS = 1 << 22
# Densities at which the codec is timed: a line through both gives the time at another one.
_SPARSE, _DENSE = 1e-3, 1 / 16
# Repetitions of a measurement, of which the median counts.
_TIMES = 5
# Bytes that are written before each measurement. A step displaces the buffers of an exchange from the caches, so
# measurements with warm caches would be too fast.
_DISPLACING = 1 << 27
# Small messages and bytes of the measurement of TCP on this machine.
_PINGS, _CARRIED = 200, 1 << 24
# Parts of a message, and elements of each, in the measurement of the work that does not depend on their length.
_PARTS, _PART = 64, 256
# Elements by which the update moves from one step of the measurement of the codec to the next.
_SHIFT = 12_352
# Rows and columns of the matrices whose product is timed: some milliseconds on a core.
_MATRIX = 512


def measure_codec(elements: int, threads: int | None = None) -> Codec:
    """Measure the threshold codec on this machine, in a second; its kernels should be compiled."""
    from hvdx import codec

    timed = max(min(elements, _TIMED_ELEMENTS), 1)
    numbers = _heavy_tailed(timed + _SHIFT * (_TIMES + 2))
    seconds: dict[float, list[float]] = {}
    for density in (_SPARSE, _DENSE):
        threshold = codec.Threshold(target_density=density, threads=threads)
        threshold.prepare()
        state, out = threshold.init([timed]), [np.zeros(timed, np.float32)]
        encoding: list[float] = []
        few: list[float] = []
        many: list[float] = []
        entries = 0.0
        for step in range(_TIMES + 2):
            # Other elements in each step, since a repeated update fills the residual and empties it at once.
            update = numbers[_SHIFT * step :][:timed]
            _displace()
            begin = time.perf_counter()
            message, state = threshold.encode([update], state)
            encoding.append(time.perf_counter() - begin)
            for times, messages in ((few, [message]), (many, [message] * 4)):
                _displace()
                times.append(_seconds(lambda: threshold.decode_sum(messages, out, 0.5)))  # noqa: B023
            entries = float(state.sent)
        # The first updates find tau.
        seconds[density] = [entries, *(float(np.median(times[2:])) for times in (encoding, few, many))]
    (sparse, thin, one, _), (dense, thick, one_dense, several_dense) = seconds[_SPARSE], seconds[_DENSE]
    entry = max(thick - thin, 0.0) / max(dense - sparse, 1.0)
    decode = max(several_dense - one_dense, 0.0) / 3 / max(dense, 1.0)
    opening, cutting, joining = _measure_parts(threads)
    return Codec(
        encode_element=max(thin - entry * sparse, 0.0) / timed,
        encode_entry=entry,
        decode_element=max(one - decode * sparse, 0.0) / timed,
        decode_entry=decode,
        decode_message=opening,
        cut=cutting,
        join=joining,
    )


def measure_arithmetic() -> float:
    """Return the seconds of a product of matrices on this machine, which compare it with others like it."""
    matrix = np.ones((_MATRIX, _MATRIX), np.float32)
    return _median(lambda: matrix @ matrix)


def _heavy_tailed(count: int) -> np.ndarray:
    """Return numbers of a Laplace distribution, float32[count].

    As many of their entries carry more than one tau as in recorded updates; the decoder takes longer for them. A normal
    distribution has fewer, and decodes three times as fast.
    """
    random = np.random.default_rng(0)
    return random.standard_exponential(count, np.float32) * (2 * random.integers(2, size=count, dtype=np.int8) - 1)


def _measure_parts(threads: int | None) -> tuple[float, float, float]:
    """Return the seconds of the codec's work for each message that is decoded, and each part cut off, and joined."""
    from hvdx import codec

    threshold = codec.Threshold(target_density=_DENSE, threads=threads, part=_PART)
    elements = _PARTS * _PART
    message, _ = threshold.encode([_heavy_tailed(elements)], threshold.init([elements]))
    parts, out = threshold.split(message, elements), [np.zeros(_PART, np.float32)]
    one, all_of_them, cutting, joining = (
        np.median([_seconds(work) for _ in range(_TIMES + 2)][2:])
        for work in (
            lambda: threshold.decode_sum(parts[:1], out),
            lambda: threshold.decode_sum(parts, out),
            lambda: threshold.split(message, elements),
            lambda: threshold.join(parts, _PART),
        )
    )
    return max(float(all_of_them - one), 0.0) / (_PARTS - 1), float(cutting) / _PARTS, float(joining) / _PARTS


def measure_memory(elements: int) -> float:
    """Return the bytes per second of a pass over arrays.

    Args:
        elements: number of elements of the model, since a small one fits the cache.
    """
    n = max(min(elements, _TIMED_ELEMENTS), 1 << 10)
    left, more = np.ones(n, np.float32), np.ones(n, np.float32)
    # The result is a new array, as in most copies of an exchange.
    return 12 * n / max(_median(lambda: left + more), 1e-9)


def measure_network() -> tuple[float, float]:
    """Return the seconds of a small message, and bytes per second, of TCP within this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=10)
        far, _ = server.accept()
    with near, far:
        for end in (near, far):
            end.settimeout(10)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo = threading.Thread(target=_echo, args=(far,), daemon=True)
        echo.start()
        pings = [_seconds(lambda: _ping(near)) for _ in range(_PINGS)]
        block, begin = bytes(1 << 20), time.perf_counter()
        for _ in range(_CARRIED // len(block)):
            near.sendall(block)
        near.shutdown(socket.SHUT_WR)
        while near.recv(1 << 16):
            pass
        carried = time.perf_counter() - begin
        echo.join(10)
    # A ping is two messages, and each byte of the block was sent once: `_echo` drops them.
    return float(np.median(pings)) / 2, _CARRIED / max(carried, 1e-9)


def _ping(end: socket.socket) -> None:
    end.sendall(b"x")
    end.recv(1)


def _echo(end: socket.socket) -> None:
    """Answer single bytes, and drop what is longer, until the other end is shut down."""
    buffer, answered = bytearray(1 << 20), 0
    while count := end.recv_into(buffer):
        if answered < _PINGS:
            answered += 1
            end.sendall(buffer[:count])
    end.shutdown(socket.SHUT_WR)


def measure_machine(elements: int, threads: int | None = None) -> Machine:
    """Measure this machine, in a few seconds."""
    message, transport = measure_network()
    return Machine(measure_memory(elements), message, transport, measure_codec(elements, threads))


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TIMES):
        _displace()
        seconds.append(_seconds(work))
    return float(np.median(seconds))


def _displace() -> None:
    """Displace other arrays from the caches."""
    _displacing().fill(1)


@functools.cache
def _displacing() -> np.ndarray:
    return np.zeros(_DISPLACING, np.uint8)
