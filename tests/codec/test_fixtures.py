"""Tests that pin the format: the messages in tests/fixtures/wire are decoded as described and encoded to the byte."""

# Tests: hvdx/codec/floats.py, hvdx/codec/threshold.py, hvdx/codec/frame.py

import json

import numpy as np
import pytest

from hvdx.codec import CODECS, make
from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import Layout
from tests.codec import make_fixtures
from tests.codec.make_fixtures import FOLDER, READ_ONLY, dense
from tests.kernels.strategies import make_runs

CASES = {
    path.stem: (path.with_suffix(".bin").read_bytes(), json.loads(path.read_text())) for path in FOLDER.glob("*.json")
}
WHOLE = sorted(name for name, (_, described) in CASES.items() if "codec" in described)
TILES = sorted(name for name, (_, described) in CASES.items() if "tiles" in described)


@pytest.mark.parametrize("name", WHOLE)
def test_codec_reads_and_writes_the_pinned_message(name):
    message, described = CASES[name]
    options = described["options"]
    codec = make(described["codec"], **({"index_coding": options["index_coding"]} if name in READ_ONLY else options))
    update = [dense(u) for u in described["update"]]
    sizes = [u.size for u in update]

    out = [np.zeros(size, np.float32) for size in sizes]
    codec.decode([np.frombuffer(message, np.uint8)], out)
    for o, want in zip(out, described["decoded"], strict=True):
        assert o.tobytes() == dense(want).tobytes()
    if name in READ_ONLY:
        return

    state = codec.init(sizes)
    if "residual" in described:
        state = codec.restore(state.arrays() | {"residual": dense(described["residual"])}, sizes)
    written, state = codec.encode(update, state)
    assert written.tobytes() == message
    if "residual" in described:
        assert state.arrays()["residual"].tobytes() == dense(described["residual after"]).tobytes()


@pytest.mark.parametrize("name", TILES)
def test_kernels_read_and_write_the_pinned_tiles(name):
    data, described = CASES[name]
    n, rice, layout = described["n"], described["tiles"] == "rice", Layout(**described["layout"])
    index, m = np.array(described["index"], np.int64), np.array(described["m"], np.int64)
    negative = np.array([sign == "1" for sign in described["negative"]], bool)
    message = np.frombuffer(data, np.uint8)

    for got, want in zip(reference.read(message, n, rice), (index, negative, m), strict=True):
        np.testing.assert_array_equal(got, want)
    assert reference.write(index, negative, m, n, rice, layout).tobytes() == data
    cpu.inspect(message, n, rice)

    if n < 10**6:
        runs, update = make_runs((n, 0.5)), np.zeros(n, np.float32)
        update[index] = np.where(negative, -0.5, 0.5) * m
        assert cpu.encode([update], np.zeros(n, np.float32), runs, rice, layout).tiles.tobytes() == data
        out = np.zeros(n, np.float32)
        cpu.decode([(message, runs)], 1.0, [out], rice)
        np.testing.assert_array_equal(out, update)


def test_every_codec_has_a_pinned_message():
    assert {CASES[name][1]["codec"] for name in WHOLE} == set(CODECS)
    assert sorted(CASES) == sorted([*make_fixtures.fixtures(), *READ_ONLY])


def test_make_fixtures_keeps_pinned_files(tmp_path, capsys):
    there = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert make_fixtures.main([]) == 1
    assert "--force" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == there
    assert make_fixtures.main(["--folder", str(tmp_path / "new")]) == 0
    (tmp_path / "new" / "none.bin").write_bytes(b"mine")
    (tmp_path / "new" / "bf16.bin").unlink()
    assert make_fixtures.main(["--folder", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "none.bin").read_bytes() == b"mine"
    assert make_fixtures.main(["--folder", str(tmp_path / "new"), "--force"]) == 0
    made = {name: data for name, data in there.items() if name.partition(".")[0] not in READ_ONLY}
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == made
