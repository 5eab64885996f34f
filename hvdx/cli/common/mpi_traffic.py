"""Options of Open MPI that keep the traffic of ranks off networks that the job does not need.

By default each rank accepts TCP connections from every network, even if all ranks run on one host. Open MPI binds its
port to all interfaces whatever the options (its issue 12668), but it takes connections only from the networks in use.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdx.cli.common.mpi_tools import Mpi

# Variables of a user who chooses the transports or the networks of Open MPI.
_CHOSEN = {"OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"}
#: Variable of a batch system with the path of the job's host file, which has a line for each task; Slurm has none.
HOSTFILE = {"PBS": "PBS_NODEFILE", "LSF": "LSB_DJOB_HOSTFILE"}
# Variables that give mpirun other hosts than this one.
ALLOCATED = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", *HOSTFILE.values())
# Open MPI's file of parameters below the home folder, and the one below its own, which a distribution moves.
_USERS_FILE = "~/.openmpi/mca-params.conf"
_SITES_FILE = {True: Path("/etc/openmpi/openmpi-mca-params.conf"), False: Path("etc/openmpi-mca-params.conf")}
_DEFAULT_HOSTS = "default_hostfile"
_ROUTES = Path("/proc/net/route")
_UP, _GATEWAY = 1, 2


def traffic_options(mpi: Mpi, hosts: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the options of mpirun that limit the networks of ranks.

    Ranks on this host alone exchange through shared memory, and listen nowhere. Ranks on several hosts exchange over
    the network that all hosts are on. There are no options if the user or the site has chosen transports or networks by
    Open MPI's variables or files of parameters, if a batch system chooses the hosts, if the hosts share no network, or
    for the mpirun of another vendor.

    Args:
        hosts: names or addresses of the hosts; none for this host.
        environ: environment variables; those of the process by default.

    Example:
        >>> traffic_options(Mpi(launcher_vendor="Open MPI"), environ={})
        ['--mca', 'btl', '^tcp']
    """
    environ = os.environ if environ is None else environ
    if mpi.launcher_vendor != "Open MPI" or not _CHOSEN.isdisjoint({*environ, *_in_files(mpi)}):
        return []
    if all(map(is_this_machine, hosts)):
        elsewhere = not hosts and any(name in ALLOCATED or name.endswith(_DEFAULT_HOSTS) for name in environ)
        return [] if elsewhere else ["--mca", "btl", "^tcp"]
    network = _network_of(hosts)
    return ["--mca", "btl_tcp_if_include", network] if network else []


def is_this_machine(host: str) -> bool:
    """Return whether a name or an address is one of this machine: only such an address can be bound."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError):
        return False
    return True


def _in_files(mpi: Mpi) -> list[str]:
    """Return the parameters that Open MPI's files set, named as its variables."""
    files = [Path(os.path.expanduser(_USERS_FILE))]
    if mpi.mpirun:
        prefix = Path(mpi.mpirun).resolve().parent.parent
        files.append(prefix / _SITES_FILE[prefix == Path("/usr")])
    found = []
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        found += [f"OMPI_MCA_{line.partition('=')[0].strip()}" for line in lines if "=" in line]
    return found


def _network_of(hosts: Sequence[str]) -> str:
    """Return the directly connected IPv4 network of all hosts, such as "10.0.0.0/24"; "" if there is none."""
    try:
        addresses = [ipaddress.IPv4Address(socket.gethostbyname(host)) for host in hosts]
    except (OSError, UnicodeError):  # a name that only ssh knows, or none at all
        return ""
    # This host's own name may stand for a loopback address.
    others = [address for address in addresses if not address.is_loopback]
    fitting = [n for n in _connected_networks() if others and all(address in n for address in others)]
    return str(max(fitting, key=lambda n: n.prefixlen)) if fitting else ""


def _connected_networks() -> list[ipaddress.IPv4Network]:
    """Return the networks that this host reaches without a gateway."""
    try:
        rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return []
    found = []
    for _, destination, _, flags, _, _, _, mask, *_ in rows:
        if int(flags, 16) & (_UP | _GATEWAY) == _UP and int(mask, 16):
            found.append(ipaddress.IPv4Network((_address(destination), str(_address(mask)))))
    return found


def _address(text: str) -> ipaddress.IPv4Address:
    """Return an address of the table of routes, which has the bytes of each address in the processor's order."""
    return ipaddress.IPv4Address(int(text, 16).to_bytes(4, sys.byteorder))
