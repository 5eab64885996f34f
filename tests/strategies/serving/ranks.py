"""Workers and servers as virtual ranks, one thread each, with a time limit."""

import faulthandler
import sys
import threading
import time

import numpy as np
import pytest

from hvdx.comm.local import virtual_world
from hvdx.strategies import TensorSpec
from hvdx.strategies.serving import client
from hvdx.strategies.serving.messages import SERVER_BOX
from hvdx.strategies.serving.server import RequestHandler, serve

SHAPES = ((3, 4), (), (0, 2), (7,))
SPECS = [TensorSpec(f"variable {i}", shape, 4) for i, shape in enumerate(SHAPES)]
DOUBLE = [TensorSpec(s.name, s.shape, 8) for s in SPECS]


def zeros(specs=SPECS):
    return [np.zeros(s.shape, np.float64 if s.itemsize > 4 else np.float32) for s in specs]


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def run(workers, function, servers=0, limit=40.0):
    """Call function(comm) on each worker; return the results or raised errors, in rank order."""
    results, world = [None] * workers, virtual_world(workers, servers)
    stop = threading.Event()

    def work(comm):
        if comm.serves:
            serve(comm.mailbox(SERVER_BOX), RequestHandler(workers, threads=1), stop)
            return
        try:
            results[comm.rank] = function(comm)
        except Exception as error:
            results[comm.rank] = error
        finally:
            opened = client._clients._made.pop(comm, None)
            if opened is not None:
                opened.close()

    threads = [threading.Thread(target=work, args=(comm,), daemon=True) for comm in world]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads[:workers]:
        thread.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads[:workers]) if thread.is_alive()]
    if late:
        faulthandler.dump_traceback(sys.__stderr__)
    # Workers that failed before they opened a client do not disconnect.
    never_joined = all(isinstance(result, Exception) for result in results)
    if late or never_joined:
        stop.set()
    for thread in threads[workers:]:
        thread.join(5.0)
    stop.set()
    assert not late, f"workers {late} did not end"
    assert never_joined or not any(thread.is_alive() for thread in threads), "servers did not end"
    return results


def all_fine(results):
    """Return the results if none is an error; raise the first error otherwise."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def expect_everywhere(results, error, match):
    """Check that all workers raised this error."""
    for result in results:
        with pytest.raises(error, match=match):
            all_fine([result])
