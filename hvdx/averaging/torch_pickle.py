"""Reads the pickle in a PyTorch file without executing any of it.

A pickle is a program: it names functions and calls them. Here every name stands for something harmless of this module,
names that are not on its list are refused, and PyTorch is not imported.

Source: `torch.serialization` and `torch._utils` say what `torch.save` writes.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdx.errors import AverageError

#: What to do instead, wherever a file holds more than tensors.
REMEDY = "Save the tensors alone: torch.save(model.state_dict(), path)."

# What `dtypes.py` or NumPy calls the elements of each kind of storage.
_STORAGES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
    "ComplexFloatStorage": "c8",
    "ComplexDoubleStorage": "c16",
}
_DTYPES = {
    "float64": "f8",
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "int64": "i8",
    "int32": "i4",
    "int16": "i2",
    "int8": "i1",
    "uint64": "u8",
    "uint32": "u4",
    "uint16": "u2",
    "uint8": "u1",
    "bool": "?",
    "complex64": "c8",
    "complex128": "c16",
}
# Whatever these make, no tensor comes of it.
_NO_TENSORS = {
    ("torch", "device"),
    ("torch", "strided"),
    ("torch.serialization", "_get_layout"),
    ("_codecs", "encode"),
    ("builtins", "set"),
    ("__builtin__", "set"),
    ("torch", "contiguous_format"),
    ("torch", "channels_last"),
    ("torch", "preserve_format"),
}
_KINDS = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}


class View:
    """A tensor of the pickle: part of a storage.

    Attributes:
        storage: name of the entry that holds its elements.
        dtype: of the elements, as `hvdx.averaging.dtypes` or NumPy calls it.
        count: bytes of the storage, or its elements, as `in_bytes` says.
        offset, shape, stride: in elements.
    """

    __slots__ = ("count", "dtype", "in_bytes", "offset", "shape", "storage", "stride")

    def __init__(self, storage: "_Storage", offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str = ""):
        self.storage, self.count, self.in_bytes = storage.key, storage.count, not storage.dtype
        self.dtype = dtype or storage.dtype
        self.offset, self.shape, self.stride = offset, tuple(shape), tuple(stride)
        whole = (self.offset, *self.shape, *self.stride)
        if not self.dtype or len(self.shape) != len(self.stride) or not all(type(n) is int and n >= 0 for n in whole):
            raise ValueError("a tensor without a shape")

    def __setstate__(self, state: Any) -> NoReturn:
        raise ValueError("a tensor with a state")


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str  # "" where it holds bytes
    count: int

    def __setstate__(self, state: Any) -> NoReturn:
        raise ValueError("a storage with a state")


class Opaque:
    """A value that is no tensor and that nothing looks into."""

    __slots__ = ()

    def __call__(self, *args: Any) -> "Opaque":
        return self

    def __setstate__(self, state: Any) -> None:
        pass


class _Dictionary(dict):
    """In place of OrderedDict, whose state is the versions of the modules."""

    def __setstate__(self, state: Any) -> None:
        pass


class _Function:
    """What a name of the pickle stands for. No class and no function, so that nothing can be set on it."""

    __slots__ = ("_body",)
    _body: Callable[..., Any]

    def __init__(self, body: Callable[..., Any]):
        object.__setattr__(self, "_body", body)

    def __call__(self, *args: Any) -> Any:
        return self._body(*args)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise ValueError("a name with a state")

    def __setstate__(self, state: Any) -> NoReturn:
        raise ValueError("a name with a state")


class _Dtype(_Function):
    """A dtype, or a kind of storage."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str):
        super().__init__(_not_callable)
        object.__setattr__(self, "name", name)


def _not_callable(*args: Any) -> NoReturn:
    raise ValueError("a call of what is no function")


def _tensor_v2(
    storage: _Storage, offset: int, shape: Any, stride: Any, needs: Any = None, hooks: Any = None, more: Any = None
) -> View:
    if more:
        raise _UnsupportedError("a conjugate or negative view (call resolve_conj() and resolve_neg() before saving)")
    return View(storage, offset, shape, stride)


def _tensor_v3(
    storage: _Storage, offset: int, shape: Any, stride: Any, needs: Any, hooks: Any, dtype: _Dtype, more: Any = None
) -> View:
    if more:
        raise _UnsupportedError("a conjugate or negative view (call resolve_conj() and resolve_neg() before saving)")
    return View(storage, offset, shape, stride, dtype.name)


def _parameter(tensor: View, needs_gradient: Any = None, hooks: Any = None, state: Any = None) -> View:
    if not isinstance(tensor, View):
        raise ValueError("a parameter that is no tensor")
    return tensor


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if not isinstance(function, _Function):
        raise ValueError("a tensor of an unknown kind")
    return function(*args)


class _UnsupportedError(Exception):
    """Something that is right, and cannot be averaged."""


_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Function(lambda *pairs: _Dictionary(*pairs)),
    ("torch", "Size"): _Function(lambda *shape: tuple(*shape)),
    ("torch._utils", "_rebuild_tensor"): _Function(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _Function(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _Function(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): _Function(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_from_type),
    ("torch.storage", "UntypedStorage"): _Dtype(""),
    **{("torch", name): _Dtype(dtype) for name, dtype in (_STORAGES | _DTYPES).items()},
    **{pair: Opaque() for pair in _NO_TENSORS | _KINDS},
}
_CANNOT = {
    "_rebuild_sparse_tensor": "a sparse tensor (convert it with to_dense())",
    "_rebuild_qtensor": "a quantised tensor (convert it with dequantize())",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no elements",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _FUNCTIONS.get((module, name))
        if found is not None:
            return found
        if name in _CANNOT and module == "torch._utils":
            raise _UnsupportedError(_CANNOT[name])
        raise _UnsupportedError(f"{module}.{name}, which loading would execute (it was not)")

    def persistent_load(self, pid: Any) -> Any:
        what, kind, key, _, count = pid
        if what != "storage" or not isinstance(kind, _Dtype) or not isinstance(key, str) or type(count) is not int:
            raise ValueError("a storage that is none")
        return _Storage(key, kind.name, count)


def read_pickle(content: bytes, where: str) -> Any:
    """What a PyTorch file holds, with a `View` in place of each tensor.

    Args:
        content: the pickle.
        where: the file, for messages.

    Raises:
        AverageError: it is damaged, or holds anything but tensors, dictionaries, lists, numbers and text. Nothing of
            it was executed.

    Example:
        >>> read_pickle(pickle.dumps({"epoch": 3}), "model.pt")
        {'epoch': 3}
    """
    try:
        _check_memo(content)
        return _Unpickler(io.BytesIO(content)).load()
    except _UnsupportedError as error:
        raise AverageError(
            f"{where}: expected tensors, dictionaries, lists and numbers, got {error}. {REMEDY}"
        ) from None
    # A damaged pickle fails in as many ways as there are opcodes.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise AverageError(f"{where}: expected a pickle as torch.save writes it, got {reason}. {REMEDY}") from None


def _check_memo(content: bytes) -> None:
    """Refuse a memo larger than the pickle: the unpickler makes room for the largest index there is."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name.endswith("PUT") and (argument or 0) > len(content):
            raise ValueError(f"a memo of {argument} entries")


def tensors_of(value: Any) -> list[tuple[str, View]]:
    """The tensors in a nest of dictionaries and lists, each with its keys joined by dots.

    Example:
        >>> tensors_of({"epoch": 3})
        []
    """
    found: list[tuple[str, View]] = []
    _walk(value, (), found, set())
    return found


def _walk(value: Any, keys: tuple[str, ...], found: list[tuple[str, View]], above: set[int]) -> None:
    if isinstance(value, View):
        found.append((".".join(keys) or "tensor", value))
        return
    if isinstance(value, dict):
        inside = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        inside = [(str(i), item) for i, item in enumerate(value)]
    else:
        return
    # A pickle may hold a list that holds itself.
    if id(value) not in above:
        within = above | {id(value)}
        for key, item in inside:
            _walk(item, (*keys, key), found, within)
