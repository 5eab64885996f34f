"""Fuzz test of the decoders: damaged messages must cause an error and nothing else.

    python -m tests.fuzz_wire --seconds 600 --seed 1
    python -m tests.fuzz_wire --replay FILE

A message must be refused with the output unchanged, or decoded to the result of `kernels.reference`. If the output is
cleared, a refusal may leave anything in it. The message is
placed against a page that cannot be read, the output is between values that must not change, and memory is limited. So
a decoder that reads or writes outside its arguments, or trusts a length, ends the process. A file holds the current
case, so it can be replayed after that.
"""

import argparse
import json
import mmap
import resource
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from hvdx.codec import Codec, Threshold, frame, make
from hvdx.errors import WireError
from hvdx.kernels import cpu, reference, varint
from hvdx.kernels.tiles import TILE_MAX, Malformed, Runs
from tests.kernels.guarded import Guarded
from tests.kernels.mutations import corpus, mutate, mutate_bytes
from tests.kernels.strategies import noise, split

#: Largest number of bytes of a message, and of elements of an output.
ROOM, LARGEST = 1 << 17, 5000
#: Bytes of the two lists of entries for each of two messages: 8 bytes an entry, for eight of the largest tiles.
LISTS = 2 * 2 * 8 * 8 * TILE_MAX
#: Bytes that the process may allocate after everything has run once.
SPARE = 256 << 20
#: Number of cases between two checks of the memory.
WARM = 1000
CANARY = np.float32(-12345.678)
CODECS: dict[str, Codec] = {
    "none": make("none"),
    "fp16": make("fp16"),
    "bf16": make("bf16"),
    "rice": make("threshold", tau=0.5, threads=1),
    "plain": make("threshold", tau=0.5, index_coding="none", threads=1),
}


class Case(NamedTuple):
    """Message for a decoder: a whole message of a codec, or with codec "" the tiles that a kernel reads."""

    codec: str
    n: int
    rice: bool
    lengths: list[int]
    taus: list[float]
    threads: int
    data: bytes
    #: Message decoded before this one, which must not be added if this one is refused.
    before: bytes
    #: Whether the output is cleared first. It may then be anything if this message is refused.
    clear: bool

    @property
    def runs(self) -> Runs:
        return Runs(np.array(self.lengths, np.int64), np.array(self.taus, np.float32))


class Journal:
    """File with the current case, which outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(3 * ROOM))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def note(self, case: Case) -> None:
        head = json.dumps(case._asdict() | {"data": len(case.data), "before": len(case.before)}).encode() + b"\n"
        whole = head + case.data + case.before
        self._memory[: len(whole)] = whole


def load(path: Path) -> Case:
    """Read the case from a journal's file."""
    head, rest = path.read_bytes().split(b"\n", 1)
    fields = json.loads(head)
    data, before = fields["data"], fields["before"]
    return Case(**fields | {"data": rest[:data], "before": rest[data : data + before]})


class Fuzzer:
    """Generator and checker of cases."""

    def __init__(self, seed: int, journal: Path) -> None:
        self.rng, self.journal = Random(seed), Journal(journal)
        self.messages = corpus()
        self.sealed = [(name, n, message) for name in CODECS for n, message in _sealed(CODECS[name])]
        self.room = Guarded(ROOM)
        self.start = np.random.default_rng(seed).normal(0, 1, LARGEST).astype(np.float32)
        self.counts: Counter[str] = Counter()

    def case(self) -> Case:
        """Return the next case."""
        rng = self.rng
        if rng.random() < 0.3:
            return self._codec_case()
        message = mutate(rng, self.messages)
        n, rice = message.n, message.rice
        if rng.random() < 0.05:
            n, rice = max(0, rng.choice((0, 1, n - 1, n + 1, 2**48))), rng.random() < 0.5
        lengths, taus = message.runs.lengths.tolist(), message.runs.taus.tolist()
        if n != message.n:
            lengths, taus = ([n], [0.5]) if n else ([], [])
        good = [m.tiles for m in self.messages if m.n == n and m.rice == rice]
        before = rng.choice(good) if good and rng.random() < 0.3 else b""
        return Case(
            "", n, rice, lengths, taus, rng.choice((1, 1, 1, 2)), message.tiles[:ROOM], before, rng.random() < 0.5
        )

    def _codec_case(self) -> Case:
        """Return a damaged message; in most cases its checksum is recomputed."""
        rng = self.rng
        name, n, sealed = rng.choice(self.sealed)
        clear = rng.random() < 0.5
        _, _, other = rng.choice(self.sealed)
        before = rng.choice([m for c, k, m in self.sealed if (c, k) == (name, n)])
        if rng.random() < 0.2:
            return Case(name, n, True, [], [], 1, mutate_bytes(rng, sealed, other)[:ROOM], before, clear)
        body = mutate_bytes(rng, sealed[frame.SIZE :], other[frame.SIZE :])[: ROOM - frame.SIZE]
        whole = np.frombuffer(bytes(frame.SIZE) + body, np.uint8).copy()
        return Case(name, n, True, [], [], 1, frame.seal(whole, sealed[3]).tobytes(), before, clear)

    def check(self, case: Case, thorough: bool) -> None:
        """Decode a case; `thorough` also compares a refusal with the reference, and memory with a limit."""
        self.journal.note(case)
        message = self.room.place(case.data, at_end=self.rng.random() < 0.8)
        if case.n > LARGEST:
            got = _accepts(lambda: cpu.inspect(message, case.n, case.rice, case.threads), Malformed)
            if got or thorough:
                assert got == _accepts(lambda: reference.read(message, case.n, case.rice), Malformed)
            self.counts["inspected, right" if got else "inspected, refused"] += 1
            return
        whole = np.full(case.n + 64, CANARY)
        whole[32 : 32 + case.n] = self.start[: case.n]
        was, out = whole.tobytes(), split(whole[32 : 32 + case.n], [case.n // 3])
        if thorough:
            tracemalloc.start()
        try:
            got = self._decode(case, message, out)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if thorough:
            most = 20 * (len(case.data) + len(case.before) + 4 * case.n) + LISTS + 100_000
            assert peak < most, f"{peak} bytes were taken"
        assert message.tobytes() == case.data, "the message was changed"
        if not got and not case.clear:
            assert whole.tobytes() == was, "the message was refused, but the output has changed"
        assert (whole[:32] == CANARY).all(), "values before the output have changed"
        assert (whole[32 + case.n :] == CANARY).all(), "values after the output have changed"
        if got or thorough:
            want = expected(case, np.zeros(case.n, np.float32) if case.clear else self.start[: case.n])
            assert got == (want is not None), "the reference gives another result"
            if want is not None:
                np.testing.assert_array_equal(whole[32 : 32 + case.n], want)
        self.counts[f"{case.codec or 'kernel'}, {'right' if got else 'refused'}"] += 1

    def _decode(self, case: Case, message: np.ndarray, out: list[np.ndarray]) -> bool:
        before, refused = np.frombuffer(case.before, np.uint8), WireError if case.codec else Malformed
        try:
            if case.codec:
                codec = CODECS[case.codec]
                (codec.decode_sum if case.clear else codec.decode)([before, message], out, 0.5)
            else:
                messages = [(before, case.runs), (message, case.runs)]
                cpu.decode(messages, 0.5, out, case.rice, case.threads, case.clear)
        except refused as error:
            blamed = error.rank if isinstance(error, WireError) else error.message
        else:
            return True
        assert blamed == 1, "the other message was blamed"
        return False


def _accepts(call, error: type[Exception]) -> bool:
    try:
        call()
    except error:
        return False
    return True


def _sealed(codec: Codec) -> list[tuple[int, bytes]]:
    """Return (n, message) of valid messages."""
    messages = []
    for n, density in ((0, 0), (3, 1), (200, 0.1), (200, 1), (3000, 0.02)):
        update, _ = noise(n, np.full(n, 0.5, np.float32), density, n)
        arrays = split(np.clip(update, -6e4, 6e4), [n // 2])
        messages.append((n, codec.encode(arrays, codec.init([a.size for a in arrays]))[0].tobytes()))
        if isinstance(codec, Threshold):
            # A message of several runs.
            part = n // 2
            parts = [codec.encode([a], codec.init([part]))[0] for a in (update[:part], update[part : 2 * part])]
            messages.append((2 * part, codec.join(parts, part).tobytes()))
    return messages


def expected(case: Case, start: np.ndarray) -> np.ndarray | None:
    """Return the result of the specification: float32[n], or None if the message is invalid."""
    out = [start.copy()]
    with np.errstate(all="ignore"):
        try:
            if not case.codec:
                tiles = [np.frombuffer(data, np.uint8) for data in (case.before, case.data)]
                reference.decode([(t, case.runs) for t in tiles], 0.5, out, case.rice)
                return out[0]
            for data in (case.before, case.data):
                _add(data, case, out)
        except ValueError:
            return None
    return out[0]


def _add(data: bytes, case: Case, out: list[np.ndarray]) -> None:
    """Add a codec's message to `out`.

    Raises:
        ValueError: if the message is invalid.
    """
    fresh = frame.seal(np.frombuffer(data.ljust(frame.SIZE, b"\0"), np.uint8).copy(), case.before[3]).tobytes()
    if data != fresh:
        raise ValueError("not sealed")
    count, at = varint.get(data, frame.SIZE)
    if case.codec in ("rice", "plain"):
        lengths = []
        for _ in range(min(count, len(data))):
            length, at = varint.get(data, at)
            lengths.append(length)
        if len(data) - at < 4 * count:
            raise ValueError("no taus")
        taus = np.frombuffer(data[at : at + 4 * count], "<f4")
        if sum(lengths) != case.n or 0 in lengths or not ((taus >= 2.0**-126) & (taus <= 2.0**126)).all():
            raise ValueError("wrong runs")
        tiles = np.frombuffer(data[at + 4 * count :], np.uint8)
        reference.decode([(tiles, Runs(np.array(lengths, np.int64), taus))], 0.5, out, case.codec == "rice")
        return
    width = 4 if case.codec == "none" else 2
    if count != case.n or len(data) - at != width * count:
        raise ValueError("of another size")
    if case.codec == "bf16":
        values = (np.frombuffer(data[at:], "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data[at:], "<f4" if width == 4 else "<f2").astype(np.float32)
    out[0] += values * np.float32(0.5)


def limit_memory(spare: int) -> None:
    """Limit this process to its current memory and `spare` bytes."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + spare, resource.getrlimit(resource.RLIMIT_AS)[1]))


def run(fuzzer: Fuzzer, cases: int, seconds: float) -> int:
    """Check cases until their number or the time is reached; return their number."""
    begin = last = time.monotonic()
    for i in range(cases):
        # The first cases compile the kernels, which takes memory.
        if i == WARM:
            limit_memory(SPARE)
        fuzzer.check(fuzzer.case(), thorough=i > WARM and i % 5 == 0)
        if i % 256 == 0 and time.monotonic() - last > 5:
            last = time.monotonic()
            print(f"{i} cases, {last - begin:.0f} s", file=sys.stderr, flush=True)
            if last - begin > seconds:
                return i + 1
    return cases


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_wire", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="stop after this time")
    parser.add_argument("--cases", type=int, default=10**12, help="stop after this many messages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, default=Path("fuzz-wire.case"), help="file for the current case")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="check the case in this file alone")
    options = parser.parse_args(arguments)
    if options.replay:
        case = load(options.replay)
        fuzzer = Fuzzer(options.seed, options.replay.with_suffix(".replayed"))
        # Several times, because the message is placed at either end of its page, and the first time compiles.
        for i in range(20):
            fuzzer.check(case, thorough=i > 0)
        print(f"right: {dict(fuzzer.counts)}")
        fuzzer.journal.path.unlink()
        return 0
    print(f"current case: {options.journal}; after a failure: --replay {options.journal}", file=sys.stderr)
    fuzzer = Fuzzer(options.seed, options.journal)
    # A wrong message may decode to infinity.
    np.seterr(all="ignore")
    done = run(fuzzer, options.cases, options.seconds)
    options.journal.unlink()
    print(f"{done} cases, seed {options.seed}: " + "; ".join(f"{v} {k}" for k, v in sorted(fuzzer.counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
