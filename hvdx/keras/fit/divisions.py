"""The division of the rows of each step among the ranks, which changes in the course of a training.

The rows of a step add up to the same number whatever the division, so the step is that of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hvdx.keras.backend import tf

#: Number of an order of the samples, and number of a step in it.
Position = tuple[int, int]

_FIRST: Position = (-1, -1)


def even_part(
    length: int | tf.Tensor, rank: int | tf.Tensor, size: int | tf.Tensor
) -> tuple[int | tf.Tensor, int | tf.Tensor]:
    """Return the first of a rank's rows, and the row after its last, if all ranks have as many, or some one more.

    Example:
        >>> [even_part(32, rank, 3) for rank in range(3)]
        [(0, 10), (10, 21), (21, 32)]
    """
    return rank * length // size, (rank + 1) * length // size


def even(total: int, size: int) -> tuple[int, ...]:
    """Return the rows of each rank in `even_part`.

    Example:
        >>> even(32, 3)
        (10, 11, 11)
    """
    parts = (even_part(total, rank, size) for rank in range(size))
    return tuple(int(end - begin) for begin, end in parts)


class Division:
    """Rows of each rank in a step, from some positions on; the pipelines that draw the samples ask it in each step.

    Positions are pairs of the number of an order, and of a step in it. A change is agreed on by all ranks: each calls
    `hold`, then `change` with the highest of the positions that these calls have returned, or `release`.

    Args:
        rows: rows of each rank in a full step.
        rank: rank whose samples the pipelines of this process draw.
        changes: changes that are known: positions, and rows from there on; with some, no other is made.
        most: most rows that this rank may have; None for all.

    Attributes:
        total: rows of a full step on all ranks.
        rank: the rank of this process when the rows were last dealt; a rank that has died since has 0 rows.
        most: most rows that this rank may have.
        planned: whether the changes are known.

    Example:
        >>> division = Division([8, 8], 1)
        >>> division.rows_at((0, 3)), division.hold()
        ((8, 8), (0, 4))
        >>> division.change((0, 4), [12, 4])
        >>> division.rows_at((0, 4)), division.bounds(0, 4)
        ((12, 4), (12, 16))
    """

    def __init__(
        self,
        rows: Sequence[int],
        rank: int,
        changes: Sequence[tuple[Position, Sequence[int]]] = (),
        most: int | None = None,
    ):
        self.total, self.rank, self.planned = sum(rows), rank, bool(changes)
        self.most = self.total if most is None else most
        self._even = tuple(rows)
        self._changes: list[tuple[Position, tuple[int, ...]]] = [(_FIRST, self._even)]
        self._changes += [(tuple(at), tuple(those)) for at, those in changes]  # type: ignore[misc]
        self._drawn = _FIRST
        self._held: Position | None = None
        self._resumed = False
        self._free = threading.Condition()

    @property
    def latest(self) -> tuple[int, ...]:
        """Rows of each rank after the last change."""
        return self._changes[-1][1]

    @property
    def is_even(self) -> bool:
        """True if all ranks have as many rows in each step that is left."""
        return all(len(set(rows)) == 1 for _, rows in self._changes)

    @property
    def history(self) -> list[tuple[Position, tuple[int, ...]]]:
        """Positions of this fit, the first one before all others, and the rows from there on."""
        return list(self._changes)

    def resume(self, history: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Continue with the `history` of a fit that a checkpoint has ended, if it was one of as many ranks and rows."""
        if all(len(rows) == len(self._even) and sum(rows) == self.total and min(rows) for _, rows in history):
            self._changes = [((at[0], at[1]), tuple(rows)) for at, rows in history]
            self._resumed = True

    def begin(self) -> None:
        """Begin a fit, with the rows of the last change unless it resumes one; all ranks begin together."""
        with self._free:
            self._changes = self._changes if self._resumed else [(_FIRST, self.latest)]
            self._drawn, self._resumed = _FIRST, False

    def deal(self, rank: int, size: int) -> None:
        """Deal the rows of the next pass evenly, if ranks have died or joined since the last time; all ranks do so.

        Nothing changes if the changes are known.
        """
        with self._free:
            if self.planned or ((rank, size) == (self.rank, len(self._even)) and all(self.latest)):
                return
            self.rank, self._even = rank, even(self.total, size)
            self._changes, self._drawn = [(_FIRST, self._even)], _FIRST

    def rows_at(self, position: Position) -> tuple[int, ...]:
        """Return the rows of each rank in a step; wait while a change is being agreed on that may concern it."""
        with self._free:
            self._free.wait_for(lambda: self._held is None or position < self._held)
            self._drawn = max(self._drawn, position)
            return next(rows for at, rows in reversed(self._changes) if at <= position)

    def bounds(self, order: int, step: int) -> tuple[int, int]:
        """Return the first of this rank's rows in a full step, and the row after its last."""
        rows = self.rows_at((order, step))
        return sum(rows[: self.rank]), sum(rows[: self.rank + 1])

    def hold(self) -> Position:
        """Stop the pipeline at a position, and return it: earlier steps may be drawn, later ones wait."""
        with self._free:
            self._held = max((self._drawn[0], self._drawn[1] + 1), self._changes[-1][0])
            return self._held

    def change(self, position: Position, rows: Sequence[int]) -> None:
        """Change the rows from a position on, and let the pipeline go on."""
        with self._free:
            self._changes.append((position, tuple(rows)))
        self.release()

    def release(self) -> None:
        """Let the pipeline go on."""
        with self._free:
            self._held = None
            self._free.notify_all()
