"""Mesh of the ranks: groups that split layers among them, and the peers that hold the same part in every group."""

from collections.abc import Sequence

from hvdx.comm.interfaces import Comm, Mesh
from hvdx.errors import ConfigError

#: Environment variable that sets the number of ranks that split a layer.
VARIABLE = "HVDX_SPLIT"
#: Value of the option that makes the ranks of a host a group.
NODE = "node"


def mesh_of(comm: Comm) -> Mesh:
    """Return the mesh of ranks that split layers.

    Raises:
        ConfigError: if they split none.
    """
    if comm.mesh is None:
        raise ConfigError("split layers: expected ranks in groups, got none. Do: call hvdx.init(split=...) first.")
    return comm.mesh


def parse(split: object) -> int | str:
    """Return the option `split` as a positive number or "node".

    Args:
        split: the option; None or "" means 1, which is no split.

    Raises:
        ConfigError: if it is anything else.

    Example:
        >>> parse("2"), parse("node"), parse(None)
        (2, 'node', 1)
    """
    if split in (None, ""):
        return 1
    if split == NODE:
        return NODE
    text = split if isinstance(split, str) else "" if isinstance(split, bool) else str(split)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"split: expected a positive number or 'node', got {split!r}. Correct init(split=) or {VARIABLE}."
        )
    return int(text)


def make(comm: Comm, split: int | str) -> Mesh | None:
    """Form the groups; ranks of one host stay together. Collective, with the same `split` on all ranks.

    Args:
        comm: the ranks that train, with the hosts in `comm.hosts`.
        split: result of `parse`.

    Returns:
        The mesh; None if a group has one rank.

    Raises:
        ConfigError: on all ranks, if the groups would be of different sizes.
    """
    groups = arrange(comm.hosts, split)
    if len(groups[0]) == 1:
        return None
    index = next(i for i, ranks in enumerate(groups) if comm.rank in ranks)
    position = groups[index].index(comm.rank)
    group = comm.divide(index, position, "split layers")
    peers = comm.divide(position, index, "parts of split layers")
    return Mesh(groups, index, position, group, peers, group.channel("the collectives of split layers"))


def arrange(hosts: Sequence[str], split: int | str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each group.

    Args:
        hosts: name of the host of each rank.
        split: number of ranks in a group, or "node" for the ranks of a host.

    Raises:
        ConfigError: if the groups would be of different sizes.

    Example:
        >>> arrange(["a", "b", "a", "b"], 2)
        ((0, 2), (1, 3))
    """
    first = {host: hosts.index(host) for host in hosts}
    order = sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], rank))
    if split == NODE:
        on_host = {host: [r for r in order if hosts[r] == host] for host in first}
        sizes = {host: len(ranks) for host, ranks in on_host.items()}
        if len(set(sizes.values())) > 1:
            raise ConfigError.on_all_ranks(
                f"split='node': expected the same number of ranks on every host, got {sizes}. Start as many."
            )
        return tuple(tuple(ranks) for ranks in on_host.values())
    size = int(split)
    if len(hosts) % size:
        divisors = [d for d in range(1, len(hosts) + 1) if len(hosts) % d == 0]
        raise ConfigError.on_all_ranks(
            f"split={size}: expected a divisor of {len(hosts)}, the number of ranks that train, got {size}. Give "
            f"one of {divisors}, or start another number of ranks."
        )
    return tuple(tuple(order[i : i + size]) for i in range(0, len(order), size))


def divide_by_host(comm: Comm) -> tuple[Comm, Comm]:
    """Return the communicators of this host, and of the hosts' ranks at this rank's place. Collective.

    Each host needs as many ranks.
    """
    host = list(dict.fromkeys(comm.hosts)).index(comm.hosts[comm.rank])
    place = list(comm.hosts[: comm.rank]).count(comm.hosts[comm.rank])
    return comm.divide(host, place, "the ranks of a host"), comm.divide(place, host, "the hosts")


def bounds_of(extent: int, parts: int) -> tuple[int, ...]:
    """Return the bounds of nearly equal parts: part i is [bounds[i], bounds[i + 1]).

    Example:
        >>> bounds_of(10, 4)
        (0, 2, 5, 7, 10)
    """
    return tuple(i * extent // parts for i in range(parts + 1))
