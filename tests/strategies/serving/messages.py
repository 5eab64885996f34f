"""Messages to a handler, for tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx.comm import Message
from hvdx.comm.interfaces import HEADER_WORDS
from hvdx.strategies.serving.messages import MessageType, SessionConfig


def message(sender: int, header: Sequence[int], body: Any = None) -> Message:
    """Return a message as a mailbox delivers it: the header is padded, and the body is a copy."""
    data = None if body is None else np.frombuffer(np.ascontiguousarray(body).tobytes(), np.uint8).copy()
    return Message(sender, (*map(int, header), *[0] * (HEADER_WORDS - len(header))), data)


def opening(session: int, config: SessionConfig, weights: np.ndarray) -> list[tuple[list[int], np.ndarray]]:
    """Return the header and body of the messages from worker 0 that open a session."""
    data = np.frombuffer(config.to_json(), np.uint8)
    return [([MessageType.OPEN, session], data), ([MessageType.LOAD, session], weights)]
