"""Mutation tests: put one fault at a time into a copy of the project, and check that its tests fail.

    python -m tests.mutate                          all faults of tests/mutants.toml
    python -m tests.mutate --only mean-not-divided  some of them
    python -m tests.mutate --list                   their names, and the test that has to find each

A test that passes on broken code protects nothing. Each fault replaces one line of the project, and names the narrowest
test that must fail then.
"""

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hvdx.cache import kernels_folder
from tests.launch import ROOT, environment

#: The faults.
FAULTS = ROOT / "tests" / "mutants.toml"
# This variable marks all processes of a run, in whichever session they are.
_MARK = "HVDX_MUTATE"
_LIMIT_SECONDS = 180.0
# Number of lines of a test's output that are shown for a problem.
_LINES = 25

_EPILOG = """\
what becomes of a fault:
  found       its test failed, or the process died
  hung        its test did not end within the time limit, and was killed: the fault was noticed
  SURVIVED    its test passed. Write the test that is missing, or choose a fault that matters
  ERROR       the text is not there, not once, or pytest could not run the test (exit codes 2 to 5: a fault has to be
              one that can still be imported)

First every test has to pass on the unbroken copy. The copies hold the files that git tracks, as they are now, and lie
in a temporary folder; the working tree is never touched.

a fault in tests/mutants.toml:
  [[mutant]]
  name = "mean-not-divided"               unique; letters, digits and dashes
  file = "hvdx/strategies/auto.py"
  old = "self._flat /= self._size"        stands exactly once in the file
  new = "self._flat /= 1"
  test = "tests/strategies/test_auto.py::test_trial_averages[2]"      or a list of them
  ranks = 2                               only for tests/ranks: run under mpirun with this number of ranks
  why = "the sum passes for the mean"     only where it is not plain

Exit code 0: all were found; 1: some were not; 130: interrupted.
"""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: unique.
        file: path from the top of the project.
        old, new: text that occurs once in the file, and its replacement.
        tests: pytest's node ids, of which one must fail.
        ranks: number of ranks that run the tests; 1 runs without a launcher.
        why: explanation of the fault, if `new` does not show it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    ranks: int = 1
    why: str = ""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one fault.

    Attributes:
        mutant: the fault.
        result: "found", "hung", "SURVIVED" or "ERROR".
        seconds: duration of its tests.
        detail: explanation for people; "" for none.
    """

    mutant: Mutant
    result: str
    seconds: float = 0.0
    detail: str = ""

    @property
    def fine(self) -> bool:
        """True if the tests noticed the fault."""
        return self.result in ("found", "hung")

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        about = {"name": self.mutant.name, "file": self.mutant.file, "tests": list(self.mutant.tests)}
        return about | {"ranks": self.mutant.ranks, "result": self.result, "seconds": round(self.seconds, 1)}


@dataclass(frozen=True)
class Ended:
    """Result of one run of pytest.

    Attributes:
        code: exit status; None if the time limit ended it.
        out: output.
        seconds: duration.
    """

    code: int | None
    out: str
    seconds: float

    @property
    def tail(self) -> str:
        """Last lines of the output, indented."""
        return "\n".join(f"    {line}" for line in self.out.splitlines()[-_LINES:])


class _StoppedError(Exception):
    """The user has interrupted the run."""


def load(path: Path) -> list[Mutant]:
    """Read faults.

    Args:
        path: a file such as tests/mutants.toml.

    Raises:
        ValueError: if an entry lacks a key, has an unknown one, or repeats a name.
    """
    found = []
    for entry in tomllib.loads(path.read_text())["mutant"]:
        fields = dict(entry)
        tests = fields.pop("test", ())
        try:
            found.append(Mutant(tests=(tests,) if isinstance(tests, str) else tuple(tests), **fields))
        except TypeError as error:
            raise ValueError(f"{path.name}: {entry.get('name', entry)}: {error}") from None
    names = [mutant.name for mutant in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path.name}: expected each name once, got {', '.join(twice)} more often.")
    return found


def problem(mutant: Mutant, root: Path) -> str:
    """Return the reason why a fault does not apply to the files below `root`; "" if it does."""
    path = root / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    count = path.read_text().count(mutant.old)
    if count != 1:
        return "old text not found" if count == 0 else f"the old text stands {count} times in {mutant.file}"
    return "the new text is the old one" if mutant.old == mutant.new else ""


def missing_test(node: str, root: Path) -> str:
    """Return the part of a node id, file or function, that is missing below `root`; "" if both exist."""
    file, _, rest = node.partition("::")
    function = rest.partition("[")[0].rpartition("::")[2]
    path = root / file
    if not path.is_file():
        return f"there is no {file}"
    return "" if f"def {function}(" in path.read_text() else f"there is no {function} in {file}"


class Copy:
    """A copy of the project in which one file at a time is broken.

    Args:
        root: the project, a working tree of git.
        folder: place of the copy; its temporary files go beside it.
    """

    def __init__(self, root: Path, folder: Path):
        self.folder, self.mark, self._writes = folder, uuid.uuid4().hex, 0
        self._scratch = folder.with_name(f"{folder.name}t")
        self._cache = folder.with_name(f"{folder.name}c")
        (self._cache / "kernels").mkdir(parents=True)
        for kept in kernels_folder().glob("*"):
            (self._cache / "kernels" / kept.name).symlink_to(kept)
        self._scratch.mkdir(parents=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            # hvdx/kernels and hvdx/jobs are links to folders.
            if (root / name).is_file() or (root / name).is_symlink():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)

    @contextlib.contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """Put a fault in until the block ends."""
        path = self.folder / mutant.file
        text, before = path.read_text(), path.stat()
        try:
            path.write_text(text.replace(mutant.old, mutant.new))
            # Python compares modification times in seconds to validate its compiled files.
            self._writes += 1
            os.utime(path, (before.st_mtime + self._writes, before.st_mtime + self._writes))
            yield
        finally:
            path.write_text(text)
            os.utime(path, (before.st_atime, before.st_mtime))

    def pytest(self, tests: Sequence[str], ranks: int, limit: float, stop: threading.Event, *options: str) -> Ended:
        """Run some tests in the copy, and kill all their processes at the time limit.

        Args:
            tests: node ids.
            ranks: see `Mutant`.
            limit: seconds.
            stop: set if the run is interrupted.
            options: options of pytest.

        Raises:
            _StoppedError: if `stop` is set.
        """
        command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *options, *tests]
        if ranks > 1:
            from hvdx.cli.common.mpi_tools import mpirun_command

            command = mpirun_command(ranks) + command
        # Broken kernels must not enter the cache of the correct ones.
        here = {"PYTHONPATH": str(self.folder), "TMPDIR": str(self._scratch), "HVDX_CACHE": str(self._cache)}
        env = environment(here | {_MARK: self.mark})
        begin = time.monotonic()
        with (self._scratch / "out").open("w+b") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = _wait(process, begin + limit, stop)
            finally:
                kill_marked(self.mark)
                process.wait()
            seconds = time.monotonic() - begin
            out.seek(0)
            return Ended(code, out.read().decode(errors="replace"), seconds)


def _wait(process: subprocess.Popen, end: float, stop: threading.Event) -> int | None:
    while time.monotonic() < end:
        if stop.is_set():
            raise _StoppedError
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
    return None


def kill_marked(mark: str) -> None:
    """Kill all processes with a mark in their environment, because ranks and tests' processes leave the process group.

    Args:
        mark: value of the variable, made by `Copy`.
    """
    wanted = f"{_MARK}={mark}".encode()
    for _ in range(50):
        left = 0
        for folder in Path("/proc").glob("[0-9]*"):
            # Processes of other users, and those that have just ended, cannot be read. Zombies have no environment.
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    left += 1
        if not left:
            return
        time.sleep(0.05)


def try_out(mutant: Mutant, copy: Copy, limit: float, stop: threading.Event) -> Outcome:
    """Put a fault into a copy, run its tests, and take it out again.

    Args:
        mutant: the fault.
        copy: copy of the project.
        limit: seconds for its tests.
        stop: see `Copy.pytest`.
    """
    wrong = problem(mutant, copy.folder)
    if wrong:
        return Outcome(mutant, "ERROR", detail=wrong)
    with copy.broken(mutant):
        ended = copy.pytest(mutant.tests, mutant.ranks, limit, stop, "-x", "-rs")
    if ended.code is None:
        return Outcome(mutant, "hung", ended.seconds)
    if ended.code == 0:
        skipped = "its test was skipped" if "SKIPPED" in ended.out else ""
        return Outcome(mutant, "SURVIVED", ended.seconds, skipped)
    # Exit statuses of pytest: error of collection, internal error, wrong usage, no tests.
    if 2 <= ended.code <= 5:
        return Outcome(mutant, "ERROR", ended.seconds, f"pytest ended with exit code {ended.code}:\n{ended.tail}")
    return Outcome(mutant, "found", ended.seconds)


def unbroken(tests: Mapping[int, Sequence[str]], copy: Copy, limit: float, stop: threading.Event) -> str:
    """Run the tests of all faults on an unchanged copy, in one launch for each number of ranks.

    Args:
        tests: node ids by number of ranks.
        copy: copy of the project.
        limit: seconds for one test.
        stop: see `Copy.pytest`.

    Returns:
        Description of the failure; "" if all tests passed and none was skipped.
    """
    for ranks, nodes in sorted(tests.items()):
        ended = copy.pytest(nodes, ranks, limit * len(nodes), stop, "-rfEs")
        print(f"  {len(nodes)} tests at {ranks} rank{'s' * (ranks > 1)}: {ended.seconds:.0f} s", flush=True)
        if ended.code != 0 or "SKIPPED" in ended.out:
            return f"exit code {ended.code} at {ranks} ranks, or a test was skipped:\n{ended.tail}"
    return ""


def distinct_tests(mutants: Sequence[Mutant]) -> dict[int, list[str]]:
    """Return the node ids of some faults, each once, by number of ranks."""
    found: dict[int, dict[str, None]] = {}
    for mutant in mutants:
        found.setdefault(mutant.ranks, {}).update(dict.fromkeys(mutant.tests))
    return {ranks: list(nodes) for ranks, nodes in found.items()}


class Run:
    """Run of all faults, several at once.

    Args:
        mutants: the faults.
        root: the project.
        jobs: number of copies of the project that run at once.
        limit: seconds for the tests of one fault.
    """

    def __init__(self, mutants: Sequence[Mutant], root: Path, jobs: int, limit: float):
        self._mutants, self._root, self._jobs, self._limit = list(mutants), root, jobs, limit
        self._todo: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.outcomes: list[Outcome] = []

    def all(self, check_first: bool = True) -> str:
        """Try all faults, and append the result of each to `outcomes` at once.

        Args:
            check_first: run the tests without faults first; they must pass.

        Returns:
            The reason why no fault was tried; "" if they were.
        """
        folder = Path(tempfile.mkdtemp(prefix="hvdx-"))
        copies = []
        try:
            copies = [Copy(self._root, folder / str(i)) for i in range(min(self._jobs, len(self._mutants)))]
            if check_first:
                print("the tests without faults:", flush=True)
                wrong = unbroken(distinct_tests(self._mutants), copies[0], self._limit, self._stop)
                if wrong:
                    return wrong
            for mutant in self._mutants:
                self._todo.put(mutant)
            workers = [threading.Thread(target=self._work, args=(copy,), daemon=True) for copy in copies]
            for worker in workers:
                worker.start()
            try:
                self._report(len(workers))
            finally:
                self._stop.set()
                for worker in workers:
                    worker.join()
            return ""
        finally:
            for copy in copies:
                kill_marked(copy.mark)
            shutil.rmtree(folder, ignore_errors=True)

    def _work(self, copy: Copy) -> None:
        with contextlib.suppress(queue.Empty, _StoppedError):
            while not self._stop.is_set():
                mutant = self._todo.get_nowait()
                try:
                    self._done.put(try_out(mutant, copy, self._limit, self._stop))
                except OSError as error:
                    self._done.put(Outcome(mutant, "ERROR", detail=str(error)))
        self._done.put(None)

    def _report(self, workers: int) -> None:
        """Print outcomes as they arrive, until all workers have ended."""
        begin, total = time.monotonic(), len(self._mutants)
        width = max(len(mutant.name) for mutant in self._mutants)
        while workers:
            outcome = self._done.get()
            if outcome is None:
                workers -= 1
                continue
            assert isinstance(outcome, Outcome)
            self.outcomes.append(outcome)
            count = len(self.outcomes)
            left = (time.monotonic() - begin) / count * (total - count)
            after = f", {_in_words(left)} left" if count < total else ""
            print(
                f"[{count:>{len(str(total))}}/{total}] {outcome.result:<8} {outcome.mutant.name:<{width}} "
                f"{outcome.seconds:6.1f} s{after}",
                flush=True,
            )
            if outcome.detail:
                print(f"    {outcome.detail.lstrip()}", flush=True)


def _in_words(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {seconds:.0f} s"


def summary(outcomes: Sequence[Outcome], total: int) -> str:
    """Return the counts of all outcomes, and the names of the faults that need attention."""
    counts = {kind: sum(o.result == kind for o in outcomes) for kind in ("found", "hung", "SURVIVED", "ERROR")}
    lines = [f"{total} faults: " + ", ".join(f"{n} {kind}" for kind, n in counts.items() if n or kind == "found")]
    for outcome in outcomes:
        if not outcome.fine:
            lines.append(f"  {outcome.result} {outcome.mutant.name}: {outcome.mutant.file}")
            lines += [f"      {test}" for test in outcome.mutant.tests]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, root: Path = ROOT, faults: Path = FAULTS) -> int:
    """Run the command; see the docstring of this module.

    Args:
        argv: arguments after the command's name.
        root: folder of the project.
        faults: file of the faults.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutate",
        description="Put one fault at a time into a copy of the project, and see whether the tests notice it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--jobs", type=int, default=1, metavar="N", help="faults that are tried side by side; 1 by default")
    add("--only", nargs="+", metavar="NAME", help="these faults alone")
    add("--list", action="store_true", help="print the faults, and run nothing")
    add(
        "--limit",
        type=float,
        default=_LIMIT_SECONDS,
        metavar="SECONDS",
        help="for each fault; %(default).0f by default",
    )
    add("--unchecked", action="store_true", help="leave out the run of the tests without faults")
    add("--json", type=Path, metavar="FILE", help="write what became of each fault there")
    args = parser.parse_args(argv)
    mutants = load(faults)
    if args.only:
        unknown = [name for name in args.only if name not in {m.name for m in mutants}]
        if unknown:
            parser.error(f"--only: there is no fault called {', '.join(unknown)}. Do: python -m tests.mutate --list")
        mutants = [m for m in mutants if m.name in args.only]
    if args.jobs < 1:
        parser.error(f"--jobs: expected 1 or more, got {args.jobs}.")
    if args.list:
        for mutant in mutants:
            ranks = f" at {mutant.ranks} ranks" if mutant.ranks > 1 else ""
            print(f"{mutant.name}: {mutant.file}: {', '.join(mutant.tests)}{ranks}")
        return 0
    return _run(Run(mutants, root, args.jobs, args.limit), len(mutants), not args.unchecked, args.json)


def _run(run: Run, total: int, check_first: bool, file: Path | None) -> int:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with _handling(signal.SIGTERM, interrupt):
        try:
            wrong = run.all(check_first)
        except KeyboardInterrupt:
            print("\ninterrupted; nothing is left behind", file=sys.stderr)
            return 130
        finally:
            if file is not None:
                file.write_text(json.dumps([outcome.as_json() for outcome in run.outcomes], indent=1) + "\n")
    if wrong:
        print(f"the tests have to pass without faults first: {wrong}")
        return 1
    print(f"\n{summary(run.outcomes, total)}")
    return 0 if len(run.outcomes) == total and all(outcome.fine for outcome in run.outcomes) else 1


@contextlib.contextmanager
def _handling(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    """Handle a signal until the block ends; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


if __name__ == "__main__":
    sys.exit(main())
