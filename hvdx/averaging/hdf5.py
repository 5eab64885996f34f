"""HDF5 files: the weights of Keras models, and whole models saved by Keras 2."""

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdx.averaging.extents import File, splice
from hvdx.averaging.keras_config import parse_config
from hvdx.averaging.limits import check_unpacked
from hvdx.averaging.network import Network, Tensor, Values, gather, small_float
from hvdx.errors import AverageError

if TYPE_CHECKING:
    import h5py
    from _typeshed import WriteableBuffer

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Exceptions of h5py for damaged files; which one it raises depends on the damage.
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError)


class Hdf5(Network):
    """HDF5 file.

    Contiguous tensors, which include all that Keras writes, are read and written in place. The state of random number
    generators has no mean and is copied from the first network.
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
        """Compare the first bytes and the name: a damaged file is recognised by its name."""
        return head.startswith(_SIGNATURE) or (path.is_file() and path.name.endswith((*cls.suffixes, ".weights.json")))

    @classmethod
    def open(cls, path: Path) -> Network:
        if path.name.endswith(".weights.json"):
            raise AverageError(
                f"{path}: expected weights in one file, got the index of several. Save them in one: "
                'model.save_weights("name.weights.h5").'
            )
        return cls(path)

    def write(self, out: Path, values: Values) -> None:
        self._content.write(out, values)

    def close(self) -> None:
        self._content.close()


class Content:
    """Content of an HDF5 file, which may lie within another file.

    Args:
        file: file that contains it; `close` closes it.
        begin, end: range of the HDF5 file, in bytes; the whole file by default.
        what: its name within the other file, for error messages.

    Attributes:
        tensors: tensors by name: contiguous ones in the order of their offsets, then scattered ones.
        attributes: attributes of the root group.
        scattered: names of the tensors that are compressed, in chunks, or otherwise not contiguous NumPy elements.
        normalises: see `Network`.

    Raises:
        AverageError: if it is damaged, or h5py is not installed.
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

        def visit(name: str, item: "h5py.Dataset") -> None:
            # Keras stores the name of a layer as an attribute; the name of its group may be unrelated.
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
                    f"{self.file.path}: {tensor.name}: expected {tensor.nbytes} bytes of its own, got bytes that "
                    "another tensor shares. The file is damaged: save it again."
                )
            self._placed[self.begin + offset] = tensor
        self.tensors = {tensor.name: tensor for tensor in [*self._placed.values(), *scattered]}
        self.scattered = [tensor.name for tensor in scattered]
        # Scattered tensors are read whole: the shape decides how much memory they take, not the size in the file.
        for tensor in scattered:
            check_unpacked(f"{self.file.path}: {tensor.name}", tensor.nbytes, self.end - self.begin)

    def _check_is_tensor(self, name: str, item: "h5py.Dataset") -> None:
        if item.external or item.is_virtual:
            raise AverageError(
                f"{self.file.path}: {name}: expected its elements in this file, got a reference to another file. "
                "Save it again in one file."
            )

    def _scattered_tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        def read(start: int, out: np.ndarray) -> None:
            # h5py is used by one thread at a time. The array is kept for the next blocks of the same tensor.
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
        """Write it as a separate file with new values; see `Network.write`."""
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

    def write_placed(self, values: Values, write: Callable[[Any], object]) -> None:
        """Pass the file to `write`, with new values for the contiguous tensors."""
        splice(self.file, self._placed, values, write, self.begin, self.end)

    def close(self) -> None:
        """Close the file."""
        if hasattr(self, "_h5"):
            self._h5.close()
        self._kept = ("", np.empty(0))
        self.file.close()


class _Region(io.RawIOBase):
    """Byte range of a file, as a file object."""

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

    def readinto(self, buffer: "WriteableBuffer") -> int:
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
        raise AverageError(
            f"{path}: reading HDF5 requires h5py, which is not installed. Do: pip install h5py."
        ) from None
    return h5py


def _dtype(path: Path, name: str, item: "h5py.Dataset") -> np.dtype:
    """Return the dtype of the elements. For bfloat16, which HDF5 lacks, Keras writes two opaque bytes."""
    if item.dtype.kind != "V":
        return item.dtype
    if item.dtype.names is not None or item.dtype.itemsize != 2 or item.attrs.get("dtype", "bfloat16") != "bfloat16":
        raise AverageError(f"{path}: {name}: expected numbers, got {item.dtype}. It has no mean.")
    return small_float("bfloat16", path)


def _is_array(item: "h5py.Dataset") -> bool:
    """Return whether an HDF5 object is a dataset with elements; groups, named types and empty datasets are not."""
    return hasattr(item, "chunks") and item.shape is not None


def _as_stored(item: "h5py.Dataset") -> bool:
    """Return whether the file stores the bytes of NumPy's elements, so that HDF5 need not convert them."""
    from h5py import h5t

    return item.id.get_storage_size() == item.size * item.dtype.itemsize and (
        item.dtype.kind == "V" or item.id.get_type() == h5t.py_create(item.dtype, logical=True)
    )


def _is_normalisation(name: str) -> bool:
    return "batch_norm" in name or "batchnorm" in name.lower() or "moving_variance" in name


def _is_random_state(name: str) -> bool:
    return re.search(r"(^|/)seed_generator(_\d+)?/", name) is not None


def _model_config(content: Content) -> Any:
    """Return the architecture from the attributes of a whole model that Keras 2 saved, else None."""
    text = content.attributes.get("model_config")
    return None if text is None else parse_config(text, f"{content.file.path}: model_config")[1]


def _first_line(error: BaseException) -> str:
    return (str(error.args[0]) if error.args else str(error)).strip().split("\n")[0].rstrip(".")
