"""Allowed names in the pickle of a PyTorch file, each with a harmless stand-in.

Source: `torch.serialization` and `torch._utils` say what `torch.save` writes.
"""

from collections.abc import Sequence
from typing import Any

from hvdx.averaging.torch_beside import BESIDE
from hvdx.averaging.torch_values import (
    MOST_DIMENSIONS,
    Dictionary,
    Dtype,
    Function,
    Opaque,
    Storage,
    UnsupportedError,
    View,
)

# Dtype of the elements of each kind of storage, as named by `dtypes.py` or NumPy.
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
