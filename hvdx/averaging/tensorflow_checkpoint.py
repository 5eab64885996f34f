"""TensorFlow checkpoints: an index and its data files, which share a prefix."""

import collections
import itertools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hvdx.averaging.network import Network, Tensor, Values, gather
from hvdx.errors import AverageError

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_SHARD_BYTES = 1 << 25
# Lists of variables in an export of a Keras model.
_ORDERED, _UNORDERED = "variables/", "_all_variables/"
# Names of variables with the state of random number generators, in Keras and in tf.random.Generator.
_RANDOM_STATES = ("seed_generator_state", "StateVar")


class TensorFlowCheckpoint(Network):
    """Checkpoint from `tf.train.Checkpoint`, given by its prefix, such as `folder/ckpt-3`.

    Text, the object graph and the state of random number generators are copied from the first network. No `checkpoint`
    file is written, since `tf.train.Checkpoint(...).restore(prefix)` needs none.
    """

    format = "TensorFlow checkpoint"
    suffixes = ()
    tensors: dict[str, Tensor]

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._kept: tuple[str, np.ndarray] = ("", np.empty(0))
        tf = tensorflow(path)
        try:
            self._reader: Any = tf.train.load_checkpoint(str(_prefix(path)))
            shapes = self._reader.get_variable_to_shape_map()
            dtypes = self._reader.get_variable_to_dtype_map()
            names = self._full_names()
        # The exceptions of TensorFlow for damaged files depend on the damage and on its version.
        except Exception as error:
            raise AverageError(
                f"{path}: expected a TensorFlow checkpoint, got one that is damaged or was cut short "
                f"({_reason(error)}). Copy or save it again."
            ) from error
        self.tensors = {}
        self._keys: dict[str, str] = {}
        self._copies: dict[str, list[str]] = collections.defaultdict(list)
        self._others: list[str] = []
        # The file stores tensors in the order of their keys.
        for key in sorted(shapes):
            original = self._original(key, shapes, names)
            if dtypes[key] == tf.string or names.get(key, "").endswith(_RANDOM_STATES):
                self._others.append(key)
            elif original is not None:
                self._copies[original].append(key)
            else:
                self._add(key, names, tuple(shapes[key]), np.dtype(dtypes[key].as_numpy_dtype))
        self.normalises = any("moving_variance" in n for n in [*self.tensors, *names.values()])

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Look for an index file of this prefix, or for a `checkpoint` file in a folder."""
        if path.is_dir():
            return (path / "checkpoint").is_file()
        return _prefix(path) != path or Path(f"{path}.index").is_file()

    @classmethod
    def open(cls, path: Path) -> Network:
        if path.is_dir():
            prefixes = ", ".join(sorted(str(p)[: -len(".index")] for p in path.glob("*.index"))) or "none"
            raise AverageError(
                f"{path}: expected a checkpoint's prefix, got a folder of checkpoints. Name one of those in it: "
                f"{prefixes}."
            )
        return cls(path)

    def _full_names(self) -> dict[str, str]:
        """Return the names of variables in the program, by key: keys such as variables/7 do not identify them."""
        from tensorflow.core.protobuf import trackable_object_graph_pb2

        if not self._reader.has_tensor(_GRAPH):
            return {}
        graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(self._reader.get_tensor(_GRAPH))
        return {a.checkpoint_key: a.full_name for node in graph.nodes for a in node.attributes}

    def _original(self, key: str, shapes: dict[str, Any], names: dict[str, str]) -> str | None:
        """Return the key of the same variable in the first list, for a key in the second list of a Keras export.

        The order of the second list varies, so its keys mean different variables in different files. Other keys have no
        original, and the result is None.
        """
        if not key.startswith(_UNORDERED):
            return None
        alike = [
            other
            for other, name in names.items()
            if other.startswith(_ORDERED) and name == names.get(key) and shapes[other] == shapes[key]
        ]
        if len(alike) > 1:
            content = self._read(key).tobytes()
            alike = [other for other in alike if self._read(other).tobytes() == content]
        return alike[0] if alike else None

    def _add(self, key: str, names: dict[str, str], shape: tuple[int, ...], dtype: np.dtype) -> None:
        name = f"{_UNORDERED}{names.get(key, key)}" if key.startswith(_UNORDERED) else key.removesuffix(_VALUE)
        if name in self.tensors:
            raise AverageError(
                f"{self.path}: {name}: expected one variable of this name, got two, and nothing else distinguishes "
                "them. Give the layers different names."
            )
        self._keys[name] = key
        self.tensors[name] = self._tensor(name, shape, dtype)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        def read(start: int, out: np.ndarray) -> None:
            # TensorFlow reads whole tensors, so the array is kept for the next blocks.
            with self._lock:
                if self._kept[0] != name:
                    self._kept = ("", np.empty(0))
                    self._kept = (name, np.asarray(self._read(self._keys[name])).reshape(-1))
                array = self._kept[1]
            out[...] = array[start : start + out.size]

        return Tensor(name, shape, dtype, read)

    def _read(self, key: str) -> Any:
        """Return a NumPy array or scalar, or bytes: a NumPy array would lose zeros at the end of bytes."""
        try:
            return self._reader.get_tensor(key)
        except Exception as error:
            raise AverageError(
                f"{self.path}: {key.removesuffix(_VALUE)}: it cannot be read ({_reason(error)}). The checkpoint is "
                "damaged: copy or save it again."
            ) from error

    def write(self, out: Path, values: Values) -> None:
        tf = tensorflow(self.path)
        try:
            shards = [str(shard) for shard in self._write_shards(tf, out, values)]
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=shards, destination_prefix=str(out), delete_old_dirs=False
            )
        except tf.errors.OpError as error:
            raise OSError(_reason(error)) from error

    def _write_shards(self, tf: ModuleType, out: Path, values: Values) -> list[Path]:
        """Write checkpoints of at most `_SHARD_BYTES`, or of one larger tensor, to save memory; return the prefixes."""

        def save(content: dict[str, Any]) -> Path:
            shard = out.with_name(f"{out.name}.part-{next(number)}")
            tf.raw_ops.SaveV2(
                prefix=str(shard),
                tensor_names=list(content),
                shape_and_slices=[""] * len(content),
                tensors=[tf.constant(array) for array in content.values()],
            )
            return shard

        number, written = itertools.count(), []
        before: Future[Path] | None = None
        # One checkpoint is written while the content of the next is computed.
        with ThreadPoolExecutor(1, "hvdx-average-save") as pool:
            for content in self._shards(values):
                if before is not None:
                    written.append(before.result())
                before = pool.submit(save, content)
        return [*written, before.result()] if before is not None else []

    def _shards(self, values: Values) -> Iterator[dict[str, Any]]:
        """Yield the new tensors by key, in groups; the first group includes everything that is not a tensor."""
        content: dict[str, Any] = {key: self._read(key) for key in self._others}
        held = 0
        for name, tensor in self.tensors.items():
            if held and held + tensor.nbytes > _SHARD_BYTES:
                yield content
                content, held = {}, 0
            array, key = gather(tensor, values), self._keys[name]
            content.update(dict.fromkeys([key, *self._copies.get(key, [])], array))
            held += tensor.nbytes
        yield content

    def close(self) -> None:
        self._reader = None
        self._kept = ("", np.empty(0))


def tensorflow(path: Path) -> Any:
    """Return TensorFlow; raise an error that says how to install it if it is missing."""
    try:
        import tensorflow as tf
    except ImportError:
        raise AverageError(
            f"{path}: reading it requires TensorFlow, which is not installed. Do: pip install tensorflow."
        ) from None
    return tf


def _prefix(path: Path) -> Path:
    """Return the prefix of a checkpoint; `path` may be the prefix or one of the files."""
    prefix = Path(re.sub(r"\.(index|data-\d{5}-of-\d{5})$", "", str(path)))
    return prefix if Path(f"{prefix}.index").is_file() else path


def _reason(error: BaseException) -> str:
    return (str(getattr(error, "message", None) or error)).strip().split("\n")[0].rstrip(".")
