"""A check that ssh reaches the hosts of a launch, before the launcher prints a page about those that it does not."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hvdx.cli.common.mpi_traffic import ALLOCATED, is_this_machine
from hvdx.cli.common.processes import key_line
from hvdx.errors import LaunchError

# Seconds for a connection, and for the whole answer of a host.
_CONNECT, _ANSWER = 5, 15.0
# Most hosts that are asked at once.
_AT_ONCE = 32
# Variables that replace ssh as the way to other hosts: an agent of the user, or a batch system.
_OTHER_WAYS = (
    "PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_rsh_agent", "OMPI_MCA_plm", "OMPI_MCA_plm_rsh_agent",
    "OMPI_MCA_plm_ssh_agent", "OMPI_MCA_orte_rsh_agent", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC",
    "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC", *ALLOCATED,
)  # fmt: skip


def check_hosts(hosts: Iterable[str], environ: Mapping[str, str] | None = None) -> None:
    """Check that ssh starts a command on each host without a password.

    Args:
        hosts, environ: see `absent_hosts`.

    Raises:
        LaunchError: if hosts do not answer, with the reason of each.
    """
    absent = absent_hosts(hosts, environ)
    if absent:
        listed = "; ".join(f"{host}: {reason}" for host, reason in absent.items())
        raise LaunchError(
            f"run: --hosts: expected hosts on which ssh starts commands without a password, got {listed}. "
            f"Do: check the names, and try: ssh {next(iter(absent))} true"
        )


def absent_hosts(hosts: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Find the hosts on which ssh starts no command without a password; ask all hosts at the same time.

    No host is asked where something else than ssh reaches them, such as a batch system.

    Args:
        hosts: names of hosts; this machine is left out.
        environ: environment variables; those of this process by default.

    Returns:
        The hosts that do not answer, with the reason of each.
    """
    asked = with_ssh(hosts, environ)
    if not asked:
        return {}
    with ThreadPoolExecutor(min(len(asked), _AT_ONCE)) as pool:
        reasons = dict(zip(asked, pool.map(_reason, asked), strict=True))
    return {host: reason for host, reason in reasons.items() if reason}


def with_ssh(hosts: Iterable[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return those of the hosts to which ssh is the way: not this machine, and none in a batch system.

    Args:
        hosts, environ: see `absent_hosts`.
    """
    environ = os.environ if environ is None else environ
    others = any(environ.get(name) for name in _OTHER_WAYS)
    return [] if others else [host for host in hosts if not is_this_machine(host)]


def ssh_command(host: str, command: str, options: Sequence[str] = ()) -> list[str]:
    """Return the words that run a command of a shell on a host, without questions to the user."""
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}", *options, "--", host, command]


def _reason(host: str) -> str:
    """Return why ssh does not reach a host, in one line; "" if it does."""
    if shutil.which("ssh") is None:
        return "there is no ssh on PATH"
    command = ssh_command(host, "true")
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {_ANSWER:g} s"
    # ssh's own failures end with 255; another code is that of the command, which has started.
    if done.returncode != 255:
        return ""
    return key_line(done.stderr.decode(errors="replace")) or "ssh failed"
