"""Sharded exchange of the threshold strategy: in two phases, whose messages do not grow with the number of ranks.

The update is cut into a shard for each rank. In the first phase each rank sends each shard's entries to the shard's
owner. The owner adds up the messages of all ranks and its own residual, encodes the sum again, and keeps the rest. In
the second phase it sends the result to all, at four times the density. So a rank receives 5 (N - 1) / N messages of
whole updates, where an all-gather brings N - 1. All ranks, the owners too, apply the messages of the second phase.

    sum of the applied messages + residuals of all ranks + residuals of all owners = sum of all updates

Sources: DoubleSqueeze (Tang et al. 2019) compresses a second time where updates are added up, with a residual there;
1-bit Adam (Tang et al. 2021) has an owner for each shard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdx import codec as codecs
from hvdx.codec.tau import on_grid
from hvdx.comm import Comm, Received, clock
from hvdx.errors import ConfigError, UpdateError, WireError
from hvdx.strategies import link
from hvdx.strategies.base import TensorSpec, views
from hvdx.strategies.step import Sent
from hvdx.strategies.threshold.encoder import Options, ThresholdExchange
from hvdx.strategies.threshold.noise import sums_of
from hvdx.strategies.threshold.shards import OWNER, OWNER_DENSITY, OWNER_LOOKAHEAD, OWNERS, Shards, owner_density

# Numbers that a rank sends to each other rank before the first phase: bytes of its part, status, and the times in
# microseconds.
_PART, _STATUS, _TIMES = 0, 1, slice(2, 4)
_NUMBERS = 4
# Steps between two samples of the gradients: each takes an all-reduce of its own.
_SAMPLE_EVERY = 4
# An owner raises its tau at once if a message has this many times the wanted entries.
_TOO_MANY = 1.5


class ShardedExchange(ThresholdExchange):
    """Exchange of one optimiser under `Threshold(exchange="sharded")`, on the host.

    Args:
        strategy, comm, specs, lookahead, network, summed, elements: see `ThresholdExchange`.
    """

    def __init__(
        self,
        strategy: Options,
        comm: Comm,
        specs: Sequence[TensorSpec],
        lookahead: float,
        network: link.Link | None = None,
        summed: int = 1,
        elements: int | None = None,
    ):
        self._shards = Shards([s.elements for s in specs], comm.size)
        super().__init__(strategy, comm, specs, lookahead, "cpu", network, summed, elements)
        self._zeros = np.zeros(self._shards.part, np.float32)
        self._zeros.flags.writeable = False
        self.write_to([self._flat])
        self._sum = np.zeros(self._shards.part, np.float32)
        self._second: codecs.Threshold | None = None
        self._owner: Any = self._owner_codec(self._density).init([self._shards.part])
        # Sums over the ranks of the last sample of gradients and of its squares.
        self._sums: np.ndarray | None = None
        self._owner_lookahead = 0.0

    @property
    def way(self) -> str:
        return f"sharded exchange between {self._size} {'hosts' if self._summed > 1 else 'workers'}"

    def make_codec(self, density: float | None) -> codecs.Threshold:
        return self._strategy.make_codec(density, self._threads, self._kind, self._shards.part)

    def encoded_sizes(self) -> list[int]:
        return self._shards.sizes

    def messages(self, size: int) -> float:
        return (1 + OWNER_DENSITY) * (size - 1) / size

    def _owner_codec(self, density: float | None) -> codecs.Threshold:
        """Return the codec of a shard's owner, given the density of a rank's message; None for a fixed tau.

        A fixed tau is one of the mean, and the owner encodes the sum.
        """
        density = None if density is None else owner_density(density)
        if self._second is None or self._second.target_density != density:
            self._second = self._strategy.make_codec(density, self._threads, self._kind, None, self._size)
        return self._second

    def write_to(self, arrays: Sequence[np.ndarray]) -> None:
        super().write_to(arrays)
        padding = np.zeros(self._shards.part, np.float32)
        self._targets = Shards([a.size for a in arrays], self._size).pieces(arrays, padding)

    # -- a step -------------------------------------------------------------------------------------------------------

    def encode(self, tensors: Sequence[np.ndarray], codec: codecs.Codec[Any]) -> np.ndarray:
        if codec is self._bfloat16:
            return super().encode(tensors, codec)
        try:
            return super().encode(self._shards.pieces(tensors, self._zeros), codec)
        except UpdateError as error:
            raise UpdateError(error.problem, *self._shards.origin(error.variable, error.element)) from None

    def swap(self, header: Sequence[int], sent: Sent) -> Received:
        if sent.codec is self._bfloat16:
            return super().swap(header, sent)
        begin, self._owned = clock.now(), 0.0
        parts = [np.zeros(0, np.uint8)] * self._size
        if sent.message.size:
            codec: Any = sent.codec
            parts = self._owner_clock("encoding", lambda: codec.split(sent.message, self._shards.elements))
        numbers = np.empty((self._size, _NUMBERS), np.int32)
        numbers[:, _PART] = [part.size for part in parts]
        numbers[:, _STATUS:] = header[0], *(min(ns // 1000, 2**31 - 1) for ns in header[1:3])
        numbers = self._channel.swap(numbers)
        arrived, cutting = clock.now(), self._owned
        self._owned = 0.0
        headers = np.zeros((self._size, 3), np.int64)
        headers[:, 0], headers[:, 1:] = numbers[:, _STATUS], 1000 * numbers[:, _TIMES].astype(np.int64)
        messages: list[np.ndarray] = []
        if not headers[:, 0].any():
            self._sums = np.array(header[3:], np.int64).view(np.float64)
            if self._sums.size:
                self._channel.all_reduce(self._sums)
            messages = self._two_phases(parts, numbers[:, _PART], sent, headers)
        seconds = clock.now() - arrived - self._owned
        return Received(headers, messages, arrived - begin - cutting, seconds)

    def _two_phases(
        self, parts: list[np.ndarray], sizes: np.ndarray, sent: Sent, headers: np.ndarray
    ) -> list[np.ndarray]:
        """Return the messages of all owners. If one cannot encode its sum, its status is set in `headers`."""
        got = self._channel.all_to_all(parts, sizes.tolist())
        codec = self._owner_codec(sent.codec.target_density)  # type: ignore[attr-defined]
        self._owner_clock("decoding", lambda: codec.decode_sum(got[: sent.active], [self._sum]))
        status, message = 0, np.zeros(0, np.uint8)
        try:
            message = self._owner_clock("encoding", lambda: self._encode_sum(codec))
        except UpdateError:
            status = 1
        received = self._channel.exchange([status], message)
        counts, others = self.telemetry, self._size - 1
        headed = others * (4 * _NUMBERS + 16)
        counts.sent += sum(map(len, parts)) - len(parts[self._rank]) + others * message.size + headed
        counts.received += int(sizes.sum() - sizes[self._rank]) + headed
        counts.received += sum(m.size for m in received.messages) - message.size
        faults = received.headers[:, 0]
        if faults.any():
            headers[:, 0] = faults
            if not status:
                codec.decode([message], [self._owner.residual])
                np.subtract(self._owner.residual, self._sum, out=self._owner.residual)
        return received.messages

    def _encode_sum(self, codec: codecs.Threshold) -> np.ndarray:
        if codec.target_density is not None:
            # Entries are multiples of the ranks' taus. If there are fewer than the owner may send, a smaller tau would
            # only make the multiples larger.
            least = self._state.taus
            taus = np.where(self._owner.found, np.maximum(self._owner.taus, least), least)
            self._owner = replace(self._owner, taus=taus, found=np.ones_like(self._owner.found))
        message, self._owner = codec.encode([self._sum], self._owner, self._owner_lookahead)
        if codec.target_density is not None:
            self._owner = _with_fewer_entries(self._owner, codec)
        return message

    def _owner_clock(self, counter: str, work: Any) -> Any:
        """Measure the work of the owner. With overlap it is a part of the exchange that the computation hides."""
        if self._thread is not None:
            return work()
        begin = clock.now()
        result = self._clock(counter, work)
        self._owned += clock.now() - begin
        return result

    def add_up(self, sent: Sent, messages: Sequence[np.ndarray], scale: float) -> None:
        if sent.codec is self._bfloat16:
            super().add_up(sent, messages, scale)
            return
        codec: Any = sent.codec
        joined = codec.join(messages, self._shards.part)
        try:
            codec.decode_sum([joined], self._targets, scale)
        except WireError:
            for rank, message in enumerate(messages):
                _blame(codec, message, self._shards.part, rank)
            raise

    def take_back(self, sent: Sent) -> None:
        if not sent.message.size:
            return
        if sent.codec is self._bfloat16:
            natural = self.read_residual()
            sent.codec.decode([sent.message], [natural])
            self.write_residual(natural - np.concatenate([np.ravel(t) for t in sent.update]))
            return
        residual = self._state.residual
        sent.codec.decode([sent.message], [residual])
        residual -= np.concatenate(self._shards.pieces(sent.update, self._zeros))

    # -- second moments -----------------------------------------------------------------------------------------------

    def more_header(self) -> Sequence[int]:
        """Return the sample of this rank's gradients and the sum of its squares, as the bits of float64."""
        self._owner_lookahead = OWNER_LOOKAHEAD * self._lookahead if self.sample else 0.0
        if not self.sample or self._step % _SAMPLE_EVERY:
            return ()
        sample = np.concatenate([np.ravel(s) for s in self.sample]).astype(np.float64)
        squares = float(np.dot(sample, sample))
        if self._summed > 1:
            sample, squares = sums_of(sample, self._summed)
        return np.append(sample, squares).view(np.int64).tolist()

    def observe_samples(self, received: Received) -> None:
        if self._sums is not None and self._sums.size:
            self._noise.observe_sums(self._sums[:-1], float(self._sums[-1]), self._size * self._summed)
        self._sums = None

    # -- state --------------------------------------------------------------------------------------------------------

    def read_residual(self) -> np.ndarray:
        return self._shards.natural(self._state.residual)

    def write_residual(self, values: np.ndarray) -> None:
        self._state.residual[:] = self._shards.padded(values)

    @property
    def residuals(self) -> list[np.ndarray]:
        """Residuals of this rank, with that of its shard."""
        return views(self.read_residual() + self._shards.whole(self._owner.residual, self._rank), self.specs)

    def state_dict(self) -> dict[str, np.ndarray]:
        owner = {OWNER + name: value for name, value in self._owner.arrays().items()} | {OWNERS: np.array(self._size)}
        lengths = np.array([self._n] * (self._n > 0), np.int64)
        natural = {"codec.residual": self.read_residual(), "codec.lengths": lengths}
        return super().state_dict() | natural | owner

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a saved state, of this exchange or of one that gathers all messages."""
        ranks = int(state.get(OWNERS, self._size))
        if ranks != self._size:
            raise ConfigError(f"threshold: the saved state: expected one of {self._size} shards, got one of {ranks}.")
        codec = self._owner_codec(self._density)
        owner = {name.removeprefix(OWNER): value for name, value in state.items() if name.startswith(OWNER)}
        sizes = [self._shards.part]
        restored = codec.restore(owner, sizes) if OWNERS in state else codec.init(sizes)
        super().load_state_dict(state)
        self._owner = restored

    def with_whole_residual(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return a saved state with the residual of this rank in the order of the shards."""
        if "codec.residual" not in state or state["codec.residual"].size != self._n:
            return state  # restoring it raises an error
        residual = self._shards.padded(state["codec.residual"])
        return dict(state) | {"codec.residual": residual, "codec.lengths": np.array([residual.size], np.int64)}


def _with_fewer_entries(owner: Any, codec: codecs.Threshold) -> Any:
    """Return the state of an owner with a larger tau, if its last message had too many entries.

    A sum starts at the tau of one rank, and settles at one that grows with the number of ranks. Up to four times the
    wanted entries the codec raises tau by 2 % in a step, so an owner would send too much for a hundred steps.

    Args:
        owner: state of the owner's encoder.
        codec: its codec, with a target density.
    """
    wanted, sent = max((codec.target_density or 0.0) * owner.residual.size, 1.0), float(owner.sent.sum())
    if not _TOO_MANY * wanted < sent <= 4 * wanted:
        return owner
    # As the codec does above four times the wanted number: the density falls at least with the square of tau.
    raised = [on_grid(float(tau) * (sent / wanted) ** 0.5, codec.tau_steps, up=True) for tau in owner.taus]
    taus = np.maximum(owner.taus, np.array(raised, np.float32))
    return replace(owner, taus=taus, means=np.minimum(owner.means, wanted))


def _blame(codec: Any, message: np.ndarray, part: int, rank: int) -> None:
    """Raise WireError with the rank that sent the message of a shard, if it is invalid."""
    try:
        codec.decode([message], [np.zeros(part, np.float32)])
    except WireError as error:
        raise error.of(rank) from None
