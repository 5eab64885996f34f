"""Opening of the exchanges of `Threshold`: an encoder, a route, and the step around them."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from hvdx.comm import Comm
from hvdx.costs.link import probe
from hvdx.costs.model import Situation
from hvdx.costs.types import Link
from hvdx.strategies.base import TensorSpec
from hvdx.strategies.step import MessageExchange, Route
from hvdx.strategies.threshold import costs
from hvdx.strategies.threshold.encoder import ThresholdEncoder
from hvdx.strategies.threshold.options import Options
from hvdx.strategies.threshold.routes.all_gather import AllGatherRoute
from hvdx.strategies.threshold.routes.sharded import ShardedRoute
from hvdx.strategies.threshold.shards import OWNER_DENSITY, Shards


def open_messages(
    options: Options,
    comm: Comm,
    specs: Sequence[TensorSpec],
    lookahead: float,
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
        lookahead: see `Threshold`.
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
    encoder = ThresholdEncoder(options, comm, specs, lookahead, shards, device)
    channel = comm.channel("the updates")
    channel.exchange([])  # all ranks have compiled
    route: Route = AllGatherRoute(channel, ranks_per_message)
    if shards is not None:
        route = ShardedRoute(options, channel, shards, lookahead, encoder.codec, ranks_per_message)
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
        active_ranks=partial(options.start.active_ranks, size=comm.size),
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
