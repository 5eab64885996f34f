"""Lists of variables and layers in arguments."""

from collections.abc import Sequence
from types import UnionType
from typing import Any

from hvdx.errors import ConfigError


def listed(value: object, kinds: type | UnionType, expected: str, remedy: str) -> list[Any]:
    """Return one object, or several, as a list.

    Args:
        value: None, an object, or a collection of them.
        kinds: classes of the objects.
        expected: what was expected for which option, for the message.
        remedy: what to give.

    Raises:
        ConfigError: if it is anything else.

    Example:
        >>> [len(listed(given, int, "size: expected integers", "give 1")) for given in (None, 3, [3, 4])]
        [0, 1, 2]
    """
    found = [value] if isinstance(value, kinds) else [] if value is None else value
    if not isinstance(found, Sequence | set | frozenset) or not all(isinstance(item, kinds) for item in found):
        raise ConfigError(f"{expected}, got {value!r}. Do: {remedy}.")
    return list(found)
