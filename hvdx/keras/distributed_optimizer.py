"""`DistributedOptimizer` and `DistributedGradientTape`: Horovod's two doors to the same averaging."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdx import comm as world
from hvdx.errors import ConfigError
from hvdx.keras.horovod_api import Average, Compression, is_partial, operation, wire
from hvdx.keras.optimizer import attach
from hvdx.keras.optimizer_state import innermost
from hvdx.strategies import AllReduce, GraphStrategy, Strategy, agree_on_strategy, join, resolve

_numbers = itertools.count()


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    strategy: Strategy | str | None = None,
) -> Any:
    """Make an optimiser combine its gradients over the ranks.

    Unlike Horovod's this ties the optimiser that is given, and keeps its state and its class.

    Args:
        optimizer: a Keras 3 optimiser, not yet used where `backward_passes_per_step` is above 1.
        name: pairs up what the ranks send; chosen for you by default.
        device_dense, device_sparse: devices of the collectives.
        compression: Compression.none, .fp16 or .bf16.
        sparse_as_dense: send the gradients of embeddings as whole tables.
        gradient_predivide_factor: splits the averaging before and after the sum.
        op: Average or Sum.
        backward_passes_per_step: accumulate this many gradients before they are combined and applied.
        average_aggregated_gradients: divide the accumulated gradient by `backward_passes_per_step`.
        num_groups, groups: number of collectives a step; or, `groups` only, lists of indices into the gradients.
        process_set: not supported; all ranks take part.
        scale_local_gradients: must stay True; there are no local variables.
        strategy: hvdx's own way to say all of this: a strategy or its one-line spelling. By default the other
            arguments decide, and where they are at their defaults `HVDX_STRATEGY` does.

    Returns:
        The same optimiser; under the policy "mixed_float16" a loss-scale optimiser around it, which Keras would
        otherwise add where the ranks cannot agree on skipping a step.

    Raises:
        ConfigError: an argument that is not supported.

    Example:
        >>> join().size
        1
        >>> type(DistributedOptimizer(keras.optimizers.SGD(0.1))).__name__
        'SGD'
    """
    _refuse(process_set, scale_local_gradients)
    given = _all_reduce(
        device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op, num_groups, groups
    )
    chosen = _choose(strategy, given)
    gain = _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    if keras.config.dtype_policy().name == "mixed_float16":
        optimizer = _loss_scaled(optimizer)
    joined = join()
    if joined.size > 1:
        agree_on_strategy(chosen, joined)
        attach(optimizer, chosen, name or f"optimizer.{next(_numbers)}", gain)
    return optimizer


class DistributedGradientTape:
    """A gradient tape whose gradients are those of all ranks.

    Args:
        gradtape: a `tf.GradientTape`.
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups:
            see `DistributedOptimizer`.
        process_set, scale_local_gradients: not supported.
        strategy: see `DistributedOptimizer`.

    Example:
        >>> w = keras.Variable(2.0)
        >>> with DistributedGradientTape(tf.GradientTape()) as tape:
        ...     loss = w * w
        >>> float(tape.gradient(loss, w))
        4.0
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: Any = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
        strategy: Strategy | str | None = None,
    ):
        _refuse(process_set, scale_local_gradients)
        given = _all_reduce(
            device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op, num_groups, groups
        )
        chosen = _choose(strategy, given)
        if not isinstance(chosen, GraphStrategy):
            raise ConfigError(
                f"DistributedGradientTape: {chosen!r} remembers what it has not sent from one step to the next, and "
                "a tape is gone after one. Give it to DistributedOptimizer in its place."
            )
        self._strategy = chosen
        self._tape = gradtape
        self._comm = world.graph()

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """The gradient of `target` over all ranks.

        Args:
            target: as for `tf.GradientTape.gradient`.
            sources: a variable of Keras or TensorFlow, or a nested structure of them.
            output_gradients, options: as for `tf.GradientTape.gradient`.

        Returns:
            Gradients in the structure of `sources`; None where there is none.
        """
        plain = tf.nest.map_structure(lambda v: v.value if isinstance(v, keras.Variable) else v, sources)
        gradients = tf.nest.flatten(
            self._tape.gradient(target, plain, output_gradients, **options), expand_composites=False
        )
        present = [i for i, g in enumerate(gradients) if g is not None]
        if self._comm.size > 1 and present:
            combined = self._strategy.exchange(self._comm, [gradients[i] for i in present], "tape")
            for i, gradient in zip(present, combined, strict=True):
                gradients[i] = gradient
        return tf.nest.pack_sequence_as(plain, gradients)


def _all_reduce(
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: Any,
    num_groups: int,
    groups: Any,
) -> AllReduce:
    """The strategy that Horovod's arguments describe."""
    return AllReduce(
        op=operation(op),  # type: ignore[arg-type]
        compression=wire(compression),
        groups=_groups(num_groups, groups),
        sparse="dense" if sparse_as_dense else "gather",
        gradient_predivide_factor=gradient_predivide_factor,
        device=device_dense,
        device_sparse=device_sparse,
    )


def _choose(strategy: Strategy | str | None, given: AllReduce) -> Strategy:
    """What Horovod's arguments say, or hvdx's; what the environment says where both are silent."""
    if repr(given) == "AllReduce()":
        return resolve(strategy)
    if strategy is not None:
        raise ConfigError(f"strategy={strategy!r} and {given!r} were both given. Give one.")
    return given


def _groups(num_groups: int, groups: Any) -> int | Sequence[Sequence[int]]:
    if groups is None:
        return num_groups or 1
    if isinstance(groups, int) and groups > 0:
        return groups
    if isinstance(groups, list | tuple) and all(isinstance(i, int) for group in groups for i in group):
        return groups
    raise ConfigError(
        "groups: expected a positive number or lists of indices into the trainable variables. Lists of variables are "
        "not supported: their gradients are known by position."
    )


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Have Keras accumulate over `passes` micro-steps; return the factor that turns its mean into what was asked."""
    if not isinstance(passes, int) or passes < 1:
        raise ConfigError(f"backward_passes_per_step: expected 1 or more, got {passes!r}.")
    if passes == 1:
        return 1.0
    inner = innermost(optimizer)
    if inner.gradient_accumulation_steps:
        raise ConfigError(
            f"backward_passes_per_step={passes}: the optimizer accumulates over {inner.gradient_accumulation_steps} "
            "steps already (gradient_accumulation_steps). Use one of the two."
        )
    if inner.built:
        raise ConfigError("backward_passes_per_step: the optimizer has been used already. Give a fresh one.")
    inner.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)


def _loss_scaled(optimizer: Any) -> Any:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")


def _refuse(process_set: Any, scale_local_gradients: bool) -> None:
    """Raise for what hvdx does not have; Horovod's set of all processes, whose id is 0, is what it has."""
    if is_partial(process_set) or not scale_local_gradients:
        raise ConfigError("process_set, scale_local_gradients: not supported by hvdx. Leave them out.")
