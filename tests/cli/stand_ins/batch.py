"""Stand-in for sbatch, scontrol, qsub and bsub: records its arguments, prints an answer, and runs nothing.

It also stands in for `scontrol show`, and for pbs_tmrsh and blaunch, which check that a host answers; it does not
record these.
"""

import json
import os
import sys
from pathlib import Path

ANSWERS = {"sbatch": "Submitted batch job 17", "qsub": "17.server", "bsub": "Job <17> is submitted.", "scontrol": ""}


def main(name, words):
    if words[:2] == ["show", "hostnames"]:
        print(words[2].replace(",", "\n"))
        return 0
    if words[:2] == ["show", "job"]:
        # For the last task of an array, Slurm prints all tasks, because they share this job id.
        for number in (18, 17):
            print(f"JobId={number}\n   Command={os.environ.get('STAND_IN_SCRIPT', '(null)')}\n   WorkDir=/\n")
        return 0
    if name in ("pbs_tmrsh", "blaunch"):
        return int(words[0] in os.environ.get("STAND_IN_LOST", "").split())
    files = [word for word in words if Path(word).is_file()]
    record = {"name": name, "words": words, "files": [Path(f).read_text() for f in files]}
    record["stdin"] = "" if files or name == "scontrol" else sys.stdin.read()
    with open(os.environ["STAND_IN_RECORD"], "a") as file:
        file.write(json.dumps(record) + "\n")
    code = int(os.environ.get("STAND_IN_CODE", "0"))
    if code:
        print(f"{name}: error: invalid account", file=sys.stderr)
    else:
        print(ANSWERS[name])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
