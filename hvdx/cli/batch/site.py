"""The user's site file: what is the same in all batch jobs of a cluster, such as the account and the modules."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdx.cli.batch.template import template
from hvdx.errors import ConfigError

#: The environment variable that names another site file.
VARIABLE = "HVDX_SITE"

# Keys and what they hold; `list` is lines, and one line may be written as a string.
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

#: system: the keys that its table may have.
TABLES: dict[str, dict[str, type]] = {
    "slurm": {**_BATCH, "partition": str, "launcher": str, "mpi_plugin": str},
    "pbs": {**_BATCH, "queue": str},
    "lsf": {**_BATCH, "queue": str, "launcher": str},
    "mpirun": _BY_HOSTS,
    "horovodrun": _BY_HOSTS,
}
_IN_WORDS = {str: 'a text, such as "name"', int: "a whole number", list: 'lines, such as ["first", "second"]'}


def location(environ: Mapping[str, str] | None = None) -> Path:
    """Where the site file belongs; it need not be there.

    Args:
        environ: where to look for HVDX_SITE and XDG_CONFIG_HOME; the process environment by default.

    Example:
        >>> location({"XDG_CONFIG_HOME": "/home/me/config"})
        PosixPath('/home/me/config/hvdx/site.toml')
    """
    environ = os.environ if environ is None else environ
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE]).expanduser()
    folder = environ.get("XDG_CONFIG_HOME")
    # The specification: a path that is not absolute is to be ignored.
    base = Path(folder) if folder and Path(folder).is_absolute() else Path("~/.config").expanduser()
    return base / "hvdx" / "site.toml"


def settings(system: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the site file says for one system; nothing where there is no file.

    Args:
        system: one of `TABLES`.
        environ: see `location`.

    Returns:
        key: value; lines are always lists.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, or a value of the wrong kind.

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
    # All tables are checked, not only the one in use: a slip shows when the file is written.
    for table, content in tables.items():
        if isinstance(content, dict):
            if table not in TABLES:
                raise ConfigError(_unknown(path, f"[{table}]", list(TABLES), table))
            checked = {key: _checked(path, f"[{table}] ", key, value, TABLES[table]) for key, value in content.items()}
            if table == system:
                found |= checked
    return {key: value for key, value in found.items() if key in TABLES[system]}


def example() -> str:
    """A site file with everything in it, as comments."""
    return template("site.toml")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"site file: expected to read {path}, got: {error.strerror}. "
            f"Do: hvdx job site > {path}, or unset {VARIABLE}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"site file {path}: expected TOML, got: {error}. Do: hvdx job site, which prints an example."
        ) from None


def _checked(path: Path, where: str, key: str, value: Any, known: Mapping[str, type]) -> Any:
    """The value, where key and kind are right."""
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
            "Do: hvdx job site, which prints an example."
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
        remedy = "hvdx job site prints an example."
    return f"site file {path}: {where}: expected one of {', '.join(sorted(known))}, got {word!r}. Do: {remedy}"
