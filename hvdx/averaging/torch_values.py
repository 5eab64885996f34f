"""The values that a pickle of PyTorch is made of while it is read: tensors, storages, and stand-ins for all else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

MOST_DIMENSIONS = 64
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
        if len(shape) > MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {len(shape)} dimensions, and there are at most {MOST_DIMENSIONS}")
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
        super().__init__(not_callable)
        object.__setattr__(self, "name", name)


def not_callable(*args: Any) -> NoReturn:
    """The body of a name that stands for no function."""
    raise ValueError("a call of what is no function")


class UnsupportedError(Exception):
    """Something that is right, and cannot be averaged."""
