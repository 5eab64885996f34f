"""Everything hvdx raises on purpose.

    HvdxError
    ├── ConfigError          an argument, option or strategy that hvdx does not know (also a ValueError)
    ├── LaunchError          the processes were started in a way that cannot work
    ├── HorovodError         Horovod is missing, or was built for something else (also an ImportError)
    ├── NotDistributedError  a training step went past hvdx, so nothing would be combined
    ├── ReplicaError         the ranks hold, or were given, different things; raised on every rank alike
    ├── ExchangeError        ranks did not come to an exchange within the time limit, or sent too much for it
    ├── WireError            a message from a rank is not what it should be; nothing of it was applied
    ├── UpdateError          an update holds what cannot be sent, such as NaN; nothing was changed (also a ValueError)
    ├── CheckpointError      a checkpoint is damaged; nothing of it was taken
    └── AverageError         saved networks that cannot be averaged, or not written; nothing was (also a ValueError)

Each message says what was expected, what was found, and what to do.
"""


class HvdxError(Exception):
    """Base of everything hvdx raises on purpose."""

    #: True when every rank raises the same error at the same point, so that one rank may speak for all.
    collective = False


class ConfigError(HvdxError, ValueError):
    """An argument, option or strategy that hvdx does not know."""


class LaunchError(HvdxError, RuntimeError):
    """The processes were started in a way that cannot work."""


class HorovodError(HvdxError, ImportError):
    """Horovod is missing, or was built for another TensorFlow or MPI."""


class NotDistributedError(HvdxError, RuntimeError):
    """A training step went past hvdx: it would have run without combining anything."""


class ReplicaError(HvdxError, RuntimeError):
    """The ranks hold, or were given, different things. Raised on every rank alike."""

    collective = True


class ExchangeError(HvdxError, RuntimeError):
    """Ranks did not come to an exchange within the time limit, or sent more than one exchange can carry."""


class CheckpointError(HvdxError, RuntimeError):
    """A checkpoint is cut off, altered or incomplete. Nothing of it was taken."""


class WireError(HvdxError, RuntimeError):
    """A message from a rank is not what it should be. Nothing of it, or of those beside it, was applied.

    Attributes:
        rank: the rank it came from, or None where that is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class UpdateError(HvdxError, ValueError):
    """An update holds what cannot be sent: NaN, infinity, or too many tau. The encoder's state is as it was.

    Attributes:
        variable: which of the update's arrays.
        element: which of its elements, counted through the array's flattened form.
    """

    def __init__(self, message: str, variable: int, element: int) -> None:
        super().__init__(message)
        self.variable, self.element = variable, element


class AverageError(HvdxError, ValueError):
    """Saved networks that cannot be averaged: damaged, of different architectures, or nowhere to write the result."""
