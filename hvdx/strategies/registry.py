"""Strategies by name, also those of other packages; and joining the world with the strategy of a script.

A one-line spelling is a name, with or without options: `all_reduce:compression=fp16,op=sum`. The strategy says how many
ranks only serve, so workers and servers are separated before a script can read its rank.
"""

import ast
import difflib
import inspect
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hvdx import comm as world
from hvdx.comm import Comm
from hvdx.errors import ConfigError
from hvdx.strategies.all_reduce import AllReduce
from hvdx.strategies.auto import Auto
from hvdx.strategies.contract import Strategy
from hvdx.strategies.parameter_averaging import ParameterAveraging
from hvdx.strategies.parameter_server import ParameterServer
from hvdx.strategies.serving.client import client_of, close_all
from hvdx.strategies.threshold import Threshold

#: Group of the entry points by which other packages name their strategies.
GROUP = "hvdx.strategies"
#: Environment variable that chooses the strategy of a script that names none.
VARIABLE = "HVDX_STRATEGY"

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (AllReduce, Auto, ParameterAveraging, ParameterServer, Threshold)
}

# Options that were removed, and the reason; see docs/adr/0037-options-that-win-nowhere-are-removed.md.
_REMOVED = {
    ("threshold", "overlap"): "updates that are applied a step late cost four points of accuracy with momentum",
    ("threshold", "scope"): "a tau for each variable was no better than one tau for all",
    ("threshold", "tau_steps"): "a coarser grid of tau lost a tenth of a nat",
    ("threshold", "op"): "updates count as their mean, and a sum is the mean at N times the learning rate",
    ("parameter_server", "op"): "updates count as their mean, and a sum is the mean at N times the learning rate",
}

_default: Strategy | None = None


def names() -> list[str]:
    """Return the names of all strategies."""
    return sorted({*STRATEGIES, *_installed()})


def find(name: str) -> type[Strategy]:
    """Return the class of a strategy.

    Raises:
        ConfigError: if the name is unknown, or names an object of another package that is not a strategy.

    Example:
        >>> find("all_reduce").__name__
        'AllReduce'
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    point = _installed().get(name)
    if point is None:
        raise ConfigError(
            f"strategy {name!r}: expected one of {', '.join(names())}{_did_you_mean(name, names())}. "
            f'Write it as {VARIABLE}="name:option=value,option=value".'
        )
    found = point.load()
    if not isinstance(found, type) or not issubclass(found, Strategy):
        raise ConfigError(
            f"strategy {name!r}: expected a subclass of hvdx.strategies.Strategy at {point.value} (an entry point of "
            f"{GROUP}), got {found!r}. Fix or uninstall the package that defines it."
        )
    return found


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def options(name: str) -> dict[str, object]:
    """Return the options of a strategy with their defaults.

    Args:
        name: one of `names()`.

    Example:
        >>> options("all_reduce")["compression"]
        'none'
    """
    parameters = inspect.signature(find(name)).parameters.values()
    return {p.name: p.default for p in parameters}


def parse(text: str) -> Strategy:
    """Make a strategy from its one-line spelling.

    Args:
        text: `name` or `name:option=value,option=value`.

    Raises:
        ConfigError: if a name, option or value is unknown; the message lists those that are known.

    Example:
        >>> parse("all_reduce:compression=fp16")
        AllReduce(compression='fp16')
    """
    name, _, rest = text.strip().partition(":")
    name = name.strip()
    cls, known = find(name), options(name)
    chosen: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        option, equals, value = (part.strip() for part in item.partition("="))
        if (name, option) in _REMOVED:
            raise ConfigError(f"strategy {name}: option {option} was removed: {_REMOVED[name, option]}. Leave it out.")
        if option not in known or not equals:
            listed = ", ".join(f"{k}={v}" for k, v in known.items())
            raise ConfigError(
                f"strategy {name}: option {item!r}: expected option=value{_did_you_mean(option, list(known))}. "
                f"Options and defaults: {listed}."
            )
        parsed_by_strategy = option in cls.own_spelling
        chosen[option] = value if parsed_by_strategy else _value(value, known[option], f"strategy {name}: {option}")
    return cls(**chosen)


def set_default(strategy: Strategy | str | None) -> None:
    """Set the strategy that `resolve` returns for None.

    Args:
        strategy: a strategy or its one-line spelling; None restores the choice by `HVDX_STRATEGY`.

    Raises:
        ConfigError: see `resolve`.
    """
    global _default
    _default = None if strategy is None else resolve(strategy)


def resolve(strategy: Strategy | str | None) -> Strategy:
    """Return a strategy.

    Args:
        strategy: a strategy, its one-line spelling, or None. None means the strategy of `set_default`; if there is
            none, that of `HVDX_STRATEGY`; if that is not set, `AllReduce()`.

    Raises:
        ConfigError: if it is anything else, or the spelling is wrong.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy is None and _default is not None:
        return _default
    if strategy is None:
        return parse(os.environ.get(VARIABLE) or AllReduce.name)
    if isinstance(strategy, str):
        return parse(strategy)
    raise ConfigError(
        f"strategy: expected a strategy such as hvdx.AllReduce(), a name ({', '.join(names())}) or None, "
        f"got {strategy!r}."
    )


def join(strategy: Strategy | str | None = None) -> Comm:
    """Join the world at the first call, and return the same communicator at later calls.

    A rank that the strategy needs as a server serves here until all workers have disconnected, and then exits.

    Args:
        strategy: strategy that determines the number of ranks that only serve; for None see `resolve`.

    Returns:
        The communicator of the workers.

    Raises:
        ConfigError, LaunchError, HorovodError: see `resolve` and `hvdx.comm.start`.
        SystemExit: on a server, after all workers have disconnected.
    """
    joined = world.current()
    if joined is not None:
        return joined
    chosen = resolve(strategy)
    joined = world.start(chosen.dedicated)
    if joined.serves:
        chosen.serve(joined)
        sys.exit(0)
    if joined.servers:
        # Servers wait until every worker has disconnected. Even a worker that never trains needs a client for that.
        client_of(joined)
    return joined


def leave() -> None:
    """Disconnect from the servers, then leave the world."""
    close_all()
    set_default(None)
    world.stop()


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _value(text: str, default: object, where: str) -> object:
    """Convert a text to the type of the default that it replaces."""
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        value = text
    numeric = isinstance(default, int | float) and not isinstance(default, bool)
    if numeric and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{where}: expected a number such as {default}, got {text!r}.")
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false, got {text!r}.")
    if isinstance(default, int) and isinstance(value, float):
        raise ConfigError(f"{where}: expected a whole number, got {text!r}.")
    return value
