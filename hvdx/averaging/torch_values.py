"""Values in a PyTorch pickle while it is read: tensors, storages, and stand-ins for everything else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

MOST_DIMENSIONS = 64
_MOST_EXTENT = (1 << 63) - 1


class View:
    """Tensor of the pickle: part of a storage.

    Attributes:
        storage: name of the entry with its elements.
        dtype: dtype of the elements, as named by `hvdx.averaging.dtypes` or NumPy.
        count: size of the storage, in bytes or elements.
        in_bytes: unit of `count`: True for bytes, False for elements.
        offset, shape, stride: position in the storage, in elements.
    """

    __slots__ = ("count", "dtype", "in_bytes", "offset", "shape", "storage", "stride")

    def __init__(self, storage: "Storage", offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str = ""):
        self.storage, self.count, self.in_bytes = storage.key, storage.count, not storage.dtype
        self.dtype = dtype or storage.dtype
        if len(shape) > MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {len(shape)} dimensions, the maximum is {MOST_DIMENSIONS}")
        self.offset, self.shape, self.stride = offset, tuple(shape), tuple(stride)
        whole = (self.offset, *self.shape, *self.stride)
        if not self.dtype or len(self.shape) != len(self.stride) or not all(map(_is_extent, whole)):
            raise ValueError("a tensor without a shape")

    def __setstate__(self, state: object) -> NoReturn:
        raise ValueError("a tensor with a state")


def _is_extent(number: object) -> bool:
    return type(number) is int and 0 <= number <= _MOST_EXTENT


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage of tensors: an entry of the archive."""

    key: str
    dtype: str  # "" for a storage of bytes
    count: int

    def __setstate__(self, state: object) -> NoReturn:
        raise ValueError("a storage with a state")


class Opaque:
    """Stand-in for a value that is not a tensor and is only copied."""

    __slots__ = ()

    def __call__(self, *args: object) -> "Opaque":
        return self

    def __setstate__(self, state: object) -> None:
        pass


class Dictionary(dict[object, object]):
    """Stand-in for OrderedDict; its state, the versions of modules, is ignored."""

    def __setstate__(self, state: object) -> None:
        pass


class Function:
    """Stand-in for a name in the pickle. It is neither a class nor a Python function, so nothing can be set on it."""

    __slots__ = ("_body",)
    _body: Callable[..., object]

    def __init__(self, body: Callable[..., object]):
        object.__setattr__(self, "_body", body)

    def __call__(self, *args: object) -> object:
        return self._body(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ValueError("a name with a state")

    def __setstate__(self, state: object) -> NoReturn:
        raise ValueError("a name with a state")


class Dtype(Function):
    """Stand-in for a dtype or a kind of storage."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str):
        super().__init__(not_callable)
        object.__setattr__(self, "name", name)


def not_callable(*args: object) -> NoReturn:
    """Reject a call of a name that is not a function."""
    raise ValueError("a call of something that is not a function")


class UnsupportedError(Exception):
    """Valid content that cannot be averaged."""
