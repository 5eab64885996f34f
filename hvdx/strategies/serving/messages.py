"""The messages between workers and servers; docs/parameter-server.md draws who answers what with what.

Each has a header of whole numbers, its type first and its session second, and some have a body. A session is one list
of variables of one optimiser; its number is alike on all ranks.
"""

import itertools
from dataclasses import dataclass
from enum import IntEnum

#: The boxes of a rank: where its server finds messages, and where its worker does.
SERVER_BOX, WORKER_BOX = 0, 1


class MessageType(IntEnum):
    """What a message is; in brackets the numbers that follow kind and session.

    To a server:
        OPEN: a session begins, or begins anew, under the pickled `SessionConfig` in the body. From worker 0. No answer.
        LOAD: the body is the server's part of the weights. From worker 0. Answer: READY.
        PUSH: [version, fine] the body is this worker's update, computed from the weights of that version; without a
            body where `fine` is 0, since it held NaN. Answer: WEIGHTS, as soon as the worker may go on.
        FLUSH: this worker will push nothing until it is answered. Answer, when all workers say so: FINAL.
        CLOSE: the session is over. From worker 0. Answer: none.
        STEP: [round, tickets, stop] may I take another step of this round, of which there are so many? Or, to stop:
            may nobody take another? Answer: GRANT.
        DISCONNECT: this worker leaves for good. Answer: none.

    To a worker:
        READY: the session is open. A server tells worker 0, which tells the other workers.
        WEIGHTS: [version, staleness, fine, microseconds held back] the body is the server's part.
        FINAL: [version, updates, applied, refused, microseconds of work, microseconds open] the same, alike for all.
        GRANT: [granted, tickets given out, stopped]
        WAIT_NOTICE: this worker is still waiting; the body tells for which ranks (JSON). At any time.
        ERROR: the body says in words why the last message was not accepted; nothing of it was applied.
    """

    OPEN = 1
    LOAD = 2
    PUSH = 3
    FLUSH = 4
    CLOSE = 5
    STEP = 6
    DISCONNECT = 7
    READY = 11
    WEIGHTS = 12
    FINAL = 13
    GRANT = 14
    WAIT_NOTICE = 15
    ERROR = 16


@dataclass(frozen=True)
class SessionConfig:
    """What a server has to know of a session.

    Attributes:
        workers: how many there are; their ranks are the first.
        elements: of the server's part.
        dtype: of the weights: "float32" or "float64".
        codec: of the updates, as in `ParameterServer`.
        aggregate: updates that are applied together.
        share: what an update counts.
        staleness_exponent: an update of staleness s counts share / s^power; 0 counts all alike.
        max_staleness: steps that a worker may be ahead of the slowest; None sets no bound.
    """

    workers: int
    elements: int
    dtype: str = "float32"
    codec: str = "none"
    aggregate: int = 1
    share: float = 1.0
    staleness_exponent: float = 0.0
    max_staleness: int | None = None


def cut(elements: int, parts: int) -> list[tuple[int, int]]:
    """Where each part of a flat array begins and ends: parts of one size, but for one element.

    Args:
        elements: of the array; large variables are cut, small ones lie together.
        parts: how many; fewer where there are fewer elements, at least one.

    Example:
        >>> cut(10, 3)
        [(0, 3), (3, 6), (6, 10)]
    """
    parts = max(1, min(parts, elements))
    bounds = [elements * k // parts for k in range(parts + 1)]
    return list(itertools.pairwise(bounds))
