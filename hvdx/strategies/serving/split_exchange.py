"""Exchange of a worker's whole weights and parts of split layers with the parameter servers."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hvdx.comm import Comm
from hvdx.comm.mesh import mesh_of
from hvdx.strategies.base import TensorSpec
from hvdx.strategies.host import HostExchange, StepInput
from hvdx.strategies.serving.client import Call, client_of
from hvdx.strategies.serving.exchange import ServerExchange
from hvdx.strategies.serving.messages import MessageType
from hvdx.strategies.serving.updates import is_finite
from hvdx.strategies.split import SplitHostExchange, SplitStep, Subset

if TYPE_CHECKING:
    from hvdx.codec.base import Array


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
        step_input = replace(step_input, finite=not mesh_of(self._comm).group.any_true(not mine))
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
