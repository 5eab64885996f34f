"""Routes of messages between the ranks, and the opening of the exchanges of `Threshold`, which chooses one of them.

`AllGatherRoute` brings the messages of all ranks to all ranks. `ShardedRoute` has two phases, whose messages do not
grow with the number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hvdx import codec as codecs
from hvdx.codec.base import Array, Decoder
from hvdx.comm import Channel, Comm, clock
from hvdx.costs.link import probe
from hvdx.costs.model import Situation
from hvdx.costs.types import Link
from hvdx.errors import ConfigError, UpdateError, WireError
from hvdx.log import Log
from hvdx.strategies.contract import TensorSpec
from hvdx.strategies.host_exchange import NOT_FINITE, HostExchange, Outgoing
from hvdx.strategies.step import Arrived, MessageExchange, Route
from hvdx.strategies.threshold import prediction
from hvdx.strategies.threshold.encoder import Lookahead, ThresholdEncoder
from hvdx.strategies.threshold.gradient_noise import GatheredSample, SummedSample, sums_of, words_of
from hvdx.strategies.threshold.hosts import HostsExchange
from hvdx.strategies.threshold.options import Options
from hvdx.strategies.threshold.ordered import OrderedExchange
from hvdx.strategies.threshold.shards import OWNER_DENSITY, Shards, owner_density
from hvdx.strategies.threshold.states import OWNER, OWNERS, whole_residual

_log = Log(__name__)

T = TypeVar("T")

# Integers of a header before the sample of gradients: status and two times.
_HEADER = 3
# Numbers that a rank sends to each other rank before the first phase: bytes for its shard, status, and the times in
# microseconds.
_BYTES, _STATUS, _TIMES = 0, 1, slice(2, 4)
_NUMBERS = 4
# Steps between two samples of the gradients: each takes an all-reduce of its own.
_SAMPLE_EVERY = 4
# Largest number of elements that the ranks of a host add up: MPI counts bytes in a C int.
_MOST_ELEMENTS = 2**29 - 1


@dataclass(frozen=True, kw_only=True)
class Messages(Arrived):
    """Messages of all ranks.

    Attributes:
        codec: their codec.
        messages: uint8[bytes] of each rank that counts, in rank order.
    """

    codec: Decoder
    messages: Sequence[np.ndarray]

    def add_to(self, out: Sequence[Array], scale: float, clear: bool) -> None:
        (self.codec.decode_sum if clear else self.codec.decode)(self.messages, out, scale)

    def add_sum_to(self, out: Sequence[np.ndarray], scale: float) -> None:
        self.codec.add_sum(self.messages, out, scale)


class AllGatherRoute(Route):
    """Route of messages from each rank to all ranks.

    Args:
        channel: channel between the ranks.
        ranks_per_message: number of ranks whose updates each message adds up.
    """

    def __init__(self, channel: Channel, ranks_per_message: int = 1):
        self._channel, self._per_message = channel, ranks_per_message

    def send(self, outgoing: Outgoing) -> Messages:
        encoded = outgoing.encoded
        assert encoded is not None
        message = encoded.message
        sample = [] if outgoing.sample is None else words_of(outgoing.sample)
        header = [outgoing.status, *outgoing.times, *sample]
        received = self._channel.exchange(header, message)
        others, size = self._channel.size - 1, 8 * (len(header) + 1)
        more = np.ascontiguousarray(received.headers[:, _HEADER:])
        return Messages(
            statuses=received.headers[:, 0],
            times=received.headers[:, 1:_HEADER],
            waited=received.waited,
            seconds=received.seconds,
            sent=others * (message.size + size),
            received=sum(map(len, received.messages)) - message.size + others * size,
            sample=GatheredSample(more.view(np.float16), self._per_message) if more.size else None,
            codec=encoded.codec,
            messages=received.messages,
        )

    def restore(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return whole_residual(state, self._channel.rank)


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

    The update is cut into a shard for each rank. In the first phase each rank sends each shard's entries to the shard's
    owner. The owner adds up the messages of all ranks and its own residual, encodes the sum again, and keeps the rest.
    In the second phase it sends the result to all, at four times the density. So a rank receives 5 (N - 1) / N messages
    of whole updates, where an all-gather brings N - 1. All ranks, the owners too, apply the messages of the second
    phase.

        sum of the applied messages + residuals of all ranks + residuals of all owners = sum of all updates

    Sources: DoubleSqueeze (Tang et al. 2019) compresses a second time where updates are added up, with a residual
    there; 1-bit Adam (Tang et al. 2021) has an owner for each shard.

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
        """Encode this rank's shard of the sum."""
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
    """Seconds of work on this rank in a step."""

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


# -- opening -----------------------------------------------------------------------------------------------------------


def open_exchange(
    options: Options, comm: Comm, specs: Sequence[TensorSpec], device: str, ranks_to_sum: int
) -> HostExchange:
    """Open the exchange that fits the options, the ranks and the link; report it if hvdx has chosen it. Collective.

    Args:
        options, comm, specs, device: see `open_messages`.
        ranks_to_sum: number of ranks whose updates may be added up on each host; 1 if every rank sends its own.
    """
    if options.asynchronous:
        return OrderedExchange(options, comm, specs)
    exchange: HostsExchange | MessageExchange
    if adds_up(options, comm, sum(s.elements for s in specs), device, ranks_to_sum):
        exchange = HostsExchange(
            options,
            comm,
            specs,
            lambda between, pieces, **more: open_messages(options, between, pieces, **more),
        )
        chosen = "auto" in (options.local, options.exchange)
    else:
        exchange, chosen = open_messages(options, comm, specs, device), options.exchange == "auto"
    if comm.world_ranks[comm.rank] == 0 and exchange.description and chosen:
        _log.info(f"threshold: {exchange.description}")
    return exchange


def adds_up(options: Options, comm: Comm, elements: int, device: str, count: int) -> bool:
    """Return whether the ranks of a host add up their updates; the same on all ranks. Collective.

    Args:
        options, comm, device: see `open_messages`.
        elements: number of elements of the tensors.
        count: see `ranks_to_sum` of `open_exchange`.
    """
    if count == 1 or elements < count:
        return False
    if elements > _MOST_ELEMENTS and options.local == "dense":
        raise ConfigError.on_all_ranks(
            f"threshold: local='dense': expected at most {_MOST_ELEMENTS:,} elements, got {elements:,}. Use "
            "local='none'."
        )
    # Hosts may differ: some have no GPU.
    devices = comm.all_gather_object(device, "the devices of updates")
    return elements <= _MOST_ELEMENTS and set(devices) == {"cpu"}


def open_messages(
    options: Options,
    comm: Comm,
    specs: Sequence[TensorSpec],
    device: str = "cpu",
    network: Link | None = None,
    ranks_per_message: int = 1,
    elements: int | None = None,
    results: Sequence[np.ndarray] | None = None,
) -> MessageExchange:
    """Open the exchange by the route that fits the ranks and the link. Collective.

    Args:
        options: options, the same on all ranks.
        comm: the ranks.
        specs: the tensors, of the same shapes on all ranks.
        device: device of the tensors, of the result and of the residual; see `Strategy.device_for`.
        network: the link between the ranks, if it has been measured.
        ranks_per_message: number of ranks whose updates each message adds up; see `hvdx.strategies.threshold.hosts`.
        elements: number of elements from which an automatic density starts, if it is not that of the tensors.
        results: see `MessageExchange`.
    """
    sizes = [s.elements for s in specs]
    elements = elements or sum(sizes)
    kind, network = choose_route(options, comm, elements, device, network)
    shards = Shards(sizes, comm.size) if kind == "sharded" else None
    encoder = ThresholdEncoder(options, comm, specs, shards, device)
    channel = comm.channel("the updates")
    channel.exchange([])  # all ranks have compiled
    route: Route = AllGatherRoute(channel, ranks_per_message)
    if shards is not None:
        route = ShardedRoute(options, channel, shards, encoder.codec, ranks_per_message)
    if options.target_density == "auto":
        network = network or probe(channel)
        size = comm.size
        messages = (1 + OWNER_DENSITY) * (size - 1) / size if shards is not None else size - 1
        encoder.follow(network, messages, elements)
    else:
        network = None
    return MessageExchange(
        comm,
        specs,
        encoder,
        route,
        ranks_per_message=ranks_per_message,
        results=results,
        network=network,
    )


def choose_route(
    options: Options, comm: Comm, elements: int, device: str, network: Link | None = None
) -> tuple[str, Link | None]:
    """Return the kind of route, and the link if it has been measured. Collective."""
    if options.exchange == "all_gather" or comm.size == 1 or not elements:
        return "all_gather", network
    # Hosts may differ: some have no GPU.
    if set(comm.all_gather_object(device, "the devices of updates")) != {"cpu"}:
        return "all_gather", network
    if network is None and prediction.follows_link(options, comm.size):
        channel = comm.channel("the link")
        network = probe(channel)
        channel.close()
    situation = Situation(comm.size, (elements,), 0.0, network or Link(0.0, 1.0))
    return prediction.kind_for(options, situation), network
