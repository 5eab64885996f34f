"""Start of one rank under `hvdx run`: set environment and output, then execute the program.

For a start within milliseconds it imports only `comm/launcher.py` of hvdx, by its path.

    python rank.py all|first PROGRAM [ARGUMENT ...]
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any


def main(argv: list[str]) -> None:
    """Set the environment, and execute the program in this process."""
    output, *program = argv
    launcher = _launcher()
    found = launcher.detect()
    rank, here = (found.rank, found.local_size) if found is not None else (0, None)
    # TensorFlow reads these when it starts, even if the script has not called hvdx.init() before.
    share = launcher.threads_for(here or 1, chosen_by=launcher.TENSORFLOW_THREADS)
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(share.threads))
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", str(share.threads))
    # By default, each process of Python orders sets of strings in its own way, and ranks would have different
    # vocabularies from `list(set(words))`.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    # Hides TensorFlow's start-up notes, about twenty lines on each rank. Rank 0 still shows errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if rank == 0 else "3")
    if rank and output == "first":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"hvdx run: {program[0]}: {error.strerror}")


def _launcher() -> Any:
    package = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    path = os.path.join(package, "comm", "launcher.py")
    spec = spec_from_file_location("launcher", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["launcher"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
