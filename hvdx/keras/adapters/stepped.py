"""Adapters for JAX and PyTorch, whose training steps Python calls: gradients within a step, weights between two steps.

An exchange of gradients is a call of Python code within the step. Updates and weights are exchanged after it, so the
optimiser's own step is left as it is: an update is the difference of the weights to those that all ranks share.
"""

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import keras
import numpy as np

from hvdx import comm as world
from hvdx.comm import Comm, clock
from hvdx.comm.array_comm import ArrayComm
from hvdx.comm.interfaces import GraphComm
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.adapters import second_moments, updates
from hvdx.keras.adapters.base import Adapter, apply_constraints, describe, describe_sum, scaled
from hvdx.keras.adapters.finite import holds_bad
from hvdx.keras.backends import stepped
from hvdx.keras.optimizer_state import accumulated_gradients, innermost, moving_averages, slots
from hvdx.keras.seams.optimizers import step_counter, trained_variables, velocity_of
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import dtype_of, is_float, view_of
from hvdx.strategies import Exchange, HostExchange, StepInput, Strategy, TensorSpec
from hvdx.strategies.contract import Weights, agree_on_steps
from hvdx.strategies.parameter_averaging import AveragingExchange
from hvdx.strategies.telemetry import AveragingTelemetry, Telemetry


class Count:
    """A count with the methods of a variable of TensorFlow."""

    def __init__(self) -> None:
        self._value = 0

    def assign(self, value: object) -> None:
        """Set the count to a number, or to another count."""
        self._value = int(value.numpy() if isinstance(value, Count) else cast(int, value))

    def assign_add(self, more: int) -> None:
        self._value += more

    def numpy(self) -> int:
        return self._value


class SteppedAdapter(Adapter):
    """Adapter whose steps are counted, and whose exchanges are called, by Python."""

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(name, gain)
        self.strategy, self.comm = strategy, comm
        self.logs_cost = strategy.placement == "weights" or strategy.runs == "host"
        self._optimizer = weakref.ref(optimizer)
        # Rows of the step that is taken or traced, and since the last exchange; None if all ranks have as many.
        self._batch: float | None = None
        self._rows: float | None = None

    def _counter(self) -> Count:
        return Count()

    def count_step(self) -> None:
        """Do nothing in the step, which JAX traces once: `meet` counts."""
        self.stepped = True

    def begin_batch(self, rows: float) -> None:
        """Begin a step of some rows, or its trace: `gradients` makes it one for batches of as many."""
        self._batch = rows

    def add_rows(self, rows: float) -> None:
        """Count the rows of a step that is taken now, for `meet`."""
        self._rows = (self._rows or 0.0) + rows

    def any_overflow(self, overflowed: Gradient) -> Gradient:
        """Return the overflow of any rank, so that the loss scales of all stay alike; if asynchronous, of this one."""
        if self.strategy.asynchronous:
            return overflowed

        def ask(arrays: list[np.ndarray]) -> list[np.ndarray]:
            return [np.asarray(self.comm.any_true(bool(arrays[0] > 0)), np.float32)]

        return stepped().on_host(ask, [overflowed])[0]

    def close(self) -> None:
        """Close what the fit has opened. Collective."""

    def due(self, steps: int) -> bool:
        """Count steps that were taken, and return whether `meet` is to be called now.

        Args:
            steps: steps since the last call: more than 1 where several are executed together.
        """
        self.steps.assign_add(steps)
        return False

    def meet(self) -> None:
        """Exchange between two steps, while the model's variables hold their values. Collective."""

    def share(self, rows: float | None) -> float:
        """Return the weight of a rank with some rows in a mean: these divided by their mean. Collective if not None."""
        if rows is None or not self.strategy.weighs:
            return 1.0
        total = float(self.comm.all_reduce_sum(np.array([rows]), f"{self.name}.rows")[0])
        return rows * self.comm.size / total if total else 0.0


class SteppedExchange(SteppedAdapter):
    """Adapter with one exchange; one on the host has a residual, and is that of the optimiser's next fit too."""

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(strategy, comm, optimizer, name, gain)
        self._exchange: Exchange[np.ndarray] | None = None
        before = _remembered.pop(innermost(optimizer), None)
        if before is not None:
            same = (repr(strategy), comm) == before[:2]
            if same and {id(v) for v in before[2]} == {id(v) for v in trained_variables(innermost(optimizer))}:
                self.record_variables(before[2])
                self._exchange = cast("Exchange[np.ndarray]", before[3])
            else:
                before[3].close()

    def _opened(self) -> Exchange[np.ndarray]:
        if self._exchange is None:
            self._exchange = cast("Exchange[np.ndarray]", self.strategy.open(self.comm, self.specs, name=self.name))
        return self._exchange

    @property
    def exchange(self) -> HostExchange | None:  # type: ignore[override]
        return self._exchange if isinstance(self._exchange, HostExchange) else None

    @property
    def exchanged(self) -> list[Variable]:
        return self.variables

    @property
    def has_state(self) -> bool:
        return self.strategy.rank_local_state and self._exchange is not None

    def reset(self) -> None:
        super().reset()
        if self.exchange is not None:
            self.exchange.reset_telemetry()

    def restart_timer(self) -> None:
        if self.exchange is not None:
            self.exchange.restart_timer()

    def close(self) -> None:
        if self.exchange is not None and self.strategy.persists_between_fits:
            _remembered[innermost(self._optimizer())] = repr(self.strategy), self.comm, self.variables, self.exchange
        elif self._exchange is not None:
            self._exchange.close()

    def cost(self) -> Telemetry:
        return Telemetry() if self.exchange is None else self.exchange.telemetry

    @property
    def telemetries(self) -> list[Telemetry] | None:
        return None if self.strategy.runs == "graph" else [] if self.exchange is None else [self.exchange.telemetry]

    @property
    def state_key(self) -> str:
        return f"{self.strategy.name}, {self.strategy.placement}"

    def state_dict(self) -> dict[str, np.ndarray]:
        return {} if self.exchange is None else self.exchange.state_dict()

    def reopen(self, variables: Sequence[Variable]) -> None:
        self.record_variables(variables)
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None
        self._opened()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        cast(HostExchange, self._opened()).load_state_dict(state)


class SteppedGradients(SteppedExchange):
    """Adapter that combines gradients within the step."""

    def reset(self) -> None:
        super().reset()
        self._seconds, self._exchanges, self._first_bad = 0.0, 0, (0, "")

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Combine gradients over the ranks, and measure the time."""
        rows = self._batch
        return stepped().on_host(lambda arrays: self._combine(arrays, rows), gradients)

    def _combine(self, arrays: list[np.ndarray], rows: float | None) -> Sequence[np.ndarray]:
        bad = first_bad(arrays)
        if bad >= 0 and not self._first_bad[0]:
            self._first_bad = self.steps.numpy() + 1, self.specs[bad].name
        now = clock.timer()
        begin = now()
        weight = self.share(rows)
        mine = [a if weight == 1.0 else a * a.dtype.type(weight) for a in arrays]
        exchange = self._opened()
        if isinstance(exchange, HostExchange):
            given = StepInput([m.astype(np.float32, copy=False) for m in mine], finite=bad < 0)
            combined: Sequence[object] = exchange.take(given)
        else:
            combined = exchange.step(mine)
        self._seconds += now() - begin
        self._exchanges += 1
        results = [_like(c, a) for c, a in zip(combined, arrays, strict=True)]
        return [r * r.dtype.type(self.gain) for r in results] if self.gain != 1.0 else results

    def first_bad(self) -> tuple[int, str]:
        found, self._first_bad = self._first_bad, (0, "")
        return found

    def cost(self) -> Telemetry:
        if self.exchange is not None:
            return self.exchange.telemetry
        sent = self._exchanges * (self._exchange.sent if self._exchange is not None else 0)
        elements = sum(s.elements for s in self.specs)
        return Telemetry(steps=self._exchanges, elements=elements, sent=sent, received=sent, exchanging=self._seconds)


class SteppedUpdates(SteppedExchange):
    """Adapter that combines the updates of the ranks' own optimisers after each period, a step or several.

    As under `PeriodicAdapter`, ranks go on from the shared weights, in periods of one step plus a share of their
    residuals. What the script writes itself, as by constraints, is a part of the next update here.
    """

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
        # Weights that all ranks share, float32 by the `id` of the variable, and the share of this rank's residual by
        # which those at the beginning of the period were ahead of them. Arrays, or the backend's tensors on a GPU.
        self._common: dict[int, Any] = {}
        self._on_gpu = False
        self._share = np.float32(0.0)
        # Whether `go_on` is to go ahead of the shared weights.
        self._drained = False
        # What steps have told: index of the period's first gradient that is not finite, or -1; a sample of the last.
        self._bad = -1
        self._sample: list[np.ndarray] | None = None
        self._since = 0

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

    def due(self, steps: int) -> bool:
        super().due(steps)
        self._since += steps
        micro = innermost(self._optimizer()).gradient_accumulation_steps or 1
        return self._since >= micro * (1 if self.exchange is None else self.exchange.period)

    def meet(self) -> None:
        """Send the change of the weights in this period, add the combined one to the shared weights, and go on."""
        now = clock.timer()
        begin = now()
        weight, common = self.share(self._rows), [self._common[id(v)] for v in self.variables]
        if self._on_gpu:
            changes = [stepped().flat_update([v.value for v in self.variables], [*self._begun()], weight)]
        else:
            changes = [
                np.subtract(view_of(v), base, dtype=np.float32)
                for v, base in zip(self.variables, self._begun(), strict=True)
            ]
            if weight != 1.0:
                changes = [c * np.float32(weight) for c in changes]
        given = StepInput(
            changes,
            finite=self._bad < 0,
            blamed=self.specs[self._bad].name if self._bad >= 0 else "",
            sample=self._sample,
            preparing=now() - begin,
            steps=self._since,
            allocate=self._zeros if self._on_gpu else None,
            into=None if self._on_gpu else common,
        )
        exchange = cast(HostExchange, self._opened())
        result = exchange.take(given)
        if self._on_gpu:
            self._common.update(zip(map(id, self.variables), stepped().add(common, result[0]), strict=True))
        self._go_ahead()
        # Writing of the weights is cost: without an exchange, the optimiser would have written them.
        exchange.applied()
        self._sample, self._since, self._bad, self._rows = None, 0, -1, None

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
        # A tensor could take the memory of the array, which the next step changes.
        pairs = zip(self.variables, self._begun(), strict=True)
        here = (value.astype(dtype_of(variable.dtype), copy=True) for variable, value in pairs)
        values = stepped().copies([*self._begun()]) if self._on_gpu else here
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


# Of an optimiser whose fit has ended: its strategy, ranks, variables and exchange.
_Memory = tuple[str, Comm, list[Variable], HostExchange]
_remembered: "weakref.WeakKeyDictionary[keras.optimizers.Optimizer, _Memory]" = weakref.WeakKeyDictionary()
# Optimisers with rank-local momenta from an earlier fit.
_have_local_momenta: "weakref.WeakSet[keras.optimizers.Optimizer]" = weakref.WeakSet()
# Sample count of a rank without samples; if no rank has any, all count the same.
_NO_SAMPLES = 1e-6
# By the communicator below: each opens channels, which all fits use.
_array_comms: "weakref.WeakKeyDictionary[Comm, ArrayComm]" = weakref.WeakKeyDictionary()
_KINDS: dict[tuple[str, str], type[SteppedAdapter]] = {
    ("graph", "gradient"): SteppedGradients,
    ("host", "gradient"): SteppedGradients,
    ("graph", "weights"): SteppedAverages,
    ("host", "update"): SteppedUpdates,
}


def make(
    strategy: Strategy, optimizer: keras.optimizers.Optimizer, name: str, gain: float, comm: Comm | None
) -> SteppedAdapter:
    """Make the adapter for a strategy.

    Args:
        strategy, optimizer, name, gain, comm: see `hvdx.keras.adapters.optimizer.attach`.

    Raises:
        ConfigError: if hvdx has the strategy, or what the optimiser does, for TensorFlow alone.
    """
    comm = comm or world.start()
    kind = _KINDS.get((strategy.runs, strategy.placement))
    if kind is None or strategy.asynchronous or strategy.dedicated or comm.survives:
        backend.needs_tensorflow(f"strategy {strategy!r}" + ", HVDX_SURVIVE=1" * comm.survives)
    if isinstance(comm, GraphComm) and comm.size > 1:
        comm.channel("the data of this strategy")  # raises: Horovod's own launcher starts no MPI
    assert kind is not None
    if strategy.runs == "graph":
        if comm not in _array_comms:
            _array_comms[comm] = ArrayComm(comm)
        comm = _array_comms[comm]
    return kind(strategy, comm, optimizer, name, gain)


def first_bad(arrays: Sequence[np.ndarray]) -> int:
    """Return the index of the first array that holds NaN or infinity; -1 if none does.

    Example:
        >>> first_bad([np.ones(2), np.array([0.0, np.nan])])
        1
    """
    return next((i for i, array in enumerate(arrays) if holds_bad(array)), -1)


def _located(variables: Sequence[Variable]) -> list[TensorSpec]:
    """Return the specs of variables with the devices of their values, which a step that is traced does not know."""
    return [replace(describe(v), device=stepped().device_of(v.value)) for v in variables]


def _for_sum(values: np.ndarray) -> np.ndarray:
    return values if values.itemsize >= 4 else values.astype(np.float32)


def _like(result: object, array: np.ndarray) -> np.ndarray:
    return np.asarray(result).astype(array.dtype, copy=False).reshape(array.shape)


def _some(tensor: Gradient, count: int) -> Gradient:
    """Return elements of a tensor at evenly spaced positions, the same in each step."""
    size = math.prod(tensor.shape)
    return keras.ops.take(keras.ops.reshape(tensor, [-1]), np.arange(count) * (size // count))


def _divided(gradient: np.ndarray, velocity: np.ndarray, decay: float) -> np.ndarray:
    """Return the gradient divided by the root of its second moment after this step; 0 where that is 0."""
    root = np.sqrt(decay * velocity.astype(np.float32) + (1.0 - decay) * np.square(gradient, dtype=np.float32))
    return np.divide(gradient, root, out=np.zeros(gradient.shape, np.float32), where=root > 0)
