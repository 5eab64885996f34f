"""Namespaces of `hvdx lab`: the command that enters them, and a check that this machine supports them."""

import os
import shutil
import sys

from hvdx.cli.common.processes import run

_TIMEOUT = 20.0  # seconds
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}

# Steps of the lab, tried once in temporary namespaces: command, description, remedy.
_STEPS = (
    ("mount -t sysfs sysfs /sys", "mount /sys in a new network namespace", "{rights}"),
    ("mount -t tmpfs tmpfs /dev/shm", "mount /dev/shm", "{rights}"),
    ("ip link add veth1 type veth peer name veth2", "make a veth link", "Do: modprobe veth"),
    ("ip link add switch type bridge", "make a bridge", "Do: modprobe bridge"),
    (
        "tc qdisc add dev veth1 root tbf rate 1mbit burst 4kb latency 100ms",
        "limit a link's rate with tbf",
        "Do: modprobe sch_tbf (on some systems after: apt install linux-modules-extra-$(uname -r))",
    ),
)
_DELAY_STEP = (
    "tc qdisc add dev veth2 root netem delay 1ms",
    "delay a link with netem",
    "Do: modprobe sch_netem, or leave out --latency",
)
_FIRST_CODE = 100  # exit code for a failure of the first step; lower codes come from the tools


def enter() -> list[str]:
    """Return the first words of a command that runs a program as the first process of new namespaces.

    When `unshare` ends, its child, the program, is killed; then the kernel kills every other process in the namespaces.
    Users other than root get a user namespace, in which they are root.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]


def obstacle(delay: bool = False) -> str | None:
    """Return the reason why `hvdx lab` cannot work here, with the remedy; None if it can.

    Args:
        delay: True if links are to be delayed (`--latency`), which also needs netem.

    Example:
        >>> obstacle()  # doctest: +SKIP
        "expected the command tc, found none. Do: apt install iproute2"
    """
    if sys.platform != "linux":
        return f"expected Linux, got {sys.platform}. Do: run the lab in a Linux virtual machine"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_TOOLS[tool] for tool in missing))
        return f"expected the command {', '.join(missing)}, found none. Do: apt install {packages}"
    steps = (*_STEPS, _DELAY_STEP) if delay else _STEPS
    lines = [f"{command} || exit {_FIRST_CODE + i}" for i, (command, _, _) in enumerate(steps)]
    done = run([*enter(), "sh", "-c", "\n".join(lines)], _TIMEOUT)
    if done.code == 0:
        return None
    said = done.err.strip().splitlines()[-1:] or [done.reason()]
    failed = (done.code or 0) - _FIRST_CODE
    if 0 <= failed < len(steps):
        _, what, remedy = steps[failed]
        return f"expected to {what}, got: {said[0]}. {remedy.format(rights=_rights())}"
    return f"expected to make namespaces, got: {said[0]}. {_rights()}"


def _rights() -> str:
    container = (
        "in a container: start it with --privileged (CAP_SYS_ADMIN and CAP_NET_ADMIN, seccomp and AppArmor unconfined)"
    )
    if os.geteuid() == 0:
        return f"Do, {container}"
    return (
        "Do: run it as root, or allow users to make namespaces (sysctl -w user.max_user_namespaces=10000; "
        f"on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0); {container}"
    )
