"""Limits on the unpacked size of a file, on its description, and on names in archives."""

from hvdx.errors import AverageError

# Weights compress to nine tenths of their size. Weights that are still zero compress to a thousandth, but are small.
_MOST_FREE = 1 << 28
_MOST_RATIO = 100
# A tensor is described in some hundred bytes, and has more as a rule; a state with many numbers has few tensors.
_MOST_DESCRIPTION = 1 << 22


def check_unpacked(where: str, nbytes: int, stored: int) -> None:
    """Reject a file that would unpack to far more than weights do.

    Args:
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


def check_description(where: str, described: int, rest: int) -> None:
    """Reject a file whose description of its tensors is larger than the tensors: reading it takes long.

    Args:
        described: size of the description, in bytes.
        rest: size of the rest of the file, in bytes.

    Raises:
        AverageError: if it exceeds 4 MiB plus the rest of the file.

    Example:
        >>> check_description("a.pt: data.pkl", 5_000_000, 250_000_000)
    """
    most = _MOST_DESCRIPTION + rest
    if described > most:
        raise AverageError(
            f"{where}: expected at most {most} bytes, since the rest of the file has {rest}, got {described}. It holds "
            "more than weights: save the weights alone."
        )


def check_name(where: str, name: str) -> None:
    """Reject the name of an entry by which unpacking the archive would write outside of its folder.

    Raises:
        AverageError: if it is absolute, or has a part "..".

    Example:
        >>> check_name("a.keras", "assets/words.txt")
    """
    parts = name.replace("\\", "/").split("/")
    if ".." in parts or parts[0] == "" or parts[0].endswith(":"):
        raise AverageError(
            f"{where}: {name}: expected an entry within the archive, got one outside, which would overwrite a file "
            "when it is unpacked. Save the model again, and ask who made this file."
        )
