"""Test hvdx with the oldest and the newest versions of TensorFlow and Keras, each pair in an environment of its own.

    python -m tests.matrix                    all pairs, all rows
    python -m tests.matrix --only 2.16 2.18   some pairs, by the beginnings of TensorFlow's versions
    python -m tests.matrix --save             also write the table of docs/install.md

The environments are in the cache folder of hvdx, below "matrix". They are made again when the dependencies in
pyproject.toml change; delete one to get a newer Keras.
"""

import argparse
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdx.cache import cache_folder
from hvdx.cli.common import processes
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render
from tests.launch import ROOT, environment

PAGE, RESULTS = ROOT / "docs" / "install.md", ROOT / "docs" / "benchmarks" / "matrix.json"
_MARKS = ("<!-- matrix -->", "<!-- end of matrix -->")
# The oldest pair that pyproject.toml allows, and one between; "" is the newest that pip resolves.
FIXED = (("2.16.2", "3.6.0"), ("2.18.*", "3.9.*"))
NEWEST = 2
INSTALL_SECONDS, TEST_SECONDS, TRAINING_SECONDS = 900, 240, 120
# The package of TensorFlow in the extra `tf`.
TENSORFLOW = "tensorflow-cpu"
# As a module: the folder tests has one named keras.
TRAINING = ["-m", "tests.matrix_training"]
#: What pytest, and the training, say at the end.
SAID = r"\b\d+ passed\b|^trained: "
STRATEGIES = {
    "AllReduce": "all_reduce:engine=mpi",
    "Threshold": "threshold",
    "ParameterAveraging": "parameter_averaging:period=4",
    "ParameterServer in the workers": "parameter_server:servers=colocated",
    "ParameterServer in ranks of its own": "parameter_server:servers=1",
    "Threshold, late messages": "threshold:max_staleness=inf",
}
#: Rows of the table: name, command after Python, number of ranks, environment variables, time limit.
Row = tuple[str, list[str], int, dict[str, str], float]
ROWS: list[Row] = [
    ("what `hvdx/keras/seams` relies on", ["-m", "pytest", "-q", "tests/keras/test_seams.py"], 1, {}, TEST_SECONDS),
    (
        "names of Horovod, without Horovod",
        ["-m", "pytest", "-q", "tests/keras/horovod/test_names.py"],
        1,
        {},
        TEST_SECONDS,
    ),
    *(
        (name, [*TRAINING, "arrays"], 3 if "=1" in spelled else 2, {"HVDX_STRATEGY": spelled}, TRAINING_SECONDS)
        for name, spelled in STRATEGIES.items()
    ),
    (
        "`PyDataset`, late messages",
        [*TRAINING, "py_dataset"],
        2,
        {"HVDX_STRATEGY": "threshold:max_staleness=inf"},
        TRAINING_SECONDS,
    ),
    ("resuming in mid-epoch", [*TRAINING, "resume"], 2, {"HVDX_STRATEGY": "threshold"}, TRAINING_SECONDS),
    ("split layers", [*TRAINING, "split"], 2, {"HVDX_SPLIT": "2"}, TRAINING_SECONDS),
]


@dataclass(frozen=True)
class Cell:
    """Result of a row with one pair of versions.

    Attributes:
        tensorflow, keras: the versions that were installed.
        row: name of the row.
        result: "passed", or the first line of the failure.
        seconds: how long it took.
    """

    tensorflow: str
    keras: str
    row: str
    result: str
    seconds: float = field(default=0.0, compare=False)


class MatrixError(Exception):
    """An environment cannot be made."""


def newest_minors(listing: str, below: tuple[int, int], count: int = NEWEST) -> list[str]:
    """Return the newest versions of the newest minor releases, oldest first.

    Args:
        listing: output of `pip index versions`.
        below: the first minor release that is too new.
        count: number of minor releases.

    Example:
        >>> newest_minors("Available versions: 2.22.0, 2.21.1, 2.21.0, 2.20.0, 2.19.1", (2, 22))
        ['2.20.0', '2.21.1']
    """
    versions = re.findall(r"\b(\d+)\.(\d+)\.(\d+)\b", listing.partition("versions:")[2].partition("\n")[0])
    newest: dict[tuple[int, int], int] = {}
    for major, minor, patch in ((int(a), int(b), int(c)) for a, b, c in versions):
        if (major, minor) < below:
            newest[major, minor] = max(patch, newest.get((major, minor), 0))
    return [f"{major}.{minor}.{newest[major, minor]}" for major, minor in sorted(newest)[-count:]]


def pairs() -> list[tuple[str, str]]:
    """Return the versions of TensorFlow and Keras to install, oldest first; "" for the newest Keras."""
    allowed = re.search(TENSORFLOW + r">=[\d.]+,<(\d+)\.(\d+)", (ROOT / "pyproject.toml").read_text())
    if allowed is None:
        raise MatrixError(f"pyproject.toml: expected an upper bound of {TENSORFLOW}, got none. Do: add one.")
    command = [sys.executable, "-m", "pip", "index", "versions", TENSORFLOW]
    listed = processes.run(command, 60, environment(), ROOT, merged=True)
    found = newest_minors(listed.text, (int(allowed[1]), int(allowed[2])))
    if len(found) < NEWEST:
        raise MatrixError(f"{' '.join(command)}: expected versions, got: {listed.reason()}")
    return [*FIXED, *((version, "") for version in found)]


def prepare(tensorflow: str, keras: str, python: str) -> Path:
    """Return the environment of a pair of versions; make it unless it is up to date.

    Raises:
        MatrixError: if a package cannot be installed.
    """
    wanted = [f"{TENSORFLOW}=={tensorflow}", f"keras=={keras}" if keras else "keras>=3.6"]
    # What tests/conftest.py and the tests of the first rows import.
    wanted += ["pytest>=8", "hypothesis", "--editable", f"{ROOT}[mpi]"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stamp_text = repr((python, wanted, project["dependencies"], project["optional-dependencies"]["mpi"]))
    folder = cache_folder() / "matrix" / f"tensorflow-{tensorflow}-keras-{keras or 'newest'}".replace("*", "x")
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == stamp_text:
        return folder
    print(f"installing into {folder} (a minute or two)", flush=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    for command in ([python, "-m", "venv", "--clear", str(folder)], pip):
        done = processes.run(command, INSTALL_SECONDS, None, ROOT, merged=True)
        if done.code != 0:
            raise MatrixError(
                f"TensorFlow {tensorflow}: expected an environment, got: {done.reason()}. TensorFlow 2.16 and 2.18 "
                "need Python 3.11 or 3.12. Do: give --python."
            )
    stamp.write_text(stamp_text)
    return folder


def versions_in(folder: Path) -> tuple[str, str]:
    """Return the versions of TensorFlow and Keras in an environment."""
    code = f"from importlib.metadata import version as v; print(v({TENSORFLOW!r}), v('keras'))"
    tensorflow, keras = subprocess.run(
        [str(folder / "bin" / "python"), "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    return tensorflow, keras


def attempt(row: Row, folder: Path, tensorflow: str, keras: str) -> Cell:
    """Run a row in an environment."""
    name, program, ranks, variables, limit = row
    python = str(folder / "bin" / "python")
    launcher = [] if ranks == 1 else [str(folder / "bin" / "hvdx"), "run", "-n", str(ranks)]
    began = time.monotonic()
    done = processes.run([*launcher, python, *program], limit, environment(variables), ROOT, merged=True)
    seconds = round(time.monotonic() - began, 1)
    result = verdict(done)
    # An exit status of 0 is no proof that anything has been trained.
    if result == "passed" and not re.search(SAID, done.text, re.MULTILINE):
        result = "exit status 0 without a test or a training"
    return Cell(tensorflow, keras, name, result, seconds)


def verdict(done: processes.Outcome) -> str:
    """Return "passed", or the first line of a failure.

    Example:
        >>> verdict(processes.Outcome(1, "E   AssertionError: seam layers_of: ...\\n1 failed"))
        'AssertionError: seam layers_of: ...'
    """
    if done.code == 0:
        return "passed"
    failure = None if done.timed_out else re.search(r"^E +(.+)$", done.text, re.MULTILINE)
    return failure[1] if failure else done.reason()


def merge(path: Path, cells: Sequence[Cell]) -> list[Cell]:
    """Write the cells to a file, in place of earlier ones of the same minor releases and of rows that are no more."""
    known = [Cell(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
    renewed = {_minor(cell) for cell in cells}
    order = [row[0] for row in ROWS]
    kept = [c for c in known if _minor(c) not in renewed and c.row in order] + list(cells)
    kept.sort(key=lambda c: ([int(part) for part in c.tensorflow.split(".")], order.index(c.row)))
    path.write_text(harness.dump({"command": "python -m tests.matrix --save", "rows": [asdict(c) for c in kept]}))
    return kept


def _minor(cell: Cell) -> str:
    return cell.tensorflow.rpartition(".")[0]


def table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table: a column for each pair of versions."""
    found = list(dict.fromkeys((c.tensorflow, c.keras) for c in cells))
    results: Mapping[tuple[str, str, str], str] = {(c.tensorflow, c.keras, c.row): c.result for c in cells}
    rows = [[row[0], *(results.get((*pair, row[0]), "") for pair in found)] for row in ROWS]
    return ["", *(f"TensorFlow {t}, Keras {k}" for t, k in found)], rows


def write_page(page: Path, cells: Sequence[Cell]) -> None:
    """Put the table into a page, between its two marks."""
    head, _, rest = page.read_text().partition(_MARKS[0])
    _, _, tail = rest.partition(_MARKS[1])
    names, rows = table(cells)
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    page.write_text(f"{head}{_MARKS[0]}\n\n" + "\n".join(lines) + f"\n\n{_MARKS[1]}{tail}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows with all pairs and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="VERSION", help="beginnings of TensorFlow's versions (default: all)"
    )
    parser.add_argument("--python", default=sys.executable, help="Python of the environments (default: %(default)s)")
    parser.add_argument("--prepare", action="store_true", help="make the environments, and run nothing")
    parser.add_argument(
        "--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args(arguments)
    try:
        known = pairs()
        chosen = [pair for pair in known if not options.only or pair[0].startswith(tuple(options.only))]
        if not chosen:
            parser.error(f"--only: expected beginnings of {[pair[0] for pair in known]}, got {options.only}")
        cells: list[Cell] = []
        for number, pair in enumerate(chosen, 1):
            folder = prepare(*pair, options.python)
            tensorflow, keras = versions_in(folder)
            print(f"{number} of {len(chosen)}: TensorFlow {tensorflow}, Keras {keras}", flush=True)
            for row in ROWS if not options.prepare else []:
                cells.append(attempt(row, folder, tensorflow, keras))
                print(f"{cells[-1].seconds:6.1f} s  {row[0]:38}{cells[-1].result[:300]}", flush=True)
            if options.save and cells:
                write_page(PAGE, merge(RESULTS, cells))
    except MatrixError as error:
        print(f"python -m tests.matrix: {error}", file=sys.stderr)
        return 1
    failed = [cell for cell in cells if cell.result != "passed"]
    if cells:
        names, rows = table(cells)
        print("\n" + render(rows, names))
        print(f"\n{len(cells)} runs, of which {len(failed)} fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
