"""Exchange of the threshold strategy on hosts with several ranks: dense sums within a host, messages between hosts."""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from hvdx.comm import Channel, Comm
from hvdx.comm.memory import aligned
from hvdx.comm.mesh import divide_by_host
from hvdx.costs.link import probe
from hvdx.costs.types import Link
from hvdx.errors import ConfigError
from hvdx.log import Log
from hvdx.strategies.compiling import prepare_together
from hvdx.strategies.contract import TensorSpec, views
from hvdx.strategies.host_exchange import ELSEWHERE, NOT_FINITE, HostExchange, Outgoing, StepInput
from hvdx.strategies.step import MessageExchange, saved_step
from hvdx.strategies.threshold.density import INITIAL_DENSITY
from hvdx.strategies.threshold.gradient_noise import common_sample, words_of
from hvdx.strategies.threshold.options import Options
from hvdx.strategies.threshold.shards import Dealing
from hvdx.strategies.threshold.states import OWNER, scaled, whole_residual

_log = Log(__name__)

# Elements that are summed at a time. They stay in the level-2 cache until they have been checked.
_CHUNK = 1 << 16
# Elements of a tensor from which this rank's own blocks are read where they are. For a small tensor the calls that this
# takes cost more than a copy.
_LARGE = 1 << 16


def open_sums(channel: Channel, sizes: Sequence[int]) -> "HostSums":
    """Open the sums of a host: in shared memory, if the ranks can share it. Collective.

    Args:
        channel: the ranks of the host; at least two.
        sizes: number of elements of each tensor.
    """
    dealing = Dealing(sizes, channel.size)
    updates = channel.share(sum(sizes))
    result = None if updates is None else channel.share(0 if channel.rank else sum(sizes))
    if updates is None or result is None:
        return MessageSums(channel, dealing)
    return SharedSums(channel, dealing, updates, result[0])


class HostSums(abc.ABC):
    """Sums of the updates of a host's ranks: in memory that they share, or by messages if they cannot share memory.

    Each rank sums one piece of the vector, and each element in rank order, so both ways give the same bits.

    A step consists of `publish`, an exchange of the channel, `add_up`, another exchange, and `gather`. The ranks may
    share the arrays: a rank may write to `targets` between the exchange after `add_up` and `gather`, and
    a result is valid until this rank's first exchange after its next `publish`.

    Args:
        channel: the ranks of the host.
        dealing: division of the vector; rank r sums piece r.

    Attributes:
        result: float32[n], all pieces of the result after `gather`; callers must not change it.
        targets: contiguous views of this rank's piece of the result, in the order of the piece, if the piece may be
            written there instead of being given to `gather`; else None.
        gathered: bytes that this rank gives to other ranks in `gather`.
    """

    result: np.ndarray
    targets: list[np.ndarray] | None = None
    gathered: int

    def __init__(self, channel: Channel, dealing: Dealing):
        self.dealing, self._channel, self._rank = dealing, channel, channel.rank

    @abc.abstractmethod
    def publish(self, tensors: Sequence[np.ndarray]) -> None:
        """Make this rank's update available to the other ranks, after an exchange of the channel.

        Args:
            tensors: contiguous float32 arrays of the sizes that were given, which must not change before `add_up`.
        """

    @abc.abstractmethod
    def add_up(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        """Set `out` to the sum of the updates of all ranks, for this rank's piece; return whether it is finite.

        Args:
            tensors: those of `publish`.
            out: float32[piece].
        """

    @abc.abstractmethod
    def values(self, element: int, tensors: Sequence[np.ndarray]) -> list[float]:
        """Return the value of each rank at an element of this rank's piece, after `add_up` of these tensors."""

    @abc.abstractmethod
    def gather(self, piece: np.ndarray | None) -> float:
        """Set `result` to the pieces of all ranks; return the seconds of waiting for other ranks. Collective.

        Args:
            piece: float32[piece], that of this rank; None if it was written to `targets`.
        """

    def total(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Set `out` to the sum of the updates of all ranks, for this rank's piece. Collective."""
        self.publish(tensors)
        self._channel.exchange([])
        self.add_up(tensors, out)
        self._channel.exchange([])  # all ranks have read this update before one of them publishes the next


class MessageSums(HostSums):
    """Sums by messages: an all-to-all of the updates and an all-gather of the result."""

    def __init__(self, channel: Channel, dealing: Dealing):
        super().__init__(channel, dealing)
        self._pieces, self.result = np.zeros(dealing.elements, np.float32), aligned(dealing.elements)
        self._theirs = self._pieces[:0]
        self.gathered = 4 * (dealing.count - 1) * int(np.diff(dealing.bounds)[self._rank])

    def publish(self, tensors: Sequence[np.ndarray]) -> None:
        self._pieces[:] = self.dealing.split(np.concatenate([np.ravel(t) for t in tensors]))

    def add_up(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        self._theirs = self._channel.scatter_pieces(self._pieces, self.dealing.bounds)
        with np.errstate(over="ignore", invalid="ignore"):
            return _add(list(self._theirs), out)

    def values(self, element: int, tensors: Sequence[np.ndarray]) -> list[float]:
        values: list[float] = self._theirs[:, element].tolist()
        return values

    def gather(self, piece: np.ndarray | None) -> float:
        assert piece is not None
        self._channel.gather_pieces(piece, self.dealing.bounds, self._pieces)
        self.dealing.join(self._pieces, self.result)
        return 0.0


class SharedSums(HostSums):
    """Sums in memory that all ranks read and write.

    Each rank copies what others need of its update to an array of its own, and reads its piece from the arrays of all.
    The result is one array for all ranks.

    Args:
        channel, dealing: see `HostSums`.
        updates: array of each rank, float32[n], in the order of the vector.
        result: float32[n].
    """

    def __init__(self, channel: Channel, dealing: Dealing, updates: Sequence[np.ndarray], result: np.ndarray):
        super().__init__(channel, dealing)
        self._updates, self.result = list(updates), result
        self.gathered = 4 * int(np.diff(dealing.bounds)[self._rank])
        self._end = dealing.elements // dealing.round * dealing.round
        rest = dealing.rest(result, self._rank)
        self.targets = [*dealing.blocks(result[: self._end], self._rank), *([rest] if rest.size else [])]
        self._spans = list(self._find_spans())

    def _find_spans(self) -> "list[tuple[int, int, int]]":
        """Divide the whole rounds of the vector into (begin, end, number of the large tensor that holds them or -1)."""
        spans, at, size = [], 0, self.dealing.round
        for number, (begin, end) in enumerate(pairwise(self.dealing.ends)):
            first, last = -(-begin // size) * size, end // size * size
            if last - first >= _LARGE:
                spans += [(at, first, -1), (first, last, number)]
                at = last
        return [span for span in [*spans, (at, self._end, -1)] if span[0] < span[1]]

    def publish(self, tensors: Sequence[np.ndarray]) -> None:
        mine, count, block = self._updates[self._rank], self.dealing.count, self.dealing.block
        large = {number: (begin, end) for begin, end, number in self._spans if number >= 0}
        for number, (begin, end) in enumerate(pairwise(self.dealing.ends)):
            flat, target = np.ravel(tensors[number]), mine[begin:end]
            if number not in large:
                target[:] = flat
                continue
            first, last = (at - begin for at in large[number])
            target[:first], target[last:] = flat[:first], flat[last:]
            here, there = (array[first:last].reshape(-1, count, block) for array in (flat, target))
            there[:, : self._rank], there[:, self._rank + 1 :] = here[:, : self._rank], here[:, self._rank + 1 :]

    def add_up(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            rests = [self.dealing.rest(update, self._rank) for update in self._updates]
            finite = _add(rests, out[self._end // self.dealing.count :])
            for span in self._spans:
                finite &= self._add_span(span, tensors, out)
            return finite

    def _add_span(self, span: tuple[int, int, int], tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        """Do the work of `add_up` for one of the spans."""
        begin, end, number = span
        updates = [update[begin:end] for update in self._updates]
        if number >= 0:
            first = begin - self.dealing.ends[number]
            updates[self._rank] = np.ravel(tensors[number])[first : first + end - begin]
        blocks = [self.dealing.blocks(update, self._rank) for update in updates]
        count, block, finite = self.dealing.count, self.dealing.block, True
        total = out[begin // count : end // count].reshape(-1, block)
        some = max(1, _CHUNK // block)
        for low in range(0, len(total), some):
            finite &= _add([b[low : low + some] for b in blocks], total[low : low + some])
        return finite

    def values(self, element: int, tensors: Sequence[np.ndarray]) -> list[float]:
        place = self.dealing.origin(self._rank, element)
        values = [float(update[place]) for update in self._updates]
        number = int(np.searchsorted(self.dealing.ends, place, side="right")) - 1
        values[self._rank] = float(np.ravel(tensors[number])[place - self.dealing.ends[number]])
        return values

    def gather(self, piece: np.ndarray | None) -> float:
        if piece is not None:
            self.dealing.place(piece, self._rank, self.result)
        return self._channel.exchange([]).waited


def _add(arrays: Sequence[np.ndarray], out: np.ndarray) -> bool:
    """Set `out`, contiguous, to the sum of two or more arrays, in their order; return whether it is finite."""
    np.add(arrays[0], arrays[1], out=out)
    for array in arrays[2:]:
        np.add(out, array, out=out)
    flat = out.reshape(-1)
    # The square of a finite sum may overflow.
    return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())


# "No rank", where a header names a rank of the host.
_NOBODY = -1

#: Function that opens the exchange of a piece between hosts; see `hvdx.strategies.threshold.routes.open_messages`.
OpenMessages = Callable[..., MessageExchange]


class HostsExchange(HostExchange):
    """Exchange of one optimiser under `Threshold(local="dense")`.

    The vector of all elements is divided into one piece for each rank of a host. The ranks of a host add up their
    updates, each for its own piece (`HostSums`). The ranks with the same piece, one on each host, exchange
    its sums by a `MessageExchange`. Then each host gathers the results.

    Args:
        options: options, the same on all ranks.
        comm: the ranks, the same number on each host.
        specs: the tensors, of the same shapes on all ranks.
        open_messages: opens the exchange of a piece between hosts.

    Attributes:
        inner: exchange of this rank's piece between hosts.
    """

    def __init__(self, options: Options, comm: Comm, specs: Sequence[TensorSpec], open_messages: OpenMessages):
        local, between = divide_by_host(comm)
        self._rank = comm.rank
        self._position, self._count = local.rank, local.size
        self._host, self._hosts = between.rank, between.size
        # Numbers in reports, of the ranks of this host.
        self._world_ranks = local.world_ranks
        self._channel = local.channel("the updates within a host")

        target = options.target_density
        self._codec = options.make_codec(INITIAL_DENSITY if isinstance(target, str) else target, None, "cpu")
        prepare_together(self._codec, comm, "Threshold")
        self._sizes = [s.elements for s in specs]
        self._sums = open_sums(self._channel, self._sizes)
        self._dealing = self._sums.dealing
        piece_specs = [
            replace(s, shape=(k,)) for s, k in zip(specs, self._dealing.sizes_in_piece(self._position), strict=True)
        ]
        network = None
        if target == "auto":
            network = self.network = self._probe(between)
        # The same link and size on all ranks, so that all pieces have one kind of exchange and one density.
        largest = int(np.diff(self._dealing.bounds).max())
        self.inner = open_messages(
            between,
            piece_specs,
            network=network,
            ranks_per_message=self._count,
            elements=largest,
            results=self._sums.targets,
        )
        # The counters are those of the exchange between hosts, for the elements of the whole update.
        super().__init__(specs, self.inner.telemetry)
        # Sum of the host's updates, for this rank's piece.
        self._piece = np.zeros(int(np.diff(self._dealing.bounds)[self._position]), np.float32)
        self._piece_views = views(self._piece, piece_specs)
        self._out = views(self._sums.result, specs)

    @property
    def description(self) -> str:
        """How messages travel."""
        between = self.inner.description or f"all-gather between {self._hosts} hosts"
        return f"the {self._count} workers of each host add up their updates; {between}"

    def _probe(self, between: Comm) -> Link:
        """Measure the link of the hosts, which the ranks of a host use at once; the same on all ranks."""
        channel = between.channel("the link between hosts")
        found = probe(channel)
        channel.close()
        measured = self._channel.exchange([round(1e9 * found.latency), round(found.bandwidth)]).headers
        return Link(int(measured[:, 0].max()) / 1e9, float(measured[:, 1].min()))

    @property
    def period(self) -> int:  # type: ignore[override]
        return self.inner.period

    def reset_telemetry(self) -> None:
        self.inner.reset_telemetry()
        self.telemetry = self.inner.telemetry

    def add_cost(self, counter: str, seconds: float) -> None:
        self.inner.add_cost(counter, seconds)

    # -- a step -------------------------------------------------------------------------------------------------------

    def combine(self, step_input: StepInput) -> list[np.ndarray]:
        return self.deliver(self.prepare(step_input))

    def prepare(self, step_input: StepInput) -> Outgoing:
        """Add up the updates of the host, and encode this rank's piece. Collective among the ranks of a host."""
        inner, tensors, now = self.inner, [np.asarray(t) for t in step_input.tensors], self._now
        begin = now()
        self._sums.publish(tensors)
        seconds = now() - begin
        samples = step_input.sample
        words = words_of(np.concatenate([np.ravel(s) for s in samples]), np.float32) if samples else []
        arrived = self._channel.exchange([int(not step_input.finite), *words])
        self.telemetry.waiting += arrived.waited
        sample = _common(step_input.sample, arrived.headers[:, 1:])
        begin = now()
        finite = self._add_up(tensors, self._piece)
        faulty, fault = (_NOBODY, "") if finite else self._find_fault(tensors)
        seconds += now() - begin
        piece = step_input._replace(tensors=self._piece_views, finite=True, blamed="", sample=sample, into=None)
        sent = inner.prepare(piece)
        self.add_cost("exchanging", seconds)
        if not sent.is_fine:
            faulty = self._position
        statuses = self._channel.exchange([faulty, *sent.times])
        self.telemetry.waiting += statuses.waited
        # The same times on all ranks of a host, so that all pieces keep one density.
        times = round(float(statuses.headers[:, 1].mean())), int(statuses.headers[:, 2].max())
        blaming = statuses.headers[:, 0].tolist()
        failed = {*np.flatnonzero(arrived.headers[:, 0]).tolist(), *blaming} - {_NOBODY}
        if fault and blaming.index(faulty) == self._position:
            where = f"rank {self._world_ranks[faulty]}, step {sent.step + 1}"
            _log.warning(f"{where}: {fault}: NaN or infinity in the update")
        # The host cannot take the step if one of its ranks cannot; only that rank is blamed.
        status = NOT_FINITE if self._position in failed else ELSEWHERE if failed else sent.status
        return sent._replace(status=status, times=times)

    def deliver(self, outgoing: Outgoing) -> list[np.ndarray]:
        """Exchange an encoded piece, and gather the results of the host's ranks. Collective."""
        self.inner.deliver(outgoing)
        begin = self._now()
        waited = self._sums.gather(np.asarray(self.inner.result) if self._sums.targets is None else None)
        self.telemetry.inside += self._sums.gathered
        self.telemetry.waiting += waited
        self.add_cost("exchanging", self._now() - begin - waited)
        return self._out

    def _add_up(self, tensors: Sequence[np.ndarray], out: np.ndarray) -> bool:
        """Set `out` to the sum of the host's tensors for this rank's piece; return whether it is finite."""
        finite = self._sums.add_up(tensors, out)
        self.telemetry.inside += 4 * (self._n - out.size)
        return finite

    def _find_fault(self, tensors: Sequence[np.ndarray]) -> tuple[int, str]:
        """Return the rank of the host with NaN or infinity in this piece, and the variable; clear the piece."""
        element = int(np.argmin(np.isfinite(self._piece)))
        values = self._sums.values(element, tensors)
        rank = next((r for r, value in enumerate(values) if not np.isfinite(value)), self._position)
        ends = np.cumsum([s.elements for s in self.inner.specs])
        # All ranks will skip the step, and its message must not hold NaN.
        self._piece.fill(0)
        return rank, self.specs[int(np.searchsorted(ends, element, side="right"))].name

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def unsent_share(self) -> float:  # type: ignore[override]
        return self.inner.unsent_share

    def unsent(self, allocate: object = None) -> list[np.ndarray]:
        """Return what this rank's piece of the host's sum still holds, and zeros elsewhere."""
        return views(self._whole(np.asarray(self.inner.encoder.unsent(None))), self.specs)

    @property
    def residuals(self) -> list[np.ndarray]:
        """Share of this rank in its host's residual: that of its piece, and zeros elsewhere."""
        return views(self._whole(np.concatenate([np.ravel(r) for r in self.inner.residuals])), self.specs)

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        """Add the tensors of all ranks of the host to its residual. Collective among them."""
        total = np.empty_like(self._piece)
        self._sums.total(tensors, total)
        self.inner.add_to_residual(views(total, self.inner.specs))

    def _whole(self, piece: np.ndarray) -> np.ndarray:
        """Return float32[n] with the elements of this rank's piece, and zeros elsewhere."""
        whole = np.zeros(self._n, np.float32)
        self._dealing.place(piece, self._position, whole)
        return whole

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a state that an exchange of any number of ranks and hosts can restore.

        It is that of an exchange without sums on hosts: residual and taus are for all elements. The state of this
        rank's piece comes in addition, for a restored exchange of the same hosts.
        """
        state = self.inner.state_dict()
        own = {f"piece.{name}": value for name, value in state.items()} | {"piece": self._place}
        # The residual of a shard becomes a part of that of the piece.
        state = dict(whole_residual(state, self._host))
        piece = {k.removeprefix("codec."): v for k, v in state.items() if k.startswith("codec.")}
        whole = self._codec.init(self._sizes).arrays()
        whole |= scaled(piece, whole["lengths"] / piece["lengths"])
        whole |= {"residual": self._whole(piece["residual"]), "step": piece["step"]}
        rest = {k: v for k, v in state.items() if not k.startswith(("codec.", OWNER))}
        return rest | {f"codec.{k}": v for k, v in whole.items()} | own

    @property
    def _place(self) -> np.ndarray:
        """Position of this rank: pieces, number of its piece, hosts, number of its host, elements of a block."""
        return np.array([self._count, self._position, self._hosts, self._host, self._dealing.block])

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a saved state. Collective among the ranks of a host.

        Raises:
            ConfigError: if the state of a rank of the host does not fit the tensors or the options.
        """
        problem = self._problem_of(state)
        elsewhere = not np.array_equal(state.get("piece", ()), self._place)
        flags = self._channel.exchange([int(bool(problem)), int(elsewhere)]).headers
        failed = np.flatnonzero(flags[:, 0]).tolist()
        if failed:
            other = f"rank {self._world_ranks[failed[0]]} of this host cannot restore its state; see its error."
            raise ConfigError(f"threshold: the saved state: {problem or other}")
        piece = {k.removeprefix("piece."): v for k, v in state.items() if k.startswith("piece.")}
        self.inner.load_state_dict(self._piece_of(state) if flags[:, 1].any() else piece)

    def _problem_of(self, state: Mapping[str, np.ndarray]) -> str:
        """Return the reason why a state does not fit, or ""."""
        fresh = self._codec.init(self._sizes).arrays()
        wanted = {f"codec.{name}": array.shape for name, array in fresh.items()} | {"step": (), "density": ()}
        for name, shape in wanted.items():
            if name not in state:
                return f"expected {', '.join(wanted)}, got {sorted(state)}."
            if np.shape(state[name]) != shape:
                got = np.shape(state[name])
                return f"{name}: expected the shape {shape}, got {got}. It is of another model."
        if (state["codec.lengths"] != fresh["lengths"]).any():
            return f"codec.lengths: expected {fresh['lengths']}, got {state['codec.lengths']}."
        try:
            saved_step(state)
            whole_residual(state, self._rank)
        except ConfigError as error:
            return str(error)
        return ""

    def _piece_of(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the state of this rank's piece, with the sum of the residuals of the host's ranks. Collective."""
        residual = np.empty_like(self._piece)
        whole = whole_residual(state, self._rank)["codec.residual"]
        self._sums.total(views(np.ascontiguousarray(whole), self.specs), residual)
        lengths = self._codec.init([s.elements for s in self.inner.specs]).arrays()["lengths"]
        before = {k.removeprefix("codec."): v for k, v in state.items() if k.startswith("codec.")}
        piece = scaled(before, lengths / before["lengths"])
        piece |= {"residual": residual, "lengths": lengths, "step": state["codec.step"]}
        rest = {k: v for k, v in state.items() if not k.startswith(("codec.", "piece", OWNER))}
        return rest | {f"codec.{k}": v for k, v in piece.items()}


def _common(sample: Sequence[np.ndarray] | None, words: np.ndarray) -> list[np.ndarray] | None:
    """Return the samples of a host's ranks as one; None without samples.

    Args:
        sample: sample of this rank.
        words: results of `words_of` of all ranks, of float32.
    """
    if not sample:
        return None
    samples = np.ascontiguousarray(words).view(np.float32)[:, : sum(np.size(s) for s in sample)]
    return [common_sample(samples)]
