"""Virtual ranks, one thread each."""

from concurrent.futures import ThreadPoolExecutor

from hvdx.comm.local import virtual_world
from hvdx.strategies import TensorSpec

SHAPES = ((40, 30), (), (0, 3), (7,))
SPECS = [TensorSpec(f"variable {i}", shape, 4) for i, shape in enumerate(SHAPES)]
ELEMENTS = sum(s.elements for s in SPECS)


def on_all(size, function):
    """Call function(comm) on `size` virtual ranks; return the results in rank order."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, virtual_world(size)))


def on_hosts(hosts, function):
    """Call function(comm) on virtual ranks, each on a host of the given name; return the results in rank order."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(function, virtual_world(len(hosts), hosts=list(hosts))))
