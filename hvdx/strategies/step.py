"""A step of an exchange of messages: input -> encoder -> route -> result.

`MessageExchange` is the step. It holds an `Encoder` (what a rank sends, and what it keeps) and a `Route` (how messages
travel), adds the agreement on NaN, skipped steps and counters, and knows neither their classes nor their parts. All
decisions depend only on what the route returns, which is the same on all ranks, so all ranks decide the same without
another exchange. If one rank has NaN, all ranks skip the step, and their residuals stay unchanged.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hvdx.comm import Comm
from hvdx.comm.memory import aligned
from hvdx.costs.types import Link
from hvdx.errors import ConfigError, UpdateError, WireError
from hvdx.log import Log
from hvdx.strategies.contract import TensorSpec, views
from hvdx.strategies.host_exchange import (
    ELSEWHERE,
    FINE,
    MAX_SKIPPED_STEPS,
    NOT_FINITE,
    REFUSED,
    Encoded,
    HostExchange,
    Outgoing,
    StepInput,
)
from hvdx.strategies.telemetry import Telemetry

if TYPE_CHECKING:
    from hvdx.codec.base import Array  # imports Numba, which not all strategies need

_log = Log(__name__)

#: Exchanges between measurements of the residual, each of which reads all of it.
RESIDUAL_EVERY = 64


class DeviceArrays(Protocol):
    """Functions for arrays of another device than the host, such as `hvdx.codec.devices.Gpu`."""

    def zeros(self, n: int) -> "Array":
        """Return float32[n] of zeros."""

    def view(self, array: "Array") -> "Array":
        """Return an array of another library as one that the other functions take without a conversion."""

    def place(self, values: np.ndarray) -> "Array":
        """Return a copy of a host array."""

    def fetch(self, array: "Array") -> np.ndarray:
        """Return a copy in host memory."""

    def assign(self, values: np.ndarray, out: "Array") -> None:
        """Copy a host array to an array of the device."""

    def copy(self, values: "Array", out: "Array") -> None:
        """Copy an array to another one."""

    def subtract(self, values: "Array", out: "Array") -> None:
        """Subtract an array from another one."""


def count_entries(counts: Telemetry, encoded: Encoded, elements: int) -> None:
    """Count the entries of a message of some elements."""
    counts.entries += encoded.entries
    counts.encoded += elements
    counts.entry_bytes += encoded.message.size
    counts.density, counts.tau = encoded.density, encoded.tau
    counts.starved += encoded.starved


class Encoder(abc.ABC):
    """Encoder of the tensors of one optimiser: what a rank sends in a step, and what it keeps in a residual.

    Attributes:
        device: device of tensors, residual and result; None for the host.
    """

    device: DeviceArrays | None = None

    @abc.abstractmethod
    def encode(self, step_input: StepInput, step: int) -> Encoded:
        """Encode the tensors of a step, and add to the residual what the message does not hold.

        Args:
            step_input: input of the step. Its tensors are float32 arrays of the shapes of the specs, or a list of one
                array on the device.
            step: number of the step, from 0.

        Raises:
            UpdateError: if the tensors cannot be encoded, for example because of NaN; all ranks then skip the step.
        """

    @abc.abstractmethod
    def silent(self, step: int) -> Encoded:
        """Return an empty message for a step in which this rank's tensors could not be encoded."""

    @abc.abstractmethod
    def roll_back(self, encoded: Encoded) -> None:
        """Restore the residual to its value before a step that all ranks skip.

        The update is dropped on every rank. If the residual kept it, the updates of several skipped steps, all computed
        from the same weights, would later be applied together.
        """

    def correction(self, ranks: int) -> float:
        """Return a factor on the mean of the updates; the same on all ranks.

        Args:
            ranks: number of ranks whose updates are in it.
        """
        return 1.0

    def observe_sample(self, sample: object) -> None:
        """Process the sample of gradients of all ranks, as the route returned it."""
        return

    @property
    def period(self) -> int:
        """Number of steps until the next exchange; see `HostExchange.period`."""
        return 1

    def observe_cost(self, computing: float, costs: Sequence[float]) -> None:
        """Adapt to the seconds of a step, which are the same on all ranks.

        Args:
            computing: seconds of computing.
            costs: seconds that the exchange took on each rank.
        """
        return

    @abc.abstractmethod
    def read_residual(self) -> np.ndarray:
        """Return the residual in host memory, float32[elements], in the order of the elements of the tensors."""

    def unsent(self, allocate: "Callable[[int], Array] | None") -> "Array":
        """Return the residual on the encoder's device, float32[elements]; see `HostExchange.unsent`."""
        return self.read_residual()

    @abc.abstractmethod
    def write_residual(self, values: np.ndarray) -> None:
        """Set the residual to what `read_residual` is to return."""

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        """Add tensors to the residual; see `HostExchange.add_to_residual`."""
        flat = np.concatenate([np.ravel(t) for t in tensors])
        self.write_residual((self.read_residual() + flat).astype(np.float32, copy=False))

    def residual_rms(self) -> float:
        """Return the root mean square of the residual, in units of tau; 0 without tau."""
        return 0.0

    @abc.abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the state for a checkpoint."""

    @abc.abstractmethod
    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a saved state.

        Raises:
            ConfigError: if it does not fit the tensors or the options.
        """


@dataclass(frozen=True)
class Arrived(abc.ABC):
    """What a route returns: the contributions of all ranks to a step. A route derives its own class, with `add_to`.

    Attributes:
        statuses: int64[ranks], status of each rank.
        times: int64[ranks, 2], computing and cost of each rank in nanoseconds.
        waited: seconds until all ranks had begun the exchange.
        seconds: seconds from then until all messages had arrived, without the next two.
        encoding, decoding: seconds of work on messages of other ranks.
        sent, received: bytes to and from other ranks.
        sample: sample of the gradients of all ranks, for the encoder; None if there is none.
    """

    statuses: np.ndarray
    times: np.ndarray
    waited: float
    seconds: float
    encoding: float = 0.0
    decoding: float = 0.0
    sent: int = 0
    received: int = 0
    sample: object = None

    @abc.abstractmethod
    def add_to(self, out: "Sequence[Array]", scale: float, clear: bool) -> None:
        """Add the sum of the messages that count, times a factor, to an output.

        Args:
            out: contiguous arrays of as many elements together as the tensors, in their order.
            scale: the factor.
            clear: the output is set to the sum; its elements are not read.

        Raises:
            WireError: if a message is damaged; it names the rank by its number in the route.
        """

    def add_sum_to(self, out: Sequence[np.ndarray], scale: float) -> None:
        """Add the sum of the messages that count, times a factor, to an output of the host: one addition an element.

        Args:
            out, scale: see `add_to`.

        Raises:
            WireError: as `add_to` does; the output is then undefined.
        """
        total = [np.empty(array.shape, np.float32) for array in out]
        self.add_to(total, scale, True)
        for array, change in zip(out, total, strict=True):
            np.add(array, change, out=array)


class Route(abc.ABC):
    """Way of messages between the ranks.

    Attributes:
        description: how messages travel, if it is not from each rank to all others; else "".
    """

    description: str = ""

    @abc.abstractmethod
    def send(self, outgoing: Outgoing) -> Arrived:
        """Exchange the contributions of all ranks. Collective.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
            WireError: see `Arrived.add_to`.
        """

    def residual(self) -> np.ndarray | float:
        """Return the residual that this rank keeps for the route, float32[elements] in the order of the tensors."""
        return 0.0

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the state for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Restore a saved state of this or another route; return the state for the encoder.

        Raises:
            ConfigError: if it does not fit the tensors or the ranks.
        """
        return state


class MessageExchange(HostExchange):
    """Exchange of one optimiser by messages: the step around an encoder and a route.

    Args:
        comm: the ranks.
        specs: the tensors.
        encoder: what a rank sends, and keeps.
        route: how messages travel.
        ranks_per_message: number of ranks whose tensors each message holds.
        results: arrays to which results are written, contiguous float32 arrays of the host with as many elements
            together as the tensors; then the arrays that a step returns, and `result`, are undefined.
        network: link between the ranks, if it was measured.

    Attributes:
        encoder, route: see above.
    """

    def __init__(
        self,
        comm: Comm,
        specs: Sequence[TensorSpec],
        encoder: Encoder,
        route: Route,
        ranks_per_message: int = 1,
        results: Sequence[np.ndarray] | None = None,
        network: Link | None = None,
    ):
        super().__init__(specs, Telemetry())
        self.encoder, self.route, self._device = encoder, route, encoder.device
        self._comm, self._per_message = comm, ranks_per_message
        self.network = network
        # Result of a step.
        self._flat = aligned(self._n if self._device is None else 0)
        self._out: Sequence[Array] = [] if self._device is not None else views(self._flat, specs)
        # Arrays that are set to the result on the host.
        self._results: Sequence[Array] = list(results) if results is not None else [self._flat]
        # Residual of the last step as the tensors, and its address.
        self._unsent: list[np.ndarray] = []
        self._unsent_at = 0
        self._step = 0
        self._exchanges = 0
        self._computing = 0.0

    @property
    def description(self) -> str:
        """How messages travel, if it is not from each worker to all others; else ""."""
        return self.route.description

    @property
    def period(self) -> int:  # type: ignore[override]
        return self.encoder.period

    # -- a step -------------------------------------------------------------------------------------------------------

    def combine(self, step_input: StepInput) -> "Sequence[Array]":
        return self.deliver(self.prepare(step_input))

    def prepare(self, step_input: StepInput) -> Outgoing:
        """Encode the tensors of a step. Not collective."""
        begin, cost, self._cost = self._now(), self._cost, 0.0
        if step_input.computing is not None:
            self._computing = step_input.computing
        given, status = step_input, FINE if step_input.finite else NOT_FINITE
        if self._device is not None:
            given = step_input._replace(tensors=[self._device.view(t) for t in step_input.tensors])
        try:
            encoded = self.encoder.encode(given, self._step)
            count_entries(self.telemetry, encoded, self._n)
        except UpdateError as error:
            where = f"rank {self._comm.world_ranks[self._comm.rank]}, step {self._step + 1}"
            fault = error.within(self.specs[error.variable].name)
            _log.warning(f"{where}: {fault}")
            status, encoded = REFUSED, self.encoder.silent(self._step)
        several = self._comm.size * self._per_message > 1
        sample = np.concatenate([np.ravel(s) for s in step_input.sample]) if several and step_input.sample else None
        seconds = self._now() - begin
        self.telemetry.encoding += seconds
        self._cost += seconds
        times = round(1e9 * self._computing), round(1e9 * cost)
        return Outgoing(step_input, status, encoded, self._step, times, sample)

    def deliver(self, outgoing: Outgoing) -> "Sequence[Array]":
        """Exchange an encoded step, and return the sum of the messages. Collective."""
        try:
            arrived = self.route.send(outgoing)
        except WireError as error:
            raise self._of_world(error) from None
        scale = self._count(outgoing, arrived)
        begin = self._now()
        result = self._decode(outgoing.step_input, arrived, scale)
        seconds = self._now() - begin
        self.telemetry.decoding += seconds
        self._cost += seconds
        self._step += outgoing.step_input.steps
        return result

    def _of_world(self, error: WireError) -> WireError:
        """Return the error of a damaged message, with its sender's rank among all ranks."""
        return error if error.rank is None else error.of(self._comm.world_ranks[error.rank])

    @property
    def result(self) -> "Array":
        """Result of the last step as one array, float32[elements], which the next step overwrites."""
        return self._flat

    @property
    def steps(self) -> int:
        """Number of steps taken, those of the restored state included."""
        return self._step

    def _decode(self, step_input: StepInput, arrived: Arrived, scale: float | None) -> "Sequence[Array]":
        """Return the sum of the messages that arrived, times a factor; zeros for None, if all ranks skip the step."""
        into, on_host = step_input.into, self._device is None
        try:
            if into is not None and all(array.dtype == np.float32 for array in into):
                # A result of its own would have the size of the model.
                if scale is not None:
                    arrived.add_sum_to(into, scale)
                return into
            out, results = self._out, self._results
            if self._device is not None:
                # A new array, because TensorFlow may keep the previous one. The caller has it.
                out = [(step_input.allocate or self._device.zeros)(self._n)]
                results = [self._device.view(out[0])]
            if scale is not None:
                arrived.add_to(results, scale, on_host)
            elif on_host:
                for result in results:
                    result[...] = 0
            return out
        except WireError as error:
            raise self._of_world(error) from None

    # -- counters -----------------------------------------------------------------------------------------------------

    def _count(self, outgoing: Outgoing, arrived: Arrived) -> float | None:
        """Count the cost of an exchange; return the factor of the sum of its messages, None if the step is skipped."""
        counts, steps, encoded = self.telemetry, outgoing.step_input.steps, outgoing.encoded
        assert encoded is not None
        counts.steps += steps
        self._exchanges += 1
        counts.messages += encoded.message.size
        counts.sent += arrived.sent
        counts.received += arrived.received
        counts.waiting += arrived.waited
        counts.encoding += arrived.encoding
        counts.decoding += arrived.decoding
        counts.exchanging += arrived.seconds
        self._cost += arrived.encoding + arrived.decoding + arrived.seconds
        skipped = bool(arrived.statuses.any())
        if not skipped:
            self.encoder.observe_sample(arrived.sample)
        if self._exchanges % RESIDUAL_EVERY == 1 and counts.tau:
            counts.residual = self.encoder.residual_rms()
        computing = float(np.median(arrived.times[:, 0])) / 1e9
        self.encoder.observe_cost(computing, (arrived.times[:, 1] / 1e9).tolist())
        counts.period = self.encoder.period
        if skipped:
            if encoded.message.size:
                self.encoder.roll_back(encoded)
            self._report_skipped(arrived.statuses, outgoing.step + steps - 1)
            return None
        self._skips = 0
        return self.unsent_share

    def _report_skipped(self, statuses: np.ndarray, step: int) -> None:
        ranks = [self._comm.world_ranks[i] for i, status in enumerate(statuses) if status not in (FINE, ELSEWHERE)]
        listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank that reports name"
        self._skipped(
            self._comm.rank == 0 and bool(ranks),  # otherwise another exchange reports
            lambda again: f"step {step + 1}: NaN or infinity on {listed}; all ranks skipped the step{again}.",
            lambda: f"{MAX_SKIPPED_STEPS} steps in a row were skipped: NaN or infinity on {listed}. The training has "
            "diverged: lower the learning rate, clip gradients, or check the data of that rank.",
        )

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def unsent_share(self) -> float:  # type: ignore[override]
        ranks = self._comm.size * self._per_message
        return 1.0 / ranks * self.encoder.correction(ranks)

    def unsent(self, allocate: "Callable[[int], Array] | None" = None) -> "Sequence[Array]":
        residual = self.encoder.unsent(allocate)
        if self._device is not None:
            return [residual]
        flat = np.asarray(residual)
        # Usually the same memory in each step.
        if flat.ctypes.data != self._unsent_at:
            self._unsent_at, self._unsent = flat.ctypes.data, views(flat, self.specs)
        return self._unsent

    @property
    def residuals(self) -> list[np.ndarray]:
        """Residuals of this rank, with that which it keeps for the route."""
        kept = self.route.residual()
        mine = self.encoder.read_residual()
        return views(mine if isinstance(kept, float) else mine + kept, self.specs)

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        self.encoder.add_to_residual(tensors)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state of encoder and route, and the number of steps."""
        return {"step": np.array(self._step)} | self.encoder.arrays() | self.route.arrays()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        step = saved_step(state)
        self.encoder.restore(self.route.restore(state))
        self._step = step


def saved_step(state: Mapping[str, np.ndarray]) -> int:
    """Return the number of steps in a saved state.

    Raises:
        ConfigError: if there is none, or a result waited to be applied.
    """
    if "late" in state:
        raise ConfigError(
            "the saved state: expected no result in flight, got one of overlap=True, an option that was removed. "
            "Restore a checkpoint of the end of an epoch."
        )
    if "step" not in state:
        raise ConfigError(f"the saved state: expected a step, got {sorted(state)}.")
    return int(state["step"])
