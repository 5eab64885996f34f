"""Base classes of exchanges on the host.

`HostExchange` measures the time of each step and reports skipped steps. `MessageExchange` is for strategies that send
every rank's message to every rank: it adds the vote on NaN, skipped steps, overlap and byte counts.
"""

import abc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from hvdx.comm import Comm, Received, clock
from hvdx.comm.alignment import aligned
from hvdx.errors import ConfigError, HvdxError, UpdateError, WireError
from hvdx.strategies.base import Exchange, TensorSpec, views
from hvdx.strategies.telemetry import Telemetry

if TYPE_CHECKING:
    from hvdx.codec import Codec  # imports Numba, which not all strategies need

T = TypeVar("T")

# Status of a rank's step, in the header of its message. "Elsewhere": another exchange reports why the step is skipped.
_FINE, _NOT_FINITE, _REFUSED, _ELSEWHERE = 0, 1, 2, 3
#: Number of skipped steps in a row after which the training ends with an error, because it has diverged.
MAX_SKIPPED_STEPS = 100


@dataclass
class Prepared:
    """Step of one rank that is ready to be exchanged.

    Attributes:
        update: tensors of this rank.
        status: status of this rank; it is sent to the others.
    """

    update: Sequence[np.ndarray]
    status: int

    @property
    def is_fine(self) -> bool:
        """True if this rank can take the step."""
        return self.status == _FINE

    def skip(self, blamed: bool) -> None:
        """Skip the step in this exchange because this rank, or another one, skips it in one of its exchanges.

        Args:
            blamed: whether reports name this rank.
        """
        self.status = _NOT_FINITE if blamed else _ELSEWHERE


class HostExchange(Exchange):
    """Exchange that runs on the host. A subclass implements `combine`, and may override the other methods.

    Args:
        specs: the tensors.
        telemetry: counters of the exchange.

    Attributes:
        telemetry: counters of the exchange; a caller may replace them.
        blamed: for a step that is not finite, the variable whose gradient held NaN or infinity; "" if unknown.
        network: `hvdx.strategies.link.Link` between the ranks, if the exchange has measured it; otherwise None.
        sample: for a strategy that corrects second moments, some elements of this rank's gradients in this step, each
            divided by the root of its second moment: one float array per tensor (on a GPU, one for all tensors), of the
            same sizes on all ranks and in all steps. None if the optimiser does not divide by second moments.
        allocate: for an exchange on a GPU, function from a number of elements to a new float32 array of zeros there, as
            which a step returns its result; None for an array of Numba.
    """

    network: Any = None
    sample: Sequence[np.ndarray] | None = None
    allocate: Callable[[int], Any] | None = None

    def __init__(self, specs: Sequence[TensorSpec], telemetry: Telemetry):
        self.specs, self.telemetry, self.blamed = list(specs), telemetry, ""
        self._n = self.telemetry.elements = sum(s.elements for s in specs)
        # End of the last step; None if the time from there to the next step is not all computing.
        self._last_end: float | None = None
        self._computed = 0.0
        self._skips = 0

    @abc.abstractmethod
    def combine(self, tensors: Sequence[np.ndarray], finite: bool) -> list[np.ndarray]:
        """Do the work of `Exchange.step`, without the measurement of the time between two steps."""

    def step(self, tensors: Sequence[np.ndarray], finite: Any = True) -> list[np.ndarray]:
        self.stop_timer()
        result = self.combine(tensors, bool(finite))
        self.start_timer()
        return result

    def prepare(self, tensors: Sequence[np.ndarray], finite: bool) -> Any:
        """Do the part of `combine` that comes before the exchange. Not collective.

        Args:
            tensors, finite: see `step`.

        Returns:
            A `Prepared`.
        """
        fine = finite and all(bool(np.isfinite(t.sum(dtype=np.float64))) for t in tensors)
        return Prepared(tensors, _FINE if fine else _NOT_FINITE)

    def deliver(self, prepared: Any) -> list[np.ndarray]:
        """Exchange what `prepare` returned; return the result of `combine`. Collective, as `step` is."""
        return self.combine(prepared.update, prepared.is_fine)

    def start_timer(self) -> None:
        """Start the compute timer at the end of a step."""
        self._last_end = clock.now()

    def stop_timer(self) -> None:
        """Stop the compute timer at the beginning of a step, and count the time."""
        if self._last_end is not None:
            self._computed = clock.now() - self._last_end
            self.telemetry.computing += self._computed

    def restart_timer(self) -> None:
        """Restart the compute timer before a run of steps."""
        self._last_end = None

    @property
    def is_open(self) -> bool:
        """True if `step` may be called. An exchange of weights may be closed: `begin` must then be called first."""
        return True

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Open an exchange of weights with the given weights. Collective.

        Args:
            weights: arrays of the shapes of the specs; those of rank 0 are used.
        """

    def renew(self) -> None:
        """Discard a session that an exception ended. Some ranks may not have begun the session. Collective."""

    @property
    def residuals(self) -> list[np.ndarray]:
        """Residuals of this rank, which callers must not change: float32 arrays of the shapes of the specs."""
        return [np.zeros(s.shape, np.float32) for s in self.specs]

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        """Add tensors to the residual; a no-op if the exchange has none.

        Args:
            tensors: float32 arrays of the shapes of the specs.
        """

    def drain(self) -> None:
        """Wait for the step in flight, and keep its result for the next step. Collective.

        Unlike `flush`, it does not change the results of the training.
        """

    def _find(self, place: int) -> tuple[int, int]:
        """Return the index of the tensor that holds an element of the flat array, and the element in it."""
        ends = np.cumsum([s.elements for s in self.specs])
        variable = int(np.searchsorted(ends, place, side="right"))
        return variable, place - int(ends[variable]) + self.specs[variable].elements

    def _skipped(self, reports: bool, report: Callable[[str], str], error: Callable[[], str]) -> None:
        """Count a skipped step. Report only the 1st, 2nd, 4th, 8th ... in a row, so that a long series stays readable.

        Args:
            reports: whether this rank prints the report.
            report: function that returns the report; its argument is "" or a text such as ", 4 in a row".
            error: function that returns the message of the error that ends the training.

        Raises:
            HvdxError: after `MAX_SKIPPED_STEPS` steps in a row.
        """
        self.telemetry.skipped += 1
        self._skips += 1
        if self._skips >= MAX_SKIPPED_STEPS:
            raise HvdxError(error())
        if reports and (self._skips & (self._skips - 1)) == 0:
            again = f", {self._skips} in a row" if self._skips > 1 else ""
            print(f"hvdx: {report(again)}", file=sys.stderr, flush=True)


@dataclass
class Sent(Prepared):
    """Encoded update, before it is sent or in flight.

    Attributes:
        update: tensors that this rank added to its residual.
        message: uint8[bytes], message of this rank; it must not change before it is decoded.
        codec: codec of the message.
        active: number of ranks whose messages count.
        step: number of the step, from 0.
        late: the step before, if this rank has waited for it, and ranks did not skip it.
    """

    message: np.ndarray
    codec: "Codec[Any]"
    active: int
    step: int
    late: "tuple[Sent, Received] | None" = None


class DeviceArrays(Protocol):
    """Functions for arrays of another device than the host, such as `hvdx.codec.devices.Gpu`."""

    def zeros(self, n: int) -> Any:
        """Return float32[n] of zeros."""

    def view(self, array: Any) -> Any:
        """Return an array of another library as one that the other functions take without a conversion."""

    def place(self, values: np.ndarray) -> Any:
        """Return a copy of a host array."""

    def fetch(self, array: Any) -> np.ndarray:
        """Return a copy in host memory."""

    def copy(self, array: Any) -> Any:
        """Return a copy on the device."""

    def assign(self, values: np.ndarray, out: Any) -> None:
        """Copy a host array to an array of the device."""

    def add(self, values: Any, out: Any) -> None:
        """Add an array to another one."""

    def subtract(self, values: Any, out: Any) -> None:
        """Subtract an array from another one."""


class MessageExchange(HostExchange):
    """Exchange that sends every rank's message to every rank, and adds them up in rank order.

    A subclass implements `codec` and `encode`. All decisions depend only on the headers of messages, so all ranks
    decide the same without another exchange. If one rank has NaN, all ranks skip the step, and their residuals stay
    unchanged.

    Args:
        comm: the ranks.
        specs: the tensors.
        what: name of the tensors, for error messages.
        op: "mean" or "sum" of the ranks' tensors.
        overlap: let messages travel while the next step is computed; they are added one step late.
        device: device of the tensors, the result and the residual; None for the host. The tensors of a step and its
            result are then one array in a list, with the elements of all tensors.
    """

    def __init__(
        self,
        comm: Comm,
        specs: Sequence[TensorSpec],
        what: str,
        op: str = "mean",
        overlap: bool = False,
        device: DeviceArrays | None = None,
    ):
        super().__init__(specs, Telemetry())
        self._device = device
        self._rank, self._size, self._op = comm.rank, comm.size, op
        # Numbers of the ranks in reports.
        self._numbers = comm.world_ranks
        self._channel = comm.channel(what)
        # Result of a step.
        self._flat: Any = aligned(self._n if device is None else 0)
        self._out = [] if device is not None else views(self._flat, specs)
        # Arrays that are set to the result on the host; see `write_to`.
        self._results = [self._flat]
        self._thread = clock.background("hvdx-exchange") if overlap else None
        self._pending: tuple[Sent, Future[Received]] | None = None
        self._drained: np.ndarray | None = None
        self._step = 0
        # Seconds that this step has cost so far, and that the step before it cost.
        self._cost = self._cost_before = 0.0
        # Seconds of computing in this step, and seconds that the previous step cost, for the header. The owner of this
        # exchange may change them between `prepare` and `deliver`.
        self.times = (0.0, 0.0)

    # -- methods of subclasses ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def codec(self) -> "Codec[Any]":
        """Return the codec of this step, the same on all ranks. It is called before `encode`."""

    @abc.abstractmethod
    def encode(self, tensors: Sequence[np.ndarray], codec: "Codec[Any]") -> np.ndarray:
        """Encode the message of a step: uint8[bytes].

        Args:
            tensors: float32 arrays of the shapes of the specs.
            codec: codec of this step.

        Raises:
            UpdateError: if the tensors cannot be encoded, for example because of NaN; all ranks then skip the step.
        """

    @property
    def residual(self) -> Any:
        """Residual, float32[elements] on the device, to which `encode` adds its tensors; None if there is none."""
        return None

    def active(self) -> int:
        """Return the number of ranks whose messages count in this step. They are the lowest ranks."""
        return self._size

    def more_header(self) -> Sequence[int]:
        """Return integers that a strategy adds to the header of this rank; their number is the same on all ranks."""
        return ()

    def scale(self, active: int) -> float:
        """Return the factor on the sum of the messages; the same on all ranks.

        Args:
            active: number of ranks whose messages count.
        """
        return 1.0 / active if self._op == "mean" else 1.0

    def observe(self, received: Received) -> None:
        """Process the headers and messages of all ranks, which are the same on every rank.

        Args:
            received: headers are [status, nanoseconds of computing, nanoseconds that the previous step cost], followed
                by `more_header`. The cost is the time of encoding, transfer and decoding; with overlap, that which the
                computation did not hide.
        """

    def swap(self, header: Sequence[int], sent: Sent) -> Received:
        """Exchange the message of this rank for those of all ranks, and count the bytes.

        Args:
            header: header of this rank, as `observe` describes it.
            sent: the step.
        """
        received = self._channel.exchange(header, sent.message)
        counts, others, size = self.telemetry, self._size - 1, 8 * (len(header) + 1)
        counts.sent += others * (sent.message.size + size)
        counts.received += sum(m.size for m in received.messages) - sent.message.size + others * size
        return received

    # -- a step -------------------------------------------------------------------------------------------------------

    def combine(self, tensors: Sequence[np.ndarray], finite: bool) -> list[np.ndarray]:
        return self.deliver(self.prepare(tensors, finite))

    def prepare(self, tensors: Sequence[np.ndarray], finite: bool) -> Sent:
        # The late step comes first: if all ranks skip it, the residual is restored before the next update is added.
        self._cost_before, self._cost = self._cost, 0.0
        self.times = self._computed, self._cost_before
        late = self._take_pending()
        sent = self._clock("encoding", lambda: self._encode(tensors, finite))
        sent.late = late
        return sent

    def deliver(self, sent: Sent) -> list[np.ndarray]:
        late, sent.late = sent.late, None
        header = [sent.status, *(round(1e9 * seconds) for seconds in self.times), *self.more_header()]
        if self._thread is None:
            received = self._exchange(header, sent)
            late = (sent, received) if self._count(sent, received) else None
        result = self._clock("decoding", lambda: self._decode(late))
        if self._thread is not None:
            # The next exchange begins after decoding, because it overwrites the messages of the late step.
            self._pending = sent, self._thread.submit(self._exchange, header, sent)
        if self._device is not None:
            self._flat, self._out = None, []  # the caller has the result
        self._step += 1
        return result

    def _exchange(self, header: Sequence[int], sent: Sent) -> Received:
        with self._naming():
            return self.swap(header, sent)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Name the sender of a damaged message by its number in reports."""
        try:
            yield
        except WireError as error:
            raise error if error.rank is None else error.of(self._numbers[error.rank]) from None

    def _encode(self, tensors: Sequence[np.ndarray], finite: bool) -> Sent:
        codec, active = self.codec(), self.active()
        sent = Sent((), _FINE, np.zeros(0, np.uint8), codec, active, self._step)
        if self._rank >= active:
            return sent  # this rank's message does not count, so its NaN does not count either
        if self._device is not None:
            tensors = [self._device.view(t) for t in tensors]
        try:
            sent.message = self.encode(tensors, codec)
        except UpdateError as error:
            where = f"rank {self._numbers[self._rank]}, step {self._step + 1}"
            fault = error.within(self.specs[error.variable].name)
            print(f"hvdx: {where}: {fault}", file=sys.stderr, flush=True)
            sent.status = _REFUSED
            return sent
        sent.status = _FINE if finite else _NOT_FINITE
        # With overlap the update is needed after the step, when TensorFlow may have overwritten its arrays.
        copy = np.copy if self._device is None else self._device.copy
        sent.update = tensors if self._thread is None else [copy(t) for t in tensors]
        return sent

    @property
    def result(self) -> Any:
        """Result of the last step or flush as one array, float32[elements], which the next step overwrites."""
        return self._flat

    @property
    def in_flight(self) -> bool:
        """True if a result is still to come; see `flush`."""
        return self._pending is not None or self._drained is not None

    def write_to(self, arrays: Sequence[np.ndarray]) -> None:
        """Write the results of steps and flushes to other arrays; `result` and the returned arrays are then undefined.

        Args:
            arrays: contiguous float32 arrays of the host, with as many elements together as the tensors.
        """
        self._results = list(arrays)

    def charge(self, seconds: float) -> None:
        """Count work of this exchange's owner as a part of the exchange of this step.

        Args:
            seconds: time that the work took.
        """
        self._cost += seconds
        self.telemetry.exchanging += seconds

    def flush(self) -> list[np.ndarray] | None:
        if not self.in_flight:
            return None
        late = self._clock("decoding", lambda: self._decode(self._take_pending()))
        # Outside of a step results are on the host.
        return late if self._device is None else views(self._device.fetch(self._flat), self.specs)

    def drain(self) -> None:
        if self._pending is not None:
            self._clock("decoding", lambda: self._decode(self._take_pending()))
            self._drained = np.concatenate(self._results) if self._device is None else self._device.fetch(self._flat)

    def _take_pending(self) -> tuple[Sent, Received] | None:
        """Wait for the step in flight. Return None if there is none, or if all ranks skip it."""
        if self._pending is None:
            return None
        (sent, future), self._pending = self._pending, None
        begin = clock.now()
        received = future.result()
        # The time spent here is the part of the exchange that the computation did not hide.
        return (sent, received) if self._count(sent, received, clock.now() - begin) else None

    def _decode(self, arrived: tuple[Sent, Received] | None) -> list[np.ndarray]:
        """Return the sum of the messages that arrived and of the drained result."""
        if arrived is None or self._device is not None:
            self._clear()
        if arrived is not None:
            sent, received = arrived
            with self._naming():
                self.add_up(sent, received.messages, self.scale(sent.active))
        if self._drained is not None:
            if self._device is None:
                ends = np.cumsum([r.size for r in self._results])
                for result, more in zip(self._results, np.split(self._drained, ends[:-1]), strict=True):
                    np.add(result, more, out=result)
            else:
                self._device.add(self._device.place(self._drained), self._flat)
            self._drained = None
        return self._out

    def add_up(self, sent: Sent, messages: Sequence[np.ndarray], scale: float) -> None:
        """Set the result of the step to the sum of the messages of all ranks.

        Args:
            sent: the step.
            messages: those that `swap` returned.
            scale: factor on the sum.
        """
        if self._device is None:
            sent.codec.decode_sum(messages[: sent.active], self._results, scale)
        else:
            self._add_messages(sent.codec, messages[: sent.active], self._flat, scale)

    def _add_messages(self, codec: "Codec[Any]", messages: Sequence[np.ndarray], out: Any, scale: float = 1.0) -> None:
        """Add messages to an array on the device, through the host if the codec has no kernels there."""
        if self._device is None or codec.device != "cpu":
            codec.decode(messages, [out], scale)
            return
        flat = self._device.fetch(out)
        codec.decode(messages, [flat], scale)
        self._device.assign(flat, out)

    def _clear(self) -> None:
        """Prepare the result of a step. On a device it is a new array, because TensorFlow may keep the previous one."""
        if self._device is None:
            for result in self._results:
                result.fill(0)
        else:
            self._out = [(self.allocate or self._device.zeros)(self._n)]
            self._flat = self._device.view(self._out[0])

    # -- counters -----------------------------------------------------------------------------------------------------

    def _clock(self, counter: str, work: Callable[[], T]) -> T:
        begin = clock.now()
        result = work()
        seconds = clock.now() - begin
        self._cost += seconds
        setattr(self.telemetry, counter, getattr(self.telemetry, counter) + seconds)
        return result

    def _count(self, sent: Sent, received: Received, exposed: float | None = None) -> bool:
        """Count the cost of an exchange; return whether its step is to be added."""
        self._cost += received.seconds if exposed is None else exposed
        counts = self.telemetry
        counts.steps += 1
        counts.messages += sent.message.size
        if exposed is None:
            counts.waiting += received.waited
            counts.exchanging += received.seconds
        else:
            counts.exchanging += exposed
        self.observe(received)
        if received.headers[:, 0].any():
            self.take_back(sent)
            self._report_skipped(received.headers[:, 0], sent.step)
            return False
        self._skips = 0
        return True

    def take_back(self, sent: Sent) -> None:
        """Restore the residual to its value before a step that all ranks skip. A no-op if there is no residual.

        The update is dropped on every rank. If the residual kept it, the updates of several skipped steps, all computed
        from the same weights, would later be applied together.
        """
        if sent.message.size and self.residual is not None:
            self._add_messages(sent.codec, [sent.message], self.residual)
            if self._device is not None:
                self._device.subtract(sent.update[0], self.residual)
                return
            for tensor, residual in zip(sent.update, self.residuals, strict=True):
                np.subtract(residual, tensor, out=residual)

    def _report_skipped(self, statuses: np.ndarray, step: int) -> None:
        ranks = [self._numbers[i] for i, status in enumerate(statuses) if status not in (_FINE, _ELSEWHERE)]
        listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank that reports name"
        self._skipped(
            self._rank == 0 and bool(ranks),  # otherwise another exchange reports
            lambda again: f"step {step + 1}: NaN or infinity on {listed}; all ranks skipped the step{again}.",
            lambda: f"{MAX_SKIPPED_STEPS} steps in a row were skipped: NaN or infinity on {listed}. The training has "
            "diverged: lower the learning rate, clip gradients, or check the data of that rank.",
        )

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def residuals(self) -> list[np.ndarray]:
        if self.residual is None:
            return super().residuals
        return views(self.read_residual(), self.specs)

    def read_residual(self) -> np.ndarray:
        """Return the residual in host memory, float32[elements], in the order of the elements of the tensors."""
        return np.asarray(self.residual if self._device is None else self._device.fetch(self.residual))

    def write_residual(self, values: np.ndarray) -> None:
        """Set the residual to what `read_residual` is to return."""
        if self._device is None:
            self.residual[:] = values
        else:
            self._device.assign(values, self.residual)

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        if self.residual is not None:
            flat = np.concatenate([np.ravel(t) for t in tensors])
            self.write_residual((self.read_residual() + flat).astype(np.float32, copy=False))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the number of steps and the result that `drain` kept; a subclass adds its own state."""
        if self._pending is not None:
            raise HvdxError("state_dict: expected no step in flight, got one. Call flush or drain first.")
        return ({} if self._drained is None else {"late": self._drained}) | {"step": np.array(self._step)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the number of steps and the drained result; a subclass restores its own state."""
        if "step" not in state:
            raise ConfigError(f"the saved state: expected a step, got {sorted(state)}.")
        late = state.get("late")
        if late is not None and late.size != self._n:
            raise ConfigError(f"the saved state: expected a drained result of {self._n} elements, got {late.size}.")
        self._step = int(state["step"])
        self._drained = None if late is None else np.array(late, np.float32)
