"""Communicator for the TensorFlow graph without Horovod: each collective calls Python with arrays on the host."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm import failure
from hvdx.comm.array_comm import ArrayComm
from hvdx.comm.buckets import fill
from hvdx.comm.interfaces import Comm, Reduction
from hvdx.comm.launcher import usable_cores
from hvdx.comm.memory import is_aligned
from hvdx.comm.tensors import MismatchError, TensorComm
from hvdx.errors import ConfigError

_WIRES = {"fp16": tf.float16, "bf16": tf.bfloat16}


class HostGraphComm(TensorComm, ArrayComm):
    """Communicator for the graph on top of a host communicator. Creating one is collective.

    Horovod matches the ranks' collectives by name; here they are matched by order. A graph runs its collectives in the
    order in which the program calls them, which is the same on all ranks.

    Args:
        comm: communicator on the host, with channels.
    """

    mismatch = MismatchError

    def __init__(self, comm: Comm):
        prepare()
        super().__init__(comm)
        # Within a host, an exchange takes the cores that compute the other gradients. A rank that died in the middle of
        # a bucket would leave the others at different buckets.
        self._overlaps = self._leaves_host and not comm.survives and not comm.any_true(_operations_at_once() == 1)

    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> Sequence[npt.ArrayLike]:
        if tf.executing_eagerly():
            return self._comm.broadcast(tensors, root, what)
        sent = list(map(tf.convert_to_tensor, tensors))
        received = on_host(lambda *arrays: self._comm.broadcast(arrays, root, what), sent, [t.dtype for t in sent])
        for result, tensor in zip(received, sent, strict=True):
            result.set_shape(tensor.shape)
        return received

    def all_reduce(
        self, tensors: Sequence[tf.Tensor | tf.IndexedSlices], how: Reduction, name: str
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sum or average tensors over the ranks; see `GraphComm.all_reduce`.

        Raises:
            ConfigError: if `how` names a device.
        """
        if how.device or how.device_sparse:
            raise ConfigError.on_all_ranks(
                f"device: expected none where MPI combines tensors, got {how.device or how.device_sparse!r}. Do: leave "
                "device and device_sparse out, or build Horovod: hvdx build-horovod"
            )
        # Within a host nothing is sent, and a cast would cost time and digits.
        return super().all_reduce(tensors, how if self._leaves_host else replace(how, wire="none"), name)

    def reduce_group(self, tensors: list[tf.Tensor], how: Reduction, name: str) -> list[tf.Tensor]:
        before = how.predivide if how.average else 1.0
        # Cast on the tensor's own device: only half the bytes then leave a GPU, and TensorFlow casts several times
        # faster than NumPy.
        sent = [_narrow(t / before if before != 1.0 else t, how.wire) for t in tensors]
        # Only a scalar needs a dimension; `DenseSums` takes arrays of any other shape.
        sent = [t if t.shape.rank else tf.reshape(t, [-1]) for t in sent]
        buckets: list[list[int]] = []
        if self._overlaps and how.sizes:
            buckets = fill([elements * t.dtype.size for elements, t in zip(how.sizes, sent, strict=True)])
        marks = name if how.of_step and sent[0].dtype.is_floating else ""
        if len(buckets) > 1:
            received = in_order(lambda: self._sums_behind(sent, buckets, how, marks))
        else:

            def sums(vectors: Sequence[np.ndarray]) -> Sequence[npt.ArrayLike]:
                self._sums(vectors, how, marks)
                return ()

            _, received = change(sums, sent)
        received = [r if t.shape.rank else tf.reshape(r, tf.shape(t)) for r, t in zip(received, tensors, strict=True)]
        return [tf.cast(r, t.dtype) for r, t in zip(received, tensors, strict=True)]

    def _sums_behind(
        self, sent: list[tf.Tensor], buckets: list[list[int]], how: Reduction, marks: str
    ) -> list[tf.Tensor]:
        """Make operations that sum vectors in buckets, in a thread, while the vectors of other buckets are computed."""

        def give(number: int) -> Callable[..., Sequence[npt.ArrayLike]]:
            def work(_: npt.ArrayLike, *vectors: np.ndarray) -> Sequence[npt.ArrayLike]:
                self._give_bucket(number, buckets, vectors, how, marks)
                return [np.int64(number)]

            return work

        def take(*_: npt.ArrayLike) -> list[npt.ArrayLike]:
            found = [sums for bucket in self._behind.take(len(buckets)) for sums in bucket]
            self._check_marks(found[len(positions) :], how)
            return [np.int64(0), *(found[positions[i]] for i in copied)]

        positions = np.argsort([i for bucket in buckets for i in bucket]).tolist()
        mine, copied = owned(sent), copied_ones(sent)
        # TensorFlow runs stateful operations one after another in program order, so those before `give`, such as the
        # adapter's clock, would delay it. A stateless one could be called while the graph is optimised if all its
        # inputs were constants, or left out if nobody read its result.
        given = []
        for number, bucket in enumerate(buckets):
            vectors = [mine[i] for i in bucket]
            given += _call(give(number), [_sequence().read_value(), *vectors], [tf.int64], stateful=False)
        taken = _call(take, given, [tf.int64, *(sent[i].dtype for i in copied)], copy_results=False)
        return _after(mine, taken, dict(zip(copied, taken[1:], strict=True)))

    def _gather_slices(self, slices: tf.IndexedSlices, how: Reduction, name: str) -> tf.IndexedSlices:
        """Gather rows and indices in one unit, so that they come from the same ranks; see `TensorComm`."""

        def work(values: np.ndarray, indices: np.ndarray) -> list[np.ndarray]:
            def unit() -> list[np.ndarray]:
                self._renew()
                # The second exchange overwrites what the first one received.
                rows, places = [part.copy() for part in self._parts(values)], self._parts(indices)
                alike = all(np.array_equal(part, places[0]) for part in places)
                if alike and np.unique(places[0]).size == places[0].size:
                    added = np.sum([part.astype(np.float32) if part.itemsize < 4 else part for part in rows], axis=0)
                    return [added.astype(values.dtype), places[0].copy(), np.array(float(self.size))]
                return [np.concatenate(rows), np.concatenate(places), np.array(float(self.size))]

            return self._comm.complete(unit)

        sent = _narrow(slices.values, how.wire)
        values, indices, ranks = on_host(work, [sent, slices.indices], [sent.dtype, slices.indices.dtype, tf.float64])
        values.set_shape([None, *sent.shape[1:]])
        indices.set_shape([None])
        ranks.set_shape([])
        values = tf.cast(values, slices.values.dtype)
        values = values / tf.cast(ranks, values.dtype) if how.average else values
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        (rows,) = on_host(self._gathered, [tensor], [tensor.dtype])
        rows.set_shape([None, *tensor.shape[1:]])
        return rows

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        def work(rows: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
            def unit() -> list[np.ndarray]:
                self._renew()
                return self._exchanged(rows, counts)

            return self._comm.complete(unit)

        rows, counts = on_host(work, [tensor, splits], [tensor.dtype, tf.int32])
        rows.set_shape([None, *tensor.shape[1:]])
        counts.set_shape(splits.shape)
        return rows, counts

    @staticmethod
    def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return an array as a new one of another dtype."""
        if "float16" not in (values.dtype.name, dtype.name):
            # ml_dtypes casts bfloat16 faster than TensorFlow; NumPy casts small float16 forty times more slowly.
            return values.astype(dtype)
        with tf.device("CPU:0"):
            cast: np.ndarray = tf.cast(values, dtype).numpy()
        return cast

    def check_call(self, call: str, tensors: Sequence[tf.Tensor]) -> None:
        def check(*shapes: np.ndarray) -> list[np.int64]:
            pairs = zip(tensors, shapes, strict=True)
            mine = f"{call} of {', '.join(f'{t.dtype.name}{np.asarray(shape).tolist()}' for t, shape in pairs)}"
            self._renew()
            received = self._dense.everyone.exchange([], np.frombuffer(mine.encode(), np.uint8)).messages
            calls = [message.tobytes().decode() for message in received]
            for rank, other in zip(self.world_ranks, calls, strict=True):
                if other != calls[0]:
                    raise MismatchError(
                        f"{call}: expected the same call on all ranks, got {calls[0]} on rank {self.world_ranks[0]}, "
                        f"{other} on rank {rank}. Do: call it with the same arguments, in the same order, on all ranks."
                    )
            return [np.int64(0)]

        if tf.executing_eagerly():
            check(*(t.shape for t in tensors))
        else:
            on_host(check, [tf.shape(t) for t in tensors], [tf.int64])


def _operations_at_once() -> int:
    """Return the number of operations that TensorFlow runs at once. With 1, it calls Python after the last gradient."""
    chosen, text = tf.config.threading.get_inter_op_parallelism_threads(), os.environ.get("TF_NUM_INTEROP_THREADS", "")
    return int(chosen) or (int(text) if text.isdecimal() else 0) or usable_cores()


def prepare() -> None:
    """Make what `on_host`, `change` and `on_device` need. A step that makes variables would be traced twice."""
    _sequence()
    _shares_memory()


def on_host(
    work: Callable[..., Sequence[npt.ArrayLike]],
    tensors: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    copy_results: bool = True,
) -> list[tf.Tensor]:
    """Call Python code as an operation of the graph, in the order of the program's calls of this function.

    Args:
        work: function from arrays to arrays.
        tensors: arguments of `work`, on any device.
        dtypes: dtypes of the results.
        copy_results: copy the results, because `work` may change them later. TensorFlow makes tensors, and even values
            of variables, of aligned arrays without a copy.
    """
    return in_order(lambda: _call(work, tensors, dtypes, copy_results))


def _call(
    work: Callable[..., Sequence[npt.ArrayLike]],
    tensors: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    copy_results: bool = True,
    stateful: bool = True,
) -> list[tf.Tensor]:
    """Call Python code as an operation of the graph, in no order with others; see `on_host`."""

    def host(*inputs: npt.ArrayLike) -> Sequence[npt.ArrayLike]:
        try:
            results = work(*(np.asarray(a, order="C") for a in inputs))
            return [_copied(result) for result in results] if copy_results else results
        except BaseException as error:
            failure.remember(error)
            raise

    # Outside a graph `numpy_function` returns a list of one as its only element.
    results: list[tf.Tensor] = tf.nest.flatten(tf.numpy_function(host, list(tensors), list(dtypes), stateful))
    return results


def _copied(result: npt.ArrayLike) -> npt.ArrayLike:
    return result.copy() if isinstance(result, np.ndarray) and is_aligned(result) else result


def change(
    work: Callable[..., Sequence[npt.ArrayLike]],
    tensors: Sequence[tf.Tensor],
    others: Sequence[tf.Tensor] = (),
    dtypes: Sequence[tf.DType] = (),
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Call Python code that changes arrays, as an operation of the graph in the order of `on_host`.

    The changed tensors have the memory of the given ones, unless somebody else reads that. Results of Python code would
    be other memory for TensorFlow, which it gives to no later operation, and frees late.

    Args:
        work: function from a list of arrays, which it changes, and from further arrays, to its results.
        tensors: tensors of the arrays that it changes, on any device.
        others: the further arguments.
        dtypes: dtypes of the results.

    Returns:
        The results, and the changed tensors, on the CPU.
    """

    def operation() -> list[tf.Tensor]:
        return _change(work, owned(tensors), others, dtypes, copied_ones(tensors))

    made = in_order(operation)
    return made[: len(dtypes)], made[len(dtypes) :]


def _change(
    work: Callable[..., Sequence[npt.ArrayLike]],
    mine: Sequence[tf.Tensor],
    others: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    copied: Sequence[int],
) -> list[tf.Tensor]:
    """Do the work of `change` for tensors that are `owned`; return the results, then the changed tensors.

    Args:
        work, others, dtypes: see `change`.
        mine: the tensors.
        copied: numbers of those of which Python code gets copies, see `copied_ones`.
    """

    def host(*arrays: np.ndarray) -> Sequence[npt.ArrayLike]:
        given = list(arrays[: len(mine)])
        results = work(given, *arrays[len(mine) :])
        return [*results, np.int64(0), *(given[i] for i in copied)]

    all_dtypes = [*dtypes, tf.int64, *(mine[i].dtype for i in copied)]
    found = _call(host, [*mine, *others], all_dtypes, copy_results=False)
    return [*found[: len(dtypes)], *_after(mine, found, dict(zip(copied, found[len(dtypes) + 1 :], strict=True)))]


def _after(mine: Sequence[tf.Tensor], done: Sequence[tf.Tensor], copies: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors with the values that Python code has written to their memory.

    Args:
        mine: the tensors.
        done: results of the code.
        copies: those of which the code got copies, by number.
    """
    with tf.control_dependencies(done):
        after = [copies[i] if i in copies else tf.identity(t) for i, t in enumerate(mine)]
    for changed, before in zip(after, mine, strict=True):
        changed.set_shape(before.shape)
    return after


def owned(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors whose memory nobody else reads, so that Python code may write to it; most need no copy.

    An update of no element copies a tensor only if somebody else holds it, such as a variable or a constant. A value
    that is read here makes TensorFlow neither compute it while it optimises the graph, nor merge those of two calls;
    another place for each makes it not merge those of one call.
    """
    now = _sequence().read_value()
    none, step = tf.range(now, now), tf.constant([1], now.dtype)
    values = {dtype: tf.cast(none, dtype) for dtype in {t.dtype for t in tensors}}
    mine = []
    for i, tensor in enumerate(tensors):
        if tensor.shape.rank == 0:
            mine.append(tensor)
            continue
        place = tf.constant([i], now.dtype)
        mine.append(
            tf.raw_ops.TensorStridedSliceUpdate(
                input=tensor, begin=place, end=place, strides=step, value=values[tensor.dtype]
            )
        )
    return mine


def copied_ones(tensors: Sequence[tf.Tensor]) -> list[int]:
    """Return the numbers of the tensors of which Python code gets copies: scalars, and outside a graph all."""
    all_of_them = tf.executing_eagerly() or not _shares_memory()
    return [i for i, tensor in enumerate(tensors) if all_of_them or tensor.shape.rank == 0]


@functools.cache
def _shares_memory() -> bool:
    """Return whether Python code writes to the memory of TensorFlow's tensors, which no page promises; tried once."""

    @tf.function(autograph=False)
    def try_it(given: tf.Tensor) -> tf.Tensor:
        def work(arrays: list[np.ndarray]) -> Sequence[npt.ArrayLike]:
            arrays[0][:] = 7.0
            return ()

        (after,) = _change(work, owned([given + 1.0]), (), (), ())
        return after

    with tf.init_scope(), tf.device("CPU:0"):
        return bool((try_it(tf.zeros(64)).numpy() == 7.0).all())


def wait_for(tensors: Sequence[tf.Tensor]) -> None:
    """Let later calls of `on_host` begin after some tensors have been computed."""
    with tf.device("CPU:0"), tf.control_dependencies(tensors):
        _sequence().assign_add(1)


def on_device(work: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor], dtype: tf.DType, device: str) -> tf.Tensor:
    """Call Python code with eager tensors as an operation of the graph, in the order of `on_host`.

    Args:
        work: function from eager tensors on the device to one eager tensor there, which is filled when it returns.
        tensors: arguments of `work`. A GPU takes no int32.
        dtype: dtype of the result.
        device: name of the device, such as "GPU:0".
    """

    def call(*inputs: tf.Tensor) -> tf.Tensor:
        try:
            return work(*inputs)
        except BaseException as error:
            failure.remember(error)
            raise

    def operation() -> list[tf.Tensor]:
        with tf.device(device):
            return [tf.py_function(call, list(tensors), dtype)]

    return in_order(operation)[0]


def in_order(operation: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Make an operation that waits for other ranks run in the order of the program, which is the same on all ranks.

    Otherwise two ranks could begin two of them in different orders, and wait for each other.

    Args:
        operation: function that makes the operation, on the CPU, and returns its results.
    """
    sequence = _sequence()
    with tf.device("CPU:0"):
        # TensorFlow keeps the order of operations on one variable, also inside conditions and loops.
        with tf.control_dependencies([sequence.assign_add(1)]):
            results = operation()
        with tf.control_dependencies(results):
            sequence.assign_add(1)
    return results


@functools.cache
def _sequence() -> tf.Variable:
    """Return the variable that every collective on the host writes before and after its work."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


def _narrow(tensor: tf.Tensor, wire: str) -> tf.Tensor:
    """Cast a floating-point tensor to the dtype on the network if that is narrower."""
    narrower = wire in _WIRES and tensor.dtype.is_floating and tensor.dtype.size > 2
    return tf.cast(tensor, _WIRES[wire]) if narrower else tensor
