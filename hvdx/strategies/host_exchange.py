"""The contract of an exchange on the host, with the compute timer and the reports of skipped steps."""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdx.comm import clock
from hvdx.costs.types import Link
from hvdx.errors import HvdxError
from hvdx.log import Log
from hvdx.strategies.contract import Exchange, TensorSpec
from hvdx.strategies.telemetry import Telemetry

if TYPE_CHECKING:
    from hvdx.codec.base import Array, Decoder  # imports Numba, which not all strategies need

_log = Log(__name__)

#: Status of a rank's step, in the header of its message. "Elsewhere": another exchange reports why the step is skipped.
FINE, NOT_FINITE, REFUSED, ELSEWHERE = 0, 1, 2, 3
#: Number of skipped steps in a row after which the training ends with an error, because it has diverged.
MAX_SKIPPED_STEPS = 100


class StepInput(NamedTuple):
    """Input of a step of an exchange on the host.

    Attributes:
        tensors: contiguous arrays of the shapes of the specs, float32 (weights also float64); on a GPU one array in a
            list, with the elements of all.
        finite: False if this rank's gradients held NaN or infinity.
        blamed: name of the variable whose gradient did; "" if unknown.
        sample: for a strategy that corrects second moments, some elements of this rank's gradients in this step, each
            divided by the root of its second moment: one float array per tensor (on a GPU, one for all tensors), of the
            same sizes on all ranks and in all steps. None if the optimiser does not divide by second moments.
        computing: seconds of computing before this step; None if they were not measured.
        preparing: seconds of work on the tensors before this step that would not be needed without an exchange.
        steps: number of the rank's own steps whose updates the tensors hold, added up; see `HostExchange.period`.
        allocate: on a GPU, function from a number of elements to a new float32 array of zeros there, as which the step
            returns its result; None for an array of Numba.
        into: on the host, arrays of the shapes of the specs, to which the result is added; the step then returns them.
            None for a result of its own.
    """

    tensors: "Sequence[Array]"
    finite: bool = True
    blamed: str = ""
    sample: Sequence[np.ndarray] | None = None
    computing: float | None = None
    preparing: float = 0.0
    steps: int = 1
    allocate: "Callable[[int], Array] | None" = None
    into: Sequence[np.ndarray] | None = None

    def subset(self, where: Sequence[int]) -> "StepInput":
        """Return the input of an exchange of some of the tensors.

        Args:
            where: indices of the tensors.
        """
        sample = None if self.sample is None else [self.sample[i] for i in where]
        into = None if self.into is None else [self.into[i] for i in where]
        return self._replace(tensors=[self.tensors[i] for i in where], sample=sample, into=into)


class Encoded(NamedTuple):
    """Encoded tensors of a step.

    Attributes:
        message: uint8[bytes], message of this rank; it must not change before it is decoded.
        codec: codec of the message.
        tensors: the tensors. Empty if this rank encoded nothing.
        entries: number of entries in the message.
        density: share of the elements that are entries.
        tau: threshold of the encoder after the step; 0 for none.
        starved: number of steps, this one included, that are found to be starved; see `Telemetry`.
    """

    message: np.ndarray
    codec: "Decoder"
    tensors: "Sequence[Array]" = ()
    entries: int = 0
    density: float = 0.0
    tau: float = 0.0
    starved: int = 0


class Outgoing(NamedTuple):
    """Contribution of this rank to a step, before it is exchanged.

    Attributes:
        step_input: input of the step.
        status: status of this rank, which is sent to the others.
        encoded: the encoded tensors; None in an exchange without messages.
        step: number of the step, from 0.
        times: nanoseconds of computing in this step, and nanoseconds that the previous exchange cost.
        sample: elements of this rank's gradients, float[n]; None if they are not compared.
    """

    step_input: StepInput
    status: int = FINE
    encoded: Encoded | None = None
    step: int = 0
    times: tuple[int, int] = (0, 0)
    sample: np.ndarray | None = None

    @property
    def is_fine(self) -> bool:
        """True unless the step fails because of this rank."""
        return self.status in (FINE, ELSEWHERE)

    def skipped(self, blamed: bool) -> "Outgoing":
        """Return this step as one that is skipped, because a rank skips it in another of its exchanges.

        Args:
            blamed: whether reports name this rank.
        """
        return self._replace(status=NOT_FINITE if blamed else ELSEWHERE)


class HostExchange(Exchange["Array"]):
    """Exchange that runs on the host. A subclass implements `combine`, and may override the other methods.

    Args:
        specs: the tensors.
        telemetry: counters of the exchange; None if a subclass has a property of this name.

    Attributes:
        telemetry: see above.
        network: link between the ranks, if the exchange has measured it; otherwise None.
        period: number of steps that each rank should take alone until the next exchange, the same on all ranks. Above 1
            only for strategies that `may_wait`.
        unsent_share: weight of this rank's residual (`unsent`) in the mean of the ranks; 0 without a residual.
    """

    network: Link | None = None
    period: int = 1
    unsent_share: float = 0.0

    telemetry: Telemetry

    def __init__(self, specs: Sequence[TensorSpec], telemetry: Telemetry | None):
        self.specs, self._n = list(specs), sum(s.elements for s in specs)
        if telemetry is not None:
            self.telemetry = telemetry
            telemetry.elements = self._n
        self._now = clock.timer()
        # End of the last step; None if the time from there to the next step is not all computing.
        self._last_end: float | None = None
        self._skips = 0
        # Seconds that this step has cost so far.
        self._cost = 0.0

    @abc.abstractmethod
    def combine(self, step_input: StepInput) -> "Sequence[Array]":
        """Do the work of `Exchange.step`, without the measurement of the time between two steps.

        An exchange that adds its result to `StepInput.into` itself returns that; `take` adds any other result.
        """

    def step(self, tensors: "Sequence[Array]", finite: bool = True) -> "Sequence[Array]":
        return self.take(StepInput(tensors, bool(finite)))

    def take(self, step_input: StepInput) -> "Sequence[Array]":
        """Take a step; see `step`. The time since the last step is added to the input, and counted as computing."""
        if self._last_end is not None:
            computing = self._now() - self._last_end - step_input.preparing
            step_input = step_input._replace(computing=computing)
            self.count_computing(computing)
        result, into = self.combine(step_input), step_input.into
        if into is not None and result is not into:
            for array, change in zip(into, result, strict=True):
                np.add(array, np.asarray(change).astype(array.dtype, copy=False), out=array)
            result = into
        if step_input.preparing:
            self.add_cost("encoding", step_input.preparing)
        self._last_end = self._now()
        return result

    # A model with split layers has two exchanges, whose ranks have to agree between the halves of a step.

    def prepare(self, step_input: StepInput) -> Outgoing:
        """Do the part of `combine` that comes before the exchange. Not collective."""
        sums = (np.asarray(t).sum(dtype=np.float64) for t in step_input.tensors)
        fine = step_input.finite and all(bool(np.isfinite(total)) for total in sums)
        return Outgoing(step_input, FINE if fine else NOT_FINITE)

    def deliver(self, outgoing: Outgoing) -> "Sequence[Array]":
        """Do the rest of `combine`. Collective."""
        return self.combine(outgoing.step_input._replace(finite=outgoing.status == FINE))

    def restart_timer(self) -> None:
        """Restart the compute timer before a run of steps."""
        self._last_end = None

    # -- counters -----------------------------------------------------------------------------------------------------

    def reset_telemetry(self) -> None:
        """Set the counters to zero."""
        self.telemetry = type(self.telemetry)(elements=self._n)

    def count_computing(self, seconds: float) -> None:
        """Count computing before a step."""
        self.telemetry.computing += seconds

    def add_cost(self, counter: str, seconds: float) -> None:
        """Count work of this exchange or of its owner as a part of the cost of this step.

        Args:
            counter: counter of `Telemetry`.
            seconds: time that the work took.
        """
        self._cost += seconds
        setattr(self.telemetry, counter, getattr(self.telemetry, counter) + seconds)

    def applied(self) -> None:
        """Count the time since the last step as cost: the caller has written the result to the weights, and no more."""
        if self._last_end is not None:
            begin, self._last_end = self._last_end, self._now()
            self.add_cost("decoding", self._last_end - begin)

    # -- weights and residuals -------------------------------------------------------------------------------

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

    def unsent(self, allocate: "Callable[[int], Array] | None" = None) -> "Sequence[Array]":
        """Return the residual of this rank's own messages, which the next step overwrites.

        `residuals` has in addition what the rank keeps for the route.

        Args:
            allocate: on a GPU, see `StepInput`.

        Returns:
            float32 arrays of the shapes of the specs; on a GPU one array of all elements.
        """
        return self.residuals

    @property
    def residuals(self) -> list[np.ndarray]:
        """Residuals of this rank, which callers must not change: float32 arrays of the shapes of the specs."""
        return [np.zeros(s.shape, np.float32) for s in self.specs]

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        """Add tensors to the residual; a no-op if the exchange has none.

        Args:
            tensors: float32 arrays of the shapes of the specs.
        """

    # -- reports ------------------------------------------------------------------------------------------------------

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
            _log.warning(report(again))


def find(specs: Sequence[TensorSpec], place: int) -> tuple[int, int]:
    """Return the index of the tensor that holds an element of the vector of all tensors, and the element in it.

    Example:
        >>> find([TensorSpec("a", (3,), 4), TensorSpec("b", (5,), 4)], 4)
        (1, 1)
    """
    ends = np.cumsum([s.elements for s in specs])
    variable = int(np.searchsorted(ends, place, side="right"))
    return variable, place - int(ends[variable]) + specs[variable].elements
