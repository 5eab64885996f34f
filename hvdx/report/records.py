"""Records of runs, read from their files: one for each rank, in one folder for each run. `lines` has the schema."""

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdx import foreign
from hvdx.errors import ConfigError
from hvdx.log import Log
from hvdx.report.lines import COLUMNS, PARTS, SCHEMA, decode, is_cut_off

_log = Log(__name__)

#: File beside the records in which `hvdx compare` stores the settings and the end of a run.
OUTCOME = "outcome.json"

_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True)
class Epoch:
    """End of an epoch.

    Attributes:
        epoch: number of epochs that were completed, from 1.
        step: steps of this rank since the fit began.
        time: seconds since the fit began.
        logs: metrics; None for one that was NaN or infinite.
        begin: seconds since the fit began, at the beginning of the epoch; None if it was not recorded.
        spans: what came after the steps, "flush" or "evaluation", with its begin and end in seconds of the fit.
    """

    epoch: int
    step: int
    time: float
    logs: dict[str, float | None]
    begin: float | None = None
    spans: list[tuple[str, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ClockOffset:
    """Offset between the clock of a rank and that of rank 0, each in seconds since its fit began.

    Attributes:
        time: time of the measurement by this rank's clock.
        offset: seconds to add to this rank's times, for those of rank 0.
        error: the largest error of `offset`, in seconds.
    """

    time: float
    offset: float
    error: float


@dataclass(frozen=True)
class Interruption:
    """Event that cost a training seconds which are not in its result.

    Attributes:
        time: seconds since the fit began.
        seconds: seconds that were lost.
        what: what happened, in words.
    """

    time: float
    seconds: float
    what: str


@dataclass(frozen=True)
class Deaths:
    """Deaths after which the other ranks trained on.

    Attributes:
        time: seconds since the fit began.
        ranks: ranks that died.
        left: number of ranks that are left.
        seconds: seconds until the others had repeated the exchange.
    """

    time: float
    ranks: Sequence[int]
    left: int
    seconds: float


@dataclass
class RankRecord:
    """Record of one rank in one fit.

    Attributes:
        header: fields of the line `fit`.
        steps: columns of the steps: float64[steps] each; the columns of a line that leaves them out are 0.
        epochs: the epochs.
        end: fields of the line `end`; None if the job died.
        clocks: the measured offsets of the clock; none on one worker.
        deaths: deaths of other ranks.
        divisions: rows of each rank in a step, whenever they changed.
        traced: indices in the columns of the calls that begin with compiling: the first one, and the one after a
            change of the strategy.
    """

    header: dict[str, Any]
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)
    end: dict[str, Any] | None = None
    clocks: list[ClockOffset] = field(default_factory=list)
    deaths: list[Deaths] = field(default_factory=list)
    divisions: list[list[int]] = field(default_factory=list)
    traced: list[int] = field(default_factory=lambda: [0])

    def settled(self, skip: int = 1) -> np.ndarray:
        """Return which calls are steady: bool[calls], False for the first calls after each compilation.

        Args:
            skip: number of calls to leave out each time.
        """
        kept = np.ones(self.steps["step"].size if self.steps else 0, bool)
        for first in self.traced:
            kept[first : first + skip] = False
        return kept


@dataclass
class Run:
    """Record of one fit on all its ranks.

    Attributes:
        ranks: record of each rank that wrote one.
        outcome: settings and end of the run from `hvdx compare`; empty without it.
        restarts: restarts of the job, in a run that `join_attempts` made.

    Example:
        >>> run = Run(Path("demo"), {0: RankRecord({"strategy": "AllReduce()", "size": 2})})
        >>> run.strategy, run.size, run.complete
        ('AllReduce()', 2, False)
    """

    folder: Path
    ranks: dict[int, RankRecord]
    outcome: dict[str, Any] = field(default_factory=dict)
    restarts: list[Interruption] = field(default_factory=list)

    @property
    def dead(self) -> set[int]:
        """Ranks that died while the others trained on."""
        return {rank for record in self.ranks.values() for deaths in record.deaths for rank in deaths.ranks}

    @property
    def first(self) -> RankRecord:
        """Record of the lowest rank that did not die."""
        return self.ranks[min(self.ranks.keys() - self.dead or self.ranks)]

    @property
    def header(self) -> dict[str, Any]:
        """Header of the first rank."""
        return self.first.header

    @property
    def strategy(self) -> str:
        """The strategy, as the call that makes it; "one worker" if the run has one."""
        return "one worker" if self.size == 1 else str(self.header.get("strategy", ""))

    @property
    def size(self) -> int:
        """Number of workers."""
        return int(self.header.get("size", len(self.ranks)))

    @property
    def epochs(self) -> list[Epoch]:
        """The epochs, by the clock of the first rank."""
        return self.first.epochs

    @property
    def complete(self) -> bool:
        """True if every rank that did not die recorded the end of the fit."""
        left = self.ranks.keys() - self.dead
        return len(left | self.dead) == self.size and all(self.ranks[rank].end is not None for rank in left)

    @property
    def interruptions(self) -> list[Interruption]:
        """Restarts, and deaths after which the others trained on, in the order of their times."""
        deaths = [
            Interruption(found.time, found.seconds, f"{_ranks(found.ranks)} died, and {found.left} trained on")
            for found in self.first.deaths
        ]
        return sorted([*self.restarts, *deaths], key=lambda interruption: interruption.time)

    @property
    def goodput(self) -> float:
        """Share of the seconds since the fit began that trained what is in the result, from 0 to 1."""
        lost = sum(interruption.seconds for interruption in self.interruptions)
        return max(0.0, 1.0 - lost / self.seconds) if self.seconds else 1.0

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the fit to its end, or to the last line that was written."""
        times = [0.0]
        for rank in self.ranks.values():
            times += [float(rank.end["time"])] if rank.end else []
            times += [epoch.time for epoch in rank.epochs[-1:]]
            times += rank.steps["time"][-1:].tolist() if rank.steps else []
        return max(times)

    def curve(self, metric: str) -> list[tuple[int, float, float | None]]:
        """Return a metric over the epochs: (epochs completed, seconds, value); None for NaN and infinity.

        Args:
            metric: name in the logs of Keras, such as "val_accuracy".
        """
        return [(e.epoch, e.time, e.logs[metric]) for e in self.epochs if metric in e.logs]

    def step_seconds(self, skip: int = 1) -> float:
        """Return the median of the seconds of a step, over all ranks and all steps after the first ones.

        Time between two epochs (validation, checkpoints) is outside the steps.

        Args:
            skip: number of calls of each rank to leave out after each compilation.
        """
        found = [(r.steps["seconds"] / _steps_of_calls(r))[r.settled(skip)] for r in self.ranks.values() if r.steps]
        together = np.concatenate(found) if found else np.zeros(0)
        return float(np.median(together)) if together.size else 0.0

    def parts(self, skip: int = 1) -> dict[str, float]:
        """Return the mean seconds of each part of a step, over all ranks; "other" is the rest of the step.

        Args:
            skip: as for `step_seconds`.
        """
        names = (*PARTS, "other")
        rows = []
        for rank in self.ranks.values():
            kept = rank.settled(skip)
            if not kept.any():
                continue
            steps = _steps_of_calls(rank)[kept].sum()
            known = {name: rank.steps[name][kept].sum() / steps for name in PARTS}
            total = rank.steps["seconds"][kept].sum() / steps
            rows.append([*known.values(), max(0.0, total - sum(known.values()))])
        means = np.mean(rows, axis=0) if rows else np.zeros(len(names))
        return dict(zip(names, means.tolist(), strict=True))

    def bytes_per_step(self) -> float:
        """Return the mean bytes that a rank sends in a step."""
        steps = sum(rank.steps["step"][-1] for rank in self.ranks.values() if rank.steps)
        return sum(rank.steps["sent"].sum() for rank in self.ranks.values() if rank.steps) / max(steps, 1)


def _ranks(numbers: Sequence[int]) -> str:
    if not numbers:
        return "a spare that had joined"
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _steps_of_calls(rank: RankRecord) -> np.ndarray:
    """Return the number of steps in each call of the training function."""
    return np.diff(rank.steps["step"], prepend=0)


def read(folder: str | os.PathLike[str]) -> list[Run]:
    """Read the records in a folder and in the folders below it, one `Run` for each fit.

    Args:
        folder: folder of one run, or a folder of such folders.

    Returns:
        The runs, by folder and by the order of their fits.

    Raises:
        ConfigError: if there is no record, one of a later version of hvdx, or one that cannot be opened. Damaged lines
            are left out with a warning.
    """
    root = Path(folder)
    folders = sorted({path.parent for path in root.rglob("rank-*.jsonl") if _FILE.fullmatch(path.name)})
    runs = [run for each in folders for run in _read_folder(each)]
    if not runs:
        raise ConfigError(
            f"{folder}: expected records of runs (rank-0.jsonl ...), got none. "
            "Record a run: HVDX_RECORD=DIR hvdx run -n 2 python train.py"
        )
    return runs


def _read_folder(folder: Path) -> list[Run]:
    # A fit that died early may be missing in the files of some ranks, so its number does not identify it.
    fits: dict[Any, dict[int, RankRecord]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        match = _FILE.fullmatch(path.name)
        for number, record in enumerate(_read_file(path) if match else []):
            fits.setdefault(record.header.get("id", number), {})[int(match.group(1))] = record  # type: ignore[union-attr]
    outcome = read_outcome(folder)
    runs = [Run(folder, dict(sorted(ranks.items())), outcome) for ranks in fits.values()]
    return sorted(runs, key=lambda run: float(run.header.get("time", 0.0)))


def read_outcome(folder: Path) -> dict[str, Any]:
    """Return the settings and the end of a run that `hvdx compare` started; empty if there are none."""
    try:
        found = json.loads(foreign.read(folder / OUTCOME))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, which only a line feed ends; in place of one that is too long, a remark.

    Raises:
        ConfigError: if the file cannot be read.
    """
    try:
        with foreign.open_regular(path) as file:
            while data := file.readline(foreign.LARGEST):
                whole = data.endswith(b"\n") or len(data) < foreign.LARGEST
                line = data.removesuffix(b"\n").decode(errors="replace")
                yield line if whole else f"a line of more than {foreign.LARGEST} bytes"
                while not data.endswith(b"\n") and (data := file.readline(foreign.LARGEST)):
                    pass
    except OSError as error:
        raise ConfigError(f"{path}: expected a record, got: {error.strerror}. Do: remove it, or repair it.") from error


def _read_file(path: Path) -> list[RankRecord]:
    records: list[RankRecord] = []
    columns: list[dict[str, list[list[float]]]] = []
    left_out: list[str] = []
    last_step, in_fit = 0.0, False
    for number, line in enumerate(_lines(path), 1):
        kind, values, problem = decode(line, last_step)
        if problem:
            if line and not (not kind and is_cut_off(line)):
                left_out.append(f"line {number}: {problem}")
            # The lines of a fit without its first line belong to no fit.
            in_fit = in_fit and kind != "fit"
            continue
        if kind == "fit":
            if int(values.get("schema", 0)) > SCHEMA:
                raise ConfigError(
                    f"{path}: line {number}: expected a record of schema {SCHEMA} or earlier, got {values['schema']}. "
                    "Read it with the version of hvdx that wrote it, or a later one."
                )
            records.append(RankRecord(values))
            columns.append({})
            last_step, in_fit = 0.0, True
        elif in_fit and kind == "steps":
            for name in COLUMNS:
                zeros = [0.0] * len(values["step"])
                columns[-1].setdefault(name, []).append(values.get(name, zeros))
            last_step = max([last_step, *values["step"]])
        elif in_fit and kind == "strategy":
            records[-1].header["chosen"] = values.get("strategy")
            records[-1].traced.append(sum(map(len, columns[-1].get("step", []))))
        elif in_fit and kind == "epoch":
            given = {name: values[name] for name in ("epoch", "step", "time", "begin") if name in values}
            spans = [(str(name), begin, end) for name, begin, end in values.get("spans", ())]
            records[-1].epochs.append(Epoch(**given, logs=values.get("logs", {}), spans=spans))
        elif in_fit and kind == "death":
            records[-1].deaths.append(Deaths(values["time"], values["ranks"], values["left"], values["seconds"]))
        elif in_fit and kind == "division":
            records[-1].divisions.append(values["rows"])
        elif in_fit and kind == "clock":
            records[-1].clocks.append(ClockOffset(values["time"], values["offset"], values["error"]))
        elif in_fit and kind == "end":
            records[-1].end = values
    if left_out:
        more = f"; {len(left_out) - 1} more lines are left out" if len(left_out) > 1 else ""
        _log.warning(f"{path}: {left_out[0]}. The line is left out{more}.", head="hvdx: WARNING: ")
    for record, found in zip(records, columns, strict=True):
        record.steps = {name: np.array([*itertools.chain(*lists)], np.float64) for name, lists in found.items()}
    return records
