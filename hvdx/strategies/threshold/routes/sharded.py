"""Sharded route of the threshold strategy: in two phases, whose messages do not grow with the number of ranks.

The update is cut into a shard for each rank. In the first phase each rank sends each shard's entries to the shard's
owner. The owner adds up the messages of all ranks and its own residual, encodes the sum again, and keeps the rest. In
the second phase it sends the result to all, at four times the density. So a rank receives 5 (N - 1) / N messages of
whole updates, where an all-gather brings N - 1. All ranks, the owners too, apply the messages of the second phase.

    sum of the applied messages + residuals of all ranks + residuals of all owners = sum of all updates

Sources: DoubleSqueeze (Tang et al. 2019) compresses a second time where updates are added up, with a residual there;
1-bit Adam (Tang et al. 2021) has an owner for each shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hvdx import codec as codecs
from hvdx.codec.base import Array, Decoder
from hvdx.comm import Channel, clock
from hvdx.errors import ConfigError, UpdateError, WireError
from hvdx.strategies.host import NOT_FINITE, Outgoing
from hvdx.strategies.step import Arrived, Route
from hvdx.strategies.threshold.encoder import Lookahead
from hvdx.strategies.threshold.noise import SummedSample, sums_of
from hvdx.strategies.threshold.options import Options
from hvdx.strategies.threshold.shards import Shards, owner_density
from hvdx.strategies.threshold.states import OWNER, OWNERS

# Numbers that a rank sends to each other rank before the first phase: bytes for its shard, status, and the times in
# microseconds.
_BYTES, _STATUS, _TIMES = 0, 1, slice(2, 4)
_NUMBERS = 4
T = TypeVar("T")
# Steps between two samples of the gradients: each takes an all-reduce of its own.
_SAMPLE_EVERY = 4


@dataclass(frozen=True, kw_only=True)
class OwnersMessages(Arrived):
    """Messages of the owners of all shards.

    Attributes:
        codec: codec of the ranks' messages, which joins those of shards.
        messages: uint8[bytes] of each owner, in rank order; empty if a rank has NaN.
        shards: the shards.
        arranged: function that returns views of an output in the order of the shards, which it keeps.
    """

    codec: codecs.Threshold
    messages: Sequence[np.ndarray] = ()
    shards: Shards
    arranged: Callable[[Sequence[Array]], Sequence[np.ndarray]]

    def add_to(self, out: Sequence[Array], scale: float, clear: bool) -> None:
        self._decode(self.codec.decode_sum if clear else self.codec.decode, self.arranged(out), scale)

    def add_sum_to(self, out: Sequence[np.ndarray], scale: float) -> None:
        self._decode(self.codec.add_sum, self.shards.views(out, np.zeros(self.shards.shard_size, np.float32)), scale)

    def _decode(self, decode: Callable[..., None], out: Sequence[np.ndarray], scale: float) -> None:
        size = self.shards.shard_size
        joined = self.codec.join(self.messages, size)
        try:
            decode([joined], out, scale)
        except WireError:
            for rank, message in enumerate(self.messages):
                _blame(self.codec, message, size, rank)
            raise


class ShardedRoute(Route):
    """Route by the owners of shards, on the host.

    Args:
        options: options of the strategy.
        channel: channel between the ranks.
        shards: the shards, the order in which the ranks' messages hold the elements.
        codec: codec of the ranks' first messages.
        ranks_per_message: number of ranks whose updates each message adds up.
    """

    def __init__(
        self,
        options: Options,
        channel: Channel,
        shards: Shards,
        codec: codecs.Threshold,
        ranks_per_message: int = 1,
    ):
        self._options, self._channel, self._shards, self._threads = options, channel, shards, codec.threads
        self._rank, self._size, self._per_message = channel.rank, channel.size, ranks_per_message
        self._lookahead, self._density = Lookahead(options.lookahead), codec.target_density
        self._sum = np.zeros(shards.shard_size, np.float32)
        self._out: list[np.ndarray] = []
        self._views: list[np.ndarray] = []
        self._second: codecs.Threshold | None = None
        self._owner: codecs.ThresholdState = self._owner_codec(self._density).init([shards.shard_size])
        self.description = f"sharded exchange between {self._size} {'hosts' if ranks_per_message > 1 else 'workers'}"

    def _owner_codec(self, density: float | None) -> codecs.Threshold:
        """Return the codec of a shard's owner, given the density of a rank's message; None for a fixed tau.

        A fixed tau is one of the mean, and the owner encodes the sum.
        """
        density = None if density is None else owner_density(density)
        if self._second is None or self._second.target_density != density:
            self._second = self._options.make_codec(density, self._threads, tau_factor=self._size)
        return self._second

    def _arranged(self, out: Sequence[Array]) -> list[np.ndarray]:
        """Return views of an output in the order of the shards; those of the last one are kept."""
        if len(out) != len(self._out) or any(a is not b for a, b in zip(out, self._out, strict=True)):
            padding = np.zeros(self._shards.shard_size, np.float32)
            self._out = [np.asarray(array) for array in out]
            self._views = Shards([a.size for a in out], self._size).views(self._out, padding)
        return self._views

    # -- a step -------------------------------------------------------------------------------------------------------

    def send(self, outgoing: Outgoing) -> Arrived:
        encoded = outgoing.encoded
        assert encoded is not None
        codec = encoded.codec
        assert isinstance(codec, codecs.Threshold)  # the encoder's
        self._density = codec.target_density
        work, now = _Work(), clock.timer()
        begin = now()
        to_owners = [np.zeros(0, np.uint8)] * self._size
        if encoded.message.size:
            to_owners = work.timed("encoding", lambda: codec.split(encoded.message, self._shards.elements))
        numbers = np.empty((self._size, _NUMBERS), np.int32)
        numbers[:, _BYTES] = [message.size for message in to_owners]
        numbers[:, _STATUS:] = outgoing.status, *(min(ns // 1000, 2**31 - 1) for ns in outgoing.times)
        numbers = self._channel.all_to_all_rows(numbers)
        begun, cutting = now(), work.seconds
        statuses, times = numbers[:, _STATUS].astype(np.int64), 1000 * numbers[:, _TIMES].astype(np.int64)
        arrived = OwnersMessages(
            statuses, times, begun - begin - cutting, 0.0,
            codec=codec, shards=self._shards, arranged=self._arranged,
        )  # fmt: skip
        if not statuses.any():
            sample = self._sum_samples(outgoing)
            arrived = replace(
                self._two_phases(to_owners, numbers[:, _BYTES], encoded.tau, arrived, work), sample=sample
            )
        seconds = now() - begun - (work.seconds - cutting)
        return replace(arrived, seconds=seconds, encoding=work.encoding, decoding=work.decoding)

    def _sum_samples(self, outgoing: Outgoing) -> SummedSample | None:
        """Return the sums over the ranks of the samples of gradients, if one is due in this step."""
        if outgoing.sample is None or outgoing.step % _SAMPLE_EVERY:
            return None
        sample = outgoing.sample.astype(np.float64)
        squares = float(np.dot(sample, sample))
        if self._per_message > 1:
            sample, squares = sums_of(sample, self._per_message)
        sums = np.append(sample, squares)
        self._channel.all_reduce(sums)
        return SummedSample(sums[:-1], float(sums[-1]), self._size * self._per_message)

    def _two_phases(
        self,
        to_owners: list[np.ndarray],
        sizes: np.ndarray,
        least: float,
        arrived: OwnersMessages,
        work: "_Work",
    ) -> OwnersMessages:
        """Return the messages of all owners; if one cannot encode its sum, with its status.

        `least` is the tau of this rank's messages.
        """
        got = self._channel.all_to_all(to_owners, sizes.tolist())
        codec = self._owner_codec(self._density)
        work.timed("decoding", lambda: codec.decode_sum(got, [self._sum]))
        status, message = 0, np.zeros(0, np.uint8)
        try:
            message = work.timed("encoding", lambda: self._encode_sum(codec, least))
        except UpdateError:
            status = NOT_FINITE
        received = self._channel.exchange([status], message)
        headed = (self._size - 1) * (4 * _NUMBERS + 16)
        sent = sum(map(len, to_owners)) - len(to_owners[self._rank]) + (self._size - 1) * message.size + headed
        got_bytes = int(sizes.sum() - sizes[self._rank]) + headed
        got_bytes += sum(m.size for m in received.messages) - message.size
        faults = received.headers[:, 0]
        if faults.any() and not status:
            codec.decode([message], [self._owner.residual])
            residual = np.asarray(self._owner.residual)
            np.subtract(residual, self._sum, out=residual)
        return replace(
            arrived,
            statuses=faults if faults.any() else arrived.statuses,
            sent=sent,
            received=got_bytes,
            messages=received.messages,
        )

    def _encode_sum(self, codec: codecs.Threshold, least: float) -> np.ndarray:
        """Encode this rank's shard of the sum.

        Args:
            codec: codec of the owner.
            least: tau of this rank's messages.
        """
        # Entries are multiples of the ranks' taus. If there are fewer than the owner may send, a smaller tau would only
        # make the multiples larger.
        message, self._owner = codec.encode([self._sum], self._owner, self._lookahead.follow, least=least)
        return message

    # -- state --------------------------------------------------------------------------------------------------------

    def residual(self) -> np.ndarray:
        return self._shards.embed(np.asarray(self._owner.residual), self._rank)

    def arrays(self) -> dict[str, np.ndarray]:
        owner = self._owner.arrays() | {"lookahead": np.array(self._lookahead.value)}
        return {OWNER + name: value for name, value in owner.items()} | {OWNERS: np.array(self._size)}

    def restore(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Restore a saved state, of this route or of one that gathers all messages."""
        ranks = int(state.get(OWNERS, self._size))
        if ranks != self._size:
            raise ConfigError(f"threshold: the saved state: expected one of {self._size} shards, got one of {ranks}.")
        codec, sizes = self._owner_codec(self._density), [self._shards.shard_size]
        owner = {name.removeprefix(OWNER): value for name, value in state.items() if name.startswith(OWNER)}
        self._owner = codec.restore(owner, sizes) if OWNERS in state else codec.init(sizes)
        self._lookahead.restore(float(owner.get("lookahead", 0.0)))
        return state


class _Work:
    """Seconds of work on this rank in a step.

    Attributes:
        encoding, decoding: by kind.
    """

    def __init__(self) -> None:
        self.encoding = self.decoding = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of both kinds."""
        return self.encoding + self.decoding

    def timed(self, kind: str, work: Callable[[], T]) -> T:
        """Call a function, and count its seconds."""
        now = clock.timer()
        begin = now()
        result = work()
        seconds = now() - begin
        if kind == "encoding":
            self.encoding += seconds
        else:
            self.decoding += seconds
        return result


def _blame(codec: Decoder, message: np.ndarray, shard_size: int, rank: int) -> None:
    """Raise WireError with the rank that sent the message of a shard, if it is invalid."""
    try:
        codec.decode([message], [np.zeros(shard_size, np.float32)])
    except WireError as error:
        raise error.of(rank) from None
