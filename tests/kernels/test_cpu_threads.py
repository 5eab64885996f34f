import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdx.kernels import cpu
from hvdx.kernels.cpu import cut, default_threads, spread
from tests.kernels.strategies import fixed, make_runs, noise


@fixed
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([1, 4, 64]))
def test_cut_makes_even_shares(total, parts, unit):
    borders = cut(total, parts, unit)
    assert len(borders) == parts + 1
    assert (borders[0], borders[-1]) == (0, total)
    assert borders == sorted(borders)
    assert all(b % unit == 0 for b in borders[:-1] if b != total)
    assert max(np.diff(borders)) <= -(-total // unit // parts + 1) * unit + unit


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_spread_keeps_the_order_of_results(threads):
    for tasks in (1, 2, 9):
        assert spread(lambda i: i * i, tasks, threads) == [i * i for i in range(tasks)]


def test_spread_raises_errors_of_a_task():
    def fail(i):
        raise KeyError(i)

    with pytest.raises(KeyError):
        spread(fail, 3, 2)


@pytest.mark.parametrize(("setting", "threads"), [("3", 3), ("5,2", 5), ("", None), ("0", None), ("many", None)])
def test_default_threads_are_those_asked_for(setting, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert default_threads() == (threads or len(os.sched_getaffinity(0)))


def encoded(seed, threads):
    """Return the tiles of an update of several regions, the decoded output and the residual, as bytes."""
    n = 3 << 18
    update, residual = noise(n, np.full(n, 0.5, np.float32), 0.003, seed)
    runs, out = make_runs((n, 0.5)), np.zeros(n, np.float32)
    tiles = cpu.encode([update], residual, runs, threads=threads).tiles
    cpu.decode([(tiles, runs)], 1.0, [out], threads=threads)
    return tiles.tobytes(), out.tobytes(), residual.tobytes()


def test_kernels_may_be_called_from_many_threads_at_once():
    """Several threads share a pool, as when a training step overlaps an exchange."""
    alone = [encoded(seed, 1) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(encoded, range(6), [3] * 6, timeout=60)) == alone


def test_spread_works_in_a_forked_process():
    """A fork does not copy threads, so a child must not wait for those of its parent."""
    code = (
        "import os; from hvdx.kernels.cpu import spread\n"
        "spread(str, 4, 3)\n"
        "if os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "os._exit(7 if spread(str, 4, 3) == list('0123') else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 7
