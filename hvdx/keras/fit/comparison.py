"""Comparisons over the ranks at the start of a fit and after its first step."""

from __future__ import annotations

import functools
import math
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from hvdx.comm import Comm
from hvdx.errors import ReplicaError
from hvdx.keras.backend import is_dataset, tf
from hvdx.keras.fit.agreement import generators, model_state, pipeline, shares
from hvdx.keras.fit.agreement.sample import sample
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.seams.frames import epoch_iterator, validation_inputs
from hvdx.keras.seams.graphs import functions_in, traces_of
from hvdx.keras.seams.iterators import EpochIterator, arrays_of, dataset_of, epoch_is_one_pass, read_from
from hvdx.keras.seams.pipelines import copies_to_device
from hvdx.keras.types import Logs, Structure
from hvdx.log import Log

_log = Log(__name__)

# Smaller constants are seeds, rates, sizes and numbers of ranks, which scripts may choose for each rank.
_ELEMENTS = 16


class Constant(NamedTuple):
    """A constant of at least 16 elements.

    Attributes:
        name: name of the operation in the graph.
        kind: dtype and shape.
        digest: digest of the values.
    """

    name: str
    kind: str
    digest: int


def constants_of(train_function: object) -> list[Constant]:
    """Return the numeric constants of at least 16 elements in a traced training function.

    Args:
        train_function: training function that Keras made, or a `tf.function`; [] if nothing was traced.
    """
    found: dict[tuple[str, int], Constant] = {}
    seen: set[str] = set()
    for function in functions_in(train_function):
        traces = traces_of(function)
        if any(tf.compat.as_str(traced.name) in seen for traced in traces):
            continue  # The definitions of a function contain those of the functions that it calls.
        for traced in traces:
            definition = traced.graph.as_graph_def()
            seen |= {inner.signature.name for inner in definition.library.function}
            for constant in (*_in_graph(definition), *_captured(traced.graph)):
                found.setdefault((constant.kind, constant.digest), constant)
    return list(found.values())


def differing(everyone: Sequence[list[Constant]]) -> list[str]:
    """Compare the constants of all ranks.

    Constants correspond if dtype and shape are equal; their names and order may differ. Where ranks have different
    numbers of constants of a dtype and shape, nothing is compared.

    Returns:
        Each constant of rank 0 that another rank lacks, with its dtype, shape and the ranks.

    Example:
        >>> mine, other = Constant("mask", "float32[64]", 1), Constant("mask", "float32[64]", 2)
        >>> differing([[mine], [mine]]), differing([[mine], [other]])
        ([], ['mask, float32[64] (ranks 1)'])
    """
    kinds = [[constant.kind for constant in constants] for constants in everyone]
    listed = []
    for constant in everyone[0]:
        if len({each.count(constant.kind) for each in kinds}) > 1:
            continue
        others = enumerate(everyone[1:], 1)
        ranks = [r for r, theirs in others if not any(c[1:] == constant[1:] for c in theirs)]
        if ranks:
            listed.append(f"{constant.name}, {constant.kind} (ranks {', '.join(map(str, ranks))})")
    return listed


def _in_graph(definition: tf.compat.v1.GraphDef) -> Iterator[Constant]:
    for node in [*definition.node, *(node for f in definition.library.function for node in f.node_def)]:
        if node.op == "Const":
            value = node.attr["value"].tensor
            shape = [dim.size for dim in value.tensor_shape.dim]
            if _counts(tf.as_dtype(value.dtype), shape):
                content = value.SerializeToString(deterministic=True)
                yield _constant(node.name, tf.as_dtype(value.dtype), shape, content)


def _captured(graph: tf.Graph) -> Iterator[Constant]:
    """Yield the eager tensors that a function uses; TensorFlow passes larger ones as arguments."""
    for outside, inside in graph.captures:
        if hasattr(outside, "numpy") and _counts(outside.dtype, outside.shape):
            values = np.ascontiguousarray(outside.numpy())
            yield _constant(inside.op.name, outside.dtype, list(outside.shape), values.view(np.uint8).data)


def _counts(dtype: tf.DType, shape: tf.TensorShape | Sequence[int]) -> bool:
    return (dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex) and math.prod(
        shape
    ) >= _ELEMENTS


def _constant(name: str, dtype: tf.DType, shape: Sequence[int], content: bytes | memoryview) -> Constant:
    return Constant(name, f"{dtype.name}{list(shape)}", xxhash.xxh3_64(content).intdigest())


T = TypeVar("T")


class FirstBatch:
    """Dataset that computes a digest of its first batch when it is read first.

    Args:
        dataset: dataset of batches.

    Attributes:
        dataset: the same batches; each costs some microseconds more.
        digest: digest of the first batch; None before it was read.
        components: digest of each component of the first batch, see `Sample.digests`.

    Example:
        >>> first = FirstBatch(tf.data.Dataset.range(4).batch(2))
        >>> [batch.numpy().tolist() for batch in first.dataset], first.digest is None
        ([[0, 1], [2, 3]], False)
    """

    def __init__(self, dataset: tf.data.Dataset):
        self.digest: int | None = None
        self.components: list[int | None] = []
        with tf.device("CPU:0"):
            unread = tf.Variable(True, trainable=False)

        def note() -> tf.Tensor:
            unread.assign(False)
            return tf.numpy_function(self._note, parts, tf.bool)

        parts: list[tf.Tensor] = []

        def passed(*components: Structure) -> Structure:
            parts[:] = [p for p in tf.nest.flatten(components, expand_composites=True) if _has_values(p)]
            with tf.control_dependencies([tf.cond(unread, note, lambda: True)]):
                result = tf.nest.map_structure(_identity, components)
            # TensorFlow passes the parts of a tuple as arguments.
            return result if type(dataset.element_spec) is tuple else result[0]

        self.dataset = dataset.map(passed)

    def _note(self, *parts: np.ndarray) -> np.bool_:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(str((part.dtype, part.shape)).encode())
            content = repr(part.tolist()).encode() if part.dtype.kind == "O" else np.ascontiguousarray(part).tobytes()
            digest.update(content)
        self.digest = digest.intdigest()
        self.components = sample(parts).digests()
        return np.bool_(True)


def can_pass(dataset: object) -> bool:
    """Return whether `FirstBatch` can stand behind a dataset; TensorFlow allows nothing behind a copy to a GPU."""
    return is_dataset(dataset) and not any(copies_to_device(part) for part in pipeline.datasets(dataset))


def _has_values(part: object) -> bool:
    return isinstance(part, tf.Tensor) and part.dtype not in (tf.variant, tf.resource)


def _identity(part: T) -> T:
    return tf.identity(part) if _has_values(part) else part


# Largest number of differences that a message lists.
_LISTED = 3
_SHARES = (
    "Give each rank its share: model.fit(hvdx.shard((x, y), batch_size=...), shuffle=False, ...) in place of "
    "model.fit(x, y, batch_size=...); hvdx.shard(dataset, batch_size) divides a tf.data.Dataset."
)
_ALLOW = f"Set {shares.VARIABLE}=1 if this is intended."


class Comparison(Part):
    """Comparison of what must be alike on all ranks in a fit, or must differ.

    Args:
        comm: the ranks.
        attachment: optimisers of the fit. If it uses the trace of an earlier fit, model and constants were compared.
    """

    def __init__(self, comm: Comm, attachment: Attachment):
        super().__init__()
        self._comm, self._attachment = comm, attachment
        # Training function that this fit traces; None if it uses the trace of an earlier one.
        self._function: Any = None
        self._iterator: EpochIterator | None = None
        self._first_batch: FirstBatch | None = None
        self._dataset: tf.data.Dataset | None = None
        self._configuration: dict[str, str] = {}
        self._pending = False

    def offer(self) -> dict[str, object]:
        """Return what this rank has."""
        self._iterator = epoch_iterator(self)
        traced = self._attachment.traced
        # After the first step, the successor of a provisional strategy may have another function, not traced yet.
        self._function = self.model.train_function if traced else None
        self._pending, self._first_batch = True, None
        self._dataset = dataset = dataset_of(self._iterator)
        validation = validation_inputs(self)
        self._configuration = model_state.configuration(self.model) if traced else {}
        train = shares.shares_in(dataset)
        arrays, one_pass = arrays_of(self._iterator), epoch_is_one_pass(self._iterator)
        whole = arrays is not None and one_pass
        source = pipeline.source_of(dataset) if traced and one_pass and not train and not whole else None
        # A later fit of the same trace has the data of the earlier one, as a rule.
        if traced and not train and not whole and can_pass(dataset):
            self._first_batch = FirstBatch(dataset)
            read_from(self._iterator, self._first_batch.dataset)
        return {
            "training": train,
            "validation": shares.shares_in(validation),
            "arrays": sample(arrays).digest() if whole else source,
            "caches": (
                socket.gethostname(),
                [*dict.fromkeys(shares.cache_files(dataset) + shares.cache_files(validation))],
            ),
            "synchronized": model_state.synchronized(self.model),
            "adapted": model_state.adapted(self.model),
            "tables": model_state.tables_of(dataset) + model_state.tables_of(validation),
            "configuration": model_state.digest(self._configuration),
        }

    def agree(self, offered: list[dict[str, Any]]) -> None:
        """Compare what the ranks have before the first step.

        Raises:
            ReplicaError: on all ranks, if something differs that must be alike.
        """
        for use in ("training", "validation"):
            text = shares.difference(use, [theirs[use] for theirs in offered])
            if text is not None:
                self._refuse(text)
        text = shares.used_twice([theirs["caches"] for theirs in offered])
        if text is not None:
            self._refuse(text)
        if offered[0]["synchronized"]:
            self._warn(
                f"BatchNormalization(synchronized=True) takes the statistics of each rank's own batch in layers "
                f"{_listed(offered[0]['synchronized'])}: Keras synchronises only the replicas of tf.distribute. Use "
                "hvdx.keras.SyncBatchNormalization, or leave synchronized out."
            )
        for key in ("adapted", "tables"):
            differing = model_state.differing([theirs[key] for theirs in offered])
            if differing:
                self._refuse(
                    f"fit: expected preprocessing with the same state on all ranks; not as on rank 0: "
                    f"{_listed(differing)}. The same input would mean different things to the ranks. Adapt the layer "
                    "to the same data in the same order on every rank, before the data is divided; sort words from a "
                    "set or a directory; seed shuffles (hvdx.init(seed=1))."
                )
        digests = [theirs["configuration"] for theirs in offered]
        if len(set(digests)) > 1:
            # Only two ranks send theirs: a configuration can be large.
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            mine = self._configuration if self._comm.rank in (0, other) else {}
            sent = self._comm.all_gather_object(mine, "the configurations of the model")
            differing = model_state.differing_values(sent[0], sent[other], other)
            self._refuse(
                f"fit: expected the same model on all ranks, got different configurations: {_listed(differing)}. "
                "Build it from the same values on every rank: look for random choices (hvdx.init(seed=1) seeds "
                "them alike), for sets, and for values that depend on the rank or on its data."
            )
        self._configuration = {}
        self._warn_of_equal([theirs["arrays"] for theirs in offered])

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Compare what the first step shows; workers of an asynchronous strategy meet at the end of an epoch only."""
        if not self._attachment.strategy.asynchronous:
            self.end_steps()

    def begin_late(self, theirs: None) -> None:
        """Compare nothing: the others have taken their first step."""
        self._pending = False
        self._end_first_batch()
        self._function = self._iterator = self._dataset = None

    def _end_first_batch(self) -> FirstBatch | None:
        """Let the fit read its own data again; return the digest of the first batch."""
        first, self._first_batch = self._first_batch, None
        if first is not None and dataset_of(self._iterator) is first.dataset:
            read_from(self._iterator, self._dataset)
        return first

    def end_steps(self) -> None:
        """Compare first batches, elements of generators, and constants of the training function, once in a fit."""
        if not self._pending:
            return
        self._pending = False
        function, self._function = self._function, None
        found = constants_of(function) if function is not None else []
        first = self._end_first_batch()
        elements = generators.recorded(self._dataset)
        components = first.components if first and pipeline.draws_random(self._dataset) else []
        self._iterator = self._dataset = None
        mine = (first.digest if first else None, components, elements, found)
        digests, parts, drawn, traces = zip(*all_gather_at(self._comm, "the first step", mine), strict=True)
        if not self._warn_of_equal(digests) and _have_in_common(parts):
            self._warn(
                f"a part of the first batch, such as its labels, is the same on all {self._comm.size} ranks, and the "
                "random rest differs: they seem to train on the same samples with other augmentation, so an epoch "
                f"takes {self._comm.size} times the work. {_SHARES} If that part is meant to be the same, nothing is "
                "wrong."
            )
        ranks = generators.differing(drawn)
        if ranks:
            self._warn(
                f"hvdx.shard: the dataset is made by a generator that yields other elements on ranks {ranks} than on "
                "rank 0, or the same in another order. Then several ranks train some samples, and no rank trains "
                "others. Seed what the generator draws (random.Random(1), numpy.random.default_rng(1), "
                "hvdx.init(seed=1)), and sort lists of files. If each rank generates its own data, do not shard it."
            )
        changed = differing(traces)
        if changed:
            self._warn(
                f"the training function holds constants that are not those of rank 0: {_listed(changed)}. If they "
                "are random (masks, projections, noise) or a vocabulary, the ranks train different models that share "
                "weights. Make them weights (add_weight(..., trainable=False)), which hvdx gives to all ranks, or draw "
                "them with a seed (numpy.random.default_rng(1), hvdx.init(seed=1)). If each rank is meant to have its "
                "own, nothing is wrong."
            )

    def _warn_of_equal(self, digests: Sequence[int | None]) -> bool:
        """Warn if ranks have the same data, and return whether they have.

        Args:
            digests: digest of the data of each rank, or None if it is unknown.
        """
        groups: dict[int, list[int]] = {}
        for rank, digest in enumerate(digests):
            if digest is not None:
                groups.setdefault(digest, []).append(rank)
        largest = max(groups.values(), key=len, default=[])
        if len(largest) < 2:
            return False
        who = f"all {len(largest)} ranks" if len(largest) == self._comm.size else f"ranks {largest}"
        self._warn(
            f"{who} train on the same data: an epoch takes {len(largest)} times the work for the same samples. "
            f"{_SHARES} If train_step draws other data on each rank, nothing is wrong."
        )
        return True

    def _refuse(self, text: str) -> None:
        if not shares.allowed():
            raise ReplicaError(f"{text} {_ALLOW}")
        self._warn(text)

    def _warn(self, text: str) -> None:
        if self._comm.rank == 0:
            print_once(text)


def _have_in_common(everyone: Sequence[list[int | None]]) -> bool:
    """Return whether a component of the first batch has the same digest on all ranks."""
    return len({len(mine) for mine in everyone}) == 1 and any(
        mine[0] is not None and len(set(mine)) == 1 for mine in zip(*everyone, strict=True)
    )


@functools.cache
def print_once(text: str) -> None:
    """Log a warning once, however many fits the script has."""
    _log.warning(text, head="\nhvdx: WARNING: ")


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return "; ".join(items[:_LISTED]) + more
