"""Communicator on Horovod, with collectives inside the TensorFlow graph."""

import copy
import importlib
import json
import os
import pickle
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdx.comm import failure, mpi
from hvdx.comm.interfaces import BufferFor, Channel, Comm, Mailbox, Reduction, T
from hvdx.comm.launcher import Launch
from hvdx.comm.tensors import TensorComm, device_scope
from hvdx.errors import ConfigError, HorovodError

#: Variable that Horovod reads when it starts. If it is 1, process sets may be added later; each cycle then costs one
#: more message.
PROCESS_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
# Time after which a rank gives up waiting for another. By default Horovod warns after 60 s and waits without limit.
_STALL_SECONDS = "600"
# The same time if most steps have no collective: the slowest rank falls behind in every step between two collectives.
_RARE_STALL_SECONDS = "3600"
# Polling interval of Horovod's thread, in milliseconds, if most steps have no collective. Horovod's default is 1 ms. On
# two cores, steps of 8 ms took 14 ms with a poll every 1 ms, and 10 ms with a poll every 5 ms.
_RARE_CYCLE_MS = "5"
# Dtypes of Horovod's broadcast and all-gather. Others, such as bfloat16, travel as bytes.
_CARRIED = (
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64),
    *(tf.float16, tf.float32, tf.float64, tf.bool),
)


def load() -> ModuleType:
    """Import and return `horovod.tensorflow`.

    Raises:
        HorovodError: if it is missing, or was built against another TensorFlow; the error names the remedy.
    """
    _check_build()
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:  # an unloadable extension raises TensorFlow's NotFoundError, OSError or ImportError
        reason = str(error).strip().splitlines()[0]
        raise HorovodError(
            f"Horovod cannot be loaded: {reason}. Rebuild it for this environment: hvdx build-horovod --force"
        ) from error


def _check_build() -> None:
    try:
        files = metadata.files("horovod") or []
    except metadata.PackageNotFoundError:
        raise HorovodError(
            "Horovod: expected an installation beside TensorFlow, found none. Build it (two minutes): "
            "hvdx build-horovod"
        ) from None
    for file in files:
        if file.name == "metadata.json" and file.parent.name == "horovod":
            built = json.loads(Path(str(file.locate())).read_text()).get("tensorflow")
            if built and built != tf.__version__:
                raise HorovodError(
                    f"Horovod was built against TensorFlow {built}, this is TensorFlow {tf.__version__}. "
                    "Rebuild it: hvdx build-horovod"
                )


class HorovodComm(TensorComm):
    """Communicator on Horovod.

    Args:
        launch: rank and size from the launcher; checked against Horovod's.
        rarely: True if most steps have no collective. Horovod reads this when it starts; it cannot change later.
        group: `MPI.Comm` of the ranks, if they are not the whole world.

    Raises:
        HorovodError: if Horovod is missing or does not fit this environment.
        LaunchError: if Horovod's world differs from the launcher's.
    """

    def __init__(self, launch: Launch, rarely: bool = False, group: object = None):
        limit = _RARE_STALL_SECONDS if rarely else _STALL_SECONDS
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", limit)
        if rarely:
            os.environ.setdefault("HOROVOD_CYCLE_TIME", _RARE_CYCLE_MS)
        self._takes_sets = os.environ.get(PROCESS_SETS) == "1"
        self._hvd = hvd = load()
        if launch.launcher != "Horovod (Gloo)":
            if not hvd.mpi_built():
                raise HorovodError(
                    "Horovod was built without MPI, and the ranks were started by an MPI launcher. "
                    "Rebuild it: hvdx build-horovod"
                )
            mpi.check_size("MPI", mpi.initialise(), launch)
        if group is None:
            hvd.init()
            mpi.check_size("Horovod", hvd.size(), launch)
        else:
            hvd.init(comm=group)
        failure.leave_first()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.cross_rank, self.cross_size = hvd.cross_rank(), hvd.cross_size()
        self._set = hvd.global_process_set
        self._ranks: Sequence[int] = range(self.size)
        self._sets: dict[tuple[int, ...], object] = {}

    def all_gather_object(self, value: T, what: str) -> list[T]:
        message = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        with tf.device("CPU:0"):
            sizes = self.all_gather(tf.constant([message.size], tf.int64), f"{what}.sizes").numpy()
            data = self.all_gather(tf.constant(message), what).numpy()
        ends = np.cumsum(sizes)
        # Unpickling is safe: the bytes come from ranks of this job, which run the same user's code.
        return [pickle.loads(data[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        with tf.device("CPU:0"):
            tensor = tf.constant(vector, tf.float64)
            return self._hvd.allreduce(
                tensor, op=self._hvd.Sum, name=_tag(what), ignore_name_scope=True, process_set=self._set
            ).numpy()

    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> Sequence[npt.ArrayLike]:
        # In a graph the collectives have the same names on all ranks, and run concurrently.
        @tf.function(autograph=False)
        def run(values: list[tf.Tensor]) -> list[tf.Tensor]:
            return [
                _unpacked(
                    self._hvd.broadcast(
                        _packed(value),
                        self._ranks[root],
                        name=f"{_tag(what)}.{i}",
                        ignore_name_scope=True,
                        process_set=self._set,
                    ),
                    value.dtype,
                )
                for i, value in enumerate(values)
            ]

        return run(list(tensors)) if tensors else []

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        rows = self._hvd.allgather(_packed(tensor), name=_tag(name), ignore_name_scope=True, process_set=self._set)
        return _unpacked(rows, tensor.dtype)

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        rows, numbers = self._hvd.alltoall(
            _packed(tensor), splits=splits, name=_tag(name), ignore_name_scope=True, process_set=self._set
        )
        return _unpacked(rows, tensor.dtype), numbers

    def subset(self, ranks: Sequence[int]) -> "HorovodComm | None":
        if not self._takes_sets:
            raise ConfigError(
                f"process sets: expected {PROCESS_SETS}=1 when Horovod was started, got nothing. Do: call "
                'init(process_sets="dynamic") at the start of the script, or set it in the environment of the job.'
            )
        key = tuple(ranks)
        if key not in self._sets:
            self._sets[key] = self._hvd.add_process_set(list(ranks))
        if self.rank not in ranks:
            return None
        some = copy.copy(self)
        some._set, some._ranks = self._sets[key], list(ranks)
        some.rank, some.size = some._ranks.index(self.rank), len(some._ranks)
        return some

    def channel(self, what: str) -> Channel:
        raise ConfigError(
            f"{what} travels by MPI, but these processes were started by Horovod's own launcher, without MPI. "
            "Start them with mpirun, or horovodrun --mpi."
        )

    def divide(self, part: int, key: int, what: str) -> Comm:
        self.channel(what)  # raises the error that names the remedy
        raise NotImplementedError

    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        self.channel("a message")  # raises the error that names the remedy
        raise NotImplementedError

    def close(self) -> None:
        self._hvd.shutdown()

    def reduce_group(self, tensors: list[tf.Tensor], how: Reduction, name: str) -> list[tf.Tensor]:
        if how.wire == "bf16":
            return self._reduce_bf16(tensors, how, name)
        # One collective has one dtype, and none has bfloat16.
        result, dtypes = list(tensors), sorted({t.dtype for t in tensors}, key=lambda dtype: dtype.name)
        for dtype in dtypes:
            members = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            reduce = self._reduce_bf16 if dtype == tf.bfloat16 else self._reduce_alike
            tag = name if len(dtypes) == 1 else f"{name}.{dtype.name}"
            for i, tensor in zip(members, reduce([tensors[i] for i in members], how, tag), strict=True):
                result[i] = tensor
        return result

    def _reduce_alike(self, tensors: list[tf.Tensor], how: Reduction, name: str) -> list[tf.Tensor]:
        """All-reduce tensors of one dtype."""
        hvd = self._hvd
        scale = how.predivide if how.average else 1.0
        plain_mean = how.average and scale == 1.0
        with device_scope(how.device):
            return hvd.grouped_allreduce(
                tensors,
                op=hvd.Average if plain_mean else hvd.Sum,
                compression=hvd.Compression.fp16 if how.wire == "fp16" else hvd.Compression.none,
                prescale_factor=1.0 / scale,
                postscale_factor=scale / self.size if scale != 1.0 else 1.0,
                name=_tag(name),
                ignore_name_scope=True,
                process_set=self._set,
            )

    def _reduce_bf16(self, tensors: list[tf.Tensor], how: Reduction, name: str) -> list[tf.Tensor]:
        """All-reduce with bfloat16 on the network, a dtype that Horovod does not have.

        Each rank sums one part in float32 and sends it to the others, as in the two halves of a ring all-reduce.
        Horovod carries the values as bytes, with the same volume as for fp16. The sum is rounded once, not at every
        hop.
        """
        part_of = [tf.size(t) for t in tensors]
        with device_scope(how.device):
            flat = tf.concat([tf.cast(tf.reshape(t, [-1]), tf.float32) for t in tensors], axis=0)
            length = tf.size(flat)
            share = (length + self.size - 1) // self.size
            flat = tf.pad(flat, [[0, share * self.size - length]])
            wire = tf.bitcast(tf.cast(flat, tf.bfloat16), tf.uint8)
            received, _ = self._hvd.alltoall(
                wire,
                splits=tf.fill([self.size], share),
                name=_tag(f"{name}.scatter"),
                ignore_name_scope=True,
                process_set=self._set,
            )
            mine = tf.bitcast(tf.reshape(received, [self.size, share, 2]), tf.bfloat16)
            # reduce_sum over the short axis takes four times the time of add_n.
            total = tf.add_n(tf.unstack(tf.cast(mine, tf.float32), num=self.size))
            if how.average:
                total /= self.size
            total = self.all_gather(tf.cast(total, tf.bfloat16), f"{name}.gather")
            whole = tf.cast(total, tf.float32)[:length]
            pieces = tf.split(whole, part_of)
            return [tf.cast(tf.reshape(piece, tf.shape(t)), t.dtype) for piece, t in zip(pieces, tensors, strict=True)]


def _packed(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor, or its bytes along a last dimension if Horovod cannot move its dtype."""
    return tensor if tensor.dtype in _CARRIED else tf.bitcast(tensor, tf.uint8)


def _unpacked(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo `_packed`."""
    return tensor if dtype in _CARRIED else tf.bitcast(tensor, dtype)


def _tag(name: str) -> str:
    return f"hvdx.{name}".replace(" ", "_")
