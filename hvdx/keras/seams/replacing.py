"""Methods of one object in place of those of its class."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

Method = Callable[..., Any]


def override(thing: object, name: str, function: Method) -> None:
    """Give one object a method of its own, which calls `function(thing, original, *arguments)`."""
    kind = type(thing)

    def method(self: object, *args: object, **named: object) -> object:
        return function(self, functools.partial(getattr(kind, name), self), *args, **named)

    setattr(thing, name, types.MethodType(method, thing))


def restore(thing: object, names: Sequence[str]) -> None:
    for name in names:
        if name in vars(thing):
            delattr(thing, name)
