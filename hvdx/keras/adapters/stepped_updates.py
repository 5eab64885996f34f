"""Adapters for JAX and PyTorch that exchange what the ranks' own optimisers do, after their steps."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import keras
import numpy as np

from hvdx.comm import Comm, clock
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.adapters import rows, second_moments, updates
from hvdx.keras.adapters.base import apply_constraints, describe, scaled
from hvdx.keras.adapters.stepped import SteppedExchange
from hvdx.keras.backends import stepped
from hvdx.keras.optimizer_state import innermost, slots
from hvdx.keras.seams.optimizers import rate_of, step_counter, trained_variables, velocity_of
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import dtype_of, view_of
from hvdx.strategies import Exchange, HostExchange, StepInput, Strategy, TensorSpec
from hvdx.strategies.contract import agree_on_steps


class OwnOptimizers(SteppedExchange):
    """Adapter under which each rank's optimiser takes its own step, and tells what an exchange wants to know of it."""

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        updates.check_kind(innermost(optimizer), strategy.placement)
        if innermost(optimizer).use_ema:
            raise ConfigError.on_all_ranks(
                f"optimizer {optimizer.name}: use_ema=True: expected no averages of weights under {strategy!r} on the "
                f"backend {backend.name()}, where each rank would average its own. Do: AllReduce(), or leave it out."
            )
        super().__init__(strategy, comm, optimizer, name, gain)
        # What steps have told: index of the period's first gradient that is not finite, or -1; a sample of the last.
        self._bad = -1
        self._sample: list[np.ndarray] | None = None
        self._since = 0

    def due(self, steps: int) -> bool:
        super().due(steps)
        # On PyTorch a loss-scale optimiser that skips a step does not call the other, and shows no variables.
        self._since += steps if self.variables else 0
        micro = innermost(self._optimizer()).gradient_accumulation_steps or 1
        return self._since >= micro * (1 if self.exchange is None else self.exchange.period)

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return this rank's own gradients, with zeros in place of those that are not finite.

        NaN would stay in the momenta of this rank's optimiser. The step is skipped on all ranks.
        """
        optimizer, ops = innermost(self._optimizer()), keras.ops
        fine = [ops.isfinite(ops.sum(g)) for g in gradients]
        clean = [ops.where(f, g, ops.zeros_like(g)) for f, g in zip(fine, gradients, strict=True)]
        sizes, parts, decay = [0] * len(clean), [], 0.0
        if self.strategy.second_moments == "mean" and second_moments.divides(optimizer):
            decay = second_moments.decay_of(optimizer)
            sizes = second_moments.counts(clean, self.variables)
            for gradient, variable, count in zip(clean, self.variables, sizes, strict=True):
                tensors = (gradient, velocity_of(optimizer, variable).value) if count else ()
                parts += [_some(tensor, count) for tensor in tensors]
        counter = step_counter(optimizer).value
        told = [ops.stack(fine), ops.cast(counter, "int32"), *parts]
        stepped().tell(lambda arrays: self._hear(arrays, sizes, decay), told)
        return [scaled(g, self.gain) for g in clean]

    def _hear(self, arrays: Sequence[np.ndarray], sizes: Sequence[int], decay: float) -> None:
        """Keep what the step tells: gradients that are not finite, and elements of the others with their velocities."""
        fine, counter, *parts = arrays
        if self._bad < 0 and not fine.all():
            self._bad = int(np.argmin(fine))
        if decay:
            pairs = iter(zip(parts[::2], parts[1::2], strict=True))
            correction = np.float32(math.sqrt(1.0 - decay ** (int(counter) + 1.0)))
            none = np.zeros(0, np.float32)
            self._sample = [_divided(*next(pairs), decay) * correction if n else none for n in sizes]

    def _told(self, tensors: Sequence[Any], preparing: float) -> StepInput:
        """Return the input of an exchange of some tensors, with what the steps since the last one have told."""
        told = StepInput(
            tensors,
            finite=self._bad < 0,
            blamed=self.specs[self._bad].name if self._bad >= 0 else "",
            sample=self._sample,
            preparing=preparing,
            steps=self._since,
        )
        self._sample, self._since, self._bad, self._rows = None, 0, -1, None
        return told


class SteppedUpdates(OwnOptimizers):
    """Adapter that combines the updates of the ranks' own optimisers after each period, a step or several.

    As under `PeriodicAdapter`, ranks go on from the shared weights, in periods of one step plus a share of their
    residuals. What the script writes itself, as by constraints, is a part of the next update here.
    """

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(strategy, comm, optimizer, name, gain)
        # Weights that all ranks share, float32 by the `id` of the variable, and the share of this rank's residual by
        # which those at the beginning of the period were ahead of them. Arrays, or the backend's tensors on a GPU.
        self._common: dict[int, Any] = {}
        self._on_gpu = False
        self._share = np.float32(0.0)
        # Whether `go_on` is to go ahead of the shared weights.
        self._drained = False

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return the optimiser's state, and in mid-period the weights."""
        return slots(innermost(self._optimizer())) + (self.variables if now and (self._since or self._share) else [])

    def begin_epoch(self) -> None:
        """Measure updates from the present weights: callbacks may have changed them, the same on all ranks."""
        variables = trained_variables(innermost(self._optimizer()))
        self._on_gpu = self.strategy.device_for(_located(variables)) != "cpu"
        here = (np.array(view_of(v), np.float32) for v in variables)
        values = stepped().copies([v.value for v in variables]) if self._on_gpu else here
        self._common = dict(zip(map(id, variables), values, strict=True))
        self.go_on()

    def meet(self) -> None:
        """Send the change of the weights in this period, add the combined one to the shared weights, and go on."""
        with clock.measured(rows.waited.add):
            weight = self.share(self._rows)
        now = clock.timer()
        begin = now()
        common = [self._common[id(v)] for v in self.variables]
        if self._on_gpu:
            changes = [stepped().flat_update([v.value for v in self.variables], [*self._begun()], weight)]
        else:
            changes = [
                np.subtract(view_of(v), base, dtype=np.float32)
                for v, base in zip(self.variables, self._begun(), strict=True)
            ]
            if weight != 1.0:
                changes = [c * np.float32(weight) for c in changes]
        given = self._told(changes, now() - begin)
        if self._on_gpu:
            given = given._replace(allocate=self._zeros)
        else:
            given = given._replace(into=common)
        exchange = cast(HostExchange, self._opened())
        result = exchange.take(given)
        if self._on_gpu:
            self._common.update(zip(map(id, self.variables), stepped().add(common, result[0]), strict=True))
        self._go_ahead()
        # Writing of the weights is cost: without an exchange, the optimiser would have written them.
        exchange.applied()

    def _zeros(self, n: int) -> Any:
        """Return float32[n] of zeros on the GPU of the weights."""
        return stepped().zeros(n, next(iter(self._common.values())))

    def _begun(self) -> Iterator[Any]:
        """Yield the weights, float32, from which the period began: the shared ones plus a share of the residual."""
        allocate = self._zeros if self._on_gpu else None
        unsent = self.exchange.unsent(allocate) if self.exchange is not None and self._share else ()
        if unsent and self._on_gpu:
            yield from stepped().sums([self._common[id(v)] for v in self.variables], unsent[0], self._share)
            return
        for variable, rest in itertools.zip_longest(self.variables, unsent):
            common = self._common[id(variable)]
            yield common if rest is None else common + self._share * np.asarray(rest)

    def _go_ahead(self) -> None:
        # A period of several steps begins from the shared weights, from which its changes are measured.
        exchange = cast(HostExchange, self._opened())
        self._share = np.float32(exchange.unsent_share if self.strategy.may_wait and exchange.period == 1 else 0.0)
        self._write()

    def _write(self) -> None:
        # A tensor could take the memory of an array, which the next step changes.
        if self._on_gpu:
            values = stepped().copies([*self._begun()])
        else:
            pairs = zip(self.variables, self._begun(), strict=True)
            values = (value.astype(dtype_of(variable.dtype), copy=True) for variable, value in pairs)
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)
        apply_constraints(self.variables)

    def flush(self) -> None:
        """End the period, and return to the shared weights.

        Raises:
            ReplicaError: on all ranks, if they have taken different numbers of steps.
        """
        if agree_on_steps(self._since, "the last exchange", self.comm):
            self.meet()
        if self._share:
            self._share = np.float32(0.0)
            self._write()

    def drain(self) -> None:
        """End the period: a checkpoint holds the weights of all ranks."""
        ahead = not self._since and bool(self._share)
        self.flush()
        self._drained = ahead

    def go_on(self) -> None:
        if self._drained:
            self._drained = False
            self._go_ahead()

    def _opened(self) -> Exchange[np.ndarray]:
        if self._exchange is None:
            self.specs = _located(self.variables)
        return super()._opened()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state of the exchange, with an entry "ahead" if `go_on` leaves the shared weights."""
        return super().state_dict() | ({"ahead": np.ones((), np.int8)} if self._drained else {})

    def reopen(self, variables: Sequence[Variable]) -> None:
        self._since, self._share = 0, np.float32(0.0)
        super().reopen(variables)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._drained = "ahead" in state


class SteppedWeights(OwnOptimizers):
    """Adapter that sends the weights after each step, and goes on with those that it receives; see `WeightsAdapter`.

    Raises:
        ConfigError: if a variable is stored in less than 32 bits, or the optimiser is not built before the first step.
    """

    def begin_epoch(self) -> None:
        """Begin a session with the present weights of rank 0, so that no rank waits for its first step. Collective."""
        inner = innermost(self._optimizer())
        if not inner.built:
            raise ConfigError.on_all_ranks(
                f"optimizer {inner.name}: expected one that is built before the first step under {self.strategy!r}, "
                "whose servers begin with its weights. Do: optimizer.build(model.trainable_variables) before fit."
            )
        self._dtype = updates.served_dtype(trained_variables(inner))
        if self._exchange is None:
            self.record_variables(trained_variables(inner))
        self.go_on()

    def go_on(self) -> None:
        exchange = self._served()
        if not exchange.is_open:
            exchange.begin([view_of(v) for v in self.variables])
            exchange.restart_timer()

    def meet(self) -> None:
        """Push and pull weights. Not collective."""
        now = clock.timer()
        begin = now()
        weights = [view_of(v).astype(self._dtype, copy=False) for v in self.variables]
        self._pulled(self._served().take(self._told(weights, now() - begin)))

    def flush(self) -> None:
        """End the session. Collective."""
        final = self._served().flush() if self._served().is_open else None
        if final is not None:
            self._pulled(final)
            apply_constraints(self.variables)

    def drain(self) -> None:
        """End the session: a checkpoint needs the weights, which the servers hold."""
        self.flush()

    def _served(self) -> HostExchange:
        return cast(HostExchange, self._opened())

    def _pulled(self, weights: Sequence[Any]) -> None:
        for variable, value in zip(self.variables, weights, strict=True):
            if value is not None:
                # A tensor could take the memory of the array, which the next step changes.
                variable.assign(np.array(value, dtype_of(variable.dtype)).reshape(variable.shape))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state of the exchange, with an entry "apart": it says that the momenta are rank-local."""
        return {"apart": np.ones((), np.int8)} | super().state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict({name: array for name, array in state.items() if name != "apart"})

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return all optimiser variables except the learning rate; step counters differ, too."""
        outer: keras.optimizers.Optimizer = self._optimizer()
        common = {id(v) for v in (rate_of(innermost(outer)), rate_of(outer))}
        return [v for v in outer.variables if id(v) not in common]


def _located(variables: Sequence[Variable]) -> list[TensorSpec]:
    """Return the specs of variables with the devices of their values, which a step that is traced does not know."""
    return [replace(describe(v), device=stepped().device_of(v.value)) for v in variables]


def _some(tensor: Gradient, count: int) -> Gradient:
    """Return elements of a tensor at evenly spaced positions, the same in each step."""
    size = math.prod(tensor.shape)
    return keras.ops.take(keras.ops.reshape(tensor, [-1]), np.arange(count) * (size // count))


def _divided(gradient: np.ndarray, velocity: np.ndarray, decay: float) -> np.ndarray:
    """Return the gradient divided by the root of its second moment after this step; 0 where that is 0."""
    root = np.sqrt(decay * velocity.astype(np.float32) + (1.0 - decay) * np.square(gradient, dtype=np.float32))
    return np.divide(gradient, root, out=np.zeros(gradient.shape, np.float32), where=root > 0)
