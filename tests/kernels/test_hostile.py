"""Tests with random and mutated messages in a separate process, which ends if a decoder leaves its memory."""

# Tests: kernels/cpu_decode.py, kernels/table.py

import contextlib
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import Malformed
from tests import fuzz_wire
from tests.kernels.mutations import corpus, headers, mutate

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
#: Number of messages, and limit in seconds. One core of a busy machine needs about a quarter of the limit.
CASES, TIME_LIMIT = 24_000, 240


def run(*arguments, code=None):
    command = [sys.executable, "-X", "faulthandler", *(["-c", code] if code else ["-m", "tests.fuzz_wire"]), *arguments]
    return subprocess.run(command, cwd=ROOT, timeout=TIME_LIMIT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """Finished process of the fuzzer, and the path of its journal."""
    journal = tmp_path_factory.mktemp("fuzz") / "fuzz-wire.case"
    return run("--cases", str(CASES), "--seconds", str(TIME_LIMIT), "--seed", "1", "--journal", str(journal)), journal


@pytest.fixture
def harmless(fuzzed):
    """Guard for tests in this process, where a decoder that leaves its memory would end all tests."""
    if fuzzed[0].returncode:
        pytest.skip("hostile messages do harm: see test_hostile_messages_do_no_harm")


def test_hostile_messages_do_no_harm(fuzzed):
    done, journal = fuzzed
    assert done.returncode == 0, f"{done.stderr[-4000:]}\nReplay: python -m tests.fuzz_wire --replay {journal}"
    assert f"{CASES} cases" in done.stdout
    assert not journal.exists()


@pytest.mark.usefixtures("harmless")
def test_a_case_can_be_replayed(tmp_path, capsys):
    """The journal holds the current case, whether it passed or not."""
    journal = tmp_path / "fuzz-wire.case"
    fuzzer = fuzz_wire.Fuzzer(5, journal)
    for _ in range(20):
        case = fuzzer.case()
        fuzzer.check(case, thorough=False)
        assert fuzz_wire.load(journal) == case
        assert fuzz_wire.main(["--replay", str(journal)]) == 0
    assert "right: {" in capsys.readouterr().out


def check_all(fuzzer, cases, thorough=True):
    for case in cases:
        fuzzer.check(case, thorough)


def add_to_first(decode, messages, scale, out, rice, threads, clear):
    """Add the first message before checking the second."""
    for i, message in enumerate(messages):
        try:
            decode([message], scale, out, rice, threads, clear and not i)
        except Malformed as error:
            error.message = i
            raise


def write_beside(decode, messages, scale, out, rice, threads, clear):
    decode(messages, scale, out, rice, threads, clear)
    out[0].base[-1] += 1


def allocate(decode, messages, scale, out, rice, threads, clear):
    np.zeros(10**7)
    decode(messages, scale, out, rice, threads, clear)


def accept(decode, messages, scale, out, rice, threads, clear):
    with contextlib.suppress(Malformed):
        decode(messages, scale, out, rice, threads, clear)


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (add_to_first, "the output has changed"),
        (write_beside, "the output"),
        (allocate, "bytes were taken"),
        (accept, "another result"),
    ],
)
def test_fuzzer_notices_what_a_decoder_does_wrong(wrong, text, tmp_path, monkeypatch):
    fuzzer = fuzz_wire.Fuzzer(5, tmp_path / "fuzz-wire.case")
    cases = [case for case in (fuzzer.case() for _ in range(1000)) if not case.codec]
    # The first calls compile, which takes memory.
    check_all(fuzzer, cases, thorough=False)
    decode = cpu.decode
    monkeypatch.setattr(cpu, "decode", lambda *arguments: wrong(decode, *arguments))
    with pytest.raises(AssertionError, match=text):
        check_all(fuzzer, cases)


@pytest.mark.parametrize("place", [("True", "[len(message)]"), ("False", "[-1]")])
def test_memory_beside_a_message_cannot_be_read(place):
    """The fuzzer's guard works: an access one byte before or after the message ends the process."""
    at_end, index = place
    code = (
        "import ctypes; from tests.kernels.guarded import Guarded\n"
        f"message = Guarded(5000).place(bytes(77), at_end={at_end}); print(message.sum(), flush=True)\n"
        f"ctypes.cast(message.ctypes.data, ctypes.POINTER(ctypes.c_ubyte)){index}"
    )
    done = run(code=code)
    assert done.stdout.strip() == "0"
    assert done.returncode == -11


@pytest.mark.usefixtures("harmless")
def test_every_flipped_bit_is_refused_or_read_as_the_reference_does():
    """Every bit is flipped, in small messages of every kind."""
    accepted = 0
    for message in corpus():
        if len(message.tiles) > 60:
            continue
        for bit in range(8 * len(message.tiles)):
            tiles = np.frombuffer(message.tiles, np.uint8).copy()
            tiles[bit // 8] ^= 1 << bit % 8
            right = []
            for look in (
                lambda t=tiles, m=message: cpu.inspect(t, m.n, m.rice, threads=1),
                lambda t=tiles, m=message: reference.read(t, m.n, m.rice),
            ):
                try:
                    look()
                    right.append(True)
                except Malformed:
                    right.append(False)
            assert right[0] == right[1], (message, bit)
            accepted += right[0]
    assert accepted > 0


@pytest.mark.usefixtures("harmless")
def test_every_truncation_within_a_tile_is_refused():
    for message in corpus():
        ends, at = {0}, 0
        for numbers, payload in headers(message.tiles):
            at += sum(len(reference.varint(number)) for number in numbers) + len(payload)
            ends.add(at)
        assert at == len(message.tiles)
        for length in range(len(message.tiles)):
            tiles = np.frombuffer(message.tiles[:length], np.uint8)
            if length in ends:
                cpu.inspect(tiles, message.n, message.rice, threads=1)
            else:
                with pytest.raises(Malformed):
                    cpu.inspect(tiles, message.n, message.rice, threads=1)


def test_mutations_are_the_same_for_the_same_seed():
    one, other = ([mutate(Random(3), corpus()).tiles for _ in range(3)] for _ in range(2))
    assert one == other
