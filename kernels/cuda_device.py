"""Device functions that Numba CUDA does not offer: memory by its address, products that no compiler contracts, bits.

In the simulator they are functions in Python. Elsewhere they are LLVM code and functions of libdevice.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from llvmlite.ir import Value
from numba import cuda, types
from numba.core import config
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature

from hvdx.kernels.arrays import AnyArray
from hvdx.kernels.pieces import ADDRESS, END, START

#: True if Numba's simulator takes the place of a GPU.
SIMULATED = bool(vars(config)["ENABLE_CUDASIM"])

if SIMULATED:
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    _allocating = threading.Lock()

    def _shared_array(shared: FakeCUDAShared, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """Return the array that the threads of a block share at the calling line.

        The simulator's own function has no lock: at the first call, two threads at once would get an array each.
        """
        frame = sys._getframe(1)
        with _allocating:
            array: AnyArray = shared._allocations.setdefault((frame.f_code, frame.f_lineno), np.empty(shape, dtype))
            return array

    FakeCUDAShared.array = _shared_array
    # The simulator polls its threads and blocks them until the interpreter switches, so it must switch often.
    sys.setswitchinterval(1e-4)

    def load(address: int) -> np.float32:
        """Return the float32 at an address."""
        return np.float32(ctypes.c_float.from_address(int(address)).value)

    def store(address: int, value: np.float32) -> None:
        """Write a float32 to an address."""
        ctypes.c_float.from_address(int(address)).value = value

    def product(a: np.float32, b: np.float32) -> np.float32:
        """Return a * b, rounded to float32 before it is used."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.float32(a) * np.float32(b)

    def float_bits(value: np.float32) -> np.int64:
        """Return the bits of a float32, as a signed number of 32 bits."""
        return np.int64(np.float32(value).view(np.int32))

else:
    from numba.cuda import libdevice
    from numba.cuda.extending import intrinsic

    _Typed = tuple[Signature, Callable[..., Value]]
    # Address space 1 is the GPU's memory: without it every access would first find out which memory it is.
    _POINTER = ir.PointerType(ir.FloatType(), 1)

    @intrinsic
    def load(_: object, address: types.Type) -> _Typed:
        """Return the float32 at an address."""

        def generate(
            context: BaseContext, builder: ir.IRBuilder, _: Signature, arguments: Sequence[ir.Value]
        ) -> ir.Value:
            value = builder.load(builder.inttoptr(arguments[0], _POINTER))
            value.align = 4
            return value

        return types.float32(types.int64), generate

    @intrinsic
    def store(_: object, address: types.Type, value: types.Type) -> _Typed:
        """Write a float32 to an address."""

        def generate(
            context: BaseContext, builder: ir.IRBuilder, _: Signature, arguments: Sequence[ir.Value]
        ) -> ir.Value:
            builder.store(arguments[1], builder.inttoptr(arguments[0], _POINTER)).align = 4
            return context.get_dummy_value()

        return types.none(types.int64, types.float32), generate

    @cuda.jit(device=True)
    def product(a, b):
        """Return a * b, rounded to float32 before it is used."""
        return libdevice.fmul_rn(a, b)

    @cuda.jit(device=True)
    def float_bits(value):
        """Return the bits of a float32, as a signed number of 32 bits."""
        return np.int64(libdevice.float_as_int(value))


@cuda.jit(device=True)
def piece_of(pieces, index):
    """Return the row of a table of pieces that holds the element at `index`."""
    low, high = 0, pieces.shape[0] - 1
    while low < high:
        middle = (low + high) >> 1
        if pieces[middle, END] > index:
            high = middle
        else:
            low = middle + 1
    return low


@cuda.jit(device=True)
def address_in(pieces, row, index):
    """Return the address of the element at `index`, which is in this row of a table of pieces."""
    return pieces[row, ADDRESS] + 4 * (index - pieces[row, START])


@cuda.jit(device=True)
def address_of(pieces, index):
    """Return the address of the element at `index`."""
    return address_in(pieces, piece_of(pieces, index), index)
