"""Letters to a desk, for tests."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx.comm import Letter
from hvdx.comm.base import HEAD_WORDS
from hvdx.strategies.serving.messages import Kind, Plan


def letter(sender: int, head: Sequence[int], body: Any = None) -> Letter:
    """A letter as it comes out of a postbox: the head filled up, the body as bytes of its own."""
    data = None if body is None else np.frombuffer(np.ascontiguousarray(body).tobytes(), np.uint8).copy()
    return Letter(sender, (*map(int, head), *[0] * (HEAD_WORDS - len(head))), data)


def opening(session: int, plan: Plan, weights: np.ndarray) -> list[tuple[list[int], np.ndarray]]:
    """Head and body of the letters from worker 0 that open a session."""
    data = np.frombuffer(pickle.dumps(plan), np.uint8)
    return [([Kind.OPEN, session], data), ([Kind.LOAD, session], weights)]
