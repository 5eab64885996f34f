"""Limits on what a small file may unpack to."""

from hvdx.errors import AverageError

# Weights compress to nine tenths; those that are still zero to a thousandth, and are small.
_MOST_FREE = 1 << 28
_MOST_RATIO = 100


def check_unpacked(where: str, nbytes: int, stored: int) -> None:
    """Refuse what would unpack to far more than weights do.

    Args:
        where: the file and the place in it, for the message.
        nbytes: bytes when it is unpacked.
        stored: bytes of the file.

    Raises:
        AverageError: it is too much.

    Example:
        >>> check_unpacked("a.keras", 300_000_000, 250_000_000)
    """
    most = _MOST_FREE + _MOST_RATIO * stored
    if nbytes > most:
        raise AverageError(
            f"{where}: expected at most {most} bytes unpacked, since the file has {stored}, got {nbytes}. Save it "
            "again, without compression."
        )
