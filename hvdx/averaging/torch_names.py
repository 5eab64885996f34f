"""The names in the pickle of a PyTorch file, each with something harmless that stands for it.

Source: `torch.serialization` and `torch._utils` say what `torch.save` writes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

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


_MOST_DIMENSIONS = 64
_MOST_EXTENT = (1 << 63) - 1


class View:
    """A tensor of the pickle: part of a storage.

    Attributes:
        storage: name of the entry that holds its elements.
        dtype: of the elements, as `hvdx.averaging.dtypes` or NumPy calls it.
        count: bytes of the storage, or its elements, as `in_bytes` says.
        offset, shape, stride: in elements.
    """

    __slots__ = ("count", "dtype", "in_bytes", "offset", "shape", "storage", "stride")

    def __init__(self, storage: "Storage", offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str = ""):
        self.storage, self.count, self.in_bytes = storage.key, storage.count, not storage.dtype
        self.dtype = dtype or storage.dtype
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {len(shape)} dimensions, and there are at most {_MOST_DIMENSIONS}")
        self.offset, self.shape, self.stride = offset, tuple(shape), tuple(stride)
        whole = (self.offset, *self.shape, *self.stride)
        if not self.dtype or len(self.shape) != len(self.stride) or not all(map(_is_extent, whole)):
            raise ValueError("a tensor without a shape")

    def __setstate__(self, state: Any) -> NoReturn:
        raise ValueError("a tensor with a state")


def _is_extent(number: Any) -> bool:
    return type(number) is int and 0 <= number <= _MOST_EXTENT


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes that a tensor is part of: an entry of the archive."""

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


class Dictionary(dict):
    """In place of OrderedDict, whose state is the versions of the modules."""

    def __setstate__(self, state: Any) -> None:
        pass


class Function:
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


class Dtype(Function):
    """A dtype, or a kind of storage."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str):
        super().__init__(_not_callable)
        object.__setattr__(self, "name", name)


def _not_callable(*args: Any) -> NoReturn:
    raise ValueError("a call of what is no function")


def _tensor_v2(
    storage: Storage, offset: int, shape: Any, stride: Any, needs: Any = None, hooks: Any = None, more: Any = None
) -> View:
    if more:
        raise UnsupportedError("a conjugate or negative view (call resolve_conj() and resolve_neg() before saving)")
    return View(storage, offset, shape, stride)


def _tensor_v3(
    storage: Storage, offset: int, shape: Any, stride: Any, needs: Any, hooks: Any, dtype: Dtype, more: Any = None
) -> View:
    if more:
        raise UnsupportedError("a conjugate or negative view (call resolve_conj() and resolve_neg() before saving)")
    return View(storage, offset, shape, stride, dtype.name)


def _size(shape: Any = ()) -> tuple[Any, ...]:
    # It is copied, and a pickle may ask for that as often as it likes.
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a shape of {len(shape)} dimensions, and there are at most {_MOST_DIMENSIONS}")
    return tuple(shape)


def _parameter(tensor: View, needs_gradient: Any = None, hooks: Any = None, state: Any = None) -> View:
    if not isinstance(tensor, View):
        raise ValueError("a parameter that is no tensor")
    return tensor


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if not isinstance(function, Function):
        raise ValueError("a tensor of an unknown kind")
    return function(*args)


class UnsupportedError(Exception):
    """Something that is right, and cannot be averaged."""


FUNCTIONS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Function(lambda: Dictionary()),
    ("torch", "Size"): Function(_size),
    ("torch._utils", "_rebuild_tensor"): Function(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Function(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Function(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Function(_from_type),
    ("torch.storage", "UntypedStorage"): Dtype(""),
    **{("torch", name): Dtype(dtype) for name, dtype in (_STORAGES | _DTYPES).items()},
    **{pair: Opaque() for pair in _NO_TENSORS | _KINDS},
}
CANNOT = {
    "_rebuild_sparse_tensor": "a sparse tensor (convert it with to_dense())",
    "_rebuild_qtensor": "a quantised tensor (convert it with dequantize())",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no elements",
}
