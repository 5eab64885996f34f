"""Stands in for sbatch, scontrol, qsub and bsub: notes what it was given, answers, and runs nothing."""

import json
import os
import sys
from pathlib import Path

ANSWERS = {"sbatch": "Submitted batch job 17", "qsub": "17.server", "bsub": "Job <17> is submitted.", "scontrol": ""}


def main(name, words):
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
