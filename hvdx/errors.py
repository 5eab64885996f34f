"""Exceptions that hvdx raises on purpose.

    HvdxError
    ├── ConfigError          an argument, option or strategy is invalid (also a ValueError)
    ├── LaunchError          the processes were started in a way that cannot work
    ├── HorovodError         Horovod is missing, or was built for something else (also an ImportError)
    ├── NotDistributedError  a training step bypassed hvdx, so nothing would be combined
    ├── ReplicaError         the ranks hold, or were given, different values; raised on every rank
    ├── ExchangeError        ranks did not join an exchange within the time limit, or sent too much for it
    ├── WireError            a message from a rank is malformed; nothing of it was applied
    ├── UpdateError          an update holds NaN or values that cannot be sent; state unchanged (also a ValueError)
    ├── CheckpointError      a checkpoint is damaged; nothing of it was loaded
    └── AverageError         saved networks cannot be averaged, or the result cannot be written (also a ValueError)

Each error message states the expected value, the value found, and the remedy.
"""

from typing import Self


class HvdxError(Exception):
    """Base class of the exceptions that hvdx raises on purpose."""

    #: True when every rank raises the same error at the same point. Rank 0 then prints it for all ranks.
    collective = False
    #: Makes AutoGraph leave the message of an error in a `tf.function` as it is, without the lines of its own code.
    ag_pass_through = True

    @classmethod
    def on_all_ranks(cls, message: str) -> Self:
        """Make an error that every rank raises at the same point.

        Example:
            >>> ConfigError.on_all_ranks("split=3: expected a divisor of 4, got 3.").collective
            True
        """
        return cls(message).as_collective()

    def as_collective(self) -> Self:
        """Mark this error as one that every rank raises at the same point, and return it."""
        self.collective = True
        return self


class ConfigError(HvdxError, ValueError):
    """An argument, option or strategy is invalid."""


class LaunchError(HvdxError, RuntimeError):
    """The processes were started in a way that cannot work."""


class HorovodError(HvdxError, ImportError):
    """Horovod is missing, or was built for another TensorFlow or MPI."""


class NotDistributedError(HvdxError, RuntimeError):
    """A training step bypassed hvdx: it would have run without combining anything."""


class ReplicaError(HvdxError, RuntimeError):
    """The ranks hold, or were given, different values. Raised on every rank."""

    collective = True


class ExchangeError(HvdxError, RuntimeError):
    """Ranks did not join an exchange within the time limit, or sent more than one exchange can carry."""


class CheckpointError(HvdxError, RuntimeError):
    """A checkpoint is truncated, altered or incomplete. Nothing of it was loaded."""


class WireError(HvdxError, RuntimeError):
    """A message from a rank is malformed. Neither it nor the messages received with it were applied.

    Args:
        problem: fault of the message, without its sender.
        rank: rank of the sender; None if unknown.
        what: name of the message.

    Example:
        >>> error = WireError("its checksum is wrong.", 0)
        >>> str(error), str(error.of(3, "update"))
        ('message of rank 0: its checksum is wrong.', 'update of rank 3: its checksum is wrong.')
    """

    def __init__(self, problem: str, rank: int | None = None, what: str = "message") -> None:
        super().__init__(problem, rank, what)
        self.problem, self.rank, self.what = problem, rank, what

    def __str__(self) -> str:
        return self.problem if self.rank is None else f"{self.what} of rank {self.rank}: {self.problem}"

    def of(self, rank: int, what: str | None = None) -> "WireError":
        """Return the same fault in a message of a given rank, for callers that number the ranks differently."""
        return WireError(self.problem, rank, what or self.what)


class UpdateError(HvdxError, ValueError):
    """An update holds a value that cannot be sent: NaN, infinity, or too large a multiple of tau.

    The encoder's state is unchanged.

    Args:
        problem: what is wrong with the element, such as "is nan.".
        variable: index of the array in the update.
        element: index of the element in the flattened array.

    Example:
        >>> error = UpdateError("is nan.", 2, 7)
        >>> str(error), error.within("kernel")
        ('update[2]: element 7 is nan.', 'kernel: element 7 is nan.')
    """

    def __init__(self, problem: str, variable: int, element: int) -> None:
        super().__init__(problem, variable, element)
        self.problem, self.variable, self.element = problem, variable, element

    def __str__(self) -> str:
        return self.within(f"update[{self.variable}]")

    def within(self, name: str) -> str:
        """Return the text of this error, with the name of the variable."""
        return f"{name}: element {self.element} {self.problem}"


class AverageError(HvdxError, ValueError):
    """Saved networks cannot be averaged: damaged files, different architectures, or no place to write the result."""
