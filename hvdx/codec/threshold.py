"""Threshold codec: elements that reach a threshold tau are sent as multiples of +-tau; a residual keeps the rest.

Strom 2015 ("Scalable distributed DNN training using commodity GPU cloud computing", Interspeech) sends +-tau at most
once for each element, and packs an index and a sign into 32 bits; Deeplearning4j does the same. This codec differs in
two ways. An element sends the largest multiple of tau that it holds, so its residual stays below tau and nothing is
clipped. Indices are entropy-coded, in 6 to 16 bits. `docs/wire-format.md` describes every byte.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np

from hvdx.cache import kernels_folder
from hvdx.codec import frame
from hvdx.codec.base import Array, Codec, State
from hvdx.codec.devices import Gpu, Host, gpu
from hvdx.errors import ConfigError, UpdateError, WireError
from hvdx.kernels import compiled, cpu, varint
from hvdx.kernels.cpu_decode import ADD_EACH, ADD_SUM, SET_SUM
from hvdx.kernels.pieces import Located
from hvdx.kernels.table import cut_tiles, join_tiles, read_runs
from hvdx.kernels.tiles import LINE, Malformed, Runs, limit

#: tau if neither tau nor a density is given: that of Strom and Deeplearning4j, as a power of two.
DEFAULT_TAU = 2.0**-10
#: Lower bound of tau, as a share of the largest element. A smaller tau would hardly send more elements, only larger m.
SPAN = 2.0**-12
# Least number of elements of a sample, of those in it that reach tau, and most elements.
_ELEMENTS, _REACHING, _MOST_ELEMENTS = 4096, 32, 2**17
# Multiple of the wanted number of elements that may reach tau if many are equal.
_MOST_EQUAL = 1.5
# Bits of tau that are zero, so that its multiples are exact in float32 up to 16 times tau. With 8 such bits, the first
# updates of Adam, whose sizes differ by less than 2**-15, would be equal.
_UNUSED = np.uint32(0xF)
# Odd factors of a multiplicative hash: 2**32 times the golden ratio, and another.
_SCATTER = 0x9E3779B1, 0x85EBCA77
_LEAST, _MOST = np.float32(2.0**-126), np.float32(2.0**126)
_DEVICE = re.compile("cpu|cuda(:[0-9]+)?")
_USED_UP = (
    "state: encode has used it up. Use the state that encode returned; if encode was interrupted, restore a checkpoint."
)


@dataclass(frozen=True, repr=False, eq=False)
class ThresholdState(State):
    """State of the threshold encoder: the residual, and tau with the counts that adapt it.

    Attributes:
        sizes: number of elements of each array of an update.
        residual: float32[n] on the codec's device, the part of past updates that has not been sent.
        tau: threshold for the next update.
        found: False while a codec with a target density has no tau yet.
        step: number of updates encoded.
        sent: number of entries in the last message.
        device: device of the arrays, with its kernels.
    """

    sizes: tuple[int, ...]
    residual: Array
    tau: np.float32
    found: bool
    step: int
    sent: int
    device: Host | Gpu
    # Not saved. `encode` acquires the lock and keeps it, so that a state is used once.
    scratch: dict[str, Any] = field(default_factory=dict)
    claim: Lock = field(default_factory=Lock)

    def __repr__(self) -> str:
        return f"ThresholdState(step={self.step}, elements={self.residual.size}, tau={self.tau:.6g})"

    @property
    def density(self) -> float:
        """Share of the elements that the last message holds."""
        return self.sent / max(self.residual.size, 1)

    def arrays(self) -> dict[str, np.ndarray]:
        if self.claim.locked():
            raise ValueError(_USED_UP)
        saved = {
            "lengths": np.int64(self.residual.size), "taus": self.tau, "found": np.bool_(self.found),
            "sent": np.int64(self.sent),
        }  # fmt: skip
        # One value for each run of a message, which has none if there are no elements.
        runs = int(self.residual.size > 0)
        return {name: np.full(runs, value) for name, value in saved.items()} | {
            "step": np.array(self.step),
            "residual": self.device.fetch(self.residual),
        }


class _Refused(Exception):  # noqa: N818
    """An update that cannot be sent because of the element at index `fault`."""

    def __init__(self, fault: int, tau: np.float32) -> None:
        super().__init__()
        self.fault, self.tau = fault, tau


class _Step(NamedTuple):
    """One call of `encode`: device, update and residual, and the state before it."""

    device: Host | Gpu
    update: Located
    residual: Located
    state: ThresholdState


class Threshold(Codec[ThresholdState]):
    """Codec that sends the elements whose sum with the residual reaches tau, and keeps the rest in the residual.

    Args:
        tau: threshold, from 2**-126 to 2**126; 2**-10 if neither `tau` nor `target_density` is given. m * tau is exact
            if tau is a power of two, and may be rounded otherwise.
        target_density: share of the elements to send, in (0, 1). A sample of each update gives its tau.
        index_coding: "rice" for entropy-coded indices, "none" for 32 bits each; 64 bits for each entry of a tile in
            which some entry carries more than one tau.
        threads: number of threads of the kernels; None for OMP_NUM_THREADS if it is set, else the process's cores.
        device: "cpu" for NumPy arrays, "cuda" for arrays on a GPU, "cuda:1" for those on a GPU that is not the current
            one of the calling thread. All write the same bytes. On a GPU, `encode` and `decode` return when their work
            has finished, so nobody needs to wait for them. The caller's work that fills the arrays must have finished
            when they are called, or must be on the stream that is passed to them.
        part: number of elements of a part, a multiple of 64, for `split`: the messages of `encode` then have no tile
            with entries of two parts. None if messages are not split.

    Raises:
        ConfigError: if an option is outside its range.

    Example:
        >>> codec = Threshold(tau=0.5)
        >>> state = codec.init([4])
        >>> message, state = codec.encode([np.array([0.1, 0.6, -1.1, 0], np.float32)], state)
        >>> mean = [np.zeros(4, np.float32)]
        >>> codec.decode([message, message], mean, scale=0.5)
        >>> mean[0], state.residual.round(3)
        (array([ 0. ,  0.5, -1. ,  0. ], dtype=float32), array([ 0.1,  0.1, -0.1,  0. ], dtype=float32))
    """

    name, number = "threshold", 3
    compile_seconds = compiled.COMPILE_SECONDS

    def __init__(
        self,
        tau: float | None = None,
        target_density: float | None = None,
        index_coding: Literal["rice", "none"] = "rice",
        threads: int | None = None,
        device: str = "cpu",
        part: int | None = None,
    ) -> None:
        if tau is not None and target_density is not None:
            raise ConfigError("threshold: both tau and target_density are given. Give one; a density determines tau.")
        if tau is not None and not (_is_number(tau) and 2.0**-126 <= tau <= 2.0**126):
            raise ConfigError(f"threshold: tau: expected a positive number from 2**-126 to 2**126, got {tau!r}.")
        if target_density is not None and not (_is_number(target_density) and 0 < target_density < 1):
            raise ConfigError(f"threshold: target_density: expected a share between 0 and 1, got {target_density!r}.")
        if index_coding not in ("rice", "none"):
            raise ConfigError(f"threshold: index_coding: expected 'rice' or 'none', got {index_coding!r}.")
        if threads is not None and not (isinstance(threads, int) and threads >= 1):
            raise ConfigError(f"threshold: threads: expected at least 1, got {threads!r}.")
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            raise ConfigError(f"threshold: device: expected 'cpu', 'cuda' or 'cuda:NUMBER', got {device!r}.")
        if part is not None and not (isinstance(part, int) and part >= 64 and part % 64 == 0):
            raise ConfigError(f"threshold: part: expected a multiple of 64, got {part!r}.")
        if part is not None and device != "cpu":
            raise ConfigError("threshold: part: messages are split on the host only.")
        self.tau = None if tau is None and target_density is not None else DEFAULT_TAU if tau is None else float(tau)
        self.target_density, self.index_coding = target_density, index_coding
        self.threads, self.device, self.part = threads, device, part
        # Number of the codec in frames, and its name in errors.
        self._wire = self.number + (index_coding == "none"), f"{self.name}, index_coding={index_coding!r}"
        _, _, index = device.partition(":")
        self._device: Host | Gpu = Host(threads) if device == "cpu" else gpu(int(index) if index else None)

    def __repr__(self) -> str:
        options = {
            "tau": (self.tau, None),
            "target_density": (self.target_density, None),
            "index_coding": (self.index_coding, "rice"),
            "threads": (self.threads, None),
            "device": (self.device, "cpu"),
            "part": (self.part, None),
        }
        return f"Threshold({', '.join(f'{k}={v!r}' for k, (v, default) in options.items() if v != default)})"

    def init(self, sizes: Sequence[int]) -> ThresholdState:
        return ThresholdState(
            sizes=tuple(sizes),
            residual=self._device.place(np.zeros(sum(sizes), np.float32)),
            tau=np.float32(self.tau or DEFAULT_TAU),
            found=self.target_density is None,
            step=0,
            sent=0,
            device=self._device,
        )

    @property
    def prepared(self) -> bool:
        return compiled.is_kept(kernels_folder())

    def prepare(self) -> str:
        return self._kernels.why

    @cached_property
    def _kernels(self) -> compiled.Ready:
        """Outcome of preparing the kernels. It is cached because finding the folder takes system calls."""
        return cpu.prepare(kernels_folder())

    @property
    def arrays(self) -> Host | Gpu:
        """Device of the arrays, with functions for them."""
        return self._device

    def encode(
        self,
        update: Sequence[Array],
        state: ThresholdState,
        lookahead: float | Callable[[float], float] = 0.0,
        stream: object = None,
        least: float = 0.0,
    ) -> tuple[np.ndarray, ThresholdState]:
        """Encode an update as a message, as `Codec.encode` does.

        Args:
            update: see `Codec.encode`; or one array with the elements of all.
            state: see `Codec.encode`.
            lookahead: add (1 + lookahead) * update to the residual, and when the entries are found, subtract
                lookahead * update again. Or a function that returns it, called once with the lag: the delay of the
                messages before this update u, in units of u, <residual, u> / <u, u> in a sample; NaN if u is zero.
            stream: for device="cuda", stream on which the update is filled: a stream of numba.cuda, or the address of a
                stream, such as `torch.cuda.current_stream().cuda_stream`. None for CUDA's default stream, which does
                not wait for non-blocking streams.
            least: lower bound of tau, if a density determines it.

        Raises:
            UpdateError: if an element cannot be sent. The update is read only once, so on a CPU the fault may be found
                when the residual has changed; the update is then taken back. This leaves a rounding error in each
                element of the residual, at most 2**-20 of the larger absolute value of the residual and of
                (1 + lookahead) * update.
        """
        self.prepare()
        device = self._device if stream is None else self._device.on(stream)
        located = device.locate(update, "update", False)
        sizes = located.sizes
        if sizes != list(state.sizes) and sizes != [sum(state.sizes)]:
            raise ValueError(f"update: expected arrays of {list(state.sizes)} elements, got {sizes}.")
        if not state.claim.acquire(blocking=False):
            raise ValueError(_USED_UP)
        # An interruption from here on leaves a residual that is partly updated. Only a refusal takes the whole update
        # back, so only a refusal releases the state.
        if "workspace" not in state.scratch:
            state.scratch["workspace"] = device.workspace(state.residual.size, self.part or 0)
        kept = state.scratch.get("residual")
        if kept is None or kept.arrays[0] is not state.residual:
            kept = state.scratch["residual"] = device.locate([state.residual], "residual", True)
        step = _Step(device, located, kept, state)
        tau, ahead = self._measured(step, lookahead, least)
        try:
            message, after = self._encode(step, tau, ahead)
        except _Refused as refused:
            state.claim.release()
            raise self._cannot_send(step, refused.fault, refused.tau, ahead) from None
        return frame.seal(message, self._wire[0]), after

    def decode(
        self, messages: Sequence[np.ndarray], out: Sequence[Array], scale: float = 1.0, stream: object = None
    ) -> None:
        """Decode messages as `Codec.decode` does; `stream` is that of `encode`."""
        self._decode(messages, out, scale, ADD_EACH, stream)

    def decode_sum(
        self, messages: Sequence[np.ndarray], out: Sequence[Array], scale: float = 1.0, stream: object = None
    ) -> None:
        """Decode messages as `Codec.decode_sum` does; `stream` is that of `encode`."""
        self._decode(messages, out, scale, SET_SUM, stream)

    def add_sum(self, messages: Sequence[np.ndarray], out: Sequence[np.ndarray], scale: float = 1.0) -> None:
        self._decode(messages, out, scale, ADD_SUM, None)

    def _decode(
        self, messages: Sequence[np.ndarray], out: Sequence[Array], scale: float, way: int, stream: object
    ) -> None:
        self.prepare()
        device = self._device if stream is None else self._device.on(stream)
        located = device.locate(out, "out", True)
        bodies = [frame.unseal(message, *self._wire, rank) for rank, message in enumerate(messages)]
        try:
            device.decode(read_runs(bodies, located.size), scale, located, self.index_coding == "rice", way=way)
        except Malformed as error:
            raise WireError(f"{error}.", error.message) from None

    def _opened(self, message: np.ndarray, n: int, rank: int) -> tuple[np.ndarray, Runs]:
        """Check the frame of a message of n elements, and return its tiles and runs."""
        try:
            return read_runs([frame.unseal(message, *self._wire, rank)], n)[0]
        except Malformed as error:
            raise WireError(f"{error}.", rank) from None

    def split(self, message: np.ndarray, n: int) -> list[np.ndarray]:
        """Split a message that this codec encoded into a message for each part of the update.

        Args:
            message: uint8[bytes], the message.
            n: number of elements of the update, a multiple of `part`.

        Raises:
            ValueError: if this codec has no `part`, or n is no multiple of it.

        Example:
            >>> codec = Threshold(tau=1.0, part=64)
            >>> message, _ = codec.encode([np.eye(2, 64, dtype=np.float32)], codec.init([128]))
            >>> out = np.zeros(64, np.float32)
            >>> codec.decode(codec.split(message, 128)[1:], [out])
            >>> out[:3]
            array([0., 1., 0.], dtype=float32)
        """
        if self.part is None or n % self.part:
            raise ValueError(f"split: expected a codec with a part that divides {n} elements, got part={self.part}.")
        tiles, runs = self._opened(message, n, 0)
        head = _header(Runs(np.array([self.part]), runs.taus))
        return [self._sealed(head, piece) for piece in cut_tiles(tiles, n, self.part)]

    def join(self, messages: Sequence[np.ndarray], part: int) -> np.ndarray:
        """Join the messages of consecutive parts into one message; the inverse of `split`.

        Args:
            messages: untrusted uint8[bytes], message of each part.
            part: number of elements of each part.

        Raises:
            WireError: if a message is invalid; its rank is the number of the part. Entries are not checked.
        """
        pieces = [self._opened(message, part, rank) for rank, message in enumerate(messages)]
        try:
            tiles, runs = join_tiles(pieces)
        except Malformed as error:
            raise WireError(f"{error}.", error.message) from None
        return self._sealed(_header(runs), tiles)

    def _sealed(self, head: bytes, tiles: np.ndarray) -> np.ndarray:
        return frame.seal(np.concatenate([np.frombuffer(head, np.uint8), tiles]), self._wire[0])

    def restore(self, arrays: Mapping[str, np.ndarray], sizes: Sequence[int]) -> ThresholdState:
        fresh = self.init(sizes)
        new: dict[str, np.ndarray] = {}
        for name, like in fresh.arrays().items():
            if name not in arrays:
                raise ConfigError(f"threshold: the saved state has no {name!r}; it holds {sorted(arrays)}.")
            value = np.asarray(arrays[name])
            if value.shape != like.shape or value.dtype != like.dtype:
                raise ConfigError(
                    f"threshold: saved {name}: expected {like.dtype}{list(like.shape)}, got {value.dtype}"
                    f"{list(value.shape)}. The state is of another model, or has a tau for each variable, which an "
                    "option did that was removed."
                )
            new[name] = value.copy()
        n = fresh.residual.size
        if (new["lengths"] != n).any():
            raise ConfigError(f"threshold: saved lengths: expected [{n}], got {new['lengths']}.")
        if self.tau is not None and (new["taus"] != np.float32(self.tau)).any():
            raise ConfigError(
                f"threshold: the saved state was made with tau={new['taus'][0]}, this codec has tau={self.tau}. "
                "Make the codec with the tau of the saved state."
            )
        for name, least in {"taus": 2.0**-126, "sent": 0, "step": 0}.items():
            most = 2.0**126 if name == "taus" else np.inf
            if not ((new[name] >= least) & (new[name] <= most) & np.isfinite(new[name])).all():
                raise ConfigError(
                    f"threshold: saved {name}: expected numbers from {least:.6g} to {most:.6g}, got {new[name]}; the "
                    "checkpoint is damaged. Restore another one."
                )
        # A residual may exceed tau if tau has fallen, or if a lookahead was subtracted from it. Up to this limit, m of
        # the next update still fits.
        if not (np.abs(new["residual"]) <= limit(new["taus"])).all():
            raise ConfigError(
                "threshold: saved residual: expected numbers of at most 2**30 times tau, got larger ones or NaN; the "
                "checkpoint is damaged. Restore another one."
            )
        fresh = replace(fresh, residual=self._device.place(new["residual"]), step=int(new["step"]))
        if n == 0:
            return fresh
        return replace(fresh, tau=new["taus"][0], found=bool(new["found"][0]), sent=int(new["sent"][0]))

    def _encode(self, step: "_Step", tau: np.float32 | None, lookahead: float) -> tuple[np.ndarray, ThresholdState]:
        """Return the message, and the state for the next update. Raise _Refused if there is a fault.

        Args:
            step: the step.
            tau: tau that the sample gives; None for that of the state.
            lookahead: see `encode`.
        """
        state, n = step.state, step.update.size
        found, tau, tried = state.found or tau is not None, state.tau if tau is None else tau, False
        while True:
            runs = Runs(np.full(int(n > 0), n), np.full(int(n > 0), tau))
            coded = step.device.encode(
                step.update, step.residual, runs, self.index_coding == "rice", header=_header(runs),
                workspace=state.scratch["workspace"], lookahead=lookahead,
            )  # fmt: skip
            if coded.fault < 0:
                sent = int(coded.sent.sum())
                return coded.tiles, replace(state, tau=tau, found=found, step=state.step + 1, sent=sent, claim=Lock())
            # The element is NaN, infinite or too large for tau. A larger tau is tried once, unless tau is fixed.
            if self.target_density is None or tried:
                raise _Refused(coded.fault, tau)
            tried, tau = True, self._tau_of_largest(step, tau, lookahead)

    def _measured(
        self, step: "_Step", lookahead: float | Callable[[float], float], least: float
    ) -> tuple[np.float32 | None, float]:
        """Return the tau that a sample of the update gives, None for the one before, and the lookahead."""
        n, state = step.update.size, step.state
        follow = lookahead if callable(lookahead) else lambda _: lookahead
        # All of them, one large sample after another, to find the first tau.
        for lines in [lines_of(n, self.target_density, state.step)] if state.found else all_lines(n):
            values, residual = step.device.sample(step.update, step.residual, lines)
            if values.any():
                break
        else:
            # An update of zeros, as between accumulated gradients, says nothing about tau.
            return None, follow(np.nan)
        # `encode` refuses what overflows.
        with np.errstate(all="ignore"):
            u, r = values.astype(np.float64), residual.astype(np.float64)
            # No np.dot: on a large sample it would start the threads of BLAS, beside those of training.
            ahead = follow(float((r * u).sum() / (u * u).sum()))
            if self.target_density is None:
                return None, ahead
            found = tau_of_sample(residual + values * np.float32(1 + ahead), self.target_density)
        return None if found is None else max(found, np.float32(least)), ahead

    def _tau_of_largest(self, step: "_Step", tau: np.float32, lookahead: float) -> np.float32:
        """Return a tau of which the largest finite element is no large multiple, at least the one that failed."""
        largest = 0.0
        with np.errstate(all="ignore"):
            for lines in all_lines(step.update.size):
                values, _ = step.device.sample(step.update, step.residual, lines)
                sizes = np.abs(values * np.float32(1 + lookahead))
                largest = max(largest, float(sizes[np.isfinite(sizes)].max(initial=0)))
        return max(tau, np.float32(largest * SPAN))

    def _cannot_send(self, step: "_Step", fault: int, tau: np.float32, lookahead: float) -> UpdateError:
        """Return the error for the element at index `fault`."""
        sizes, variable, element = step.state.sizes, 0, fault
        while element >= sizes[variable]:
            element -= sizes[variable]
            variable += 1
        arrays = step.update.arrays
        where = (variable, element) if len(arrays) == len(sizes) else (0, fault)
        value = step.device.item(arrays[where[0]], where[1])
        times = f" times {1 + lookahead:.3g}" if lookahead else ""
        why = (
            f"which{times} is more than 2**30 times tau ({tau:.3g}). Raise tau, or give target_density instead"
            if np.isfinite(value)
            else "which cannot be sent. The training diverged, or the loss scale is too high"
        )
        return UpdateError(f"is {value}, {why}.", variable, element)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


@lru_cache(maxsize=64)
def _lengths(lengths: tuple[int, ...]) -> bytes:
    return varint.put(len(lengths)) + b"".join(varint.put(length) for length in lengths)


def _header(runs: Runs) -> bytes:
    """Return the bytes of a message before its tiles, with an empty frame."""
    return bytes(frame.SIZE) + _lengths(tuple(runs.lengths.tolist())) + runs.taus.astype("<f4").tobytes()


def lines_of(n: int, density: float | None, step: int) -> np.ndarray:
    """Return the lines of a sample of n elements: one at a scattered place in each of some equal parts, all if few.

    Lines at equal distances would meet rows, layers or shards of such a length always at the same place.

    Args:
        n: number of elements.
        density: share of the elements to send; None if the sample is for the lag only.
        step: number of the update, each of which gets other lines.

    Returns:
        int64[lines], increasing.

    Example:
        >>> lines_of(100, 0.01, 0), len(lines_of(10**6, 0.01, 0)), len(lines_of(10**6, 0.001, 0))
        (array([0, 1, 2, 3, 4, 5, 6]), 256, 2000)
    """
    whole = -(-n // LINE)
    wanted = max(_ELEMENTS, min(_REACHING / density, _MOST_ELEMENTS)) if density else _ELEMENTS
    parts = int(wanted / LINE)
    if whole < 2 * parts:
        return np.arange(whole)
    borders = np.arange(parts + 1) * whole // parts
    places = (np.arange(parts) * _SCATTER[0] + step * _SCATTER[1]) % 2**32
    return np.asarray(borders[:-1] + (places * np.diff(borders) >> 32))


def all_lines(n: int) -> Iterator[np.ndarray]:
    """Yield the lines of n elements, in parts of at most 2**20 elements, each from the whole vector.

    The first 2**20 neighbours may be a table, of which a batch changes few rows.
    """
    whole = -(-n // LINE)
    parts = -(-whole * LINE // 2**20)
    for part in range(parts):
        yield np.arange(part, whole, parts)


def tau_of_sample(sums: np.ndarray, density: float) -> np.float32 | None:
    """Return the tau that a share `density` of the elements reaches.

    If so many have the same absolute value that 1.5 times as many would reach it, those do not reach it: a message of
    them would be dense.

    Args:
        sums: float32[elements], sums of an update and the residual. NaN and infinity do not count.
        density: share of the elements to send.

    Returns:
        That tau, but at least SPAN times the largest element; None if all are zero.

    Example:
        >>> float(tau_of_sample(np.arange(-50, 50, dtype=np.float32), 0.1))
        45.0
    """
    sizes = np.abs(sums)
    largest = float(sizes.max(initial=0))
    if not np.isfinite(largest):
        sizes = sizes[np.isfinite(sizes)]
        largest = float(sizes.max(initial=0))
    if largest == 0:
        return None
    wanted = max(round(density * sizes.size), 1)
    reached = float(np.partition(sizes, sizes.size - wanted)[sizes.size - wanted])
    bits = np.float32(min(max(reached, largest * SPAN, float(_LEAST)), float(_MOST))).view(np.uint32) & ~_UNUSED
    if np.count_nonzero(sizes >= bits.view(np.float32)) > _MOST_EQUAL * wanted and bits < _MOST.view(np.uint32):
        bits += _UNUSED + np.uint32(1)
    return bits.view(np.float32)
