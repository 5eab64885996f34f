"""Options that several commands share: hosts and host files, --target and --json."""

import json
import re
from pathlib import Path
from typing import Any

from hvdx.errors import ConfigError, LaunchError

# Name of a host. One that begins with a hyphen would be an option of ssh, which can run a command.
_HOST = r"\w[\w.-]*"
# `host slots=4` (Open MPI, Horovod), `host:4` (MPICH, Intel), `host`.
_SLOTS = re.compile(r"(?:\bslots\s*=\s*|^[^\s:]+:)(\d+)")


def parse_hostfile(text: str) -> dict[str, int]:
    """Return the number of workers by host.

    Args:
        text: content of the file; each line is `host slots=4` (Open MPI, Horovod), `host:4` (MPICH, Intel) or `host`.
            The numbers of a host that stands on several lines are added.

    Raises:
        LaunchError: if a name is none of a host.

    Example:
        >>> parse_hostfile("node1 slots=4  # comment\\nnode2:2\\nnode3\\n")
        {'node1': 4, 'node2': 2, 'node3': 1}
    """
    hosts: dict[str, int] = {}
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if entry:
            slots = _SLOTS.search(entry)
            name = re.split(r"[\s:]", entry, maxsplit=1)[0]
            if not re.fullmatch(_HOST, name):
                raise LaunchError(f"hosts file: expected names of letters, digits, -, _ and ., got {name!r}.")
            hosts[name] = hosts.get(name, 0) + (int(slots.group(1)) if slots else 1)
    return hosts


def parse_hosts(text: str | None, command: str = "run") -> dict[str, int]:
    """Parse "a:2,b" to {"a": 2, "b": 1}.

    Args:
        command: subcommand that has the option, for the message.

    Raises:
        LaunchError: if a part has another form.
    """
    hosts: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        match = re.fullmatch(rf"({_HOST})(?::(\d+))?", part.strip())
        if match is None or match.group(2) == "0":
            raise LaunchError(f"{command}: --hosts: expected HOST:N,HOST:N with N of 1 or more, got {part.strip()!r}.")
        hosts[match.group(1)] = hosts.get(match.group(1), 0) + int(match.group(2) or 1)
    return hosts


def parse_target(text: str) -> tuple[str, float]:
    """Return the metric and the value of `--target`.

    Raises:
        ConfigError: if it is not a metric and a number.

    Example:
        >>> parse_target("val_accuracy=0.85")
        ('val_accuracy', 0.85)
    """
    metric, _, value = text.partition("=")
    try:
        number = float(value)
        if not metric.strip() or number != number or abs(number) == float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--target: expected a metric and a number, got {text!r}. Do: --target val_accuracy=0.85"
        ) from None
    return metric.strip(), number


def write_json(command: str, path: Path | None, document: dict[str, Any], indent: int = 2) -> None:
    """Write a document as JSON, as the option --json asks for.

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
