"""Exchange of the threshold strategy on hosts with several ranks: dense sums within a host, messages between hosts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdx.comm import Comm, clock
from hvdx.costs.link import probe
from hvdx.costs.types import Link
from hvdx.errors import ConfigError
from hvdx.log import Log
from hvdx.strategies.base import TensorSpec, views
from hvdx.strategies.compiling import prepare_together
from hvdx.strategies.host import HostExchange, Prepared, StepInput
from hvdx.strategies.step import EncodedStep, MessageExchange, saved_step
from hvdx.strategies.telemetry import Telemetry
from hvdx.strategies.threshold.density import INITIAL_DENSITY
from hvdx.strategies.threshold.host_sums import open_sums
from hvdx.strategies.threshold.noise import common_sample
from hvdx.strategies.threshold.options import Options
from hvdx.strategies.threshold.states import OWNER, scaled, whole_residual

_log = Log(__name__)

# "No rank", where a header names a rank of the host.
_NOBODY = -1

#: Function that opens the exchange of a piece between hosts; see `hvdx.strategies.threshold.opening.open_messages`.
OpenMessages = Callable[..., MessageExchange]


@dataclass(frozen=True)
class _HostStep(Prepared):
    """Encoded piece of a step.

    Attributes:
        exchange: exchange that encoded the piece.
        step_input: input of this rank.
        status: status of this rank alone.
        inner: the step in the exchange between hosts.
        others_fail: whether the host cannot take the step because of one of its other ranks.
    """

    exchange: "HostsExchange"
    inner: EncodedStep
    others_fail: bool

    def deliver(self) -> list[np.ndarray]:
        return self.exchange.deliver(self)


class HostsExchange(HostExchange):
    """Exchange of one optimiser under `Threshold(local="dense")`.

    The vector of all elements is divided into one piece for each rank of a host. The ranks of a host add up their
    updates, each for its own piece (`threshold.host_sums`). The ranks with the same piece, one on each host, exchange
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
        hosts = list(dict.fromkeys(comm.hosts))
        members = [[rank for rank, name in enumerate(comm.hosts) if name == host] for host in hosts]
        self._host = hosts.index(comm.hosts[comm.rank])
        self._rank = comm.rank
        self._position, self._count = members[self._host].index(comm.rank), len(members[self._host])
        local = comm.divide(self._host, self._position, "the ranks of a host")
        between = comm.divide(self._position, self._host, "the hosts")
        # Numbers in reports, of the ranks of this host.
        self._world_ranks = local.world_ranks
        self._hosts = between.size
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

    @property
    def telemetry(self) -> Telemetry:
        """Counters of the exchange between hosts; `sent` and `received` count bytes between hosts."""
        return self.inner.telemetry

    def reset_telemetry(self) -> None:
        self.inner.reset_telemetry()

    def add_cost(self, counter: str, seconds: float) -> None:
        self.inner.add_cost(counter, seconds)

    # -- a step -------------------------------------------------------------------------------------------------------

    def combine(self, step_input: StepInput) -> list[np.ndarray]:
        return self.prepare(step_input).deliver()

    def prepare(self, step_input: StepInput) -> _HostStep:
        """Add up the updates of the host, and encode this rank's piece. Collective among the ranks of a host."""
        inner, tensors = self.inner, [np.asarray(t) for t in step_input.tensors]
        begin = clock.now()
        self._sums.publish(tensors)
        seconds = clock.now() - begin
        arrived = self._channel.exchange([int(not step_input.finite), *_words_of(step_input.sample)])
        self.telemetry.waiting += arrived.waited
        sample = _common(step_input.sample, arrived.headers[:, 1:])
        begin = clock.now()
        finite = self._add_up(tensors, self._piece)
        faulty, fault = (_NOBODY, "") if finite else self._find_fault(tensors)
        seconds += clock.now() - begin
        sent = inner.prepare(replace(step_input, tensors=self._piece_views, finite=True, blamed="", sample=sample))
        self.add_cost("exchanging", seconds)
        if not sent.is_fine:
            faulty = self._position
        statuses = self._channel.exchange([faulty, round(1e9 * sent.computing), round(1e9 * sent.cost)])
        self.telemetry.waiting += statuses.waited
        # The same times on all ranks of a host, so that all pieces keep one density.
        computing, cost = float(statuses.headers[:, 1].mean()) / 1e9, float(statuses.headers[:, 2].max()) / 1e9
        sent = replace(sent, computing=computing, cost=cost)
        blaming = statuses.headers[:, 0].tolist()
        failed = {*np.flatnonzero(arrived.headers[:, 0]).tolist(), *blaming} - {_NOBODY}
        if fault and blaming.index(faulty) == self._position:
            where = f"rank {self._world_ranks[faulty]}, step {sent.number + 1}"
            _log.warning(f"{where}: {fault}: NaN or infinity in the update")
        step = _HostStep(self, step_input, sent.status, sent, bool(failed))
        return step.skipped(blamed=True) if self._position in failed else step

    def deliver(self, step: _HostStep) -> list[np.ndarray]:
        """Exchange an encoded piece; see `Prepared.deliver`."""
        inner = replace(step.inner, status=step.status)
        self.inner.deliver(inner.skipped(blamed=False) if step.is_fine and step.others_fail else inner)
        return self._gather()

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

    def _gather(self) -> list[np.ndarray]:
        """Gather the results of the host's ranks."""
        begin = clock.now()
        waited = self._sums.gather(np.asarray(self.inner.result) if self._sums.targets is None else None)
        self.telemetry.inside += self._sums.gathered
        self.telemetry.waiting += waited
        self.add_cost("exchanging", clock.now() - begin - waited)
        return self._out

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


def _words_of(sample: Sequence[np.ndarray] | None) -> list[int]:
    """Return the sample of a rank's gradients, two float32 in an integer."""
    if not sample:
        return []
    flat = np.concatenate([np.ravel(s) for s in sample])
    words = np.zeros(-(-flat.size // 2) * 2, np.float32)
    with np.errstate(over="ignore"):
        words[: flat.size] = flat
    found: list[int] = words.view(np.int64).tolist()
    return found


def _common(sample: Sequence[np.ndarray] | None, words: np.ndarray) -> list[np.ndarray] | None:
    """Return the samples of a host's ranks as one; None without samples.

    Args:
        sample: sample of this rank.
        words: results of `_words_of` of all ranks.
    """
    if not sample:
        return None
    samples = np.ascontiguousarray(words).view(np.float32)[:, : sum(np.size(s) for s in sample)]
    return [common_sample(samples)]
