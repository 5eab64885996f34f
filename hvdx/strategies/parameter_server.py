"""Asynchronous SGD with parameter servers."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from hvdx.comm import Comm, GraphComm
from hvdx.comm.launcher import kernel_threads
from hvdx.comm.mesh import mesh_of
from hvdx.comm.preemption import PreemptionListener
from hvdx.comm.waiting import overshoot
from hvdx.costs.model import Situation
from hvdx.costs.sizes import message_bytes
from hvdx.costs.types import Prediction
from hvdx.errors import ConfigError
from hvdx.strategies.contract import (
    Strategy,
    TensorSpec,
    agree_on_strategy,
    agree_on_tensors,
    one_of,
)
from hvdx.strategies.host_exchange import HostExchange, StepInput
from hvdx.strategies.serving.client import Call, StepClient, client_of
from hvdx.strategies.serving.exchange import ServerExchange
from hvdx.strategies.serving.messages import SERVER_BOX, MessageType, SessionConfig
from hvdx.strategies.serving.server import RequestHandler, serve
from hvdx.strategies.serving.update_codecs import density_of, is_finite, joined_residual, make_codec
from hvdx.strategies.serving.worker_sessions import HEADER_BYTES, shards_of_server
from hvdx.strategies.split import SplitHostExchange, SplitStep, Subset

if TYPE_CHECKING:
    from hvdx.codec.base import Array

# Bytes per element of the codecs that send all elements.
_ITEMSIZES = {"none": 4, "fp16": 2, "bf16": 2}
# Trips over the network until the body of a message has arrived: header, answer of MPI, body.
_TRIPS = 3


def predict_step(situation: Situation, workers: int, servers: int, dedicated: bool, codec: str) -> Prediction | None:
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


def open_split_servers(
    comm: Comm, specs: Sequence[TensorSpec], subsets: Sequence[Subset[HostExchange]]
) -> SplitHostExchange:
    """Return the exchange made of a `ServerExchange` for whole weights and one for parts.

    Args:
        comm, specs, subsets: see `SplitHostExchange`.
    """
    return SplitHostExchange(comm, specs, subsets, ServedStep(comm))


class ServedStep(SplitStep):
    """Step of two exchanges with the servers, whose messages travel together.

    A worker waits for the answers of both at once. If it flushed one after the other, it could wait in the first for a
    worker that waits, because of `max_staleness`, for it in the second.
    """

    def combine(self, subsets: Sequence[Subset[HostExchange]], step_input: StepInput) -> "list[Sequence[Array]]":
        # The ranks of a group take a step of their split layers together, or skip it.
        mine = step_input.finite and all(is_finite(np.asarray(t)) for t in step_input.tensors)
        step_input = step_input._replace(finite=not mesh_of(self._comm).group.any_true(not mine))
        calls: list[Call] = []
        for subset in subsets:
            if isinstance(subset.exchange, ServerExchange):
                calls += subset.exchange.push(step_input.subset(subset.where))
        begin = time.perf_counter()
        answers = client_of(self._comm).call(calls, MessageType.WEIGHTS)
        # The time is counted once.
        seconds = [time.perf_counter() - begin, 0.0]
        return [
            subset.exchange.pull(answers, seconds.pop(0))
            if isinstance(subset.exchange, ServerExchange)
            else subset.exchange.combine(step_input.subset(subset.where))
            for subset in subsets
        ]

    def flush(self, subsets: Sequence[Subset[HostExchange]]) -> "list[Sequence[Array | None] | None]":
        """Return the final weights of each exchange; None if no session is open, and for parts of this rank alone."""
        if not all(subset.exchange.is_open for subset in subsets):
            return [None] * len(subsets)
        served = [subset.exchange for subset in subsets if isinstance(subset.exchange, ServerExchange)]
        begin = time.perf_counter()
        answers = client_of(self._comm).call([c for exchange in served for c in exchange.finish()], MessageType.FINAL)
        seconds = [time.perf_counter() - begin, 0.0]
        result: list[Sequence[Array | None] | None] = [
            subset.exchange.final(answers, seconds.pop(0)) if isinstance(subset.exchange, ServerExchange) else None
            for subset in subsets
        ]
        for subset in subsets:
            subset.exchange.close()
        return result


Staleness = Literal["none", "scale", "bound", "scale+bound"]

_COLOCATED = re.compile(r"colocated(?::([1-9]\d*))?")
# Steps that a worker may be ahead by default.
_MAX_STALENESS = 4


class ParameterServer(Strategy):
    """Weights on servers: each worker pushes an update after each of its steps, and pulls the current weights.

    A worker waits for the servers' answers and not for other workers. An update is the change that the worker's own
    step made: after learning rate, momentum and weight decay. The weights are cut into equal parts, one or more for
    each server; large variables are cut too.

    If a server changed the weights s - 1 times after a worker pulled them, the worker's next update has staleness s.
    With N workers the mean staleness is N; with `aggregate=n` it is (N + n - 1) / n. An update counts 1 / N, so that a
    learning rate has the same meaning as under `AllReduce`; if updates are also scaled by their staleness, the factor
    before the scaling is (N / aggregate)^exponent / N, since the staleness is about N / aggregate.

    Args:
        servers: number of servers. They are ranks of their own, the last ranks of the job, and end with the training.
            Or "colocated": every worker's process serves a part; "colocated:2": the processes of the first two workers
            serve.
        staleness: "none": all updates count the same. "scale": an update of staleness s counts 1 / s^exponent. "bound":
            a worker that is more than `max_staleness` steps ahead of the slowest waits. "scale+bound": both.
        staleness_exponent: exponent of "scale" (lambda).
        max_staleness: limit of "bound", 4 by default. With 0, and `aggregate` = number of workers, training is
            synchronous.
        aggregate: soft synchronisation: number of updates, from any workers, that a server waits for and applies
            together.
        codec: codec of the updates: "none", "fp16", "bf16", or "threshold:0.01" with the share of elements to send; the
            rest stays in a residual. Weights are not encoded.

    Raises:
        ConfigError: if an option is unknown or has a wrong value.

    Example:
        >>> ParameterServer("colocated", staleness="scale", aggregate=2)
        ParameterServer(servers='colocated', staleness='scale', aggregate=2)
        >>> synchronous = ParameterServer(staleness="bound", max_staleness=0, aggregate=4)
        >>> synchronous.config(workers=4, elements=10, dtype="float32").share
        0.25

    Source: Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD); Zhang et al. 2015,
    "Staleness-aware async-SGD for distributed deep learning", for scaling (exponent 1) and aggregation; Ho et al. 2013,
    "More effective distributed ML via a stale synchronous parallel parameter server", for the bound.
    """

    name = "parameter_server"
    own_spelling = frozenset({"servers"})
    placement = "weights"
    runs = "host"
    asynchronous = True
    survives = True
    split_exchange = staticmethod(open_split_servers)

    def __init__(
        self,
        servers: int | str = 1,
        staleness: Staleness = "none",
        staleness_exponent: float = 1.0,
        max_staleness: int | None = None,
        aggregate: int = 1,
        codec: str = "none",
    ):
        self.servers = int(servers) if isinstance(servers, str) and servers.isdecimal() else servers
        colocated = _COLOCATED.fullmatch(servers) if isinstance(servers, str) else None
        if not colocated and (type(self.servers) is not int or self.servers < 1):
            raise ConfigError(
                f"ParameterServer: servers: expected a positive number, 'colocated' or 'colocated:2', got {servers!r}."
            )
        #: Number of ranks that only serve.
        self.dedicated = 0 if colocated else int(self.servers)
        self._colocated = int(colocated[1] or 0) if colocated else 0
        one_of("ParameterServer", "staleness", staleness, ("none", "scale", "bound", "scale+bound"))
        exponent = staleness_exponent
        if isinstance(exponent, bool) or not isinstance(exponent, int | float) or not 0 < exponent <= 10:
            raise ConfigError(
                f"ParameterServer: staleness_exponent: expected a number above 0 and at most 10, got {exponent!r}."
            )
        for option, value, least in (("max_staleness", max_staleness, 0), ("aggregate", aggregate, 1)):
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"ParameterServer: {option}: expected {least} or more, got {value!r}.")
        if max_staleness is not None and "bound" not in staleness:
            raise ConfigError(
                f"ParameterServer: max_staleness={max_staleness} is for staleness='bound' or 'scale+bound', got "
                f"{staleness!r}."
            )
        self.staleness, self.staleness_exponent = staleness, float(exponent)
        self.aggregate, self.codec = aggregate, codec
        self.max_staleness = _MAX_STALENESS if max_staleness is None and "bound" in staleness else max_staleness
        make_codec(codec)  # checks it

    def server_ranks(self, comm: Comm) -> list[int]:
        """Return the numbers in mailboxes of the ranks that serve; see `Comm.server_numbers`.

        Args:
            comm: the workers, or those that hold the same parts of split layers.

        Raises:
            ConfigError: on all ranks, if the job has other servers, or too few workers.
        """
        if comm.parent is not None:
            everywhere = self.server_ranks(comm.parent)
            # If all workers serve, each serves the parts that it holds.
            return list(comm.world_ranks) if everywhere == list(comm.parent.world_ranks) else everywhere
        if isinstance(comm, GraphComm) and comm.size > 1:
            comm.channel("the data of this strategy")  # raises: Horovod's own launcher starts no MPI
        if comm.servers != self.dedicated and comm.size + comm.servers > 1:
            found = f"{comm.servers} of the ranks only serve" if comm.servers else "all ranks were made workers"
            raise ConfigError.on_all_ranks(
                f"{self!r}: {found}. The servers must be known before data is divided: call hvdx.init(strategy) "
                f"with this strategy first, or set HVDX_STRATEGY={self.spelling}; or let workers serve: "
                "servers='colocated'."
            )
        # Of those that are left after deaths, all may serve, and all updates may be aggregated.
        if comm.size > 1 and not comm.recoveries and max(self._colocated, self.aggregate) > comm.size:
            option = "servers" if self._colocated > comm.size else "aggregate"
            raise ConfigError.on_all_ranks(
                f"ParameterServer: {option}: expected at most {comm.size}, the number of workers, got "
                f"{getattr(self, option)!r}."
            )
        return list(comm.server_numbers or comm.world_ranks[: self._colocated or comm.size])

    def check(self, comm: Comm) -> None:
        self.server_ranks(comm)

    def serve(self, comm: Comm) -> None:
        # A preemption signal reaches all ranks; it must not end a server before its workers have ended.
        PreemptionListener.ignore()
        serve(comm.mailbox(SERVER_BOX), RequestHandler(comm.workers, threads=kernel_threads(comm.local_size)))

    def step_client(self, comm: Comm, steps: int, begun: int = 0) -> StepClient:
        """Return the client of the first server, which hands out the steps."""
        return StepClient(comm, self.server_ranks(comm)[0], steps, begun)

    @property
    def spelling(self) -> str:
        """Value of `HVDX_STRATEGY` for this strategy."""
        options = [f"{k}={getattr(self, k)}" for k, v in self._defaults().items() if getattr(self, k) != v]
        return f"{self.name}:{','.join(options or [f'servers={self.servers}'])}"

    def predict(self, situation: Situation) -> Prediction | None:
        """Predict a worker's mean step; None without a worker beside the servers, or with another package's codec."""
        workers = situation.workers - self.dedicated
        if workers < 1:
            return None
        if situation.workers == 1:
            return situation.prediction({}, 0.0)
        servers = self.dedicated or min(self._colocated or workers, workers)
        return predict_step(situation, workers, servers, bool(self.dedicated), self.codec)

    def config(
        self, workers: int, elements: int, dtype: str, group: int = 1, ranks: Sequence[int] = ()
    ) -> SessionConfig:
        """Return the configuration of a session for one server.

        Args:
            workers: number of workers.
            elements: number of elements of the server's part.
            dtype: dtype of the weights.
            group: number of ranks that take each step of the workers together; see `hvdx.comm.mesh`.
            ranks: ranks of the workers; by default the lowest ranks.
        """
        aggregate = -(-self.aggregate // group)
        exponent, share = 0.0, 1 / workers
        if "scale" in self.staleness:
            exponent = self.staleness_exponent
            # In this form the share is exactly 1 / aggregate for an exponent of 1.
            share = workers ** (exponent - 1) / min(aggregate, workers) ** exponent
        return SessionConfig(
            workers, elements, dtype, self.codec, aggregate, share, exponent, self.max_staleness, tuple(ranks)
        )

    def open(self, comm: Comm, specs: Sequence[TensorSpec], name: str = "") -> ServerExchange:
        """Open the exchange, whose `begin` must be called next. Collective."""
        agree_on_strategy(self, comm)
        agree_on_tensors(specs, comm)
        return ServerExchange(self, comm, specs)

    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """Distribute the saved residuals over the ranks, so that their sum stays the same."""
        if not saved or not joined_residual(saved[0])[0]:
            return {}
        mine = [joined_residual(saved[other])[1] for other in range(rank, len(saved), size)]
        nothing = np.zeros(joined_residual(saved[0])[1].size)
        return {"residual": np.sum([nothing, *mine], axis=0).astype(np.float32)}

    def _defaults(self) -> dict[str, object]:
        # With "bound", the default of `max_staleness` is 4.
        return super()._defaults() | ({"max_staleness": _MAX_STALENESS} if "bound" in self.staleness else {})
