"""The threads that kernels run on: plain ones around functions that release the interpreter's lock.

Numba's own parallel loops are not used: their default layer ends the process when two Python threads enter it at once,
which overlapping a training step with an exchange does.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def default_threads() -> int:
    """Threads that a kernel uses unless setting: OMP_NUM_THREADS if it is set, else the cores this process may use."""
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(setting), 1024) if setting.isdecimal() and int(setting) > 0 else len(os.sched_getaffinity(0))


def spread(function: Callable[[int], T], tasks: int, threads: int) -> list[T]:
    """Call function(0) ... function(tasks - 1) on `threads` threads: their results in order."""
    if threads == 1 or tasks == 1:
        return [function(i) for i in range(tasks)]
    # A pool belongs to the process that made it: threads do not survive a fork.
    key = os.getpid(), threads
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads - 1, thread_name_prefix="hvdx-kernel")
    rest: list[Any] = []
    try:
        for i in range(1, tasks):
            rest.append(_pools[key].submit(function, i))
        return [function(0), *(future.result() for future in rest)]
    finally:
        # Whatever interrupts, none may go on: they work on the addresses of arrays that the caller may free.
        _wait_for_all(rest)


def _wait_for_all(futures: list[Any]) -> None:
    """Wait until none of them runs, and raise what came in the meantime only then."""
    interrupted = None
    for future in futures:
        while not future.done():
            try:
                future.cancel()
                wait([future])
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted


def cut(total: int, parts: int, unit: int = 1) -> list[int]:
    """Borders of `parts` even shares of range(total), each a multiple of `unit` but the last.

    Example:
        >>> cut(10, 2, 4)
        [0, 4, 10]
    """
    units = -(-total // unit)
    return [min(total, units * i // parts * unit) for i in range(parts + 1)]
