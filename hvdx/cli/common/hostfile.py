"""Host files: one host a line, with the number of its workers."""

import re

from hvdx.errors import LaunchError

#: Name of a host. One that begins with a hyphen would be an option of ssh, which can run a command.
HOST = r"\w[\w.-]*"
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
            if not re.fullmatch(HOST, name):
                raise LaunchError(f"hosts file: expected names of letters, digits, -, _ and ., got {name!r}.")
            hosts[name] = hosts.get(name, 0) + (int(slots.group(1)) if slots else 1)
    return hosts
