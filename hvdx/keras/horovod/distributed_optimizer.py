"""`DistributedOptimizer` and `DistributedGradientTape`: Horovod's two interfaces to averaged gradients."""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from hvdx.errors import ConfigError
from hvdx.keras import backend, separate
from hvdx.keras.adapters.base import Adapter, refuse_xla
from hvdx.keras.adapters.local_variables import LocalVariables, trained_by
from hvdx.keras.adapters.optimizer import attach
from hvdx.keras.backend import tf
from hvdx.keras.horovod.api import Average, Compression, Compressor, Operation, operation, unsupported, wire
from hvdx.keras.horovod.process_sets import ProcessSet, comm_or_none, is_partial
from hvdx.keras.joining import join
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.seams.optimizers import add_local_variables_method, trained_variables
from hvdx.keras.types import Gradient, Structure, Variable
from hvdx.strategies import AllReduce, Strategy, agree_on_strategy, resolve

# Optimisers are numbered per process set, so that its ranks agree on names even if other ranks make more optimisers.
_numbers: dict[int | None, Iterator[int]] = collections.defaultdict(itertools.count)


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Operation = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[int]] | None = None,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
    strategy: Strategy | str | None = None,
) -> keras.optimizers.Optimizer:
    """Make an optimiser combine its gradients over the ranks.

    Unlike Horovod's function, it attaches the given optimiser in place, and keeps its state and class.

    Args:
        optimizer: Keras 3 optimiser; it must be unused if `backward_passes_per_step` is above 1.
        name: name of the exchange, the same on all ranks; by default, the number of the optimiser.
        device_dense, device_sparse: devices of the collectives.
        compression: Compression.none, .fp16 or .bf16.
        sparse_as_dense: send the gradients of embeddings as whole tables.
        gradient_predivide_factor: divide by this factor before the sum, and by size / factor after it.
        op: Average or Sum.
        backward_passes_per_step: number of gradients to accumulate before they are combined and applied.
        average_aggregated_gradients: divide the accumulated gradient by `backward_passes_per_step`.
        num_groups, groups: number of collectives per step; `groups` may also be lists of indices into the gradients.
        process_set: ranks that take part, by default all. On other ranks the optimiser stays a plain one.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.
        strategy: strategy or its one-line spelling, in place of Horovod's arguments for the all-reduce. By default
            those arguments decide. If they have their default values, the strategy of `init` or `HVDX_STRATEGY` is
            used.

    Returns:
        The same optimiser; under the policy "mixed_float16", a loss-scale optimiser around it. If Keras added it later,
        ranks could not agree to skip a step. The optimiser's method
        `register_local_var(variables)` takes a Keras or TensorFlow variable, or several, before the first step; each
        rank then trains those alone.

    Raises:
        ConfigError: if an argument is not supported.

    Example:
        >>> join().size
        1
        >>> type(DistributedOptimizer(keras.optimizers.SGD(0.1))).__name__
        'SGD'
    """
    backend.needs_tensorflow("DistributedOptimizer")
    all_reduce = _all_reduce(
        device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op, num_groups, groups
    )
    chosen = _choose(strategy, all_reduce)
    gain = _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    if keras.config.dtype_policy().name == "mixed_float16":
        optimizer = _loss_scaled(optimizer)
    partial = is_partial(process_set)
    if partial and (not _in_graph(chosen) or chosen.engine != "auto"):
        raise ConfigError(
            f"process_set: expected it with AllReduce() only, whose engine is 'auto', got {chosen!r}. Do: leave one of "
            "the two out."
        )
    some = comm_or_none(process_set, "DistributedOptimizer") if partial else None
    joined = some if partial else join()
    adapter = None
    if joined is None:
        separate.allow(innermost(optimizer))
    if joined is not None and joined.size > 1:
        if chosen.provisional:
            raise ConfigError(
                f"strategy {chosen!r}: it measures the steps of a fit before it chooses. Use the Distribute "
                "callback, or name a strategy: hvdx.AllReduce(), hvdx.Threshold()."
            )
        agree_on_strategy(chosen, joined)
        number = next(_numbers[process_set.process_set_id if process_set is not None and partial else 0])
        adapter = attach(optimizer, chosen, name or f"optimizer.{number}", gain, some)
    _add_register_local_var(optimizer, chosen, adapter, scale_local_gradients)
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    *,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Make an optimiser combine its gradients over the ranks, except those of local layers.

    Args:
        optimizer: see `DistributedOptimizer`.
        local_layers: a built `keras.layers.Layer`, or several, whose weights each rank trains alone.
        options: arguments of `DistributedOptimizer`.

    Returns:
        See `DistributedOptimizer`.

    Raises:
        ConfigError: if an option is not supported, or a layer is not built.

    Example:
        >>> layer = keras.layers.Dense(1)
        >>> layer.build((None, 2))
        >>> type(PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[layer])).__name__
        'SGD'

    Source: Horovod 0.28, `horovod.keras.PartialDistributedOptimizer`.
    """
    result = DistributedOptimizer(optimizer, **options)
    result.register_local_var(trained_by(local_layers))
    return result


class DistributedGradientTape:
    """Gradient tape whose gradients are combined over the ranks.

    Args:
        gradtape: a `tf.GradientTape`.
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups:
            see `DistributedOptimizer`.
        process_set: ranks that take part, by default all. On other ranks gradients stay unchanged.
        scale_local_gradients: see `DistributedOptimizer`.
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
        compression: Compressor = Compression.none,
        sparse_as_dense: bool = False,
        op: Operation = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[int]] | None = None,
        process_set: ProcessSet | None = None,
        scale_local_gradients: bool = True,
        strategy: Strategy | str | None = None,
    ):
        backend.needs_tensorflow("DistributedGradientTape")
        all_reduce = _all_reduce(
            device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op, num_groups, groups
        )
        chosen = _choose(strategy, all_reduce)
        if not _in_graph(chosen):
            raise ConfigError(
                f"DistributedGradientTape: expected a strategy that combines gradients in the graph, got {chosen!r}, "
                "whose state would be lost with the tape after each step. Give it to DistributedOptimizer instead."
            )
        self._strategy = chosen
        self._local = LocalVariables(scale_local_gradients)
        self._tape = gradtape
        self._comm = comm_or_none(process_set, "DistributedGradientTape", chosen.engine)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def register_local_source(self, source: Variable | Sequence[Variable]) -> None:
        """Exclude sources from the exchange: each rank keeps its own gradients of them.

        Args:
            source: a Keras or TensorFlow variable, or several.
        """
        self._local.add(source)

    def get_local_and_global_gradients(
        self, target: Structure, sources: Sequence[Variable], output_gradients: Structure = None
    ) -> tuple[list[tuple[Variable, Gradient | None]], list[tuple[Variable, Gradient | None]]]:
        """Return the pairs (source, gradient) of local sources, and those of all others.

        Args:
            target, output_gradients: see `gradient`.
            sources: list of variables.
        """
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        return [p for p in pairs if self._local.holds(p[0])], [p for p in pairs if not self._local.holds(p[0])]

    def gradient(
        self,
        target: Structure,
        sources: Variable | Sequence[Variable],
        output_gradients: Structure = None,
        **options: object,
    ) -> Any:
        """Return the gradient of `target`, combined over the ranks.

        Args:
            target: see `tf.GradientTape.gradient`.
            sources: a Keras or TensorFlow variable, or a nested structure of them.
            output_gradients, options: see `tf.GradientTape.gradient`.

        Returns:
            Gradients in the structure of `sources`; None for a source without a gradient.
        """
        variables = tf.nest.flatten(sources)
        plain = tf.nest.map_structure(raw_variable, sources)
        gradients = tf.nest.flatten(
            self._tape.gradient(target, plain, output_gradients, **options), expand_composites=False
        )
        present = [i for i, g in enumerate(gradients) if g is not None]
        separate.script_combines()
        comm = self._comm
        if comm is not None and comm.size > 1 and present:
            refuse_xla()
            exchange: Any = self._strategy.open(comm, [], name="tape")
            combined = self._local.exchange_others(
                [variables[i] for i in present], [gradients[i] for i in present], comm.size, exchange.step
            )
            for i, gradient in zip(present, combined, strict=True):
                gradients[i] = gradient
        return tf.nest.pack_sequence_as(plain, gradients)


def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    *,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    **options: Any,
) -> DistributedGradientTape:
    """Return a gradient tape whose gradients are combined over the ranks, except those of local layers.

    Args:
        gradtape: a `tf.GradientTape`.
        local_layers: a built `keras.layers.Layer`, or several, whose gradients stay on each rank.
        options: arguments of `DistributedGradientTape`.

    Example:
        >>> layer = keras.layers.Dense(1, kernel_initializer="ones")
        >>> layer.build((None, 2))
        >>> with PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer) as tape:
        ...     loss = tf.reduce_sum(layer(tf.ones((1, 2))))
        >>> len(tape.gradient(loss, layer.trainable_weights))
        2

    Source: Horovod 0.28, `horovod.tensorflow.PartialDistributedGradientTape`.
    """
    tape = DistributedGradientTape(gradtape, **options)
    tape.register_local_source(trained_by(local_layers))
    return tape


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, object] | None = None,
    compression: Compressor = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a saved model and distribute its optimiser, which resumes from its saved state.

    Args:
        filepath: see `keras.models.load_model`.
        custom_optimizers: classes of your own, one of which is the saved optimiser's.
        custom_objects: see `keras.models.load_model`.
        compression: see `DistributedOptimizer`.
        legacy_opts: not supported; Keras 3 has no legacy optimisers.

    Raises:
        ConfigError: if Keras did not restore the optimiser, as happens with a compiled model in an HDF5 file.
    """
    unsupported("load_model", legacy_opts=legacy_opts)
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        _check_restored(model, filepath)
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _check_restored(model: keras.Model, filepath: str | os.PathLike[str]) -> None:
    """Raise ConfigError if the optimiser was built for no variables: Keras 3 does so for HDF5 files."""
    # An optimiser without slots has no variables either.
    if model.optimizer.built and model.trainable_variables and not trained_variables(innermost(model.optimizer)):
        raise ConfigError(
            f"load_model: {filepath}: expected a file from which Keras restores the optimizer, got one for which Keras "
            "builds it without variables, so that it cannot train. Do: save the model as .keras; to use this file, "
            "load it with keras.models.load_model(path, compile=False) and compile the model."
        )


def _in_graph(strategy: Strategy) -> bool:
    """Return whether a strategy combines gradients in the graph, and therefore has no state."""
    return (strategy.runs, strategy.placement) == ("graph", "gradient")


def _add_register_local_var(
    optimizer: keras.optimizers.Optimizer, strategy: Strategy, adapter: Adapter | None, scale: bool
) -> None:
    """Add the method `register_local_var` to an optimiser."""
    local = (adapter.local if adapter is not None else None) or LocalVariables()
    local.divide(scale)

    def register_local_var(variables: Variable | Sequence[Variable] | None) -> None:
        if not _in_graph(strategy):
            raise ConfigError(
                f"register_local_var: expected a strategy that combines gradients in the graph, got {strategy!r}. "
                "Do: use AllReduce()."
            )
        if adapter is not None and adapter.stepped:
            raise ConfigError(
                "register_local_var: expected to be called before the first step, got a call after it, which the "
                "training function would not see. Do: register local variables before fit."
            )
        local.add(variables)

    for part in (optimizer, innermost(optimizer)):
        add_local_variables_method(part, register_local_var)


def _all_reduce(
    device_dense: str,
    device_sparse: str,
    compression: Compressor,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: Operation,
    num_groups: int,
    groups: int | Sequence[Sequence[int]] | None,
) -> AllReduce:
    """Return the strategy for Horovod's arguments."""
    return AllReduce(
        op=operation(op),  # type: ignore[arg-type]
        compression=wire(compression),
        groups=_groups(num_groups, groups),
        sparse="dense" if sparse_as_dense else "gather",
        gradient_predivide_factor=gradient_predivide_factor,
        device=device_dense,
        device_sparse=device_sparse,
    )


def _choose(strategy: Strategy | str | None, all_reduce: AllReduce) -> Strategy:
    """Return the strategy of Horovod's arguments or of `strategy`; if neither is given, see `resolve`."""
    if repr(all_reduce) == "AllReduce()":
        return resolve(strategy)
    if strategy is not None:
        raise ConfigError(f"strategy={strategy!r} and {all_reduce!r} were both given. Give one.")
    return all_reduce


def _groups(num_groups: int, groups: int | Sequence[Sequence[int]] | None) -> int | Sequence[Sequence[int]]:
    if groups is None:
        return num_groups or 1
    if isinstance(groups, int) and groups > 0:
        return groups
    if isinstance(groups, list | tuple) and all(isinstance(i, int) for group in groups for i in group):
        return groups
    raise ConfigError(
        "groups: expected a positive number or lists of indices into the trainable variables. Lists of variables are "
        "not supported: gradients are identified by position."
    )


def _accumulate(optimizer: keras.optimizers.Optimizer, passes: int, average: bool) -> float:
    """Make Keras accumulate over `passes` micro-steps; return the factor from Keras' mean to the requested value."""
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
        raise ConfigError("backward_passes_per_step: the optimizer has been used already. Give a new one.")
    inner.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)


def _loss_scaled(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.LossScaleOptimizer:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
