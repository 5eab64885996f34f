"""Stand-ins for objects that training scripts save beside tensors, used while a pickle is read.

Stand-ins are not written: the result contains the bytes of the first network's pickle.

Source: the `__reduce__` methods of Python's standard library and of NumPy.
"""

from typing import Any

from hvdx.averaging.torch_values import Dictionary, Function, Opaque, UnsupportedError, View, not_callable

# Kinds of NumPy dtypes whose arrays have no mean and are copied: integers, booleans, bytes, text, times.
_COPIED_KINDS = "iubSUMm"


class Attributes:
    """Stand-in for an object with only attributes, such as a namespace.

    Attributes:
        content: attributes by name.
    """

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
