"""Stand-in for the launchers, and for hvdx run: starts the ranks on this machine, and passes USR1 on to them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

# Options whose value is the next word; all others are one word.
VALUED = {"-n", "-np", "--hostfile", "-f", "-x", "--bind-to", "--map-by", "--hosts", "--max-restarts", "--checkpoint"}


def main(name, words):
    options = {}
    rest = list(words[name == "hvdx" :])
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        value = value if equals else rest.pop(0) if option in VALUED else ""
        options[option] = [*options.get(option, []), value]
    if "--nodelist" in options:  # the script checks that this host answers
        return int(options["--nodelist"][0] in os.environ.get("STAND_IN_LOST", "").split())
    ranks = int(options.get("-n", options.get("-np", options.get("--nrs", [os.environ.get("SLURM_NTASKS", "0")])))[0])
    ranks = sum(int(host.partition(":")[2]) for host in options.get("--hosts", [""])[0].split(",") if host) or ranks
    hosts = [Path(f).read_text() for o in ("--hostfile", "-f") for f in options.get(o, [])]
    record = {"name": name, "words": words, "options": options, "ranks": ranks, "hosts": hosts, "program": rest}
    children, received = [], []

    def pass_on(number, frame):
        received.append(number)
        for child in children:
            child.send_signal(number)

    # Like the real launchers, it ends on TERM. The real horovodrun passes no signal on.
    if name != "horovodrun":
        signal.signal(signal.SIGUSR1, pass_on)
    for rank in range(ranks):
        environment = os.environ | {"STAND_IN_RANK": str(rank)}
        children.append(subprocess.Popen(rest, env=environment))
    codes = [child.wait() for child in children]
    # Python restores default handlers before it exits, but an ignored signal stays ignored.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    record |= {"codes": codes, "signals": len(received)}
    with open(os.environ["STAND_IN_RECORD"], "a") as file:
        file.write(json.dumps(record) + "\n")
    return max(128 - code if code < 0 else code for code in codes)


if __name__ == "__main__":
    assert re.fullmatch("srun|mpirun|jsrun|horovodrun|hvdx", sys.argv[1])
    sys.exit(main(sys.argv[1], sys.argv[2:]))
