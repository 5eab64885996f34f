"""Messages between workers and servers; docs/parameter-server.md lists each request with its answer.

A message has a header of whole numbers, which begins with the type and the session. Some messages have a body. A
session is the training on one shard of the weights at one server, from the first step after a flush to the next flush.
Its number is the same on all ranks. A round is an epoch whose steps the first server hands out.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum

from hvdx.errors import WireError

#: Numbers of a rank's two mailboxes: one receives messages to its server, the other messages to its worker.
SERVER_BOX, WORKER_BOX = 0, 1


class MessageType(IntEnum):
    """Type of a message. Numbers in brackets follow the type and the session in the header.

    To a server:
        OPEN: begin a session, or restart it, with the `SessionConfig` in the body (JSON). From the first worker of
            the session. No answer.
        LOAD: the body is the shard of the weights. From the first worker. Answer: READY.
        PUSH: [version, finite] the body is this worker's update, computed from the weights of that version. There is no
            body if `finite` is 0, because the update held NaN. Answer: WEIGHTS, when the worker may continue.
        FLUSH: this worker pushes nothing until the answer. Answer: FINAL, when all workers have flushed.
        CLOSE: end the session. From the first worker. No answer.
        STEP: [round, steps, stop, known] request for another step of a round that has this number of steps; or, with
            `stop`, for the end of the round. `known` steps were handed out when this worker asked last. Answer: GRANT.
        DISCONNECT: this worker sends no more messages. No answer.

    To a worker:
        READY: the session is open. A server tells the first worker, which tells the other workers of the session.
        WEIGHTS: [version, staleness, accepted, microseconds since the PUSH] the body is the shard.
        FINAL: [version, updates, applied, refused, microseconds of work, microseconds since OPEN] the body is the
            shard, the same for all workers.
        GRANT: [granted, steps handed out, stopped] granted is 0 if the worker takes no more steps in this round.
        WAIT_NOTICE: this worker still has to wait; the body names the ranks that it waits for (JSON). It may arrive
            before any answer.
        ERROR: [damaged] the body says why the last message was refused; nothing of that message was applied. `damaged`
            is 1 if the update could not be decoded.
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
    """Configuration of a session, which its first worker sends to the servers.

    Attributes:
        workers: number of workers.
        elements: number of elements of the shard.
        dtype: dtype of the weights: "float32" or "float64".
        codec: codec of the updates, as in `ParameterServer`.
        aggregate: number of updates that are applied together.
        share: factor of an update of staleness 1.
        staleness_exponent: an update of staleness s counts share / s^staleness_exponent; with 0 all updates count the
            same.
        max_staleness: number of steps that a worker may be ahead of the slowest; None sets no limit.
        ranks: ranks of the workers; by default the lowest ranks.
    """

    workers: int
    elements: int
    dtype: str = "float32"
    codec: str = "none"
    aggregate: int = 1
    share: float = 1.0
    staleness_exponent: float = 0.0
    max_staleness: int | None = None
    ranks: Sequence[int] = ()

    @property
    def members(self) -> Sequence[int]:
        """Ranks of the workers."""
        return self.ranks or range(self.workers)

    def to_json(self) -> bytes:
        """Encode the configuration as the body of OPEN."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, body: bytes) -> "SessionConfig":
        """Decode the body of OPEN.

        Raises:
            WireError: if it is not an object with exactly the fields of a configuration, of their types.

        Example:
            >>> SessionConfig.from_json(SessionConfig(2, 10, ranks=(1, 3)).to_json()).members
            (1, 3)
        """
        try:
            values = json.loads(body)
            valid = values.keys() == {field.name for field in fields(cls)} and all(
                _fits(*item) for item in values.items()
            )
        except (ValueError, AttributeError, RecursionError):
            valid = False
        if not valid:
            raise WireError(
                f"OPEN: expected the configuration of a session, got {body[:60]!r}. All ranks need the same hvdx."
            )
        return cls(**values | {"ranks": tuple(values["ranks"])})


def _fits(name: str, value: object) -> bool:
    """Return whether a decoded value has the type of a field of `SessionConfig`."""
    if name == "ranks":
        return isinstance(value, list) and all(type(rank) is int for rank in value)
    if name == "max_staleness":
        return value is None or type(value) is int
    expected = {"dtype": str, "codec": str, "share": (int, float), "staleness_exponent": (int, float)}.get(name, int)
    return isinstance(value, expected) and not isinstance(value, bool)  # type: ignore[arg-type]


def cut(elements: int, shards: int) -> list[tuple[int, int]]:
    """Return the bounds of the shards of a flat array. Their sizes differ by at most one element.

    Args:
        elements: number of elements of the array.
        shards: number of shards; fewer if there are fewer elements, at least one.

    Example:
        >>> cut(10, 3)
        [(0, 3), (3, 6), (6, 10)]
    """
    shards = max(1, min(shards, elements))
    bounds = [elements * k // shards for k in range(shards + 1)]
    return list(itertools.pairwise(bounds))
