"""Stand-in for a training: records its arguments and environment, and ends as its arguments say.

training.py FOLDER end CODE             ends at once
training.py FOLDER after SECONDS CODE   ignores USR1, ends after some seconds
training.py FOLDER die SIGNAL           kills itself
training.py FOLDER save                 saves on USR1, and ends with 75; at its next start it resumes, and ends with 0
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

LIMIT = 20  # seconds; without a signal until then, the code is 9


def main(folder, what, *more):
    rank = os.environ["STAND_IN_RANK"]
    names = ("HVDX_STRATEGY", "HVDX_CPUS_PER_TASK", "OMP_NUM_THREADS", "PREPARED")
    record = {"name": "training", "rank": int(rank), "words": [what, *more], "cwd": os.getcwd()}
    record["environment"] = {name: os.environ[name] for name in names if name in os.environ}
    record["resumed"] = (folder / f"saved.{rank}").exists()
    with open(os.environ["STAND_IN_RECORD"], "a") as file:
        file.write(json.dumps(record) + "\n")
    if what == "end":
        return int(more[0])
    if what == "die":
        os.kill(os.getpid(), int(more[0]))
    if what == "after":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        (folder / f"listening.{rank}").touch()
        time.sleep(float(more[0]))
        return int(more[1])
    if record["resumed"]:
        return 0
    received = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    (folder / f"listening.{rank}").touch()
    end = time.monotonic() + LIMIT
    while not received and time.monotonic() < end:
        time.sleep(0.02)
    if not received:
        return 9
    (folder / f"saved.{rank}").touch()
    return 75


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
