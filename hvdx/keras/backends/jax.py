"""JAX: a training step is compiled, and calls Python code in the order of the program."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import io_callback

from hvdx.comm import failure
from hvdx.keras.seams.replacing import Method

T = TypeVar("T")


def on_host(work: Callable[[list[np.ndarray]], Sequence[np.ndarray]], tensors: Sequence[jax.Array]) -> list[jax.Array]:
    """Call Python code with the arrays of some tensors within a training step.

    Args:
        work: function from arrays, which it may overwrite, to arrays of the same shapes and dtypes.
        tensors: tensors on any device; no gradient flows through them.

    Returns:
        The results.
    """

    def call(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        # JAX' own arrays must not change.
        return tuple(_kept(lambda: work([np.array(a) for a in arrays])))

    shapes = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tensors)
    return list(io_callback(call, shapes, *map(jax.lax.stop_gradient, tensors), ordered=True))


def tell(work: Callable[[list[np.ndarray]], None], tensors: Sequence[jax.Array]) -> None:
    """Call Python code with the arrays of some tensors within a training step, without a result.

    Args:
        work: function of arrays, which it must not change.
        tensors: tensors on any device.
    """

    def call(*arrays: np.ndarray) -> None:
        _kept(lambda: work([np.asarray(a) for a in arrays]))

    io_callback(call, None, *map(jax.lax.stop_gradient, tensors), ordered=True)


def watch_gradients(variables: object, gradients: object, note: object) -> None:
    """Return None: a compiled step hands out its gradients at once."""


def _kept(work: Callable[[], T]) -> T:
    """Do some work; JAX hides the type of an exception, and cuts its text."""
    try:
        return work()
    except BaseException as error:
        _raised[:] = [error]
        failure.remember(error)
        raise


# Exception of Python code in the present step.
_raised: list[BaseException] = []


def around(function: Method, note: Callable[[object], None], model: keras.Model) -> Method:
    """Return a training function that calls `note` with each batch before its step, and waits for the end of the step.

    Without the wait, callbacks would exchange messages while the step still does.

    Args:
        function: training function that Keras made.
        note: function of a batch, or of None where this rank has none: the optimiser then takes a step with zeros.
        model: the model.
    """
    logs: object = None

    def noted(batches: Iterator[object]) -> Iterator[object]:
        for batch in batches:
            note(batch)
            yield batch

    def idle(state: Sequence[list[jax.Array]]) -> object:
        note(None)
        trained, others, slots, metrics = state
        trained, slots = model.optimizer.stateless_apply(slots, [jnp.zeros_like(t) for t in trained], trained)
        return logs, (trained, others, slots, metrics)

    def step(state: Sequence[list[jax.Array]], batches: Iterator[object]) -> object:
        nonlocal logs
        first = next(batches)
        _raised.clear()
        try:
            if first is None:
                return jax.block_until_ready(idle(state))
            logs, state = jax.block_until_ready(function(state, noted(itertools.chain([first], batches))))
            return logs, state
        except Exception:
            if _raised:
                raise _raised[0] from None
            raise

    return step


def sync(model: keras.Model) -> None:
    """Make the model's variables hold their values in the middle of an epoch, in which Keras keeps them elsewhere.

    Relies on: `Model.jax_state_sync`; after it, the next step begins with the variables.
    """
    model.jax_state_sync()


def prepare(threads: int) -> None:
    """Do nothing: JAX has as many threads as the process may use cores."""


def memory() -> tuple[int, int] | None:
    """Return the most bytes that this process has held on its GPU, and those that it may hold; None on a CPU."""
    found = jax.local_devices()[0].memory_stats() or {}
    peak, limit = found.get("peak_bytes_in_use"), found.get("bytes_limit")
    return (peak, limit) if peak and limit else None


def device_of(array: jax.Array) -> str:
    """Return the value of `TensorSpec.device` for an array, which no step that is traced holds."""
    devices = [*array.devices()]
    is_gpu = len(devices) == 1 and devices[0].platform in ("gpu", "cuda")
    return f"GPU:{devices[0].local_hardware_id}" if is_gpu else "CPU"


@jax.jit
def copies(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return copies in float32, each on the device of its array; a step gives away the memory of variables."""
    return [jnp.array(a, jnp.float32, copy=True) for a in arrays]


def flat_update(arrays: list[jax.Array], begun: list[jax.Array], weight: float) -> jax.Array:
    """Return (arrays - begun) * weight on their GPU, float32[elements of all], which is filled.

    Args:
        arrays: values of variables.
        begun: float32 arrays of the same shapes.
        weight: factor.
    """
    return _differences(arrays, begun, np.float32(weight)).block_until_ready()


@jax.jit
def _differences(arrays: list[jax.Array], begun: list[jax.Array], weight: jax.Array) -> jax.Array:
    pairs = zip(arrays, begun, strict=True)
    return jnp.concatenate([jnp.ravel((a.astype(jnp.float32) - b) * weight) for a, b in pairs])


def zeros(n: int, like: jax.Array) -> jax.Array:
    """Return float32[n] of zeros on an array's GPU, filled, in memory that belongs to nobody else: kernels write it."""
    return _zeros(n, like).block_until_ready()


@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _zeros(n: int, _: jax.Array) -> jax.Array:
    return jnp.zeros(n, jnp.float32)


def sums(arrays: list[jax.Array], flat: jax.Array, factor: float) -> list[jax.Array]:
    """Return the sums of float32 arrays and a vector of all elements times a factor."""
    # Compiled with the additions, the products would not be rounded as NumPy rounds them.
    return _sums(arrays, flat * np.float32(factor))


def _added(arrays: list[jax.Array], flat: jax.Array) -> list[jax.Array]:
    parts = jnp.split(flat, np.cumsum([a.size for a in arrays])[:-1])
    return [a + part.reshape(a.shape) for a, part in zip(arrays, parts, strict=True)]


_sums = jax.jit(_added)
#: Add a vector of all elements to float32 arrays, whose memory the sums take; return them.
add = jax.jit(_added, donate_argnums=0)


def has_gpu() -> bool:
    """Return whether the host has GPUs; JAX itself would start, and take their memory, to say so."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
