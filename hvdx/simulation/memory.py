"""Memory of the arrays that an exchange keeps."""

import threading
from collections import deque
from concurrent.futures import Executor, Future
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from hvdx.comm import Channel, Comm
from hvdx.comm.clock import Clock

# Objects that belong to others, or to the simulation.
_OUTSIDE = (
    *(Comm, Channel, Clock, Executor, Future, threading.Thread),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
)


def bytes_held(*objects: Any) -> int:
    """Return the bytes of all NumPy arrays that can be reached from some objects, each counted once.

    Communicators, functions and modules are left out.

    Example:
        >>> vector = np.zeros(10, np.float32)
        >>> bytes_held({"whole": vector, "half": vector[:5]}, [np.zeros(3)])
        64
    """
    waiting, seen, total = deque(objects), set(), 0
    while waiting:
        item = waiting.popleft()
        while isinstance(item, np.ndarray) and isinstance(item.base, np.ndarray):
            item = item.base
        if id(item) in seen or isinstance(item, _OUTSIDE):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            total += item.nbytes
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | deque):
            waiting.extend(item)
        else:
            waiting.extend(getattr(item, "__dict__", {}).values())
    return total
