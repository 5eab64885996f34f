"""The option --json of commands: a document in a file, or on standard output."""

import json
from pathlib import Path
from typing import Any

from hvdx.errors import ConfigError


def write(command: str, path: Path | None, document: dict[str, Any], indent: int = 2) -> None:
    """Write a document as JSON.

    Args:
        path: path of the file; "-" prints the document, None does nothing.

    Raises:
        ConfigError: if the file cannot be written.
    """
    if path is None:
        return
    text = json.dumps(document, indent=indent)
    if str(path) == "-":
        print(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(
            f"{command}: --json {path}: {error.strerror}. Do: name a file in a folder that exists."
        ) from None
