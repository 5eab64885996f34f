"""Threads for kernels: Python threads that call compiled functions, which release the interpreter's lock.

Numba's parallel loops are not used. Their default threading layer ends the process if two Python threads enter it at
once, as they do when a training step overlaps with an exchange.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def default_threads() -> int:
    """Return the default number of threads: OMP_NUM_THREADS if it is set, else the number of the process's cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(setting), 1024) if setting.isdecimal() and int(setting) > 0 else len(os.sched_getaffinity(0))


def spread(function: Callable[[int], T], tasks: int, threads: int) -> list[T]:
    """Call function(0) ... function(tasks - 1) on `threads` threads; return the results in order."""
    if threads == 1 or tasks == 1:
        return [function(i) for i in range(tasks)]
    # A fork does not copy threads, so each process has its own pools.
    key = os.getpid(), threads
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads - 1, thread_name_prefix="hvdx-kernel")
    rest: list[Future[T]] = []
    try:
        for i in range(1, tasks):
            rest.append(_pools[key].submit(function, i))
        return [function(0), *(future.result() for future in rest)]
    finally:
        # After any interruption no task may still run: tasks use addresses of arrays that the caller may free.
        _wait_for_all(rest)


def _wait_for_all(futures: list[Future[T]]) -> None:
    """Wait until no future runs, and only then raise an exception that interrupted the wait."""
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
    """Return the borders of `parts` even shares of range(total). All but the last are multiples of `unit`.

    Example:
        >>> cut(10, 2, 4)
        [0, 4, 10]
    """
    units = -(-total // unit)
    return [min(total, units * i // parts * unit) for i in range(parts + 1)]
