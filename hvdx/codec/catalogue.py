"""Catalogue of codecs by name, including those of other packages."""

import difflib
import inspect
from importlib.metadata import entry_points
from typing import Any

from hvdx.codec.base import Codec, State
from hvdx.codec.floats import Bfloat16, Float16, Raw
from hvdx.codec.threshold import Threshold
from hvdx.errors import ConfigError

#: Group of entry points by which other packages register their codecs.
GROUP = "hvdx.codecs"

CODECS: dict[str, type[Codec[Any]]] = {cls.name: cls for cls in (Raw, Float16, Bfloat16, Threshold)}


def make(name: str, **options: object) -> Codec[State]:
    """Make a codec.

    Args:
        name: one of `names()`.
        **options: options of the codec.

    Raises:
        ConfigError: if the name, an option or a value is unknown. The message lists the valid ones.

    Example:
        >>> make("threshold", tau=2**-10)
        Threshold(tau=0.0009765625)
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        raise ConfigError(
            f"codec {name!r}: expected one of {', '.join(names())}{f'. Did you mean {near[0]!r}?' if near else '.'}"
        )
    cls = CODECS.get(name) or next(iter(entry_points(group=GROUP, name=name))).load()
    known = inspect.signature(cls).parameters
    for option in options:
        if option not in known:
            listed = ", ".join(str(p) for p in known.values()) or "none"
            raise ConfigError(f"codec {name}: unknown option {option!r}. Its options: {listed}.")
    codec: Codec[State] = cls(**options)
    return codec


def names() -> list[str]:
    """Return the names of all codecs.

    Example:
        >>> names()[:4]
        ['none', 'fp16', 'bf16', 'threshold']
    """
    return [*CODECS, *(point.name for point in entry_points(group=GROUP) if point.name not in CODECS)]
