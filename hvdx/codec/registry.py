"""Codecs by name."""

import difflib
import inspect
from typing import Any

from hvdx.codec.base import Codec
from hvdx.codec.dense import Bfloat16, Float16, Raw
from hvdx.codec.threshold import Threshold
from hvdx.errors import ConfigError

CODECS: dict[str, type[Codec]] = {cls.name: cls for cls in (Raw, Float16, Bfloat16, Threshold)}


def make(name: str, **options: Any) -> Codec:
    """Make a codec.

    Args:
        name: one of CODECS.
        **options: the codec's.

    Raises:
        ConfigError: an unknown name, option or value; the message lists the right ones.

    Example:
        >>> make("threshold", tau=2**-10)
        Threshold(tau=0.0009765625)
    """
    if name not in CODECS:
        near = difflib.get_close_matches(name, CODECS, 1)
        raise ConfigError(
            f"codec {name!r}: expected one of {', '.join(CODECS)}{f'. Did you mean {near[0]!r}?' if near else '.'}"
        )
    known = inspect.signature(CODECS[name]).parameters
    for option in options:
        if option not in known:
            listed = ", ".join(str(p) for p in known.values()) or "none"
            raise ConfigError(f"codec {name}: unknown option {option!r}. Its options: {listed}.")
    return CODECS[name](**options)
