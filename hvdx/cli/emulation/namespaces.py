"""Namespaces of `hvdx lab`: the command that enters them, a check of this machine, and the first process in them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass

from hvdx.cli.common.processes import run
from hvdx.cli.emulation import switch
from hvdx.errors import HvdxError

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


# The first process. When it ends, the kernel kills all other processes in the namespaces.
#
# `hvdx lab` starts it as `python -m hvdx.cli.emulation.namespaces PLAN`. It reads a control pipe (a byte means "end the
# job"; end-of-file means that `hvdx lab` is dead) and writes its answer to another pipe.

#: Seconds that mpirun has to end its ranks after SIGTERM.
GRACE = 5.0

# Open MPI 5 hangs if programs on 8 or more hosts end before all have started, as `hostname` does.
_PAUSE = ["sh", "-c", 'sleep 0.3; exec "$@"', "sh"]


@dataclass(frozen=True)
class Plan:
    """Settings of a lab, which `hvdx lab` passes to its first process.

    Attributes:
        hosts: number of hosts.
        per_host: number of ranks on each host.
        rate, delay, bucket: see `switch.Shape`.
        mpirun: launcher and options. The word AGENT stands for the path of the script that replaces ssh, HOSTS for the
            list of hosts with their slots.
        program: command of one rank.
        control, answers: file descriptors of the two pipes.
    """

    hosts: int
    per_host: int
    rate: int | None
    delay: float
    bucket: int | None
    mpirun: list[str]
    program: list[str]
    control: int
    answers: int

    def dump(self) -> str:
        """Return the plan as one word of a command line."""
        return json.dumps(asdict(self))


def main(text: str) -> int:
    """Build the hosts, run the program on them, and answer with the bytes that each link carried."""
    plan = Plan(**json.loads(text))
    # mpirun gets a terminal's Ctrl-C too; this process waits for it to end its ranks.
    # The signal gets a handler and not SIG_IGN, because the ranks would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    running: list[subprocess.Popen[bytes]] = []
    threading.Thread(target=_listen, args=(plan.control, running), daemon=True).start()
    began = time.monotonic()
    try:
        hosts = switch.build(plan.hosts, switch.Shape(plan.rate, plan.delay, plan.bucket))
    except HvdxError as error:
        _answer(plan, {"error": str(error)})
        return 2
    ready = time.monotonic()
    before = [host.counters() for host in hosts]
    running.append(subprocess.Popen(_command(plan, hosts)))
    code = running[0].wait()
    seconds = time.monotonic() - ready
    after = [host.counters() for host in hosts]
    links = [
        {"host": host.name, **{key: new[key] - old[key] for key in new}}
        for host, old, new in zip(hosts, before, after, strict=True)
    ]
    _answer(plan, {"seconds": seconds, "setup_seconds": ready - began, "links": links})
    return code if code >= 0 else 128 - code


def _command(plan: Plan, hosts: list[switch.Host]) -> list[str]:
    words = {"AGENT": str(switch.agent(hosts)), "HOSTS": ",".join(f"{host.name}:{plan.per_host}" for host in hosts)}
    return [words.get(word, word) for word in plan.mpirun] + _PAUSE + plan.program


def _answer(plan: Plan, facts: dict[str, object]) -> None:
    with os.fdopen(plan.answers, "w") as pipe:
        json.dump(facts, pipe)


def _listen(pipe: int, running: list[subprocess.Popen[bytes]]) -> None:
    """Terminate mpirun on a byte, and kill everything after GRACE seconds; kill everything at once on end-of-file."""
    while os.read(pipe, 1):
        for process in running:
            process.terminate()
        if not running:
            break
        limit = threading.Timer(GRACE, os._exit, [128 + signal.SIGKILL])
        limit.daemon = True
        limit.start()
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
