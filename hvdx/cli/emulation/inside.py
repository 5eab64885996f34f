"""The process that is the lab: the first one in its namespaces, so that the kernel ends all others when it ends.

Started by `hvdx lab` as `python -m hvdx.cli.emulation.inside PLAN`. It hears on one pipe (the end of it means that
`hvdx lab` is dead, whatever killed it; a byte means "wind up") and answers on another.
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

#: Seconds that mpirun has to end its ranks when it is told to.
GRACE = 5.0

# Open MPI 5 waits for ever when programs on 8 hosts or more end before all of them have started: `hostname` does.
_PAUSE = ["sh", "-c", 'sleep 0.3; exec "$@"', "sh"]


@dataclass(frozen=True)
class Plan:
    """What `hvdx lab` asks for.

    Attributes:
        hosts: how many.
        rate, delay: of each link, as in `network.Shape`.
        mpirun: the launcher and its options, up to the list of hosts.
        program: the command of one rank.
        hears, answers: file descriptors of the two pipes.

    In `mpirun`, the word AGENT stands for the path of the script, HOSTS for the list of hosts with their slots.
    """

    hosts: int
    rate: int | None
    delay: float
    mpirun: list[str]
    program: list[str]
    hears: int
    answers: int

    def dump(self) -> str:
        """As one word of a command line."""
        return json.dumps(asdict(self))


def main(text: str) -> int:
    """Build the hosts, run the program on them, answer with what the links carried."""
    plan = Plan(**json.loads(text))
    # mpirun gets a terminal's Ctrl-C as well; this process stays until mpirun is through with it.
    # (A handler, not SIG_IGN: the ranks would inherit that.)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    running: list[subprocess.Popen] = []
    threading.Thread(target=_listen, args=(plan.hears, running), daemon=True).start()
    began = time.monotonic()
    try:
        hosts = network.build(plan.hosts, network.Shape(plan.rate, plan.delay))
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
    words = {"AGENT": str(network.agent(hosts)), "HOSTS": ",".join(f"{host.name}:1" for host in hosts)}
    return [words.get(word, word) for word in plan.mpirun] + _PAUSE + plan.program


def _answer(plan: Plan, facts: dict) -> None:
    with os.fdopen(plan.answers, "w") as pipe:
        json.dump(facts, pipe)


def _listen(pipe: int, running: list[subprocess.Popen]) -> None:
    """Wind up when told to; end at once, and everything with it, when `hvdx lab` is gone."""
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
