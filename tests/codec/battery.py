"""Tests that every codec passes, one function for each promise of `hvdx.codec.base`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvdx.codec import Codec, frame, make
from hvdx.errors import ConfigError, HvdxError, UpdateError, WireError

#: Shapes of the arrays of an update, including empty arrays and a scalar.
SHAPES = [(3, 5), (0,), (), (700,), (1, 1, 9), (0, 4)]
SIZES = [int(np.prod(shape)) for shape in SHAPES]


class Row(NamedTuple):
    """Codec with options.

    Attributes:
        name: name in the catalogue.
        options: options of the codec.
        precision: largest relative error of a value; None if a residual keeps the error.
        tau: upper bound of the residual if tau is fixed, else None.
    """

    name: str
    options: dict[str, Any]
    precision: float | None
    tau: float | None = None

    def make(self) -> Codec:
        return make(self.name, **self.options)


ROWS = {
    "none": Row("none", {}, 0),
    "fp16": Row("fp16", {}, 2.0**-11),
    "bf16": Row("bf16", {}, 2.0**-8),
    "threshold": Row("threshold", {}, None, 2.0**-10),
    "threshold, not a power of two": Row("threshold", {"tau": 0.3}, None, 0.3),
    "threshold, plain": Row("threshold", {"tau": 0.25, "index_coding": "none"}, None, 0.25),
    "threshold, two threads": Row("threshold", {"tau": 0.25, "threads": 2}, None, 0.25),
    "threshold, density": Row("threshold", {"target_density": 0.05}, None),
    "threshold, large density": Row("threshold", {"target_density": 0.3, "threads": 1}, None),
    "threshold, density, plain": Row("threshold", {"target_density": 0.05, "index_coding": "none"}, None),
}


def updates(seed: int, steps: int) -> list[list[np.ndarray]]:
    """Return the updates of `steps` steps, with arrays of SHAPES."""
    rng = np.random.default_rng(seed)
    return [[rng.normal(0, 0.2, shape).astype(np.float32) for shape in SHAPES] for _ in range(steps)]


def zeros() -> list[np.ndarray]:
    return [np.zeros(shape, np.float32) for shape in SHAPES]


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([a.reshape(-1) for a in arrays])


def message_of(codec: Codec, seed: int = 0) -> np.ndarray:
    """Return the second message of a new encoder; the first one finds tau."""
    state = codec.init(SIZES)
    for update in updates(seed, 2):
        message, state = codec.encode(update, state)
    return message


def expect(error: type[Exception], call: Callable[[], Any], *parts: str) -> Exception:
    """Check that the call raises the error with these parts in its message; return the error."""
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    return caught.value


def check_round_trip(row: Row) -> None:
    """A decoded update equals the update up to the format's precision, or up to a residual below tau."""
    codec = row.make()
    state, total, got = codec.init(SIZES), flat(zeros()), zeros()
    for update in updates(1, 6):
        total += flat(update)
        message, state = codec.encode(update, state)
        assert message.dtype == np.uint8
        assert message.ndim == 1
        codec.decode([message], got)
    if row.precision is not None:
        most = row.precision * sum(np.abs(flat(update)) for update in updates(1, 6)) + 1e-6
        assert (np.abs(flat(got) - total) <= most).all()
    else:
        np.testing.assert_allclose(flat(got) + state.residual, total, atol=1e-5)
    if row.tau is not None:
        assert (np.abs(state.residual) < np.float32(row.tau)).all()


def check_nothing_is_lost(row: Row) -> None:
    """sent + residual after == update + residual before, added in float32; without a residual, sent is the update."""
    codec = row.make()
    state = codec.init(SIZES)
    for update in updates(2, 5):
        before = state.arrays().get("residual", np.float32(0))
        message, state = codec.encode(update, state)
        sent = zeros()
        codec.decode([message], sent)
        after = state.arrays().get("residual", np.float32(0))
        if row.precision is None:
            np.testing.assert_array_equal(flat(sent) + after, flat(update) + before)
        else:
            np.testing.assert_allclose(flat(sent), flat(update), rtol=row.precision)


def check_update_is_left_alone(row: Row) -> None:
    codec = row.make()
    update = updates(3, 1)[0]
    copies = [u.copy() for u in update]
    codec.encode(update, codec.init(SIZES))
    for u, copy in zip(update, copies, strict=True):
        assert u.tobytes() == copy.tobytes()


def check_same_bytes_for_the_same_update(row: Row) -> None:
    assert message_of(row.make()).tobytes() == message_of(row.make()).tobytes()


def check_empty_updates(row: Row) -> None:
    """An update without arrays, without elements, or of zeros has a message too."""
    codec = row.make()
    for sizes in ([], [0], [0, 0]):
        update = [np.zeros(size, np.float32) for size in sizes]
        message, state = codec.encode(update, codec.init(sizes))
        message, state = codec.encode(update, state)
        codec.decode([message, message], update, 0.5)
    state = codec.init(SIZES)
    for update in (zeros(), *updates(4, 1), zeros()):
        message, state = codec.encode(update, state)
        codec.decode([message], zeros())


def check_sum(row: Row) -> None:
    """`decode_sum` gives the bits of `decode` into zeros, whatever the output holds; `add_sum` adds them at once."""
    codec = row.make()
    messages, want = [message_of(codec, seed) for seed in (0, 1)], zeros()
    codec.decode(messages, want, 1 / 3)
    got = [np.full(shape, np.nan, np.float32) for shape in SHAPES]
    codec.decode_sum(messages, got, 1 / 3)
    assert flat(got).tobytes() == flat(want).tobytes()
    if codec.device == "cpu":
        added = updates(5, 1)[0]
        codec.add_sum(messages, added, 1 / 3)
        assert flat(added).tobytes() == (flat(updates(5, 1)[0]) + flat(want)).tobytes()
        expect(WireError, lambda: codec.add_sum([messages[0], messages[1][:-1]], added), "rank 1")
    codec.decode_sum([], got)
    assert flat(got).tobytes() == flat(zeros()).tobytes()
    expect(WireError, lambda: codec.decode_sum([messages[0], messages[1][:-1]], got), "rank 1")


def check_no_messages(row: Row) -> None:
    out = updates(4, 1)[0]
    row.make().decode([], out)
    np.testing.assert_array_equal(flat(out), flat(updates(4, 1)[0]))


def check_order_and_scale(row: Row) -> None:
    """The output is out + one * scale + other * scale, in this order, with each step rounded to float32."""
    codec = row.make()
    messages = [message_of(codec, seed) for seed in range(4)]
    parts = []
    for message in messages:
        part = zeros()
        codec.decode([message], part)
        parts.append(flat(part))
    for scale in (1.0, 0.25, 1 / 3, -2.0, 0.0):
        got = updates(5, 1)[0]
        want = flat(got)
        codec.decode(messages, got, scale)
        for part in parts:
            want += part * np.float32(scale)
        np.testing.assert_array_equal(flat(got), want)


def check_states_are_restored(row: Row) -> None:
    """An encoder that is saved and restored at any step writes the same messages as one that is not."""
    codec, steps = row.make(), updates(6, 8)
    state = codec.init(SIZES)
    saved, messages = [], []
    for update in steps:
        saved.append(state.arrays())
        message, state = codec.encode(update, state)
        messages.append(message.tobytes())
    for start in (0, 1, 5):
        again = row.make()
        state = again.restore(saved[start], SIZES)
        for name, value in state.arrays().items():
            assert value.dtype == saved[start][name].dtype
            np.testing.assert_array_equal(value, saved[start][name])
        for update, message in zip(steps[start:], messages[start:], strict=True):
            written, state = again.encode(update, state)
            assert written.tobytes() == message


def check_saved_arrays_are_copies(row: Row) -> None:
    """Saved arrays do not change when their encoder or a restored one continues."""
    codec = row.make()
    _, state = codec.encode(updates(7, 1)[0], codec.init(SIZES))
    saved = state.arrays()
    copies = {name: value.copy() for name, value in saved.items()}
    restored = codec.restore(saved, SIZES)
    codec.encode(updates(8, 1)[0], state)
    codec.encode(updates(8, 1)[0], restored)
    for name, value in saved.items():
        np.testing.assert_array_equal(value, copies[name])


def check_foreign_states_are_refused(row: Row) -> None:
    """Saved arrays that are missing, or of other sizes, types or values, are refused."""
    codec = row.make()
    _, state = codec.encode(updates(7, 1)[0], codec.init(SIZES))
    saved = state.arrays()
    if not saved:
        return
    for name, value in saved.items():
        expect(ConfigError, lambda name=name: codec.restore({k: v for k, v in saved.items() if k != name}, SIZES), name)
        for wrong in (value.astype(np.complex64), np.append(value, value)):
            expect(ConfigError, lambda wrong=wrong, name=name: codec.restore(saved | {name: wrong}, SIZES), name)
    expect(ConfigError, lambda: codec.restore(saved, [*SIZES, 1]))
    expect(ConfigError, lambda: codec.restore({}, SIZES))
    expect(ConfigError, lambda: codec.restore(saved | {"residual": np.full_like(saved["residual"], np.nan)}, SIZES))


def check_used_states_are_refused(row: Row) -> None:
    codec, update = row.make(), updates(9, 1)[0]
    state = codec.init(SIZES)
    codec.encode(update, state)
    if codec.init(SIZES).arrays():
        expect(ValueError, lambda: codec.encode(update, state), "state", "used it up", "returned")
        # Its residual is already that of the next state; its taus are not.
        expect(ValueError, state.arrays, "state", "used it up", "returned")


def check_unsendable_updates_are_refused(row: Row) -> None:
    """NaN and infinity in any array, at the first or a later step, raise an error with the index; the state is kept."""
    for variable, element in ((0, 0), (0, 14), (2, 0), (3, 0), (3, 64), (3, 699), (4, 8)):
        for value in (np.nan, -np.nan, np.inf, -np.inf):
            for step in (0, 2):
                _check_unsendable_update(row, variable, element, np.float32(value), step)


def _check_unsendable_update(row: Row, variable: int, element: int, value: np.float32, step: int) -> None:
    """Try an unsendable update before one step of four; the messages equal those of an encoder without it."""
    codec, clean = row.make(), row.make()
    got, want = codec.init(SIZES), clean.init(SIZES)
    for i, update in enumerate(updates(10, 4)):
        if i == step:
            bad = [u.copy() for u in update]
            bad[variable].reshape(-1)[element] = value
            saved = got.arrays()
            error = expect(UpdateError, lambda b=bad, s=got: codec.encode(b, s), f"update[{variable}]", str(value))
            assert (error.variable, error.element) == (variable, element)
            assert f"element {element} " in str(error)
            kept = got.arrays()
            if "residual" in kept:
                np.testing.assert_allclose(kept.pop("residual"), saved["residual"], rtol=0, atol=1e-5)
            for name, array in kept.items():
                np.testing.assert_array_equal(array, saved[name])
        message, got = codec.encode(update, got)
        right, want = clean.encode(update, want)
        # The rounding of the reversal moves no element of these updates across tau.
        assert message.tobytes() == right.tobytes()


def check_wrong_arrays_are_refused(row: Row) -> None:
    """Arrays of a type or memory layout that kernels cannot use raise an error that names the array and a remedy."""
    codec = row.make()
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    message, _ = codec.encode([np.zeros(4, np.float32)], codec.init([4]))
    for wrong, error, text in (
        (np.zeros(4), TypeError, "float32"),
        (np.zeros(4, np.float16), TypeError, "float32"),
        ([0.0] * 4, TypeError, "list"),
        (np.zeros(8, np.float32)[::2], ValueError, "contiguous"),
        (np.zeros((2, 2), np.float32).T[:, ::-1], ValueError, "contiguous"),
    ):
        expect(error, lambda w=wrong: codec.encode([w], codec.init([4])), "update[0]", text)
        expect(error, lambda w=wrong: codec.decode([message], [w]), "out[0]", text)
    expect(ValueError, lambda: codec.decode([message], [fixed]), "out[0]", "read-only")
    codec.encode([fixed], codec.init([4]))


def check_wrong_sizes_are_refused(row: Row) -> None:
    """Arrays of other sizes than those of the state are refused, if the state has sizes."""
    codec = row.make()
    if not codec.init(SIZES).arrays():
        return
    update = updates(11, 1)[0]
    for wrong in (
        [],
        update[:-1],
        [*update, np.zeros(1, np.float32)],
        [update[3], *update[1:3], update[0], *update[4:]],
    ):
        expect(ValueError, lambda w=wrong: codec.encode(w, codec.init(SIZES)), "update", "expected arrays of")


def check_wrong_messages_are_refused(row: Row) -> None:
    """A message that is cut, altered, or of another codec, version or size raises an error with the rank.

    The output is unchanged.
    """
    codec = row.make()
    right = message_of(codec)
    start = updates(12, 1)[0]

    def refuse(message: np.ndarray, *parts: str, sizes: Any = start) -> None:
        out = [o.copy() for o in sizes]
        error = expect(WireError, lambda: codec.decode([right, right, message], out), "rank 2", *parts)
        assert error.rank == 2
        assert isinstance(error, HvdxError)
        for o, s in zip(out, sizes, strict=True):
            assert o.tobytes() == s.tobytes()

    for length in (0, 1, 4, 7, 8, 9, len(right) // 2, len(right) - 1):
        refuse(right[:length].copy())
    refuse(np.append(right, np.uint8(0)), "checksum")
    for at in (0, 1, 2, 3, 4, 7, 8, len(right) // 2, len(right) - 1):
        altered = right.copy()
        altered[at] ^= 0x10
        refuse(altered)
    older = right.copy()
    older[2] += 1
    refuse(older, f"version {frame.VERSION}", "Run the same version")
    for other in ROWS.values():
        foreign = message_of(other.make())
        if foreign[3] != right[3]:
            refuse(foreign, f"codec {foreign[3]}", "same codec")
    for sizes in ([], [*SIZES, 1], [sum(SIZES) - 1]):
        update = [np.full(size, 0.4, np.float32) for size in sizes]
        refuse(codec.encode(update, codec.init(sizes))[0], str(sum(sizes)), "same model")
    expect(TypeError, lambda: codec.decode([right.tolist()], start), "rank 0", "uint8")
    expect(TypeError, lambda: codec.decode([right.astype(np.int64)], start), "rank 0")


def check_resealed_messages_are_refused(row: Row) -> None:
    """Messages that are too short or too long are refused even if their checksum is valid."""
    codec = row.make()
    right, start = message_of(codec), updates(12, 1)[0]
    for length in (8, 9, 10, 11, len(right) - 1, len(right) + 1, len(right) + 40):
        wrong = np.zeros(length, np.uint8)
        wrong[: len(right)] = right[:length]
        frame.seal(wrong, int(right[3]))
        out = [s.copy() for s in start]
        error = expect(WireError, lambda w=wrong, o=out: codec.decode([right, w], o), "rank 1")
        assert error.rank == 1
        assert flat(out).tobytes() == flat(start).tobytes()


def check_messages_may_be_read_only_views(row: Row) -> None:
    """Messages may be views of a receive buffer: unaligned, read-only, or not contiguous."""
    codec = row.make()
    right = message_of(codec)
    want = zeros()
    codec.decode([right], want)
    room = np.zeros(len(right) + 3, np.uint8)
    room[3:] = right
    room.flags.writeable = False
    for message in (room[3:], np.repeat(right, 2)[::2]):
        got = zeros()
        codec.decode([message], got)
        assert flat(got).tobytes() == flat(want).tobytes()


def check_one_codec_serves_many_states(row: Row) -> None:
    """The codec holds no state: two encoders that share it write the same messages as each one alone."""
    codec = row.make()
    alone = [[], []]
    for i in range(2):
        state = row.make().init(SIZES)
        for update in updates(20 + i, 4):
            message, state = codec.encode(update, state)
            alone[i].append(message.tobytes())
    states = [codec.init(SIZES), codec.init(SIZES)]
    for step in range(4):
        for i in range(2):
            message, states[i] = codec.encode(updates(20 + i, 4)[step], states[i])
            assert message.tobytes() == alone[i][step]


CODEC_CHECKS = {name.removeprefix("check_"): f for name, f in list(globals().items()) if name.startswith("check_")}
