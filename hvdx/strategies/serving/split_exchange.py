"""Exchange of a worker's whole weights and parts of split layers with the parameter servers."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from hvdx.strategies.host import StepInput
from hvdx.strategies.serving.client import Call, client_of
from hvdx.strategies.serving.exchange import ServerExchange
from hvdx.strategies.serving.messages import MessageType
from hvdx.strategies.serving.updates import is_finite
from hvdx.strategies.split import SplitHostExchange


class SplitServerExchange(SplitHostExchange):
    """Exchange made of a `ServerExchange` for whole weights and one for parts, whose messages travel together.

    A worker waits for the answers of both at once. If it flushed one after the other, it could wait in the first for a
    worker that waits, because of `max_staleness`, for it in the second.
    """

    def combine(self, given: StepInput) -> list[np.ndarray]:
        # The ranks of a group take a step of their split layers together, or skip it.
        mine = given.finite and all(is_finite(t) for t in given.tensors)
        given = replace(given, finite=not self._comm.mesh.group.any_true(not mine))
        calls: list[Call] = []
        for share in self._shares:
            calls += share.exchange.push(given.part(share.where)) if _served(share) else []
        begin = time.perf_counter()
        answers = client_of(self._comm).call(calls, MessageType.WEIGHTS)
        # The time is counted once.
        seconds = [time.perf_counter() - begin, 0.0]
        return self._all(
            share.exchange.pull(answers, seconds.pop(0))
            if _served(share)
            else share.exchange.combine(given.part(share.where))
            for share in self._shares
        )

    def flush(self) -> list[Any] | None:
        """Return the final weights, or None if no session is open; None in the place of parts of this rank alone."""
        if not self.is_open:
            return None
        served = [share.exchange for share in self._shares if _served(share)]
        begin = time.perf_counter()
        answers = client_of(self._comm).call([c for exchange in served for c in exchange.finish()], MessageType.FINAL)
        seconds = [time.perf_counter() - begin, 0.0]
        result = self._all(
            share.exchange.final(answers, seconds.pop(0)) if _served(share) else None for share in self._shares
        )
        self.close()
        return result


def _served(share: Any) -> bool:
    """Return whether servers hold the weights of an exchange."""
    return isinstance(share.exchange, ServerExchange)
