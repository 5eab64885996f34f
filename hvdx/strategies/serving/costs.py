"""Costs of a step under a parameter server, predicted without training."""

from hvdx.comm.waiting import overshoot
from hvdx.costs.model import Situation
from hvdx.costs.sizes import message_bytes
from hvdx.costs.types import Prediction
from hvdx.strategies.serving.updates import density_of
from hvdx.strategies.serving.worker_sessions import HEADER_BYTES, shards_of_server

# Bytes per element of the codecs that send all elements.
_ITEMSIZES = {"none": 4, "fp16": 2, "bf16": 2}
# Trips over the network until the body of a message has arrived: header, answer of MPI, body.
_TRIPS = 3


def predict(situation: Situation, workers: int, servers: int, dedicated: bool, codec: str) -> Prediction | None:
    """Return the mean costs of a worker's step; None for a codec of another package.

    Args:
        situation: the training; its `workers` are all ranks.
        workers: number of workers.
        servers: number of servers.
        dedicated: whether the servers are ranks of their own.
        codec: codec of the updates, in the spelling of `ParameterServer`.
    """
    count = situation.elements
    coded = _coded(situation, codec)
    if coded is None:
        return None
    update, encoding, decoding = coded
    network, weights = situation.network, 4.0 * count
    shards = servers * shards_of_server(int(weights) // servers)
    push, pull = update / network.bandwidth, weights / network.bandwidth
    # Ranks of one host share its link.
    sharing = situation.per_host if situation.workers > situation.per_host else 1
    # Share of the weights that is at servers of other ranks, on average over the workers.
    remote = 1.0 if dedicated else 1 - 1 / workers
    if dedicated:
        # While one shard is pushed, the answer for the previous shard arrives.
        transfer = sharing * (max(push, pull) + min(push, pull) / shards)
    else:
        # The link of a host with servers carries the host's updates for other servers and the answers to workers of
        # other hosts in one direction, and the reverse in the other.
        here = max(1.0, servers * sharing / workers) / servers
        own, others = sharing * (1 - here), (workers - sharing) * here
        transfer = max(own * push + others * pull, others * push + own * pull)
    # A message's header travels first. Its body follows when the receiver, which polls, has made room for it.
    trips = 2 * _TRIPS
    latency = trips * (network.latency + situation.machine.message) + 2 * shards * situation.machine.message
    # A server checks an update, adds it, and copies the answer.
    serving = (situation.passes(4 + 12 + 8) + decoding) / servers
    terms = {
        "copying": situation.passes(12 + 4 + 8 + 8 + 8),
        "encoding": encoding,
        "latency": latency + trips * overshoot(transfer / trips),
        "transfer": transfer,
        "decoding": serving,
    }
    # A server handles one update at a time, and its link carries the updates of all workers, and the answers.
    link = max(push, pull) * workers / servers * min(sharing, servers) * dedicated
    # Asynchronous workers that serve wait for each other's messages. Of a closed network of W queues with W customers
    # (Lazowska et al. 1984, balanced job bounds), each queue is busy for W / (2 W - 1) of the time; with 2 W customers,
    # because a worker pushes a shard while the answer for another one arrives, for 2 W / (3 W - 1) of it.
    underway = 2 if shards > servers else 1
    queueing = 0.0 if dedicated else transfer * (1 - 1 / workers) / underway
    idle = max(link, workers * serving) - situation.computing - sum(terms.values())
    terms["waiting"] = max(queueing, idle, 0.0)
    headers = shards * HEADER_BYTES
    sent = remote * (update + headers) + (0.0 if dedicated else remote * (weights + headers))
    buffers = {"buffers": 3 * weights, "server": 0.0 if dedicated else 2 * weights / servers}
    return situation.prediction(terms, sent, buffers, workers, note=f"workers: {workers}, servers: {servers}")


def _coded(situation: Situation, codec: str) -> tuple[float, float, float] | None:
    """Return the bytes of an update, and the seconds to encode and to decode it; None for an unknown codec."""
    name, count = codec.partition(":")[0], situation.elements
    if name == "threshold":
        density, speed = density_of(codec), situation.machine.codec
        return message_bytes(count, density), speed.encoding(count, density), speed.decoding(count, density, 1)
    if name not in _ITEMSIZES:
        return None
    # The dense codecs convert the update, convert it back to find infinity, and the server converts it again.
    passes = 0 if name == "none" else 6
    return _ITEMSIZES[name] * count, situation.passes(2 * passes), situation.passes(passes)
