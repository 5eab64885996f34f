"""Asynchronous SGD with parameter servers."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from hvdx.comm import Comm, GraphComm
from hvdx.comm.launcher import kernel_threads
from hvdx.comm.preemption import PreemptionListener
from hvdx.costs.model import Situation
from hvdx.costs.types import Prediction
from hvdx.errors import ConfigError
from hvdx.strategies.base import (
    Strategy,
    TensorSpec,
    agree_on_strategy,
    agree_on_tensors,
    one_of,
)
from hvdx.strategies.serving.costs import predict
from hvdx.strategies.serving.exchange import ServerExchange
from hvdx.strategies.serving.messages import SERVER_BOX, SessionConfig
from hvdx.strategies.serving.request_handler import RequestHandler
from hvdx.strategies.serving.server import serve
from hvdx.strategies.serving.split_exchange import open_split_servers
from hvdx.strategies.serving.step_client import StepClient
from hvdx.strategies.serving.updates import joined_residual, make_codec

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
        return predict(situation, workers, servers, bool(self.dedicated), self.codec)

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
