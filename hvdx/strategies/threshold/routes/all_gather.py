"""Route on which every rank receives the messages of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdx.comm import Channel
from hvdx.strategies.host import Outgoing
from hvdx.strategies.step import Arrived, Route
from hvdx.strategies.threshold.noise import GatheredSample
from hvdx.strategies.threshold.states import whole_residual

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hvdx.codec.base import Array, Decoder

# Integers of a header before the sample of gradients: status and two times.
_HEADER = 3


@dataclass(frozen=True, kw_only=True)
class Messages(Arrived):
    """Messages of all ranks.

    Attributes:
        codec: their codec.
        messages: uint8[bytes] of each rank that counts, in rank order.
    """

    codec: "Decoder"
    messages: Sequence[np.ndarray]

    def add_to(self, out: "Sequence[Array]", scale: float, clear: bool) -> None:
        (self.codec.decode_sum if clear else self.codec.decode)(self.messages, out, scale)

    def add_sum_to(self, out: Sequence[np.ndarray], scale: float) -> None:
        self.codec.add_sum(self.messages, out, scale)


class AllGatherRoute(Route):
    """Route of messages from each rank to all ranks.

    Args:
        channel: channel between the ranks.
        ranks_per_message: number of ranks whose updates each message adds up.
    """

    def __init__(self, channel: Channel, ranks_per_message: int = 1):
        self._channel, self._per_message = channel, ranks_per_message

    def send(self, outgoing: Outgoing) -> Messages:
        encoded = outgoing.encoded
        assert encoded is not None
        message = encoded.message
        header = [outgoing.status, *outgoing.times, *words_of(outgoing.sample)]
        received = self._channel.exchange(header, message)
        others, size = self._channel.size - 1, 8 * (len(header) + 1)
        more = np.ascontiguousarray(received.headers[:, _HEADER:])
        return Messages(
            statuses=received.headers[:, 0],
            times=received.headers[:, 1:_HEADER],
            waited=received.waited,
            seconds=received.seconds,
            sent=others * (message.size + size),
            received=sum(map(len, received.messages)) - message.size + others * size,
            sample=GatheredSample(more.view(np.float16), self._per_message) if more.size else None,
            codec=encoded.codec,
            messages=received.messages,
        )

    def restore(self, state: "Mapping[str, np.ndarray]") -> "Mapping[str, np.ndarray]":
        return whole_residual(state, self._channel.rank)


def words_of(sample: np.ndarray | None) -> list[int]:
    """Return a sample as float16, four in an integer."""
    if sample is None:
        return []
    words = np.zeros(-(-sample.size // 4) * 4, np.float16)
    # An element that float16 cannot hold becomes infinity, and the estimate leaves the sample out.
    with np.errstate(over="ignore"):
        words[: sample.size] = sample
    found: list[int] = words.view(np.int64).tolist()
    return found
