"""HDF5 files: the weights of Keras models, and whole models as Keras 2 saved them."""

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.averaging.dtypes import small_float
from hvdx.averaging.extents import File, splice
from hvdx.averaging.keras_config import parse_config
from hvdx.averaging.limits import check_unpacked
from hvdx.averaging.network import Network, Tensor, Values, gather
from hvdx.errors import AverageError

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# What h5py raises over a file that is damaged depends on what is damaged.
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError)


class Hdf5(Network):
    """An HDF5 file.

    Tensors that lie in one piece, as all that Keras writes do, are read and written where they lie. The state of
    random number generators, which has no mean, stays the first network's.
    """

    format = "Keras weights (HDF5)"
    suffixes = (".weights.h5", ".h5", ".hdf5")

    def __init__(self, path: Path):
        self.path = path
        self._content = Content(File(path))
        self.tensors = self._content.tensors
        self.normalises = self._content.normalises
        self.architecture = _model_config(self._content)

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """By its first bytes, or by its name: a file that was cut short or overwritten is to be called damaged."""
        return head.startswith(_SIGNATURE) or (path.is_file() and path.name.endswith((*cls.suffixes, ".weights.json")))

    @classmethod
    def open(cls, path: Path) -> Network:
        """See `Network.open`."""
        if path.name.endswith(".weights.json"):
            raise AverageError(
                f"{path}: expected weights in one file, got the index of several. Save them in one: "
                'model.save_weights("name.weights.h5").'
            )
        return cls(path)

    def write(self, out: Path, values: Values) -> None:
        """See `Network.write`."""
        self._content.write(out, values)

    def close(self) -> None:
        """Let go of the file."""
        self._content.close()


class Content:
    """An HDF5 file, which may lie within another file.

    Args:
        file: where it is; closed along with this.
        begin, end: the bytes that are it.
        what: what it is within the other file, for messages.

    Attributes:
        file, begin, end: as given.
        tensors: first those that lie in one piece, in the order of their places; then all others.
        attributes: of its root.
        scattered: names of the tensors that are compressed, in chunks, or otherwise not in one piece.
        normalises: see `Network`.

    Raises:
        AverageError: it is damaged, or h5py is not installed.
    """

    def __init__(self, file: File, begin: int = 0, end: int = -1, what: str = ""):
        self.file, self.begin, self.end = file, begin, file.size if end < 0 else end
        self.tensors: dict[str, Tensor] = {}
        self.scattered: list[str] = []
        self.normalises = False
        self._placed: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        self._kept: tuple[str, np.ndarray] = ("", np.empty(0))
        try:
            self._h5 = _h5py(file.path).File(_Region(file, begin, self.end), "r")
            self._scan()
        except AverageError:
            self.close()
            raise
        except _DAMAGE as error:
            self.close()
            raise AverageError(
                f"{file.path}: {what and what + ': '}expected an HDF5 file, got one that is damaged or was cut short "
                f"({_first_line(error)}). Copy or save it again."
            ) from error

    def _scan(self) -> None:
        self.attributes = dict(self._h5.attrs)
        found: list[tuple[int, Tensor]] = []
        scattered: list[Tensor] = []

        def visit(name: str, item: Any) -> None:
            # A layer's own name, which Keras keeps as an attribute: its group may be called after anything.
            self.normalises |= _is_normalisation(name) or _is_normalisation(str(item.attrs.get("name", "")))
            if not _is_array(item) or item.dtype.kind in "SUO" or _is_random_state(name):
                return
            self._check_is_tensor(name, item)
            dtype = _dtype(self.file.path, name, item)
            offset = item.id.get_offset()
            if offset is None or not item.size or not _as_stored(item):
                scattered.append(self._scattered_tensor(name, item.shape, dtype))
            else:
                found.append((offset, self.file.tensor(name, item.shape, dtype, self.begin + offset)))

        self._h5.visititems(visit)
        found.sort(key=lambda pair: pair[0])
        ends = [*(offset for offset, _ in found[1:]), self.end - self.begin]
        for (offset, tensor), following in zip(found, ends, strict=False):
            if offset + tensor.nbytes > following:
                raise AverageError(
                    f"{self.file.path}: {tensor.name}: expected {tensor.nbytes} bytes for itself, got some that are "
                    "another's too. The file is damaged: save it again."
                )
            self._placed[self.begin + offset] = tensor
        self.tensors = {tensor.name: tensor for tensor in [*self._placed.values(), *scattered]}
        self.scattered = [tensor.name for tensor in scattered]
        # In memory each is whole, and takes as much as its shape says, whatever there is of it in the file.
        for tensor in scattered:
            check_unpacked(f"{self.file.path}: {tensor.name}", tensor.nbytes, self.end - self.begin)

    def _check_is_tensor(self, name: str, item: Any) -> None:
        if item.external or item.is_virtual:
            raise AverageError(
                f"{self.file.path}: {name}: expected its elements in this file, and they are in another. Save it again "
                "in one file."
            )

    def _scattered_tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        def read(start: int, out: np.ndarray) -> None:
            # h5py is one at a time, and blocks of a tensor are asked for one after the other.
            with self._lock:
                if self._kept[0] != name:
                    self._kept = ("", np.empty(0))
                    try:
                        array = np.asarray(self._h5[name][()])
                    except _DAMAGE as error:
                        raise AverageError(
                            f"{self.file.path}: {name}: it cannot be read ({_first_line(error)}). The file is damaged: "
                            "copy or save it again."
                        ) from error
                    self._kept = (name, np.ascontiguousarray(array).reshape(-1).view(dtype))
                array = self._kept[1]
            out[...] = array[start : start + out.size]

        return Tensor(name, shape, dtype, read)

    def write(self, out: Path, values: Values) -> None:
        """Write a file of its own with other values; see `Network.write`."""
        with out.open("xb") as target:
            self.write_placed(values, target.write)
        if not self.scattered:
            return
        try:
            with _h5py(self.file.path).File(out, "r+") as h5:
                for name in self.scattered:
                    tensor = self.tensors[name]
                    item = h5[name]
                    array = gather(tensor, values)
                    if item.size:
                        item[...] = array.view(item.dtype) if item.dtype.kind == "V" else array
        except RuntimeError as error:
            raise OSError(_first_line(error)) from error

    def write_placed(self, values: Values, write: Callable[[Any], Any]) -> None:
        """Hand on the file with other values for the tensors that lie in one piece."""
        splice(self.file, self._placed, values, write, self.begin, self.end)

    def close(self) -> None:
        """Let go of the file."""
        if hasattr(self, "_h5"):
            self._h5.close()
        self._kept = ("", np.empty(0))
        self.file.close()


class _Region(io.RawIOBase):
    """Some of a file's bytes, as a file of their own."""

    def __init__(self, file: File, begin: int, end: int):
        self._file, self._begin, self._size, self._at = file, begin, end - begin, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(self._size - self._at, 0)]
        if view:
            self._file.read_into(self._begin + self._at, view, "its structure")
        self._at += len(view)
        return len(view)


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise AverageError(f"{path}: reading HDF5 takes h5py, which is not installed. Do: pip install h5py.") from None
    return h5py


def _dtype(path: Path, name: str, item: Any) -> np.dtype:
    """Of the elements. HDF5 has no bfloat16: Keras writes two opaque bytes, and mostly an attribute beside them."""
    if item.dtype.kind != "V":
        return item.dtype
    if item.dtype.names is not None or item.dtype.itemsize != 2 or item.attrs.get("dtype", "bfloat16") != "bfloat16":
        raise AverageError(f"{path}: {name}: expected numbers, got {item.dtype}. It has no mean.")
    return small_float("bfloat16", path)


def _is_array(item: Any) -> bool:
    """Return whether an HDF5 object is a dataset with elements; groups, named types and empty datasets are not."""
    return hasattr(item, "chunks") and item.shape is not None


def _as_stored(item: Any) -> bool:
    """Whether the bytes in the file are those of NumPy's elements, with nothing for HDF5 to convert."""
    from h5py import h5t

    return item.id.get_storage_size() == item.size * item.dtype.itemsize and (
        item.dtype.kind == "V" or item.id.get_type() == h5t.py_create(item.dtype, logical=True)
    )


def _is_normalisation(name: str) -> bool:
    return "batch_norm" in name or "batchnorm" in name.lower() or "moving_variance" in name


def _is_random_state(name: str) -> bool:
    return re.search(r"(^|/)seed_generator(_\d+)?/", name) is not None


def _model_config(content: Content) -> Any:
    """The architecture that Keras 2 put in the attributes of a file with a whole model."""
    text = content.attributes.get("model_config")
    return None if text is None else parse_config(text, f"{content.file.path}: model_config")[1]


def _first_line(error: BaseException) -> str:
    return (str(error.args[0]) if error.args else str(error)).strip().split("\n")[0].rstrip(".")
