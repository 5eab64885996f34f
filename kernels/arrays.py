"""Types of the arrays that kernels read and write: NumPy's on the host, and the parts of Numba's on a GPU in use."""

from collections.abc import Callable
from typing import Protocol, TypedDict

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
#: Array whose dtype and shape a function checks itself.
AnyArray = np.ndarray


class Stream(Protocol):
    """Stream of a GPU: Numba's, or the simulator's."""

    def synchronize(self) -> None:
        """Wait for all work on the stream."""


#: Stream as callers name it: the address of a stream of CUDA is allowed, and None or 0 is the default stream.
StreamLike = Stream | int | None


class HasAddress(Protocol):
    """The `ctypes` of a NumPy array, which the simulator's arrays have too."""

    @property
    def data(self) -> int: ...


class ArrayInterface(TypedDict):
    """The parts of the CUDA array interface that are used here."""

    data: tuple[int, bool]


class DeviceArray(Protocol):
    """Array on a GPU: Numba's, or the simulator's."""

    @property
    def size(self) -> int: ...

    @property
    def ndim(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[np.generic]: ...

    @property
    def ctypes(self) -> "HasAddress": ...

    @property
    def __cuda_array_interface__(self) -> "ArrayInterface": ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> "DeviceArray": ...

    def view(self, dtype: npt.DTypeLike, /) -> "DeviceArray": ...

    def reshape(self, *shape: int) -> "DeviceArray": ...

    def is_c_contiguous(self) -> bool: ...

    def copy_to_host(self, *, stream: Stream | int) -> AnyArray: ...

    def copy_to_device(self, values: "AnyArray | DeviceArray", stream: Stream | int = 0) -> None: ...


class Kernel(Protocol):
    """Kernel of a GPU: `kernel[blocks, threads, stream](*arguments)` launches it."""

    def __getitem__(self, launch: tuple[int, int, Stream | int], /) -> Callable[..., None]: ...


class Exportable(Protocol):
    """Array that its library exports by DLPack."""

    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...
