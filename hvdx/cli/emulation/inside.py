"""First process in the lab's namespaces. When it ends, the kernel kills all other processes there.

`hvdx lab` starts it as `python -m hvdx.cli.emulation.inside PLAN`. It reads a control pipe (a byte means "end the job";
end-of-file means that `hvdx lab` is dead) and writes its answer to another pipe.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass

from hvdx.cli.emulation import network
from hvdx.errors import HvdxError

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
        rate, delay, bucket: see `network.Shape`.
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
        hosts = network.build(plan.hosts, network.Shape(plan.rate, plan.delay, plan.bucket))
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


def _command(plan: Plan, hosts: list[network.Host]) -> list[str]:
    words = {"AGENT": str(network.agent(hosts)), "HOSTS": ",".join(f"{host.name}:{plan.per_host}" for host in hosts)}
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
