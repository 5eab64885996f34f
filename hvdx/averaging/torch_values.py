"""Values in a PyTorch pickle while it is read: tensors, storages, and stand-ins for everything else.

Stand-ins are not written: the result contains the bytes of the first network's pickle.

Source: the `__reduce__` methods of Python's standard library and of NumPy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

MOST_DIMENSIONS = 64
_MOST_EXTENT = (1 << 63) - 1


class View:
    """Tensor of the pickle: part of a storage.

    Attributes:
        storage: name of the entry with its elements.
        dtype: dtype of the elements, as named by `small_float` or NumPy.
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


# Stand-ins for objects that training scripts save beside tensors.

# Kinds of NumPy dtypes whose arrays have no mean and are copied: integers, booleans, bytes, text, times.
_COPIED_KINDS = "iubSUMm"


class Attributes:
    """Stand-in for an object with only attributes, such as a namespace."""

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise ValueError("a namespace whose attributes have no names")
        self.content = state


class _NumPyDtype(Opaque):
    __slots__ = ("kind",)

    def __init__(self, name: object):
        self.kind = str(name).lstrip("<>|=")[:1]


class _NumPyArray(Opaque):
    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        dtype = state[2]
        if not isinstance(dtype, _NumPyDtype) or dtype.kind not in _COPIED_KINDS:
            kind = {"f": "floats", "c": "complex", "O": "objects"}.get(getattr(dtype, "kind", ""), "records")
            raise UnsupportedError(
                f"a NumPy array of {kind}, which would not be averaged (save torch.from_numpy(array) in its place)"
            )


def copied(*arguments: object) -> Opaque:
    """Return a stand-in for an object that is only copied; reject a tensor in it, which would not be averaged."""
    for argument in arguments:
        inside = argument if isinstance(argument, (list, tuple)) else [argument]
        if any(isinstance(value, View) for value in inside):
            raise UnsupportedError("a tensor within an object that is only copied")
    return Opaque()


def _counter(items: object = None) -> Any:
    if not isinstance(items, (dict, type(None))):
        raise ValueError("a counter of something that is not a dictionary")
    return items if items is not None else Dictionary()


def _default_dictionary(factory: object = None) -> Dictionary:
    if not isinstance(factory, (Function, Opaque, type(None))):
        raise ValueError("a defaultdict with an invalid factory")
    return Dictionary()


def _names(modules: str, names: str, stand_in: object) -> dict[tuple[str, str], Any]:
    return {(module, name): stand_in for module in modules.split() for name in names.split()}


_BUILTINS = "builtins __builtin__"
_ARRAYS = "numpy.core.multiarray numpy._core.multiarray"
_PATHS = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"
_GENERATORS = "__randomstate_ctor __generator_ctor __bit_generator_ctor"

BESIDE: dict[tuple[str, str], Any] = {
    **_names("collections", "Counter", Function(_counter)),
    **_names("collections", "defaultdict", Function(_default_dictionary)),
    **_names("argparse", "Namespace", Function(Attributes)),
    **_names("types", "SimpleNamespace", Function(Attributes)),
    **_names("pathlib pathlib._local", _PATHS, Function(copied)),
    **_names("datetime", "date datetime time timedelta timezone", Function(copied)),
    **_names(_BUILTINS, "complex set frozenset", Function(copied)),
    # Factories of default values, which are not called while the pickle is read.
    **_names(_BUILTINS, "bool bytes dict float int list long str tuple unicode", Function(not_callable)),
    **_names("numpy", "dtype", Function(lambda name, *_: _NumPyDtype(name))),
    **_names("numpy", "ndarray", Function(not_callable)),
    **_names(_ARRAYS, "_reconstruct", Function(lambda *_: _NumPyArray())),
    **_names(_ARRAYS, "scalar", Function(copied)),
    **_names("numpy.random._pickle", _GENERATORS, Function(copied)),
    **_names("numpy.random._mt19937", "MT19937", Function(not_callable)),
    **_names("numpy.random._pcg64", "PCG64 PCG64DXSM", Function(not_callable)),
    **_names("numpy.random._philox", "Philox", Function(not_callable)),
    **_names("numpy.random._sfc64", "SFC64", Function(not_callable)),
    **_names("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence", Function(copied)),
    **_names("torch.torch_version", "TorchVersion", Function(copied)),
}
