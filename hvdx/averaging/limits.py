"""Limit on the unpacked size of a file."""

from hvdx.errors import AverageError

# Weights compress to nine tenths of their size. Weights that are still zero compress to a thousandth, but are small.
_MOST_FREE = 1 << 28
_MOST_RATIO = 100


def check_unpacked(where: str, nbytes: int, stored: int) -> None:
    """Reject a file that would unpack to far more than weights do.

    Args:
        where: the file and the place in it, for the error message.
        nbytes: unpacked size, in bytes.
        stored: size of the file, in bytes.

    Raises:
        AverageError: if the unpacked size exceeds 256 MiB plus 100 times the size of the file.

    Example:
        >>> check_unpacked("a.keras", 300_000_000, 250_000_000)
    """
    most = _MOST_FREE + _MOST_RATIO * stored
    if nbytes > most:
        raise AverageError(
            f"{where}: expected at most {most} bytes unpacked, since the file has {stored}, got {nbytes}. Save it "
            "again, without compression."
        )
