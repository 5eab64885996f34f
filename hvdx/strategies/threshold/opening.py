"""Opening of the exchanges of `Threshold`: the choice of their kind, and the parts of which each is composed."""

from collections.abc import Sequence

import numpy as np

from hvdx.comm import Comm
from hvdx.costs.link import probe
from hvdx.costs.model import Situation
from hvdx.costs.types import Link
from hvdx.errors import ConfigError
from hvdx.log import Log
from hvdx.strategies.base import TensorSpec
from hvdx.strategies.host import HostExchange
from hvdx.strategies.step import MessageExchange, Route
from hvdx.strategies.threshold import costs
from hvdx.strategies.threshold.encoder import ThresholdEncoder
from hvdx.strategies.threshold.hosts import HostsExchange
from hvdx.strategies.threshold.options import Options
from hvdx.strategies.threshold.ordered import OrderedExchange
from hvdx.strategies.threshold.routes.all_gather import AllGatherRoute
from hvdx.strategies.threshold.routes.sharded import ShardedRoute
from hvdx.strategies.threshold.shards import OWNER_DENSITY, Shards

_log = Log(__name__)

# Largest number of elements that the ranks of a host add up: MPI counts bytes in a C int.
_MOST_ELEMENTS = 2**29 - 1


def open_exchange(
    options: Options, comm: Comm, specs: Sequence[TensorSpec], device: str, ranks_to_sum: int
) -> HostExchange:
    """Open the exchange that fits the options, the ranks and the link; report it if hvdx has chosen it. Collective.

    Args:
        options, comm, specs, device: see `open_messages`.
        ranks_to_sum: number of ranks whose updates may be added up on each host; 1 if every rank sends its own.
    """
    if options.asynchronous:
        return OrderedExchange(options, comm, specs)
    exchange: HostsExchange | MessageExchange
    if adds_up(options, comm, sum(s.elements for s in specs), device, ranks_to_sum):
        exchange = HostsExchange(
            options,
            comm,
            specs,
            lambda between, pieces, **more: open_messages(options, between, pieces, **more),
        )
        chosen = "auto" in (options.local, options.exchange)
    else:
        exchange, chosen = open_messages(options, comm, specs, device), options.exchange == "auto"
    if comm.world_ranks[comm.rank] == 0 and exchange.description and chosen:
        _log.info(f"threshold: {exchange.description}")
    return exchange


def adds_up(options: Options, comm: Comm, elements: int, device: str, count: int) -> bool:
    """Return whether the ranks of a host add up their updates; the same on all ranks. Collective.

    Args:
        options, comm, device: see `open_messages`.
        elements: number of elements of the tensors.
        count: see `ranks_to_sum` of `open_exchange`.
    """
    if count == 1 or elements < count:
        return False
    if elements > _MOST_ELEMENTS and options.local == "dense":
        raise ConfigError.on_all_ranks(
            f"threshold: local='dense': expected at most {_MOST_ELEMENTS:,} elements, got {elements:,}. Use "
            "local='none'."
        )
    # Hosts may differ: some have no GPU.
    devices = comm.all_gather_object(device, "the devices of updates")
    return elements <= _MOST_ELEMENTS and set(devices) == {"cpu"}


def open_messages(
    options: Options,
    comm: Comm,
    specs: Sequence[TensorSpec],
    device: str = "cpu",
    network: Link | None = None,
    ranks_per_message: int = 1,
    elements: int | None = None,
    results: Sequence[np.ndarray] | None = None,
) -> MessageExchange:
    """Open the exchange by the route that fits the ranks and the link. Collective.

    Args:
        options: options, the same on all ranks.
        comm: the ranks.
        specs: the tensors, of the same shapes on all ranks.
        device: device of the tensors, of the result and of the residual; see `Strategy.device_for`.
        network: the link between the ranks, if it has been measured.
        ranks_per_message: number of ranks whose updates each message adds up; see `hvdx.strategies.threshold.hosts`.
        elements: number of elements from which an automatic density starts, if it is not that of the tensors.
        results: see `MessageExchange`.
    """
    sizes = [s.elements for s in specs]
    elements = elements or sum(sizes)
    kind, network = choose_route(options, comm, elements, device, network)
    shards = Shards(sizes, comm.size) if kind == "sharded" else None
    encoder = ThresholdEncoder(options, comm, specs, shards, device)
    channel = comm.channel("the updates")
    channel.exchange([])  # all ranks have compiled
    route: Route = AllGatherRoute(channel, ranks_per_message)
    if shards is not None:
        route = ShardedRoute(options, channel, shards, encoder.codec, ranks_per_message)
    if options.target_density == "auto":
        network = network or probe(channel)
        size = comm.size
        messages = (1 + OWNER_DENSITY) * (size - 1) / size if shards is not None else size - 1
        encoder.follow(network, messages, elements)
    else:
        network = None
    return MessageExchange(
        comm,
        specs,
        encoder,
        route,
        ranks_per_message=ranks_per_message,
        results=results,
        network=network,
    )


def choose_route(
    options: Options, comm: Comm, elements: int, device: str, network: Link | None = None
) -> tuple[str, Link | None]:
    """Return the kind of route, and the link if it has been measured. Collective.

    Args:
        options, comm, elements, device, network: see `open_messages`.
    """
    if options.exchange == "all_gather" or comm.size == 1 or not elements:
        return "all_gather", network
    # Hosts may differ: some have no GPU.
    if set(comm.all_gather_object(device, "the devices of updates")) != {"cpu"}:
        return "all_gather", network
    if network is None and costs.follows_link(options, comm.size):
        channel = comm.channel("the link")
        network = probe(channel)
        channel.close()
    situation = Situation(comm.size, (elements,), 0.0, network or Link(0.0, 1.0))
    return costs.kind_for(options, situation), network
