"""Recording of a fit: the rows and lines that `Distribute` writes to the record of its rank.

A step appends one tuple of numbers. All other work is done once a second, when the rows are written. The counters of
exchanges on the host are read after each call of the training function. Those of exchanges in the graph are variables
of TensorFlow; they are read once for each line, and its calls share the difference evenly.
"""

import atexit
import os
import time
import uuid
from collections.abc import Callable, Sequence

import numpy as np

from hvdx.comm.offsets import Offset
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.fit.description import peak_memory
from hvdx.keras.types import LogValues
from hvdx.log import WARNING, Log
from hvdx.report.lines import COLUMNS, SCHEMA, Writer
from hvdx.strategies.telemetry import Telemetry

_log = Log(__name__)

#: Environment variable: folder of the record.
VARIABLE = "HVDX_RECORD"
# Decimals of times in seconds.
_DECIMALS = 7
# Counters that only grow, and their columns; staleness is the sum over the updates, and their number.
_TIMES = ("computing", "encoding", "waiting", "exchanging", "decoding")
_BYTES = ("sent", "received")
_GROWING = (*_TIMES, *_BYTES, "staleness", "updates")
_ZEROS = (0.0,) * (len(_GROWING) + 1)
# Recordings whose fit has not ended. An exception may have ended it, so their rows are written before another fit
# begins, which may use the same file, or when the process ends.
_unfinished: list["Recording"] = []


class Recording:
    """Recording of the fits of one `Distribute`.

    Args:
        folder: folder of the run; None for that of HVDX_RECORD; without one, nothing is recorded.
        interval: seconds between two writes.

    Raises:
        ConfigError: if the folder is not a path.

    Attributes:
        on: True while a fit is recorded.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, interval: float = 1.0):
        if folder is not None and not (isinstance(folder, str | os.PathLike) and os.fspath(folder)):
            raise ConfigError(f"record: expected a folder or None, got {folder!r}. Use Distribute(record='runs/one').")
        self._folder = folder if folder is not None else os.environ.get(VARIABLE) or None
        self._interval = interval
        self.on = False
        self._writer: Writer | None = None
        self._error = ""
        self._rank = 0
        self._clear()

    def _clear(self) -> None:
        self._header: dict[str, object] = {}
        self._describe: Callable[[], dict[str, object]] | None = None
        self._adapters: Callable[[], Sequence[Adapter]] = list
        self._rows: list[tuple[float, ...]] = []
        # Counters after the last row that was written, and those at the end of an epoch's steps.
        self._before: Sequence[float] = _ZEROS
        self._at_end: Sequence[float] | None = None
        self._start = self._began = self._written = 0.0
        self._step = 0
        # Lines that wait for the header.
        self._clocks: list[dict[str, float]] = []
        # Begin of the epoch and of the present span of it, and the spans that have ended: name, begin, end.
        self._epoch_began = self._span_began = 0.0
        self._spans: list[tuple[str, float, float]] = []

    # -- the start of a fit -------------------------------------------------------------------------------------------

    def begin(
        self, rank: int, adapters: Callable[[], Sequence[Adapter]], describe: Callable[[], dict[str, object]]
    ) -> None:
        """Begin a fit. Errors are kept for `agree`.

        Args:
            rank: rank of this process.
            adapters: function that returns the adapters of the fit.
            describe: function that returns the header's fields after the first step, when the model is built.
        """
        close_all()
        self._clear()
        self._error = ""
        if self._folder is None:
            return
        self._rank, self._adapters, self._describe = rank, adapters, describe
        self._header = {"schema": SCHEMA, "id": uuid.uuid4().hex, "time": time.time()}
        self._start = self._began = time.perf_counter()
        try:
            self._writer = Writer(self._folder, rank)
        except ConfigError as error:
            self._error = str(error)
            return
        self.on = True
        _unfinished.append(self)

    @property
    def state(self) -> tuple[bool, str, str]:
        """Whether this rank records, its error, and its name of the fit: what `agree` compares."""
        return self._folder is not None, self._error, str(self._header.get("id", ""))

    def agree(self, everyone: Sequence[tuple[bool, str, str]]) -> None:
        """Compare the ranks, and use rank 0's name of the fit.

        Args:
            everyone: `state` of all ranks.

        Raises:
            ConfigError: on all ranks, if one of them cannot write its record.
            ReplicaError: on all ranks, if only some of them record.
        """
        idle = [rank for rank, (records, _, _) in enumerate(everyone) if not records]
        if 0 < len(idle) < len(everyone):
            self.close()
            raise ReplicaError(
                f"record: expected a folder on all ranks or on none, got none on ranks {idle}. {VARIABLE} must reach "
                f"all hosts (mpirun -x {VARIABLE})."
            )
        failed = next(((rank, text) for rank, (_, text, _) in enumerate(everyone) if text), None)
        if failed is not None:
            self.close()
            raise ConfigError.on_all_ranks(f"rank {failed[0]}: {failed[1]}" if len(everyone) > 1 else failed[1])
        if self.on:
            self._header["id"] = everyone[0][2]

    def add_offset(self, offset: Offset) -> None:
        """Write the offset of the clock `seconds` as it is now.

        Args:
            offset: offset between `seconds` of this rank and of rank 0.
        """
        if not self.on:
            return
        clock = {"time": self.seconds(), "offset": offset.seconds, "error": offset.error}
        if self._describe is not None:
            self._clocks.append(clock)
        else:
            self._put("clock", **clock)

    def add_death(self, ranks: Sequence[int], left: int, seconds: float) -> None:
        """Write a death after which the others went on.

        Args:
            ranks: those that died, by their numbers at the begin of the fit.
            left: number of ranks that are left.
            seconds: seconds that the others lost.
        """
        if self.on:
            self._line("death", time=self.seconds(), ranks=list(ranks), left=left, seconds=round(seconds, _DECIMALS))

    def divide(self, position: tuple[int, int], rows: Sequence[int]) -> None:
        """Write a change of the division of a step's rows.

        Args:
            position: number of the order of the samples, and of the first step in it that the change concerns.
            rows: rows of each rank.
        """
        if self.on:
            self._line("division", time=self.seconds(), position=list(position), rows=list(rows))

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Start the clock of a call of the training function."""
        self._began = time.perf_counter()

    def step_ends(self, step: int) -> None:
        """Add a row for the call that has ended.

        Args:
            step: steps of this rank since the fit began.
        """
        now = time.perf_counter()
        self._step = step
        self._rows.append((step, now, now - self._began, *self._counters()))

    def write_if_due(self) -> None:
        """Write the rows if the last write is long enough ago."""
        if self._rows and self._rows[-1][1] - self._written > self._interval:
            self._write()

    def steps_end(self) -> None:
        """Read the counters after the last step of an epoch, before the adapters are flushed."""
        self._at_end = self._read()
        self.span_begins()

    # -- epochs -------------------------------------------------------------------------------------------------------

    def epoch_begins(self) -> None:
        """Note the time."""
        self._epoch_began, self._spans = self.seconds(), []

    def span_begins(self) -> None:
        """Note the time at which something outside of the steps begins, such as a validation."""
        self._span_began = self.seconds()

    def span_ends(self, name: str) -> None:
        """Keep the name and the times of what has ended, for the line of the epoch."""
        self._spans.append((name, self._span_began, self.seconds()))

    def end_epoch(self, epoch: int, logs: LogValues, counters: dict[str, float]) -> None:
        """Write the rows and the line of an epoch.

        Args:
            epoch: number of epochs that were completed, from 1.
            logs: metrics over all ranks.
            counters: counters of the exchanges since the fit began; empty if they are not shown during training.
        """
        if not self.on:
            return
        self._write(epoch_over=True)
        values = {name: value for name, value in logs.items() if np.ndim(value) == 0}
        more = {"counters": counters} if counters else {}
        self._line(
            "epoch",
            epoch=epoch,
            step=self._step,
            begin=self._epoch_began,
            time=self.seconds(),
            spans=self._spans,
            logs=values,
            memory=peak_memory(),
            **more,
        )

    def switch(self, strategy: str) -> None:
        """Write the rows of a provisional strategy, and the line of its successor.

        Args:
            strategy: the successor. The adapters' counters begin again at 0.
        """
        if not self.on:
            return
        self._line("strategy", step=self._step, time=self.seconds(), strategy=strategy)
        self.restart_counters()

    def restart_counters(self) -> None:
        """Count from 0, as the adapters do that have opened their exchanges anew between two epochs."""
        self._before = _ZEROS

    def before_switch(self) -> None:
        """Write the rows before the adapters are replaced."""
        if self.on:
            self.steps_end()
            self._write(epoch_over=True)

    def end(self, reason: str, counters: dict[str, float]) -> None:
        """Write the end of the fit.

        Args:
            reason: "done", "stopped" or "limit".
            counters: counters of the exchanges.
        """
        if not self.on:
            return
        self._write(epoch_over=True)
        memory = peak_memory()
        self._line("end", time=self.seconds(), steps=self._step, reason=reason, memory=memory, counters=counters)
        self._stop()

    def close(self) -> None:
        """Write what is left of a fit that an exception has ended; do nothing after `end`."""
        if not self.on:
            return
        try:
            self._write(epoch_over=True, live=False)
        except Exception as error:  # The process is ending because of another error, which matters more.
            _log.urgent(WARNING, f"record: its last rows are missing: {error}")
        self._stop()

    # -- lines --------------------------------------------------------------------------------------------------------

    def seconds(self) -> float:
        """Return the seconds since the fit began."""
        return round(time.perf_counter() - self._start, _DECIMALS)

    def _stop(self) -> None:
        self.on = False
        _unfinished[:] = [other for other in _unfinished if other is not self]
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _line(self, kind: str, **values: object) -> None:
        self._begin_lines()
        self._put(kind, **values)

    def _begin_lines(self) -> None:
        """Write the header, once."""
        if self._describe is not None:
            describe, self._describe = self._describe, None
            self._put("fit", **self._header, **describe())
            clocks, self._clocks = self._clocks, []
            for clock in clocks:
                self._put("clock", **clock)

    def _put(self, kind: str, **values: object) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(kind, **values)
        except OSError as error:
            # Training is worth more than its record.
            _log.warning(
                f"rank {self._rank} records no more: {self._writer.path}: {error.strerror}.", head="hvdx: WARNING: "
            )
            self._stop()

    def _write(self, epoch_over: bool = False, live: bool = True) -> None:
        """Write the rows, except the last one in the middle of an epoch: the end of an epoch may add bytes to it.

        Args:
            epoch_over: write all rows.
            live: False if the counters in the graph may not be read any more.
        """
        if not self._rows:
            return
        self._written = self._rows[-1][1]
        rows = np.array(self._rows, np.float64)
        now = self._read() if live else self._before
        at_end, self._at_end = self._at_end, None
        own = rows[:, 3:]
        if not own.size:
            own = np.linspace(self._before, at_end if epoch_over and live and at_end else now, len(rows) + 1)[1:]
        if epoch_over and live:
            # Bytes that adapters send in a flush; the time of a flush is not the time of a step.
            for name in _BYTES:
                own[-1, _GROWING.index(name)] = now[_GROWING.index(name)]
        written = len(rows) if epoch_over else len(rows) - 1
        self._begin_lines()
        if written == 0:
            return
        self._line("steps", **columns(rows[:written, :3], own[:written], self._before, self._start))
        self._rows = self._rows[written:]
        self._before = now if epoch_over else tuple(own[written - 1])

    # -- counters -----------------------------------------------------------------------------------------------------

    def _counters(self) -> tuple[float, ...]:
        """Return the counters of exchanges on the host, density last; () if the counters are in the graph."""
        adapters = self._adapters()
        if not adapters:
            return ()
        found: list[Telemetry] = []
        for adapter in adapters:
            telemetries = adapter.telemetries
            if telemetries is None:
                return ()
            found += telemetries
        return _of(found[0]) if len(found) == 1 else _sum(found)

    def _read(self) -> tuple[float, ...]:
        """Return the counters of all exchanges as they are now."""
        return self._counters() or _sum([adapter.cost() for adapter in self._adapters()])


@atexit.register
def close_all() -> None:
    """Close the recordings of fits that exceptions have ended."""
    for recording in list(_unfinished):
        recording.close()


def _of(counts: Telemetry) -> tuple[float, ...]:
    """Return the counters of one exchange: those that grow, then the density."""
    staleness = getattr(counts, "staleness", None)
    total, updates = 0.0, 0.0
    if staleness:
        total, updates = sum(s * n for s, n in staleness.items()), sum(staleness.values())
    return (
        counts.computing,
        counts.encoding,
        counts.waiting,
        counts.exchanging,
        counts.decoding,
        counts.sent,
        counts.received,
        total,
        updates,
        counts.density,
    )


def _sum(found: Sequence[Telemetry]) -> tuple[float, ...]:
    """Return the sums over some exchanges, and the density of the largest one."""
    if not found:
        return _ZEROS
    largest = max(found, key=lambda counts: counts.elements)
    return (*map(sum, zip(*(_of(counts)[:-1] for counts in found), strict=True)), largest.density)


def columns(calls: np.ndarray, counters: np.ndarray, before: Sequence[float], start: float) -> dict[str, np.ndarray]:
    """Return the columns of a line of steps, without those that are zero.

    Args:
        calls: float64[rows, 3], steps so far, end in seconds of the clock, and duration of each call.
        counters: float64[rows, 10], counters after each call: those that grow, then the density.
        before: counters before the first row.
        start: time of the clock at which the fit began.

    Returns:
        Columns by their name in `hvdx.report.lines.COLUMNS`: float64[rows] or int64[rows].
    """
    grown = np.maximum(np.diff(counters[:, :-1], axis=0, prepend=[list(before[:-1])]), 0.0)
    by_name = dict(zip(_GROWING, grown.T, strict=True))
    found = {"step": calls[:, 0].astype(np.int64), "time": calls[:, 1] - start, "seconds": calls[:, 2]}
    # The time between two exchanges includes that between two calls.
    rest = found["seconds"] - sum(by_name[name] for name in _TIMES[1:])
    found |= {name: by_name[name] for name in _TIMES[1:]}
    found["computing"] = np.clip(by_name["computing"], 0.0, np.maximum(rest, 0.0))
    for name in _BYTES:
        # Differences of rounded sums, so that the sum of the column is exact.
        sums = np.round([before[_GROWING.index(name)], *counters[:, _GROWING.index(name)]])
        found[name] = np.maximum(np.diff(sums), 0.0).astype(np.int64)
    found["density"] = counters[:, -1]
    updates = by_name["updates"]
    found["staleness"] = np.divide(by_name["staleness"], updates, out=np.zeros_like(updates), where=updates > 0)
    kept = {name: found[name] for name in COLUMNS if name in ("step", "time", "seconds") or found[name].any()}
    return {n: values if values.dtype == np.int64 else np.round(values, _DECIMALS) for n, values in kept.items()}
