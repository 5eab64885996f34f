"""Adapter for JAX and PyTorch that averages weights and the optimiser's state between two steps."""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import cast

import keras
import numpy as np

from hvdx.comm import Comm, clock
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import apply_constraints, describe_sum, scaled
from hvdx.keras.adapters.stepped import SteppedAdapter, first_bad
from hvdx.keras.optimizer_state import accumulated_gradients, innermost, moving_averages, slots
from hvdx.keras.seams.optimizers import step_counter, trained_variables
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import dtype_of, is_float, view_of
from hvdx.strategies import Strategy
from hvdx.strategies.contract import Weights
from hvdx.strategies.parameter_averaging import AveragingExchange
from hvdx.strategies.telemetry import AveragingTelemetry, Telemetry


class SteppedAverages(SteppedAdapter):
    """Adapter that lets each rank's optimiser train alone, and averages weights and state at the end of each period."""

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        updates.check_averages(innermost(optimizer), strategy.rank_local_state)
        super().__init__(strategy, comm, optimizer, name, gain)
        self._exchange: AveragingExchange | None = None
        # Steps of the optimiser, and since the last average. JAX keeps the optimiser's own counter elsewhere in the
        # middle of an epoch.
        self._taken, self._since = 0, 0
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._averages = self._excluded = 0
        self._divergence = self._seconds = 0.0

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return this rank's own gradients."""
        return [scaled(g, self.gain) for g in gradients]

    def due(self, steps: int) -> bool:
        super().due(steps)
        micro = innermost(self._optimizer()).gradient_accumulation_steps or 1
        begun = (self._taken - self._since) // micro
        self._taken, self._since = self._taken + steps, self._since + steps
        return self._since >= micro * next(p for first, p in reversed(self.strategy.schedule) if begun >= first)

    def begin_epoch(self) -> None:
        """Read the steps so far, on which the period depends."""
        self._taken = int(view_of(step_counter(innermost(self._optimizer()))))

    def meet(self) -> None:
        """Replace weights and state by their means over the ranks. Collective."""
        inner, now = innermost(self._optimizer()), clock.timer()
        begin = now()
        weights, state = self._averaged()
        variables = [*weights, *state]
        before = [_for_sum(view_of(v)) for v in variables]
        fine = first_bad(before) < 0
        weight = (max(self._rows or 0.0, _NO_SAMPLES) if self.strategy.counts_samples else 1.0) * fine
        factors = {dtype: np.array(weight, dtype) for dtype in {b.dtype for b in before}}
        shares = [b * factors[b.dtype] if fine else np.zeros_like(b) for b in before]
        with np.errstate(invalid="ignore"):  # NaN on all ranks if all are left out
            means = [np.asarray(m) for m in self._opened().mean(shares, cast("Weights", factors))]
        for variable, mean in zip(variables, means, strict=True):
            variable.assign(mean.astype(dtype_of(variable.dtype), copy=True))
        # The mean of weights that satisfy a constraint may violate it.
        apply_constraints(weights)
        if self.strategy.rank_local_state:
            _have_local_momenta.add(inner)
            for variable in () if fine else filter(is_float, slots(inner)):
                variable.assign(np.nan_to_num(view_of(variable), nan=0.0, posinf=0.0, neginf=0.0))
        self._averages, self._excluded = self._averages + 1, self._excluded + (not fine)
        new, old = means[: len(weights)], before[: len(weights)]
        distance = sum(float(np.square(m - b).sum()) for m, b in zip(new, old, strict=True))
        norm = sum(float(np.square(m).sum()) for m in new)
        self._divergence = math.sqrt(distance / norm) if norm else 0.0
        self._seconds += now() - begin
        self._since, self._rows = 0, None

    def flush(self) -> None:
        """Average now, if there were steps since the last average.

        Raises:
            ReplicaError: on all ranks, if they have taken different numbers of steps.
        """
        if self._opened().agree(self._since):
            self.meet()

    def prepare_broadcast(self) -> None:
        """Do nothing: an average would change the weights of rank 0."""

    def before_saving(self) -> None:
        """Do nothing: each rank saves its own weights, and training continues unchanged."""

    def _averaged(self) -> tuple[list[Variable], list[Variable]]:
        """Return the weights, and the optimiser state that is averaged with them."""
        inner = innermost(self._optimizer())
        state = [*moving_averages(inner), *(() if self.strategy.rank_local_state else slots(inner))]
        return trained_variables(inner), list(filter(is_float, state))

    def _opened(self) -> AveragingExchange:
        if self._exchange is None or not self._exchange.specs:
            weights, state = self._averaged()
            specs = [describe_sum(v) for v in (*weights, *state)]
            self._exchange = cast(AveragingExchange, self.strategy.open(self.comm, specs, name=self.name))
        return self._exchange

    def cost(self) -> Telemetry:
        exchange = self._opened()
        sent = self._averages * exchange.sent
        return AveragingTelemetry(
            steps=self.steps.numpy(),
            elements=exchange.elements,
            sent=sent,
            received=sent,
            exchanging=self._seconds,
            averages=self._averages,
            divergence=self._divergence,
            excluded=self._excluded,
        )

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return all weights and optimiser variables; right after an average, only state that is not averaged."""
        inner = innermost(self._optimizer())
        if now and not self._since:
            return slots(inner) if self.strategy.rank_local_state else []
        local = {id(v) for v in accumulated_gradients(inner)}
        return [*trained_variables(inner), *(v for v in inner.variables if id(v) not in local)]

    @property
    def has_state(self) -> bool:
        return bool(self._since) or (
            self.strategy.rank_local_state and innermost(self._optimizer()) in _have_local_momenta
        )

    @property
    def state_key(self) -> str:
        return f"{self.strategy.name}, {'own' if self.strategy.rank_local_state else 'averaged'} state"

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the position in the period; an empty state right after an average, unless momenta are rank-local."""
        if not self.strategy.rank_local_state and not self._since:
            return {}
        return {"since": np.int64(self._since), "samples": np.float32(self._rows or 0.0)}  # type: ignore[dict-item]

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Resume within a period; an empty state means a position right after an average."""
        self._since, self._rows = int(state.get("since", 0)), float(state.get("samples", 0.0))


# Optimisers with rank-local momenta from an earlier fit.
_have_local_momenta: "weakref.WeakSet[keras.optimizers.Optimizer]" = weakref.WeakSet()
# Sample count of a rank without samples; if no rank has any, all count the same.
_NO_SAMPLES = 1e-6


def _for_sum(values: np.ndarray) -> np.ndarray:
    return values if values.itemsize >= 4 else values.astype(np.float32)
