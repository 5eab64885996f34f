"""Helpers of the benchmarks: options, JSON files, statistics, and workers that report their figures."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

import hvdx
from hvdx.cli.common import processes
from hvdx.cli.common.mpi_tools import mpirun_command
from hvdx.comm import launcher
from hvdx.errors import ConfigError
from hvdx.report.table import render

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from hvdx.jobs.data import Data

T = TypeVar("T")
#: Object of a JSON document: the figures of a case, or the values given to a worker.
Row = dict[str, Any]
#: Column of a table: its header, and a function that formats the cell of a row.
Column = tuple[str, Callable[[Row], str]]
#: Metrics that Keras hands to a callback.
Logs = Mapping[str, float] | None

#: Pixels and classes of Fashion-MNIST.
INPUTS, CLASSES = 784, 10
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}
_BITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}
_DIGITS = 6
# Seconds between two stored copies of the weights.
_STORE_SECONDS = 0.25
# Bytes of the headers of a packet: Ethernet 14, IPv4 20, TCP with timestamps 32.
_HEADERS = 66


# -- options and figures ----------------------------------------------------------------------------------------------


class _Format(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps the layout of the description, and shows the defaults of options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.help and not any(action.default is none for none in (None, False, argparse.SUPPRESS))
        return f"{action.help} (default: %(default)s)" if shown else action.help


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --json.

    Args:
        text: description, the docstring of the benchmark's module.
    """
    made = argparse.ArgumentParser(description=text, formatter_class=_Format, allow_abbrev=False)
    made.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return made


def size(text: str) -> int:
    """Parse a number of elements or parameters; the type of an option.

    Example:
        >>> size("16M")
        16000000
    """
    number = int(float(text.strip().rstrip("kMG")) * _UNITS.get(text.strip()[-1:], 1))
    if number < 1:
        raise ValueError(text)
    return number


def several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of an option with several values, separated by commas.

    Example:
        >>> several(int)("1,4")
        [1, 4]
    """

    def read(text: str) -> list[T]:
        return [kind(part.strip()) for part in text.split(",")]

    read.__name__ = f"list of {getattr(kind, '__name__', kind)}"
    return read


def bits(bandwidth: str) -> float:
    """Return the bits per second of a rate such as 100mbit; infinity for "none".

    Example:
        >>> bits("100mbit")
        100000000.0
    """
    unit = next((unit for unit in _BITS if bandwidth.endswith(unit)), None)
    return float(bandwidth.removesuffix(unit)) * _BITS[unit] if unit else float("inf")


def write(path: str | None, figures: Row, ranks: int = 1) -> None:
    """Write figures to a JSON file, with the command that made them.

    Args:
        path: path of the file; None or "" writes nothing.
        figures: values that JSON can represent.
        ranks: number of ranks of the command.

    Raises:
        ConfigError: if the file cannot be written.
    """
    if not path:
        return
    program = ["hvdx"] if Path(sys.argv[0]).name in ("hvdx", "__main__.py") else ["python", sys.argv[0]]
    words = [*(["mpirun", "-n", str(ranks)] if ranks > 1 else []), *program, *sys.argv[1:]]
    document = {"command": " ".join(words), "cores": len(os.sched_getaffinity(0))} | figures
    try:
        Path(path).write_text(dump(document))
    except OSError as error:
        raise ConfigError(
            f"bench: --json {path}: {error.strerror}. Do: name a file in a folder that exists."
        ) from error


def finished(path: str | None, **options: object) -> list[Row]:
    """Return the rows that an earlier call of a benchmark has written to its JSON file.

    Args:
        path: path of the file; for None, "" or a file that does not exist, there are no rows.
        options: options that all rows share; the earlier call wrote them beside its rows.

    Raises:
        ConfigError: if the file holds something else, or is of a call with other options.
    """
    if not path or not Path(path).exists():
        return []
    try:
        document = json.loads(Path(path).read_text())
        rows: list[Row] = document["rows"]
        others = {name: document[name] for name, value in options.items() if document[name] != value}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"bench: --json {path}: expected the rows of an earlier call, got {error!r}. Do: name another file."
        ) from error
    if others:
        raise ConfigError(f"bench: --json {path}: it holds rows of a call with {others}. Do: name another file.")
    return rows


def show(path: str | None, document: Row, as_text: Callable[[Row], str]) -> None:
    """Print figures as text, and write them as JSON; with path "-", print only the JSON.

    Args:
        path: as in `write`, or "-".
        document: the figures.
        as_text: function that formats the figures as text.
    """
    if path != "-":
        write(path, document)
    print(dump(document).rstrip() if path == "-" else as_text(document))


def dump(document: Row | list[Row]) -> str:
    """Return a document as compact JSON, with a line for each key, and for each row of a list of rows.

    Example:
        >>> print(dump({"cores": 2, "rows": [{"ms": 0.123456789}, {"ms": 2.0}]}), end="")
        {"cores": 2,
        "rows": [
        {"ms": 0.123457},
        {"ms": 2.0}]}
    """
    return _text(_rounded(document), top=True) + "\n"


def _text(value: object, top: bool = False) -> str:
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "]"
    if isinstance(value, dict) and (top or any(_text(part).startswith("[\n") for part in value.values())):
        return "{" + ",\n".join(f"{json.dumps(key)}: {_text(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_rounded(part) for part in value]
    value = value.item() if isinstance(value, np.generic) else value
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile.

    Example:
        >>> spread([1.0, 2.0, 3.0])
        (1.5, 2.0, 2.5)
    """
    low, median, high = np.percentile(values, [25, 50, 75])
    return float(low), float(median), float(high)


def memory(which: str) -> int:
    """Return the bytes of this process's resident memory.

    Args:
        which: "VmRSS" for the present size, "VmHWM" for the peak, which a child does not inherit, unlike ru_maxrss;
            "Pss" for the present size with what processes share divided among them.

    Raises:
        OSError: if this system does not report it.
    """
    file = Path("/proc/self/smaps_rollup" if which == "Pss" else "/proc/self/status")
    for line in file.read_text().splitlines():
        if line.startswith(f"{which}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{file} has no {which}")


# -- cases ------------------------------------------------------------------------------------------------------------


def run_cases(
    path: str | None,
    cases: Iterable[Row],
    measure: Callable[[Row], Row],
    columns: Sequence[Column],
    shared: Row | None = None,
    resumes: bool = False,
) -> list[Row]:
    """Measure cases one after another, write the file after each, and print the table.

    Args:
        path: as in `write`.
        cases: what sets the cases apart; the first values of their rows.
        measure: returns the figures of a case.
        columns: columns of the table. A line of progress has the first two.
        shared: what all rows share, none of it named "rows"; written beside them.
        resumes: True to keep the rows that an earlier call has written, and to measure the other cases only.
    """
    rows = finished(path, **(shared or {})) if resumes else []
    for case in cases:
        if any(case.items() <= row.items() for row in rows):
            continue
        rows.append(case | measure(case))
        name, first = (cell(rows[-1]) for _, cell in columns[:2])
        print(f"{name}: {first} {columns[1][0]}", file=sys.stderr, flush=True)
        write(path, (shared or {}) | {"rows": rows})
    print(table(rows, columns))
    return rows


def table(rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """Return rows as a table.

    Example:
        >>> print(table([{"way": "dense", "ms": 2.0}], [("way", lambda r: r["way"]), figure("ms", "ms", ".1f")]))
        way     ms
        -----  ---
        dense  2.0
    """
    return render([[cell(row) for _, cell in columns] for row in rows], [header for header, _ in columns])


def figure(header: str, key: str, form: str, factor: float = 1) -> Column:
    """Return the column of a number, times a factor.

    Args:
        header: header of the column.
        key: key of the number in a row; a number that is None has an empty cell.
        form: format, such as ".2f".
        factor: factor.
    """
    return header, lambda row: "" if row[key] is None else format(factor * row[key], form)


def networks(hosts: Iterable[int], bandwidths: Iterable[str]) -> Iterator[Row]:
    """Yield the cases of all numbers of emulated hosts and all bandwidths of links."""
    return ({"hosts": number, "bandwidth": bandwidth} for number in hosts for bandwidth in bandwidths)


# -- workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """Results of workers that have ended.

    Attributes:
        ranks: figures of each rank that reported some, in the order of ranks.
        out: standard output and standard error.
        lab: JSON document of `hvdx lab`; empty without it.
    """

    ranks: list[Row]
    out: str
    lab: Row


def run(
    options: argparse.ArgumentParser,
    compare: Callable[[argparse.Namespace], int],
    work: Callable[[argparse.Namespace], Row | None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark; or, in a process that `launch` started, one of its workers.

    Args:
        options: parser of the benchmark's options.
        compare: function of the benchmark: takes the options, returns the exit code.
        work: function of a worker: takes the values given to `launch`, returns the figures of this rank, or None.
        argv: command line; by default that of this process.
    """
    options.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = options.parse_args(argv)
    if chosen.worker is None:
        return compare(chosen)
    setting = argparse.Namespace(**json.loads(chosen.worker))
    figures = work(setting)
    if figures is not None:
        found = launcher.detect()
        (Path(setting.folder) / f"{found.rank if found else 0}.json").write_text(json.dumps(figures))
    return 0


def launch(
    file: str,
    setting: Row,
    ranks: int = 1,
    bandwidth: str = "",
    burst: str = "",
    per_host: int = 1,
    limit: float = 14_400,
    env: Mapping[str, str] | None = None,
    start: Sequence[str] = (),
) -> Ended:
    """Run workers of a benchmark to their end.

    Args:
        file: file of the benchmark.
        setting: values for `work`.
        ranks: number of workers, or of emulated hosts.
        bandwidth: bandwidth of the links between emulated hosts, such as 100mbit; "" for workers without emulation.
        burst: bytes that these links pass after a pause, such as 256kB; "" for the default of `hvdx lab`.
        per_host: number of workers on each emulated host.
        limit: time limit in seconds.
        env: further environment variables of the workers.
        start: words that start the workers, in place of mpirun's.

    Raises:
        SystemExit: if the workers fail, or none reports figures; the message has their output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worker = [sys.executable, file, "--worker", json.dumps(setting | {"folder": name})]
        if bandwidth:
            lab = ["lab", "-n", str(ranks), "--bandwidth", bandwidth, "--json", str(folder / "lab")]
            lab += ["--burst", burst] if burst else []
            lab += ["--ranks-per-host", str(per_host)] if per_host > 1 else []
            worker = [sys.executable, "-m", "hvdx", *lab, "--", *worker]
        elif start or ranks > 1:
            worker = [*(start or mpirun_command(ranks)), *worker]
        # The benchmark chooses the strategy.
        inherited = {name: value for name, value in os.environ.items() if name != "HVDX_STRATEGY"}
        ended = processes.run(worker, limit, inherited | dict(env or {}))
        files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
        if ended.code != 0 or not files:
            sys.exit(f"{' '.join(worker)}\nfailed ({ended.reason()}):\n{ended.text}")
        table = json.loads((folder / "lab").read_text()) if bandwidth else {}
        return Ended([json.loads(path.read_text()) for path in files], ended.text, table)


def mlp(setting: argparse.Namespace) -> "tuple[keras.Model, tf.data.Dataset, tf.data.Dataset, Data]":
    """Build the network of the comparisons, and load its data, on a rank of a running job.

    Args:
        setting: `hidden`, the units of each layer; `seed`; and optionally `learning_rate`, `batch` and `data`, the name
            of a data set, as in `hvdx.jobs.data.load`.

    Returns:
        The compiled model, training batches (of 64 on each rank by default), test batches, and the data set.
    """
    import keras

    from hvdx.jobs.data import load
    from hvdx.jobs.fashion_mnist import build

    loaded = load(getattr(setting, "data", "fashion-mnist"))
    keras.utils.set_random_seed(setting.seed)
    model = build(loaded, "mlp", setting.hidden, "sgd", getattr(setting, "learning_rate", None))
    train = hvdx.shard((loaded.train_x, loaded.train_y), getattr(setting, "batch", 64), seed=setting.seed)
    test = hvdx.shard((loaded.test_x, loaded.test_y), 500, shuffle=False, drop_remainder=False)
    return model, train, test, loaded


#: Characters in a window of the transformer's text, and windows of its held-out loss.
CONTEXT, WINDOWS = 64, 256


def transformer(learning_rate: float) -> "keras.Model":
    """Build the transformer of the comparisons, 0.11 M parameters, compiled with AdamW."""
    from hvdx.jobs.data import VOCABULARY
    from hvdx.jobs.language_model import build

    return build(VOCABULARY, CONTEXT, layers=2, width=64, heads=4, learning_rate=learning_rate)


def parameters(hidden: int) -> int:
    """Return the number of parameters of the network of `mlp` on Fashion-MNIST.

    Example:
        >>> parameters(1024)
        1863690
    """
    return (INPUTS + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * CLASSES


class StepWatch:
    """Watch of a `fit` that times its steps, and reads counters; see `callback`.

    Args:
        settled: number of first steps that are not measured.
        read: returns counters.

    Attributes:
        seconds: seconds of every step.
        totals: counters after the first `settled` steps, and at the end.
    """

    def __init__(self, settled: int, read: Callable[[], dict[str, float]]) -> None:
        self._settled, self._read = settled, read
        self.seconds: list[float] = []
        self.totals: list[dict[str, float]] = []
        self._end = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin to time a step."""
        self._end = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Time a step, and read the counters."""
        self.seconds.append(time.perf_counter() - self._end)
        if len(self.seconds) >= self._settled:
            self.totals[1:] = [self._read()]
        self._end = time.perf_counter()


class StoredWeights:
    """Weights of a model in training, stored four times a second, to be evaluated after it.

    Args:
        model: the model.

    Attributes:
        start: time from which seconds count; by default, when this object is made.
        copies: pairs (seconds, weights).
    """

    def __init__(self, model: "keras.Model") -> None:
        self._model = model
        self.start = time.perf_counter()
        self.copies: list[tuple[float, list[np.ndarray]]] = []

    def store(self, at_once: bool = False) -> None:
        """Store the weights, if the last copy is old enough or they are wanted at once."""
        now = time.perf_counter() - self.start
        if at_once or now - (self.copies[-1][0] if self.copies else 0.0) > _STORE_SECONDS:
            self.copies.append((now, self._model.get_weights()))

    def accuracy(self, weights: list[np.ndarray], data: "Data") -> tuple[float, float]:
        """Return loss and accuracy, in percent, of stored weights on test data."""
        self._model.set_weights(weights)
        loss, accuracy = self._model.evaluate(data.test_x, data.test_y, 2000, verbose=0)
        return loss, 100 * accuracy


def callback(watch: object) -> "keras.callbacks.Callback":
    """Return a callback of Keras that calls the hooks of an object, such as its `on_train_batch_end(batch, logs)`."""
    import keras

    hooks = ("on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end")
    return keras.callbacks.LambdaCallback(**{hook: getattr(watch, hook) for hook in hooks if hasattr(watch, hook)})


def link_bytes(way: str) -> int:
    """Return the bytes that the link of an emulated host has carried; 0 if there is no such link.

    Args:
        way: "tx" for sent bytes, "rx" for received bytes.
    """
    return _link_counter(f"{way}_bytes")


def link_payload(way: str) -> int:
    """Return the bytes that the link of an emulated host has carried, without headers; 0 if there is no such link.

    Args:
        way: as in `link_bytes`.
    """
    return link_bytes(way) - _HEADERS * _link_counter(f"{way}_packets")


def _link_counter(name: str) -> int:
    counter = Path(f"/sys/class/net/eth0/statistics/{name}")
    return int(counter.read_text()) if counter.exists() else 0
