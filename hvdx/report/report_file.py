"""Files that the commands write from records: written as a whole, and never over a file of another kind."""

import os
from dataclasses import dataclass
from pathlib import Path

from hvdx import foreign
from hvdx.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """Kind of a file.

    Attributes:
        command: the command that writes it.
        mark: bytes near the beginning of each such file, and of no other one.
    """

    command: str
    name: str
    mark: bytes


def write(text: str, path: Path, kind: Kind, force: bool = False) -> None:
    """Write a text to a file, all of it or nothing.

    Args:
        force: also overwrite a file of another kind.

    Raises:
        ConfigError: if the file cannot be written, or is of another kind.
    """
    check(path, kind, force)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8") as file:  # "x" does not follow a link
            file.write(text)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _unwritable(path, kind, error) from error


def check(path: Path, kind: Kind, force: bool = False) -> None:
    """Check that a file may be written.

    Args:
        force: also overwrite a file of another kind.

    Raises:
        ConfigError: if it may not.
    """
    try:
        with foreign.open_regular(path) as file:
            own = kind.mark in file.read(1000)
    except FileNotFoundError:
        own = True
    except OSError as error:
        raise _unwritable(path, kind, error) from error
    if not own and not force:
        raise ConfigError(
            f"{kind.command}: --output: expected a new file or an earlier {kind.name}, got {path}, which is another "
            "file. Do: choose another name, or add --force to overwrite it."
        )
    if not os.access(path.resolve().parent, os.W_OK):
        raise ConfigError(
            f"{kind.command}: --output: expected a folder that can be written, got {path.parent}. Do: create it."
        )


def _unwritable(path: Path, kind: Kind, error: OSError) -> ConfigError:
    return ConfigError(
        f"{kind.command}: --output: expected a file that can be written, got {path}: {error.strerror}. "
        "Do: choose another."
    )
