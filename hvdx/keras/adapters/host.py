"""Adapter for strategies that combine arrays on the host, between two parts of the graph."""

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.comm.host_graph import on_device, on_host, prepare, wait_for
from hvdx.comm.interfaces import T
from hvdx.errors import HvdxError
from hvdx.keras.adapters import rows, second_moments, updates
from hvdx.keras.adapters.base import (
    Adapter,
    describe,
    device_of,
    refuse_local_skip,
    scaled,
    values_of,
    with_values,
)
from hvdx.keras.optimizer_state import innermost, slots
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.weight_parts import part_of
from hvdx.strategies import HostExchange, StepInput, Strategy
from hvdx.strategies.telemetry import Telemetry, merged

# Number of elements from which a gradient is checked for itself.
_LARGE = 2**16

# Open exchanges of an optimiser and their variables, by the `id` of each variable.
_Open = dict[tuple[int, ...], tuple[HostExchange, list[Variable]]]


class _Memory(NamedTuple):
    """Exchanges that stay open from one fit of an optimiser to the next, with the same strategy and communicator."""

    strategy: str
    comm: Comm
    opened: _Open


_remembered: "weakref.WeakKeyDictionary[keras.optimizers.Optimizer, _Memory]" = weakref.WeakKeyDictionary()


class HostAdapter(Adapter):
    """Adapter between an optimiser and a strategy that combines arrays on the host.

    Attributes:
        rank_local: True if each rank's optimiser has a state of its own.
    """

    logs_cost = True

    def __init__(
        self, strategy: Strategy, comm: Comm, optimizer: keras.optimizers.Optimizer, name: str, gain: float = 1.0
    ):
        super().__init__(name, gain)
        prepare()
        inner = innermost(optimizer)
        self.strategy = strategy
        self.comm = comm
        self._optimizer = weakref.ref(inner)
        self.rank_local = strategy.rank_local_state
        if self.rank_local:
            updates.check_kind(inner, strategy.placement)
        # One optimiser may train several lists of variables; freezing some of them makes another list.
        self._open: _Open = {}
        before = _remembered.get(inner)
        if before is not None and before.strategy == repr(strategy) and before.comm is comm:
            self._open = before.opened
        if strategy.persists_between_fits:
            _remembered[inner] = _Memory(repr(strategy), comm, self._open)
        # Lists of variables that this adapter has exchanged; other open exchanges are from earlier fits.
        self._used: set[tuple[int, ...]] = set()
        # int32, index of the first gradient of a step that holds NaN or infinity; -1 if none does.
        self._first_bad: int | tf.Tensor = -1
        # Gradients of the step that is being traced, before they are clipped.
        self._gradients: list[Gradient] = []
        self._last: tuple[HostExchange, list[Variable]] | None = None

    @property
    def reusable_across_fits(self) -> bool:  # type: ignore[override]
        """False if each fit needs a new exchange."""
        return self.strategy.persists_between_fits

    @property
    def exchange(self) -> HostExchange | None:  # type: ignore[override]
        return self._latest()[0]

    @property
    def exchanged(self) -> list[Variable]:
        return self._latest()[1]

    def _latest(self) -> tuple[HostExchange | None, list[Variable]]:
        """Return the exchange that was used last, else the one opened last, and its variables."""
        return self._last or next(reversed(self._open.values()), (None, []))

    @property
    def has_state(self) -> bool:
        return self.rank_local and bool(self._open)

    def reset(self) -> None:
        super().reset()
        for exchange, _ in self._open.values():
            exchange.reset_telemetry()

    def restart_timer(self) -> None:
        for exchange, _ in self._open.values():
            exchange.restart_timer()

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return the optimiser's state, such as momenta, if it is rank-local; `now` has no effect."""
        return slots(self._optimizer()) if self.rank_local else []

    @property
    def state_key(self) -> str:
        return f"{self.strategy.name}, {self.strategy.placement}"

    def state_dict(self) -> dict[str, np.ndarray]:
        return {} if self.exchange is None else self.exchange.state_dict()

    def reopen(self, variables: Sequence[Variable]) -> None:
        self.variables = list(variables)
        # If an exception ended an exchange, its last message may still be in flight.
        for exchange, _ in self._open.values():
            exchange.close()
        self._open.clear()
        self._opened(list(variables))

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        assert self.exchange is not None
        self.exchange.load_state_dict(state)

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return the gradients to apply.

        Without rank-local state they are the combined gradients. With it, they are this rank's own gradients, with
        zeros in place of those that are not finite; their step is skipped.
        """
        if not self.holds_loss_scale:
            refuse_local_skip()
        if not self.rank_local:
            gradients = gradients if self._accumulates else self._weighed(gradients)
            combined = self._call([tf.convert_to_tensor(g) for g in gradients], -1, self.variables)
            return [scaled(tf.cast(c, g.dtype), self.gain) for c, g in zip(combined, gradients, strict=True)]
        # NaN or infinity in a gradient makes its sum non-finite, so one pass over the gradients finds it.
        sums = _sums([values_of(g) for g in gradients])
        bad = tf.cast(tf.logical_not(tf.math.is_finite(tf.stack(sums))), tf.int32)
        self._first_bad = tf.where(tf.reduce_max(bad) > 0, tf.argmax(bad, output_type=tf.int32), -1)
        # NaN would stay in the momenta of this rank's optimiser.
        usable = _usable(sums, gradients, self.variables)
        zeros = {dtype: tf.zeros((), dtype) for dtype in {g.dtype for g in gradients}}
        clean = [_if_usable(fine, values_of(g), zeros[g.dtype]) for fine, g in zip(usable, gradients, strict=True)]
        self._gradients = [scaled(with_values(g, c), self.gain) for g, c in zip(gradients, clean, strict=True)]
        return self._gradients

    def _weighed(self, tensors: Sequence[Gradient]) -> list[Gradient]:
        """Return gradients or updates times the weight of this rank. Collective if ranks may have other rows."""
        if not self.weighs or self.strategy.asynchronous:
            return list(tensors)
        weight = rows.share(self.comm, self.rows, self.name)
        return [scaled(t, weight) for t in tensors]

    def apply(
        self, optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
    ) -> None:
        """Take the optimiser's step; with rank-local state, combine its updates and add the result to the weights."""
        if not self.rank_local:
            step()
            return
        wanted = self._weighed(updates.updates_of(optimizer, step, variables))
        gradients, self._gradients = self._gradients, []
        dense = [tf.convert_to_tensor(u) for u in wanted]
        sample = self._sample(optimizer, gradients, variables)
        combined = self._call(dense, self._first_bad, variables, copy_results=False, sample=sample)
        # The next step of the exchange overwrites the arrays of these tensors.
        wait_for(updates.add(variables, combined))

    def _sample(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
        moves: bool = True,
    ) -> Sequence[tf.Tensor]:
        """Return `second_moments.sample` of a step if the exchange needs it, else nothing."""
        if not self._needs_sample(optimizer):
            return ()
        return second_moments.sample(optimizer, gradients, variables, moves)

    def _sample_sizes(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[int]:
        """Return the number of elements of each array of `_sample`."""
        return second_moments.counts(gradients, variables) if self._needs_sample(optimizer) else []

    def _needs_sample(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Return whether the exchange needs a sample of each step."""
        return self.strategy.second_moments == "mean" and second_moments.divides(optimizer)

    def any_overflow(self, overflowed: tf.Tensor) -> tf.Tensor:
        return any_rank(self.comm, overflowed)

    def cost(self) -> Telemetry:
        costs = [exchange.telemetry for exchange, _ in self._open.values()]
        return merged([cost for cost in costs if cost.steps] or costs)

    @property
    def telemetries(self) -> list[Telemetry]:
        return [exchange.telemetry for exchange, _ in self._open.values()]

    def _call(
        self,
        tensors: list[tf.Tensor],
        first_bad: int | tf.Tensor,
        variables: Sequence[Variable],
        dtype: tf.DType = tf.float32,
        copy_results: bool = True,
        sample: Sequence[tf.Tensor] = (),
        steps: int | tf.Tensor = 1,
    ) -> list[tf.Tensor]:
        """Call the exchange of some variables from an operation of the graph.

        Args:
            tensors: tensors of the step, see `_take`.
            first_bad: int32, index of the first variable whose gradient is not finite; -1 for none.
            variables: variables of the exchange.
            dtype: dtype in which the exchange works.
            copy_results: see `on_host`. If False, the tensors must be used before the next step.
            sample: see `StepInput`; empty for none.
            steps: see `StepInput`.

        Returns:
            One tensor per variable.
        """
        tensor_count, taken = len(tensors), self._step_of(variables)

        def step(
            bad: int,
            steps: int,
            tensors: list[tf.Tensor],
            sample: list[np.ndarray],
            allocate: Callable[[int], tf.Tensor] | None = None,
        ) -> Sequence[npt.ArrayLike]:
            return taken(bad, StepInput(tensors, sample=sample or None, steps=steps, allocate=allocate))[1]

        if self._on_device(variables):
            return on_gpu(step, tensors, sample, (first_bad, steps), variables)

        def host(bad: np.ndarray, count: np.ndarray, *arrays: np.ndarray) -> Sequence[npt.ArrayLike]:
            return step(int(bad), int(count), list(arrays[:tensor_count]), list(arrays[tensor_count:]))

        with tf.device("CPU:0"):
            numbers = [tf.cast(n, tf.int32) for n in (first_bad, steps)]
            arrays = [tf.cast(t, dtype) for t in (*tensors, *sample)]
            results = on_host(host, numbers + arrays, [dtype] * len(variables), copy_results)
        for result, variable in zip(results, variables, strict=True):
            result.set_shape(variable.shape)
        return results

    def _step_of(
        self, variables: Sequence[Variable]
    ) -> Callable[[int, StepInput], tuple[HostExchange, Sequence[npt.ArrayLike]]]:
        """Return a function that takes a step of the exchange of some variables, for an operation of the graph.

        Its arguments are the index of the first variable whose gradient is not finite, or -1, and the input of the step
        without it. It returns the exchange and its result.
        """
        # TensorFlow keeps the function until the process ends. With weak references the adapter can be freed earlier.
        adapter_ref, variable_refs = weakref.ref(self), [weakref.ref(v) for v in variables]

        def step(bad: int, step_input: StepInput) -> tuple[HostExchange, Sequence[npt.ArrayLike]]:
            adapter, left = alive(adapter_ref), [ref() for ref in variable_refs]
            exchange = adapter._opened(left)
            blamed = describe(left[bad]).name if bad >= 0 else ""
            return exchange, adapter._take(exchange, step_input._replace(finite=bad < 0, blamed=blamed))

        return step

    def _take(self, exchange: HostExchange, step_input: StepInput) -> Sequence[npt.ArrayLike]:
        """Take a step of an exchange."""
        return exchange.take(step_input)

    def _on_device(self, variables: Sequence[Variable]) -> bool:
        """Return True if the exchange of these variables runs on their GPU."""
        # Parts of split layers are exchanged by `SplitHostExchange`, on the host.
        split = any(part_of(v) is not None for v in variables)
        return not split and self.strategy.device_for([describe(v) for v in variables]) != "cpu"

    def _opened(self, variables: list[Variable]) -> HostExchange:
        """Return the exchange for these variables; the first call opens it and moves earlier residuals to it."""
        key = tuple(id(v) for v in variables)
        if key not in self._open:
            specs = [describe(v) for v in variables]
            # A strategy that runs on the host opens one.
            exchange = cast(HostExchange, self.open_exchange(variables, specs))
            self._open[key] = exchange, list(variables)
        if key not in self._used:
            self._used.add(key)
            self._move_residuals(key)
        self._last = self._open[key]
        return self._last[0]

    def _move_residuals(self, key: tuple[int, ...]) -> None:
        """Move the residuals of an exchange's variables to it from the exchanges of earlier fits."""
        new, variables = self._open[key]
        for other in [k for k in self._open if k not in self._used]:
            _move_residual(*self._open[other], new, variables)
            if set(other) <= set(key):
                self._open.pop(other)[0].close()


def alive(reference: "weakref.ref[T]") -> T:
    """Return the object of a reference that TensorFlow keeps in a traced function; raise HvdxError if it is gone."""
    found = reference()
    if found is None:
        raise HvdxError("a training function was called after its optimiser was deleted. Trace it again.")
    return found


def _move_residual(
    old: HostExchange, old_variables: Sequence[Variable], new: HostExchange, new_variables: Sequence[Variable]
) -> None:
    """Move the residuals of variables that two exchanges share from `old` to `new`."""
    old_index, shared = {id(v): i for i, v in enumerate(old_variables)}, {id(v) for v in new_variables}
    residuals = old.residuals
    zeros = [np.zeros(tuple(v.shape), np.float32) for v in new_variables]
    new.add_to_residual(
        [
            residuals[old_index[id(v)]] if id(v) in old_index else zero
            for v, zero in zip(new_variables, zeros, strict=True)
        ]
    )
    old.add_to_residual(
        [-array if id(v) in shared else np.zeros_like(array) for v, array in zip(old_variables, residuals, strict=True)]
    )


def on_gpu(
    step: Callable[[int, int, list[tf.Tensor], list[np.ndarray], Callable[[int], tf.Tensor]], Sequence[npt.ArrayLike]],
    tensors: Sequence[tf.Tensor],
    sample: Sequence[tf.Tensor],
    numbers: tuple[int | tf.Tensor, int | tf.Tensor],
    variables: Sequence[Variable],
) -> list[tf.Tensor]:
    """Call an exchange on the GPU of its variables from an operation of the graph.

    The tensors are joined there. The kernels of the exchange read and write the memory of TensorFlow's tensors, through
    DLPack: TensorFlow waits until a tensor is filled before it exports it, and the kernels have finished when `step`
    returns.

    Args:
        step: function of the index of the first variable whose gradient is not finite, of the number of steps, of the
            tensors, of `sample`, and of `allocate`; see `StepInput`.
        tensors: tensors of this rank, one for each variable.
        sample: see `StepInput`; empty for none.
        numbers: index of the first variable whose gradient is not finite, -1 for none; and the number of steps.
        variables: variables of the exchange.

    Returns:
        One float32 tensor per variable.
    """
    # In the simulator, the variables and the arrays of the "GPU" are in host memory.
    device = device_of(variables[0]) or "CPU:0"

    allocate = functools.partial(own_zeros, device=device)

    def work(bad: tf.Tensor, count: tf.Tensor, update: tf.Tensor, *sample: tf.Tensor) -> npt.ArrayLike:
        (result,) = step(int(bad), int(count), [update], [s.numpy() for s in sample], allocate)
        return result

    with tf.device(device):
        flat = tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], 0)
        # One tensor is copied to the host instead of many.
        joined = [tf.concat(list(sample), 0)] if sample else []
    counts = [tf.cast(n, tf.int64) for n in numbers]
    return _split(on_device(work, [*counts, flat, *joined], tf.float32, device), variables)


def unsent_on_gpu(exchange: Callable[[], HostExchange], variables: Sequence[Variable]) -> list[tf.Tensor]:
    """Return the tensors of `HostExchange.unsent` on the GPU of some variables, by an operation of the graph.

    Args:
        exchange: function that returns the exchange when the operation runs.
        variables: variables of the exchange.
    """
    device = device_of(variables[0]) or "CPU:0"

    def work(_: tf.Tensor) -> npt.ArrayLike:
        (result,) = exchange().unsent(functools.partial(own_zeros, device=device))
        return cast("npt.ArrayLike", result)

    return _split(on_device(work, [tf.constant(0, tf.int64)], tf.float32, device), variables)


def own_zeros(shape: int | Sequence[int], device: str, dtype: str | tf.DType = tf.float32) -> tf.Tensor:
    """Return zeros on a device, in memory that belongs to nobody else; that of a constant could be shared.

    Args:
        shape: shape, or number of elements.
        device: name of the device, such as "GPU:0".
        dtype: dtype of an element.
    """
    with tf.device(device):
        return tf.raw_ops.Empty(shape=[shape] if isinstance(shape, int) else list(shape), dtype=dtype, init=True)


def _split(flat: tf.Tensor, variables: Sequence[Variable]) -> list[tf.Tensor]:
    """Return the parts of a vector of all elements, one of the shape of each variable."""
    sizes = [math.prod(tuple(v.shape)) for v in variables]
    with tf.device(flat.device):
        flat.set_shape([sum(sizes)])
        parts = tf.split(flat, sizes)
        return [tf.reshape(part, v.shape) for part, v in zip(parts, variables, strict=True)]


def _sums(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the sum of each tensor, a float32 scalar, with one constant for all tensors of a rank."""
    ranks = {t.shape.rank for t in tensors} - {None}
    axes = {rank: tf.constant([*range(rank)], tf.int32) for rank in ranks}
    casts = [tf.cast(t, tf.float32) for t in tensors]
    return [tf.reduce_sum(c, axes.get(c.shape.rank)) for c in casts]


def _usable(sums: Sequence[tf.Tensor], gradients: Sequence[Gradient], variables: Sequence[Variable]) -> list[tf.Tensor]:
    """Return for each gradient whether the optimiser may use it, a bool scalar.

    A large gradient does not wait for the others, so that the optimiser finds it in the processor's cache: on an MLP of
    1.9 million weights that takes 0.2 ms in place of 0.7. Small ones wait for each other, which takes fewer operations.
    On a GPU all do, since each condition copies its flag to the host.
    """
    on_gpu = any("GPU" in device_of(v) for v in variables)
    large = [not on_gpu and (values_of(g).shape.num_elements() or _LARGE) >= _LARGE for g in gradients]
    small = [total for total, alone in zip(sums, large, strict=True) if not alone]
    together = tf.reduce_all(tf.math.is_finite(tf.stack(small))) if small else tf.constant(True)
    return [tf.math.is_finite(total) if alone else together for total, alone in zip(sums, large, strict=True)]


def _if_usable(fine: tf.Tensor, values: tf.Tensor, zero: tf.Tensor) -> tf.Tensor:
    """Return a gradient, or zeros in its place if the optimiser may not use it.

    Small gradients are copied, by one operation. `tf.cond` becomes the operations for large ones when the graph runs,
    but it traces two functions for each gradient: the first step of 402 variables took 5 s longer.
    """
    if tf.executing_eagerly():
        return values if fine else tf.zeros_like(values)
    if (values.shape.num_elements() or _LARGE) < _LARGE:
        return tf.raw_ops.SelectV2(condition=fine, t=values, e=zero)
    bad, good = tf.raw_ops.Switch(data=values, pred=fine)
    # `fine` is 0 there. Zeros that do not depend on it would become a constant, which has the gradient's size as long
    # as the model trains.
    zeros = tf.raw_ops.MulNoNan(x=bad, y=tf.cast(fine, values.dtype))
    return tf.raw_ops.Merge(inputs=[good, zeros])[0]


def any_rank(comm: Comm, flag: tf.Tensor) -> tf.Tensor:
    """Return a flag that is 1 if that of any rank is above 0, else 0. Collective, in the graph.

    Args:
        comm: the ranks.
        flag: float32, flag of this rank.
    """

    def ask(mine: np.ndarray) -> list[np.float32]:
        return [np.float32(comm.any_true(bool(mine > 0)))]

    (anywhere,) = on_host(ask, [flag], [tf.float32])
    anywhere.set_shape(())
    return anywhere
