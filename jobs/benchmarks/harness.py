"""What the benchmarks share: options, the file of figures, statistics, and workers that are started and report back."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

import hvdx
from hvdx.cli.common import processes
from hvdx.cli.common.mpi_tools import mpirun_command
from hvdx.comm import launcher
from hvdx.errors import ConfigError

_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}
_BITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}
_DIGITS = 6


# -- options and figures ----------------------------------------------------------------------------------------------


class _Format(argparse.RawDescriptionHelpFormatter):
    """Shows a description as it is written, and the defaults of options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.help and not any(action.default is none for none in (None, False, argparse.SUPPRESS))
        return f"{action.help} (default: %(default)s)" if shown else action.help


def parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with the option --json.

    Args:
        text: the description: the module's docstring.
    """
    made = argparse.ArgumentParser(description=text, formatter_class=_Format, allow_abbrev=False)
    made.add_argument("--json", metavar="FILE", help="write the figures there")
    return made


def size(text: str) -> int:
    """Read a number of elements or parameters, the type of an option.

    Example:
        >>> size("16M")
        16000000
    """
    number = int(float(text.strip().rstrip("kMG")) * _UNITS.get(text.strip()[-1:], 1))
    if number < 1:
        raise ValueError(text)
    return number


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of an option that takes several values, separated by commas.

    Example:
        >>> several(int)("1,4")
        [1, 4]
    """

    def read(text: str) -> list[Any]:
        return [kind(part.strip()) for part in text.split(",")]

    read.__name__ = f"list of {kind.__name__}"
    return read


def bits(bandwidth: str) -> float:
    """Bits a second of a rate such as 100mbit; infinity for none.

    Example:
        >>> bits("100mbit")
        100000000.0
    """
    unit = next((unit for unit in _BITS if bandwidth.endswith(unit)), None)
    return float(bandwidth.removesuffix(unit)) * _BITS[unit] if unit else float("inf")


def write(path: str | None, figures: dict[str, Any], ranks: int = 1) -> None:
    """Write figures, with the command that made them.

    Args:
        path: the file; nothing is written where it is None.
        figures: what JSON can hold.
        ranks: how many ranks the command was started on.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not path:
        return
    program = ["hvdx"] if Path(sys.argv[0]).name in ("hvdx", "__main__.py") else ["python", sys.argv[0]]
    words = [*(["mpirun", "-n", str(ranks)] if ranks > 1 else []), *program, *sys.argv[1:]]
    document = {"command": " ".join(words), "cores": len(os.sched_getaffinity(0))} | figures
    try:
        Path(path).write_text(dump(document))
    except OSError as error:
        raise ConfigError(f"bench: --json {path}: {error.strerror}. Name a file in a folder that exists.") from error


def show(path: str | None, document: dict[str, Any], as_text: Callable[[dict[str, Any]], str]) -> None:
    """Print figures as text, and write them; or print them as JSON.

    Args:
        path: as in `write`; "-" for JSON on standard output, and no text.
        document: the figures.
        as_text: makes the text.
    """
    if path != "-":
        write(path, document)
    print(dump(document).rstrip() if path == "-" else as_text(document))


def dump(document: dict[str, Any]) -> str:
    """A document as compact JSON: a line for each key, and for each row of a list of rows.

    Example:
        >>> print(dump({"cores": 2, "rows": [{"ms": 0.123456789}, {"ms": 2.0}]}), end="")
        {"cores": 2,
        "rows": [
        {"ms": 0.123457},
        {"ms": 2.0}]}
    """
    return _text(_rounded(document), top=True) + "\n"


def _text(value: Any, top: bool = False) -> str:
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "]"
    if isinstance(value, dict) and (top or any(_text(part).startswith("[\n") for part in value.values())):
        return "{" + ",\n".join(f"{json.dumps(key)}: {_text(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_rounded(part) for part in value]
    value = value.item() if isinstance(value, np.generic) else value
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles: low, median, high.

    Example:
        >>> spread([1.0, 2.0, 3.0])
        (1.5, 2.0, 2.5)
    """
    low, median, high = np.percentile(values, [25, 50, 75])
    return float(low), float(median), float(high)


def memory(which: str) -> int:
    """Bytes of this process's memory.

    Args:
        which: VmRSS for now, VmHWM for the most so far; unlike ru_maxrss, the latter is not inherited from a parent.

    Raises:
        OSError: this system does not tell.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {which}")


# -- workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """What came of workers.

    Attributes:
        ranks: the figures of each rank that has some, by rank.
        out: what was printed.
        lab: the table of `hvdx lab`; empty without it.
    """

    ranks: list[dict[str, Any]]
    out: str
    lab: dict[str, Any]


def run(
    options: argparse.ArgumentParser,
    compare: Callable[[argparse.Namespace], int],
    work: Callable[[argparse.Namespace], dict[str, Any] | None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark, or in a process of `launch` one of its workers.

    Args:
        options: the parser.
        compare: given the options; returns the exit code.
        work: given what `launch` was given; returns the figures of this rank, or None.
        argv: the command line; this process's by default.
    """
    options.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = options.parse_args(argv)
    if chosen.worker is None:
        return compare(chosen)
    given = argparse.Namespace(**json.loads(chosen.worker))
    figures = work(given)
    if figures is not None:
        found = launcher.detect()
        (Path(given.folder) / f"{found.rank if found else 0}.json").write_text(json.dumps(figures))
    return 0


def launch(
    file: str, given: dict[str, Any], ranks: int = 1, bandwidth: str = "", limit: float = 14_400, **env: str
) -> Ended:
    """Run workers of a benchmark to their end.

    Args:
        file: the benchmark's file.
        given: what `work` is given.
        ranks: how many workers.
        bandwidth: of the links between emulated hosts, such as 100mbit; "" for workers on this machine.
        limit: seconds.
        env: variables of the workers.

    Raises:
        SystemExit: they failed, or none has figures; with all that they printed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worker = [sys.executable, file, "--worker", json.dumps(given | {"folder": name})]
        if bandwidth:
            lab = ["lab", "-n", str(ranks), "--bandwidth", bandwidth, "--json", str(folder / "lab")]
            worker = [sys.executable, "-m", "hvdx", *lab, "--", *worker]
        elif ranks > 1:
            worker = [*mpirun_command(ranks), *worker]
        # The strategy is what the benchmark says.
        inherited = {name: value for name, value in os.environ.items() if name != "HVDX_STRATEGY"}
        ended = processes.run(worker, limit, inherited | env)
        files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
        if ended.code != 0 or not files:
            sys.exit(f"{' '.join(worker)}\nended badly ({ended.reason()}):\n{ended.text}")
        table = json.loads((folder / "lab").read_text()) if bandwidth else {}
        return Ended([json.loads(path.read_text()) for path in files], ended.text, table)


def mlp(given: argparse.Namespace, data: str = "fashion-mnist") -> tuple[Any, Any, Any, Any]:
    """The network of the comparisons, and its data, on a rank of a started job.

    Args:
        given: `hidden` units of each layer, and the `seed`; perhaps a `learning_rate`.
        data: as in `hvdx.jobs.data.load`.

    Returns:
        The compiled model, training batches of 64 a rank, test batches, and the data.
    """
    import keras

    from hvdx.jobs.data import load
    from hvdx.jobs.fashion_mnist import build

    loaded = load(data)
    keras.utils.set_random_seed(given.seed)
    model = build(loaded, "mlp", given.hidden, "sgd", getattr(given, "learning_rate", None))
    train = hvdx.shard((loaded.train_x, loaded.train_y), 64, seed=given.seed)
    test = hvdx.shard((loaded.test_x, loaded.test_y), 500, shuffle=False, drop_remainder=False)
    return model, train, test, loaded


def link_bytes(way: str) -> int:
    """Bytes that the link of an emulated host has carried; 0 elsewhere.

    Args:
        way: "tx" for sent, "rx" for received.
    """
    counter = Path(f"/sys/class/net/eth0/statistics/{way}_bytes")
    return int(counter.read_text()) if counter.exists() else 0
