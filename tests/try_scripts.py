"""Run the Keras scripts of tests/scripts on two ranks under each strategy, and judge the results.

    python -m tests.try_scripts                                       all scripts, all strategies
    python -m tests.try_scripts --only mlp gan --strategies threshold some of them
    python -m tests.try_scripts --backends jax torch                  with Keras on JAX, then on PyTorch

Each script first runs on one process. A script sets `global_batch_size` in `hvdx.shard`, so that two ranks take the
steps of one process.
"""

import argparse
import ast
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hvdx.cli.common.processes import key_line
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render
from tests.launch import ROOT, Run, run

FOLDER = ROOT / "tests" / "scripts"
PAGE, RESULTS = ROOT / "docs" / "scripts.md", ROOT / "docs" / "benchmarks" / "scripts.json"
RANKS, LIMIT_SECONDS = 2, 90
# Values of HVDX_STRATEGY.
_ALL = (
    "all_reduce:engine=mpi",
    "all_reduce:engine=horovod",
    "threshold",
    "threshold:max_staleness=inf",
    "parameter_averaging:period=4",
    "parameter_server:servers=colocated",
    "auto",
)
# JAX and PyTorch have no engine of Horovod.
_STEPPED = tuple(strategy for strategy in _ALL if "horovod" not in strategy)
#: Strategies of each backend of Keras.
STRATEGIES = {"tensorflow": _ALL, "jax": _STEPPED, "torch": _STEPPED}
TITLES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
# Largest difference between two ranks under all_reduce and one process, relative to the norm of a variable.
TOLERANCE = 1e-4
# The page's results stand between these.
_MARKS = ("<!-- results -->", "<!-- end of results -->")

_EPILOG = """\
verdicts:
  equal       trains, and the weights are those of one process (all_reduce; the largest relative difference follows)
  trains      the loss is finite and has fallen, and the ranks hold the same weights and histories (the last loss
              divided by that of one process follows)
  refused     hvdx raised an error of its own, which the script's docstring announces
  FAILS       anything else

lines of a script's docstring:
  One process: ...     why its weights differ from those of one process; no comparison then
  Falls: ...           name of what falls over the epochs, instead of the loss; or "nothing, REASON"
  Own: ...             words in the paths of weights that belong to a rank
  Refused: ...         strategies and backends that refuse the script, by the beginnings of their names, such as
                       "threshold", "jax" or "jax threshold"
  Backends: ...        backends on which Keras can run it; TensorFlow alone if the script imports it, else all

Exit code 0: nothing fails; 1: something does.
"""


@dataclass(frozen=True)
class Script:
    """A script and the lines of its docstring.

    Attributes:
        path: the file.
        title: first line of the docstring.
        alone: why one process gives other weights; "" if it gives the same.
        falls: histories that must fall.
        own: words in the paths of weights that belong to a rank.
        refused: beginnings of the names of strategies and backends that refuse it.
        backends: backends on which Keras can run it.
    """

    path: Path
    title: str
    alone: str = ""
    falls: tuple[str, ...] = ("loss",)
    own: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("tensorflow",)

    @property
    def name(self) -> str:
        """Name of the file without its ending."""
        return self.path.stem


def read(path: Path) -> Script:
    """Read a script's docstring.

    Raises:
        ValueError: if it has an unknown line.
    """
    text = path.read_text()
    title, _, rest = (ast.get_docstring(ast.parse(text)) or path.stem).partition("\n\n")
    lines = dict(line.partition(": ")[::2] for line in rest.splitlines())
    unknown = set(lines) - {"One process", "Falls", "Own", "Refused", "Backends"}
    if unknown:
        raise ValueError(f"{path}: docstring: expected the lines of python -m tests.try_scripts --help, got {unknown}")
    # Reasons may follow a comma.
    falls = lines.get("Falls", "loss").partition(",")[0]
    backends = "tensorflow" if re.search(r"^import tensorflow\b", text, re.MULTILINE) else ", ".join(STRATEGIES)
    return Script(
        path,
        title,
        lines.get("One process", ""),
        () if falls == "nothing" else (falls,),
        tuple(lines["Own"].split(", ")) if "Own" in lines else (),
        tuple(lines["Refused"].split(", ")) if "Refused" in lines else (),
        tuple(lines.get("Backends", backends).split(", ")),
    )


@dataclass(frozen=True)
class Cell:
    """What became of a script under a strategy.

    Attributes:
        backend, script, strategy: their names; the strategy "" means one process.
        verdict: "equal", "trains", "refused" or "FAILS".
        detail: the difference from one process, the refusal, or the failure.
        seconds: how long it took.
    """

    backend: str
    script: str
    strategy: str
    verdict: str
    detail: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class _Seen:
    """Files of a run: what each rank wrote."""

    errors: list[dict[str, str]]
    histories: list[list[dict[str, list[float]]]]
    weights: list[dict[str, np.ndarray]]


def _collect(folder: Path) -> _Seen:
    written = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    weights = []
    for path in sorted(folder.glob("rank-*.npz")):
        with np.load(path) as arrays:
            weights.append(dict(arrays))
    return _Seen([w["error"] for w in written if w["error"]], [w["histories"] for w in written], weights)


class ScriptError(Exception):
    """A run that neither trained as promised nor was refused as announced."""


def start(script: Script, strategy: str, ranks: int, limit: float, backend: str) -> tuple[Run, _Seen]:
    """Run a script and collect what its ranks wrote."""
    with tempfile.TemporaryDirectory(prefix="hvdx-scripts-") as folder:
        program = [str(ROOT / "tests" / "observe.py"), folder, str(script.path)]
        env = {"KERAS_BACKEND": backend} | ({"HVDX_STRATEGY": strategy} if strategy else {})
        done = run(ranks, program, limit, env)
        return done, _collect(Path(folder))


def judge(
    script: Script, strategy: str, done: Run, seen: _Seen, alone: _Seen | None, ranks: int, backend: str = "tensorflow"
) -> tuple[str, str]:
    """Return verdict and detail of a run.

    Raises:
        ScriptError: if it fails.
    """
    names = (strategy, backend, f"{backend} {strategy}")
    announced = any(name.startswith(script.refused) for name in names if name and script.refused)
    # A ReplicaError comes after steps that went wrong.
    refusals = [e for e in seen.errors if e["module"] == "hvdx.errors" and e["name"] != "ReplicaError"]
    if done.code is None:
        raise ScriptError(f"has not ended within the time limit: {key_line(done.out)}")
    if refusals and done.code:
        said = refusals[0]["text"].strip()
        if not announced:
            raise ScriptError(f"refused, which the script does not announce: {said}")
        return "refused", said
    if seen.errors or done.code:
        error = seen.errors[0] if seen.errors else {"name": f"exit status {done.code}", "text": key_line(done.out)}
        raise ScriptError(f"{error['name']}: {error['text'].strip()}")
    if announced and strategy:
        raise ScriptError("trains, although the script announces that it is refused")
    if len(seen.weights) != ranks:
        raise ScriptError(f"{len(seen.weights)} of {ranks} ranks have ended well")
    if not seen.weights[0]:
        raise ScriptError("the script leaves no model with weights")
    warning = re.search(r"^hvdx: warning: .*", done.out, re.MULTILINE | re.IGNORECASE)
    if warning:
        raise ScriptError(f"trains, with a warning: {warning.group()}")
    _check_weights(script, seen)
    _check_histories(seen, alone or seen)
    _check_fall(script, seen.histories[0])
    if alone is None:
        return "trains", ""
    if strategy.startswith("all_reduce") and not script.alone:
        return "equal", f"{_difference(seen, alone):.0e}"
    last, of_one = (run.histories[0][-1][script.falls[0]][-1] if script.falls else 1.0 for run in (seen, alone))
    return "trains", f"{last / of_one:.2f}" if script.falls else ""


def _check_weights(script: Script, seen: _Seen) -> None:
    """Check that weights are finite and the same on all ranks."""
    for rank, weights in enumerate(seen.weights):
        for name, value in weights.items():
            if not np.isfinite(value).all():
                raise ScriptError(f"{name} is not finite on rank {rank}")
            if any(word in name for word in script.own):
                continue
            other = seen.weights[0].get(name)
            if other is None or other.shape != value.shape or not np.array_equal(other, value):
                raise ScriptError(f"{name} differs between rank 0 and rank {rank}")


def _check_histories(seen: _Seen, alone: _Seen) -> None:
    """Check that losses and metrics, which one process has too, are the same on all ranks."""
    for rank, histories in enumerate(seen.histories):
        if len(histories) != len(alone.histories[0]):
            raise ScriptError(f"{len(histories)} fits on rank {rank}, {len(alone.histories[0])} on one process")
        for i, (mine, first, names) in enumerate(zip(histories, seen.histories[0], alone.histories[0], strict=True)):
            for name in names:
                if mine.get(name) != first.get(name):
                    raise ScriptError(f"{name} of fit {i + 1}: {first.get(name)} on rank 0, {mine.get(name)} on {rank}")


def _check_fall(script: Script, histories: Sequence[Mapping[str, Sequence[float]]]) -> None:
    """Check that what should fall does so in every fit of several epochs."""
    if not histories and script.falls:
        raise ScriptError("the script has trained nothing")
    for history in histories:
        for name in script.falls:
            values = np.asarray(history.get(name, [np.nan]), "float64")
            if not np.isfinite(values).all():
                raise ScriptError(f"{name} is not finite: {values.tolist()}")
            if len(values) > 1 and not values[-1] < values[0]:
                raise ScriptError(f"{name} does not fall: {values.tolist()}")


def _difference(seen: _Seen, alone: _Seen) -> float:
    """Return the largest relative difference of weights and metrics from those of one process."""
    mine, theirs = seen.weights[0], alone.weights[0]
    if list(mine) != list(theirs):
        raise ScriptError(f"other weights than one process: {sorted(set(mine) ^ set(theirs))}")
    pairs = [(name, mine[name], theirs[name]) for name in mine]
    for i, (here, there) in enumerate(zip(seen.histories[0], alone.histories[0], strict=True)):
        pairs += [(f"{name} of fit {i + 1}", np.array(here[name]), np.array(there[name])) for name in there]
    worst = 0.0
    for name, a, b in pairs:
        difference = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3 * np.sqrt(b.size)))
        if not difference <= TOLERANCE:
            raise ScriptError(f"{name} differs from one process by {difference:.0e} of its norm")
        worst = max(worst, difference)
    return worst


def attempt(
    script: Script, strategies: Sequence[str], limit: float = LIMIT_SECONDS, backend: str = "tensorflow"
) -> list[Cell]:
    """Run a script on one process, then on two ranks under each strategy; print each result."""
    cells = []
    alone: _Seen | None = None
    for strategy in ("", *strategies):
        began = time.monotonic()
        ranks = RANKS if strategy else 1
        done, seen = start(script, strategy, ranks, limit, backend)
        try:
            verdict, detail = judge(script, strategy, done, seen, alone, ranks, backend)
        except ScriptError as failure:
            verdict, detail = "FAILS", str(failure)
        if not strategy:
            alone = seen if verdict == "trains" else None
        cell = Cell(backend, script.name, strategy, verdict, detail, round(time.monotonic() - began, 1))
        cells.append(cell)
        print(
            f"{cell.seconds:5.1f} s  {script.name:22}{strategy or 'one process':36}{verdict} {detail[:300]}", flush=True
        )
        if verdict == "FAILS" and done.code:
            print(_traceback(done.out), flush=True)
    return cells


def _traceback(out: str) -> str:
    """Return the last lines before hvdx says which rank failed, indented."""
    lines = out.partition("\nhvdx: rank ")[0].splitlines()
    return "\n".join("    " + line for line in lines[-8:])


def merge(path: Path, cells: Sequence[Cell]) -> list[Cell]:
    """Write the cells to a file, one on a line, in place of earlier ones of the same backend, script and strategy."""
    known = [Cell(**row) for row in json.loads(path.read_text())] if path.exists() else []
    merged = {(cell.backend, cell.script, cell.strategy): cell for cell in [*known, *cells]}
    scripts = sorted(script.stem for script in FOLDER.glob("*.py"))
    order = [(b, script, s) for b, strategies in STRATEGIES.items() for script in scripts for s in ("", *strategies)]
    kept = [merged[place] for place in order if place in merged]
    path.write_text(harness.dump([asdict(cell) for cell in kept]))
    return kept


def rows_of(cells: Sequence[Cell], strategies: Sequence[str]) -> list[list[str]]:
    """Return a row for each script: its name and the verdict under each strategy."""
    verdicts = {
        (c.script, c.strategy): f"{c.verdict} {c.detail}" if c.verdict in ("equal", "trains") else c.verdict
        for c in cells
    }
    scripts = dict.fromkeys(cell.script for cell in cells)
    return [[script, *(verdicts.get((script, strategy), "") for strategy in ("", *strategies))] for script in scripts]


def write_page(page: Path, cells: Sequence[Cell]) -> None:
    """Put the results into a page, between its two marks."""
    head, _, rest = page.read_text().partition(_MARKS[0])
    _, _, tail = rest.partition(_MARKS[1])
    scripts = {path.stem: read(path) for path in sorted(FOLDER.glob("*.py"))}
    lines = []
    said: dict[tuple[str, str, str], list[str]] = {}
    for backend, strategies in STRATEGIES.items():
        here = [cell for cell in cells if cell.backend == backend]
        names = [s.replace(":", " ") for s in strategies]
        lines += [f"## With {TITLES[backend]}", ""]
        lines += ["| script | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for name, _, *verdicts in rows_of(here, strategies):
            lines.append(f"| [{name}](../tests/scripts/{name}.py) | " + " | ".join(verdicts) + " |")
        lines.append("")
        for cell in here:
            if cell.verdict in ("refused", "FAILS"):
                under = said.setdefault((f"`{cell.script}`, {TITLES[backend]}", cell.verdict, cell.detail), [])
                under.append(cell.strategy or "one process")
    lines += ["## What the scripts do", ""]
    for name, script in scripts.items():
        alone = f" One process gives {script.alone}" if script.alone else ""
        titles = " and ".join(TITLES[backend] for backend in script.backends)
        only = f" With {titles} only." if len(script.backends) < len(STRATEGIES) else ""
        lines.append(f"- `{name}`: {script.title}{alone}{only}")
    lines += ["", "What was refused or fails:", ""]
    lines += [
        f"- {where}, {verdict} under {', '.join(strategies)}: {' '.join(detail.split())}"
        for (where, verdict, detail), strategies in said.items()
    ]
    page.write_text(f"{head}{_MARKS[0]}\n\n" + "\n".join(lines) + f"\n\n{_MARKS[1]}{tail}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scripts and print a table for each backend."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.try_scripts", description=(__doc__ or "").partition("\n")[0], epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of scripts (default: all)")
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="beginnings of names (default: all)")
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", choices=STRATEGIES, default=["tensorflow"],
        help=f"backends of Keras: {', '.join(STRATEGIES)} (default: tensorflow)",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the scripts")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for a run (default: %(default)s)")
    parser.add_argument(
        "--save", action="store_true",
        help=f"put the results into {RESULTS.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}, beside earlier ones",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    known = {path.stem: path for path in sorted(chosen.folder.glob("*.py"))}
    began = time.monotonic()
    cells: list[Cell] = []
    tables = []
    for backend in chosen.backends:
        here = [s for s in STRATEGIES[backend] if "horovod" not in s or importlib.util.find_spec("horovod")]
        strategies = [s for s in here if not chosen.strategies or s.startswith(tuple(chosen.strategies))]
        scripts = [read(path) for name, path in known.items() if not chosen.only or name in chosen.only]
        scripts = [s for s in scripts if backend in s.backends]
        if not scripts or not strategies:
            parser.error(f"--only, --strategies: expected names of {list(known)} and beginnings of {here} for "
                         f"{backend}, got {chosen.only} and {chosen.strategies}")  # fmt: skip
        for done, script in enumerate(scripts, 1):
            print(f"{TITLES[backend]}, {done} of {len(scripts)}: {script.name}", flush=True)
            cells += attempt(script, strategies, chosen.limit, backend)
            if chosen.save:
                write_page(PAGE, merge(RESULTS, cells))
        rows = rows_of([c for c in cells if c.backend == backend], strategies)
        tables.append(render(rows, [TITLES[backend], "one process", *strategies]))
    print("", *tables, sep="\n\n")
    fails = [cell for cell in cells if cell.verdict == "FAILS"]
    print(f"\n{len(cells)} runs in {time.monotonic() - began:.0f} s, of which {len(fails)} fail")
    return 1 if fails else 0


if __name__ == "__main__":
    sys.exit(main())
