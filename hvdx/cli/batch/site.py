"""The user's site file: settings that all batch jobs on a cluster share, such as account and modules."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdx.cli.batch.template import template
from hvdx.errors import ConfigError

#: Environment variable with the path of another site file.
VARIABLE = "HVDX_SITE"

# Type of each key's value; `list` stands for lines, and a single line may be a string.
_GENERAL: dict[str, type] = {
    "account": str,
    "env_setup": list,
    "mpi": str,
    "cpus_per_task": int,
    "signal": int,
    "max_restarts": int,
}
_BATCH: dict[str, type] = {**_GENERAL, "tasks_per_node": int, "directives": list}
_BY_HOSTS: dict[str, type] = {"env_setup": list, "mpi": str, "hosts": str}

#: Keys that the table of each system may have.
TABLES: dict[str, dict[str, type]] = {
    "slurm": {**_BATCH, "partition": str, "launcher": str, "mpi_plugin": str},
    "pbs": {**_BATCH, "queue": str},
    "lsf": {**_BATCH, "queue": str, "launcher": str},
    "mpirun": _BY_HOSTS,
    "horovodrun": _BY_HOSTS,
}
_IN_WORDS = {str: 'a text, such as "name"', int: "a whole number", list: 'lines, such as ["first", "second"]'}


def location(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the site file, which need not exist.

    Args:
        environ: variables with HVDX_SITE and XDG_CONFIG_HOME; by default those of this process.

    Example:
        >>> location({"XDG_CONFIG_HOME": "/home/me/config"})
        PosixPath('/home/me/config/hvdx/site.toml')
    """
    environ = os.environ if environ is None else environ
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE]).expanduser()
    folder = environ.get("XDG_CONFIG_HOME")
    # The XDG specification says to ignore a relative path. Without a home folder, os.path leaves "~", and Path fails.
    base = Path(folder) if folder and Path(folder).is_absolute() else Path(os.path.expanduser("~/.config"))
    return base / "hvdx" / "site.toml"


def settings(system: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the settings of the site file for one system; none if there is no file.

    Args:
        system: one of `TABLES`.
        environ: as in `location`.

    Returns:
        Values by key; lines are always lists.

    Raises:
        ConfigError: if the file cannot be read, a key is unknown, or a value has the wrong type.

    Example:
        >>> settings("slurm", {"XDG_CONFIG_HOME": "/nowhere"})
        {}
    """
    environ = os.environ if environ is None else environ
    path = location(environ)
    if not path.exists() and not environ.get(VARIABLE):
        return {}
    tables = _read(path)
    general = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    found = {key: _checked(path, "", key, value, _GENERAL) for key, value in general.items()}
    # Check all tables, so that a mistake shows at once and not only when its table is used.
    for table, content in tables.items():
        if isinstance(content, dict):
            if table not in TABLES:
                raise ConfigError(_unknown(path, f"[{table}]", list(TABLES), table))
            checked = {key: _checked(path, f"[{table}] ", key, value, TABLES[table]) for key, value in content.items()}
            if table == system:
                found |= checked
    return {key: value for key, value in found.items() if key in TABLES[system]}


def example() -> str:
    """Return a site file that shows every key in comments."""
    return template("site.toml")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"site file: expected to read {path}, got: {error.strerror}. "
            f"Do: hvdx job site > {path}, or unset {VARIABLE}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"site file {path}: expected TOML, got: {error}. Do: compare it with the example of hvdx job site."
        ) from None


def _checked(path: Path, where: str, key: str, value: object, known: Mapping[str, type]) -> Any:
    """Return the value if its key is known and its type is right; turn a single line into a list."""
    if key not in known:
        raise ConfigError(_unknown(path, f"{where}{key}", list(known), key))
    kind = known[key]
    if kind is list:
        value = [value] if isinstance(value, str) else value
        right = isinstance(value, list) and all(isinstance(line, str) for line in value)
    else:
        right = isinstance(value, kind) and not isinstance(value, bool)
    if not right:
        raise ConfigError(
            f"site file {path}: {where}{key}: expected {_IN_WORDS[kind]}, got {value!r}. "
            "Do: compare it with the example of hvdx job site."
        )
    return value


def _unknown(path: Path, where: str, known: list[str], word: str) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    tables = [table for table, keys in TABLES.items() if word in keys]
    if tables:
        remedy = f"{word} belongs under " + " or ".join(f"[{table}]" for table in tables)
    elif close:
        remedy = f"did you mean {close[0]}?"
    else:
        remedy = "compare it with the example of hvdx job site."
    return f"site file {path}: {where}: expected one of {', '.join(sorted(known))}, got {word!r}. Do: {remedy}"
