"""Reader of the pickle in a PyTorch file that executes none of it.

A pickle is a program that names functions and calls them. Here every allowed name has a harmless stand-in, other
names are refused, and PyTorch is not imported.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from hvdx.averaging.torch_values import (
    BESIDE,
    MOST_DIMENSIONS,
    Attributes,
    Dictionary,
    Dtype,
    Function,
    Opaque,
    Storage,
    UnsupportedError,
    View,
    copied,
)
from hvdx.errors import AverageError

# Dtype of the elements of each kind of storage, as named by `small_float` or NumPy.
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
# Names whose results are not tensors.
_NO_TENSORS = {
    ("torch", "device"),
    ("torch", "strided"),
    ("torch.serialization", "_get_layout"),
    ("_codecs", "encode"),
    ("torch", "contiguous_format"),
    ("torch", "channels_last"),
    ("torch", "preserve_format"),
}
_KINDS = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}


# Stand-ins for the names that `torch.save` writes; `torch.serialization` and `torch._utils` say which.


def _tensor_v2(
    storage: Storage,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    needs: object = None,
    hooks: object = None,
    more: object = None,
) -> View:
    if more:
        raise UnsupportedError("a conjugate or negative view (call resolve_conj() and resolve_neg() before saving)")
    return View(storage, offset, shape, stride)


def _tensor_v3(
    storage: Storage,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    needs: object,
    hooks: object,
    dtype: Dtype,
    more: object = None,
) -> View:
    if more:
        raise UnsupportedError("a conjugate or negative view (call resolve_conj() and resolve_neg() before saving)")
    return View(storage, offset, shape, stride, dtype.name)


def _size(shape: Sequence[int] = ()) -> tuple[int, ...]:
    # The shape is copied, and a hostile pickle could request many large copies.
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"a shape of {len(shape)} dimensions, the maximum is {MOST_DIMENSIONS}")
    return tuple(shape)


def _parameter(tensor: View, needs_gradient: object = None, hooks: object = None, state: object = None) -> View:
    if not isinstance(tensor, View):
        raise ValueError("a parameter that is not a tensor")
    return tensor


def _from_type(function: object, kind: object, args: Sequence[object], state: object) -> object:
    if not isinstance(function, Function):
        raise ValueError("a tensor of an unknown kind")
    return function(*args)


FUNCTIONS: dict[tuple[str, str], Any] = {
    **BESIDE,
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


#: Advice in error messages about files that hold more than tensors.
REMEDY = "Save the tensors alone: torch.save(model.state_dict(), path)."


# Checkpoints have a dozen levels. A name joins the keys of all levels, so a short pickle may have long names.
_MOST_LEVELS = 100
_MOST_NAMES = 100_000_000
_MOST_PARTS = 16
_MOST_BITS = 64
_MOST_REASON = 300


# The unpickler in Python: the one in C hashes and calls before a subclass can check. Type checkers do not know its
# methods.
_InPython: Any = pickle._Unpickler


class _Unpickler(_InPython):
    """Unpickler that calls only stand-ins, and checks the keys of dictionaries."""

    dispatch: ClassVar[dict[int, Callable[["_Unpickler"], None]]] = dict(_InPython.dispatch)

    def find_class(self, module: str, name: str) -> object:
        found = FUNCTIONS.get((module, name))
        if found is not None:
            return found
        if name in CANNOT and module == "torch._utils":
            raise UnsupportedError(CANNOT[name])
        raise UnsupportedError(f"{module}.{name}, which loading would execute (it was not)")

    def persistent_load(self, pid: Any) -> Storage:
        what, kind, key, _, count = pid
        known = what == "storage" and isinstance(kind, Dtype) and isinstance(key, str)
        if not known or type(count) is not int or count.bit_length() > _MOST_BITS:
            raise ValueError("an invalid storage")
        return Storage(key, kind.name, count)

    def _call(self, function: object, arguments: Sequence[object]) -> None:
        if not isinstance(function, (Function, Opaque)):
            raise ValueError("a call of something that is not a function")
        self.append(function(*arguments))

    def _instantiate(self, kind: object, arguments: Sequence[object]) -> None:
        self._call(kind, arguments)

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self._call(self.stack.pop(), arguments)

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        setstate = getattr(type(made), "__setstate__", None)
        if setstate is None:
            raise ValueError(f"a state for {type(made).__name__}")
        setstate(made, state)

    def _set_item(self) -> None:
        _check_key(self.stack[-2])
        self.load_setitem()

    def _set_items(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        self.load_setitems()

    def _make_dictionary(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        self.load_dict()

    def _empty_set(self) -> None:
        self.append(Opaque())

    def _add_items(self) -> None:
        copied(*self.pop_mark())

    def _frozen_set(self) -> None:
        self.append(copied(*self.pop_mark()))

    def _refuse(self) -> NoReturn:
        raise ValueError("an opcode that torch.save does not write")

    # The first opcodes are checked: those that call, set state or set keys, and those of sets, which would hash their
    # items. The last ones are refused: buffers of any size, extension registries, and calls with keywords.
    dispatch |= {pickle.REDUCE[0]: _reduce, pickle.NEWOBJ[0]: _reduce, pickle.BUILD[0]: _build}
    dispatch |= {
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.DICT[0]: _make_dictionary,
        pickle.EMPTY_SET[0]: _empty_set,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _frozen_set,
    }
    dispatch |= dict.fromkeys(
        [
            *(pickle.BYTEARRAY8[0], pickle.NEXT_BUFFER[0], pickle.READONLY_BUFFER[0]),
            *(pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0], pickle.NEWOBJ_EX[0]),
        ],
        _refuse,
    )


def _check_key(key: object) -> None:
    """Reject keys whose hash or text takes long to compute: nested tuples, and integers of any length."""
    for part in key if type(key) is tuple and len(key) <= _MOST_PARTS else [key]:
        if not isinstance(part, (str, bytes, float, int, Opaque, Function, type(None))) or (
            isinstance(part, int) and part.bit_length() > _MOST_BITS
        ):
            raise ValueError(f"a key that is neither text nor a number ({type(part).__name__})")


def read_pickle(content: bytes, where: str) -> Any:
    """Return the content of a PyTorch file, with a `View` in place of each tensor.

    Raises:
        AverageError: if the pickle is damaged, or contains objects that have no stand-in. Nothing was executed.

    Example:
        >>> read_pickle(pickle.dumps({"epoch": 3}), "model.pt")
        {'epoch': 3}
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except UnsupportedError as error:
        raise AverageError(
            f"{where}: expected tensors, dictionaries, lists and numbers, got {_brief(error)}. {REMEDY}"
        ) from None
    # A damaged pickle may raise any exception.
    except Exception as error:
        raise AverageError(
            f"{where}: expected a pickle as torch.save writes it, got {_brief(error) or type(error).__name__}. {REMEDY}"
        ) from None


def _brief(error: Exception) -> str:
    """Return a message in one line of limited length, since it may quote the file."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MOST_REASON else f"{text[:_MOST_REASON]}..."


def tensors_of(value: object, where: str, most: int) -> list[tuple[str, View]]:
    """Return the tensors in nested dictionaries and lists, each with its keys joined by dots.

    Args:
        most: maximum number of entries; a list that is in several lists counts in each.

    Raises:
        AverageError: if there are more entries or levels, or longer names, than a checkpoint can have.

    Example:
        >>> tensors_of({"epoch": 3}, "model.pt", most=10)
        []
    """
    walk = _Walk(where, most)
    walk.enter(value, (), frozenset())
    return walk.found


class _Walk:
    """Traversal of nested values with limits: lists that contain the same list several times multiply its entries."""

    def __init__(self, where: str, most: int):
        self.found: list[tuple[str, View]] = []
        self._where, self._entries, self._characters = where, most, _MOST_NAMES

    def enter(self, value: object, keys: tuple[str, ...], above: frozenset[int]) -> None:
        self._entries -= 1
        if self._entries < 0:
            self._stop("no more entries than bytes, got far more, in lists that are in several lists")
        if isinstance(value, View):
            self._add(keys, value)
            return
        if isinstance(value, Attributes):
            value = value.content
        if isinstance(value, dict):
            inside = ((str(key), item) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            inside = ((str(i), item) for i, item in enumerate(value))
        else:
            return
        # A list in a pickle may contain itself.
        if id(value) in above:
            return
        if len(keys) == _MOST_LEVELS:
            self._stop(f"at most {_MOST_LEVELS} levels of dictionaries and lists, got more")
        for key, item in inside:
            self.enter(item, (*keys, key), above | {id(value)})

    def _add(self, keys: tuple[str, ...], view: View) -> None:
        self._characters -= sum(len(key) for key in keys)
        if self._characters < 0:
            self._stop(f"names of at most {_MOST_NAMES} characters in all, got more")
        self.found.append((".".join(keys) or "tensor", view))

    def _stop(self, reason: str) -> NoReturn:
        raise AverageError(f"{self._where}: expected {reason}. {REMEDY}")
