"""Everything hvdx raises on purpose.

    HvdxError
    ├── ConfigError          an argument, option or strategy that hvdx does not know (also a ValueError)
    ├── LaunchError          the processes were started in a way that cannot work
    ├── HorovodError         Horovod is missing, or was built for something else (also an ImportError)
    ├── NotDistributedError  a training step went past hvdx, so nothing would be combined
    └── ReplicaError         the ranks hold, or were given, different things; raised on every rank alike

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
