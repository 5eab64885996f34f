"""The tables of the pages have the figures of the JSON files in `docs/benchmarks`.

`TABLES` says how each column follows from the rows of a file. Each line of a table must have a row of its own, from
which all its figures follow, rounded to the digits that the page shows. A table of figures that is in neither `TABLES`
nor `EXEMPT` is an error.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

from tests.launch import ROOT

Row = dict[str, Any]
Formula = Callable[[Row], Any]

DOCS = ROOT / "docs"
# The hyphen of a range is no sign. A unit of bytes multiplies.
NUMBER = re.compile(r"(?P<one>\b1/)?(?<![\d.\w])(?P<n>[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(?: (?P<unit>[kMG])B\b)?")
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, None: 1.0}
LINKS = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "none": "none", "alone": "alone"}
# Cells that say that there is no figure.
NOTHING = {"", "-", "not reached"}


# -- tables of pages --------------------------------------------------------------------------------------------------


def tables(text: str) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables of a page: text of the section around it, headers, cells of each line."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        for block in re.findall(r"(?:^\|.*\n)+", section + "\n", re.MULTILINE):
            cells = [[cell.strip() for cell in re.split(r" ?\| ", line[1:-1] + " ")] for line in block.splitlines()]
            found.append((section, cells[0], cells[2:]))
    return found


def has_figures(lines: Sequence[Sequence[str]]) -> bool:
    """Return whether most cells beyond the first column begin with a number."""
    cells = [cell.strip("*`") for line in lines for cell in line[1:] if cell]
    return sum(NUMBER.match(cell) is not None for cell in cells) > len(cells) / 2


def shown(cell: str) -> list[tuple[float, float]]:
    """Return the numbers of a cell, each with half of the unit of its last digit; 1/n as n, with a minus.

    Example:
        >>> shown("6,470 (1.02)"), shown("1.5 MB"), shown("1/16")
        ([(6470.0, 5.0), (1.02, 0.005)], [(1500000.0, 50000.0)], [(-16.0, 0.5)])
    """
    numbers = []
    for found in NUMBER.finditer(cell.replace("*", "")):
        digits, _, exponent = found["n"].replace(",", "").partition("e")
        # Three digits of a larger number are enough: 6,470 stands for 6466.
        zeros = max(0, min(len(digits) - 3, len(digits) - len(digits.rstrip("0")))) if "." not in digits else 0
        last = 10.0 ** (zeros - len(digits.partition(".")[2]) + int(exponent or 0))
        scale = UNITS[found["unit"]]
        value = float(digits) * 10.0 ** int(exponent or 0)
        numbers.append((-value if found["one"] else scale * value, 0.5 * scale * last))
    return numbers


def fits(cell: str, expected: Any) -> bool:
    """Return whether a cell shows what is expected: a text, a number or several numbers."""
    if expected is None or cell in NOTHING:
        return True
    if isinstance(expected, str):
        return cell.strip("*`") == expected
    values = expected if isinstance(expected, tuple) else (expected,)
    numbers = shown(cell)
    # JSON files have six digits.
    return len(numbers) == len(values) and all(
        abs(number - value) <= half + 2e-6 * abs(value) if number >= 0 or value < 0 else abs(1 / value + number) <= half
        for (number, half), value in zip(numbers, values, strict=True)
    )


# -- rows of files ----------------------------------------------------------------------------------------------------


def rows(document: Row) -> list[Row]:
    """Return the rows of a file."""
    return document["rows"]


def by(*keys: str) -> Callable[[Row], list[Row]]:
    """Return a function that groups the rows or runs of a file: rows with these keys, and with "runs"."""

    def grouped(document: Row) -> list[Row]:
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in document.get("runs") or document["rows"]:
            groups.setdefault(tuple(row[key] for key in keys), []).append(row)
        return [dict(zip(keys, values, strict=True)) | {"runs": runs} for values, runs in groups.items()]

    return grouped


def mean(value: Formula) -> Formula:
    return lambda row: fmean(value(run) for run in row["runs"])


def with_range(value: Formula, middle: Callable[[Iterable[float]], float]) -> Formula:
    def of(row: Row) -> tuple[float, ...]:
        values = [value(run) for run in row["runs"]]
        return middle(values), min(values), max(values)

    return of


def with_deviation(value: Formula) -> Formula:
    def of(row: Row) -> tuple[float, float]:
        values = [value(run) for run in row["runs"]]
        return fmean(values), stdev(values)

    return of


def key(name: str, factor: float = 1) -> Formula:
    return lambda row: None if row[name] is None else factor * row[name]


def at(name: str, index: int) -> Formula:
    return lambda row: row[name][index]


def link(row: Row) -> str:
    return LINKS[row["bandwidth"]]


def against_dense(document: Row) -> list[Row]:
    """Return the strategies of accuracy.json, with the last accuracies of all-reduce."""
    groups = by("strategy")(document)
    dense = fmean(run["accuracy"][-1] for run in groups[0]["runs"])
    return [group | {"dense": dense} for group in groups]


def best_schemes(document: Row) -> list[Row]:
    return importlib.import_module("hvdx.jobs.benchmarks.local_steps").summary(document["rows"])


def scaling(document: Row) -> list[Row]:
    module = importlib.import_module("hvdx.jobs.benchmarks.scaling")
    found = []
    for model, bandwidth in {(row["model"], row["bandwidth"]) for row in document["rows"]}:
        found += module.summary(document["rows"], model, bandwidth)
    return [row for row in found if row["seconds"] and row["faster"]]


def simulated(document: Row) -> list[Row]:
    """Return the cases of scaling-simulated.json with the seconds to the target."""
    return [
        case | {"reached": next(seconds for seconds, loss in case["losses"] if loss <= 0.15)}
        for case in document["cases"]
    ]


def settings(cases: Iterable[Row], *keys: str) -> list[Row]:
    """Return a row for each setting: these keys, and (measured, predicted / measured) by strategy."""
    found: dict[tuple[Any, ...], Row] = {}
    for case in cases:
        setting = tuple(case[name] for name in keys)
        row = found.setdefault(setting, dict(zip(keys, setting, strict=True)) | {"cells": {}})
        row["cells"][case["strategy"]] = (case["measured"], case["predicted"] / case["measured"])
    return list(found.values())


def predictions(document: Row) -> list[Row]:
    """Return the cases of predict.json in milliseconds."""
    cases = document["cases"]
    if isinstance(cases, dict):  # as the benchmark writes them
        found = []
        for name, case in cases.items():
            row = dict(zip(("model", "hosts", "bandwidth", "strategy"), name.split(" ", 3), strict=True))
            row["hosts"] = int(row["hosts"])
            found.append(row | {"measured": 1e3 * case["measured"]["step"], "predicted": 1e3 * case["predicted"]})
        return found
    return [case | {"measured": case["measured_ms"], "predicted": case["predicted_ms"]} for case in cases]


def predicted(document: Row) -> list[Row]:
    return settings(predictions(document), "model", "hosts", "bandwidth")


def in_lab_and_simulated(document: Row) -> list[Row]:
    cases = [row | {"measured": 1e3 * row["measured"], "predicted": 1e3 * row["simulated"]} for row in document["rows"]]
    return settings(cases, "hosts", "bandwidth")


def cells(*strategies: str) -> list[Formula]:
    return [lambda row, name=name: row["cells"][name] for name in strategies]


def averaging(document: Row) -> list[Row]:
    """Return the rows of averaging-network.json, with bytes and seconds; on four hosts, to 85 %."""
    dense = 4 * document["parameters"] * 2 * 3 / 4
    found = []
    for row in document["rows"]:
        expected = dense / row["period"] * (2 if row["state"] else 1)
        step, seconds = row["sent"] / row["steps"], row["ms"] / 1e3
        reached = next((steps * seconds for steps, accuracy in row["curve"] if accuracy >= 85), None)
        carried = row["link"] if "link" in row else row["auto"]
        more = {"step": step, "expected": step / expected, "link": carried / row["sent"]}
        found.append(row | more | {"all": row["steps"] * seconds, "reached": reached})
    return found


def servers(document: Row) -> list[Row]:
    one = document["rows"][0]["steps_per_second"]
    return [row | {"relative": row["steps_per_second"] / one} for row in document["rows"]]


def late(slow: bool) -> Callable[[Row], list[Row]]:
    """Return a function that takes the rows of staleness.json with a slow worker, or those without."""

    def of(document: Row) -> list[Row]:
        found = [row for row in document["rows"] if row["slow"] == slow]
        first = found[0]["seconds"]
        return [
            row | {"sooner": first / row["seconds"] if first and row["seconds"] else None, "share": share(row)}
            for row in found
        ]

    def share(row: Row) -> float:
        return 100 * row["steps"][-1] / sum(row["steps"])

    return of


def memory(document: Row) -> list[Row]:
    first = document["rows"][0]["copies"]
    return [row | {"above": row["copies"] - first} for row in document["rows"]]


def split(document: Row) -> list[Row]:
    whole = next(row for row in document["rows"] if row["way"] == "all_reduce")["milliseconds"]
    return [row | {"relative": row["milliseconds"] / whole} for row in document["rows"]]


def split_memory(document: Row) -> list[Row]:
    one = document["rows"][0]["resident"]
    return [row | {"relative": row["resident"] / one} for row in document["rows"]]


def first_steps(document: Row) -> list[Row]:
    return [{"runs": [{"s": value} for value in values]} for values in document["seconds"].values()]


def checkpoints(document: Row) -> list[Row]:
    ratios = {"checkpoint": "checkpoint / once", "waited": "waited / copy"}
    return [
        {"runs": [{"ms": 1e3 * value} for value in document[f"{name} seconds"]]}
        | {"ratio": document[ratios[name]] if name in ratios else 1}
        for name in ("once", "checkpoint", "copy", "waited")
    ]


def bits(document: Row) -> list[Row]:
    """Return a row for each density of wire.json: of 10 million elements, with the bits of a million."""
    small = {row["density"]: row["bits"] for row in document["independent"] if row["elements"] == 1_000_000}
    found = [row for row in document["independent"] if row["elements"] == 10_000_000]
    return [row | {"small": small[row["density"]]} for row in found]


def exchanges(document: Row) -> list[Row]:
    """Return a row for each number of workers of scale.json: both exchanges."""
    found: dict[int, Row] = {}
    for row in document["rows"]:
        found.setdefault(row["workers"], {"workers": row["workers"]})[row["exchange"]] = row
    return list(found.values())


def relative(part: str) -> Formula:
    return lambda row: (row[part], row[f"predicted_{part}"] / row[part])


def speed(name: str) -> Formula:
    return lambda row: tuple(row["ratios"][name][index] for index in (1, 0, 2))


def kernel_memory(row: Row) -> float:
    return 100 * max(row["extra_memory_bytes"] - row["message_bytes"], 0) / (4 * row["elements"])


def per_add(row: Row) -> float:
    return row["seconds"]["decode"] / row["seconds"]["add"]


def network(row: Row) -> str:
    return f"{row['hosts']}, {LINKS[row['bandwidth']]}, {row['burst'].replace('kB', ' kB')}"


# -- which table has which figures ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of a page, and where its figures come from.

    Attributes:
        page: page below docs.
        file: file in docs/benchmarks.
        rows: function that makes rows from the content of the file.
        columns: header of each column, and what its cells show: a number, several numbers or a text; None: a label.
        which: position among the tables of the page with these headers; None: all of them.
        without: begin of a line that is not in the file.
    """

    page: str
    file: str
    rows: Callable[[Row], list[Row]]
    columns: Sequence[tuple[str, Formula | None]]
    which: int | None = 0
    without: str = "\0"

    @property
    def headers(self) -> list[str]:
        return [header for header, _ in self.columns]


def columns(headers: str, *formulas: Formula | None) -> list[tuple[str, Formula | None]]:
    """Return columns: headers, separated by bars as on the page, and a formula for each."""
    return list(zip(headers.split(" | "), formulas, strict=True))


BENCHMARKS = "benchmarks/README.md"
STEP = (key("median_ms"), key("ratio"), lambda row: tuple(row["ratio_quartiles"]))
LONG = "300 steps | 600 | 900 | 1,200 | 1,500"
DECODING = "received | messages decoded | ms decoding"


def decoded(exchange: str) -> list[Formula]:
    return [lambda row, name=name: row[exchange][name] for name in ("received", "decoded", "decoding")]


TABLES = [
    Table(
        BENCHMARKS,
        "step-2M.json",
        rows,
        columns("variant | on the wire | steps | median ms | ratio | its quartiles", None, None, key("steps"), *STEP),
    ),
    Table(
        BENCHMARKS,
        "step-mpi.json",
        rows,
        columns("variant | on the wire | median ms | ratio | its quartiles", None, None, *STEP),
    ),
    Table(
        BENCHMARKS,
        "step.json",
        lambda document: [row for row in document["rows"] if row["parameters"] > 1e7],
        columns("variant | on the wire | median ms | ratio | its quartiles", None, None, *STEP),
        which=1,
    ),
    Table(
        BENCHMARKS,
        "first-step.json",
        first_steps,
        columns(
            "first step | median | range",
            None,
            lambda row: median(run["s"] for run in row["runs"]),
            lambda row: with_range(lambda run: run["s"], median)(row)[1:],
        ),
        without="`Threshold()`, nothing compiled",
    ),
    Table(
        BENCHMARKS,
        "wire.json",
        bits,
        columns(
            "density | entropy | hvdx, 1 M elements | hvdx, 10 M | ratio at 10 M | Elias-Fano | Deeplearning4j | "
            "zstd of int32",
            *map(key, ("density", "entropy", "small", "bits", "ratio", "elias_fano", "deeplearning4j", "zstd")),
        ),
    ),
    Table(
        BENCHMARKS,
        "wire.json",
        lambda document: document["recorded"]["all"],
        columns(
            "target density | entries | share of more than one tau | entropy | hvdx | ratio",
            key("density"),
            key("entries"),
            key("multiples", 100),
            *map(key, ("entropy", "bits", "ratio")),
        ),
    ),
    Table(
        BENCHMARKS,
        "kernels.json",
        lambda document: document["figures"],
        columns(
            "density | threads | np.add, GB/s | encode | lookahead 3 | NumPy | 5000 arrays | decode 4 | both | memory",
            key("density"),
            key("threads"),
            key("add_bytes_per_second", 1e-9),
            speed("encode"),
            speed("encode_ahead"),
            lambda row: row["ratios"].get("numpy", [0, 0])[1],
            key("arrays_per_one"),
            per_add,
            key("step_per_add"),
            kernel_memory,
        ),
    ),
    Table(
        BENCHMARKS,
        "memory.json",
        memory,
        columns(
            "strategy | MB at 7 MB | MB at 121 MB | copies of the weights | above AllReduce",
            None,
            at("MB", 0),
            at("MB", 1),
            key("copies"),
            key("above"),
        ),
    ),
    Table(
        BENCHMARKS,
        "density.json",
        rows,
        columns(
            "hosts, link, burst | alone ms | ms | ratio | density | its range | encoding | waiting | exchanging | "
            "decoding",
            network,
            *map(key, ("alone_ms", "ms", "ratio", "density")),
            lambda row: (row["lowest"], row["highest"]),
            *map(key, ("encoding", "waiting", "exchanging", "decoding")),
        ),
    ),
    Table(
        BENCHMARKS,
        "densities.json",
        by("way"),
        columns(
            "density | median | smallest to largest",
            None,
            lambda row: median(run["seconds"] for run in row["runs"]),
            lambda row: with_range(key("seconds"), median)(row)[1:],
        ),
    ),
    Table(
        BENCHMARKS,
        "dense.json",
        rows,
        columns(
            "hosts | link | limit | MPI | alone | hvdx over MPI | over Horovod | DDP alone | DDP (gloo)",
            key("hosts"),
            link,
            *map(key, ("limit", "MPI", "alone", "mpi", "horovod", "DDP alone", "DDP")),
        ),
    ),
    Table(
        BENCHMARKS,
        "overlap.json",
        rows,
        columns(
            "link | exchange | computing | at once | in buckets | in buckets / the longer",
            link,
            *map(key, ("exchange", "computing", "at_once", "buckets", "ratio")),
        ),
    ),
    Table(
        BENCHMARKS,
        "tcp.json",
        rows,
        columns(
            "hosts | ideal | with hvdx' setting | Open MPI's default | ratio",
            *map(key, ("hosts", "ideal", "hvdx", "default", "ratio")),
        ),
    ),
    Table(
        BENCHMARKS,
        "average-files.json",
        rows,
        columns(
            "format | made by | read whole, s | in blocks, s | average, s | ratio | cold | MB",
            key("format"),
            key("made_by"),
            *map(key, ("read_whole_s", "read_blocks_s", "average_s", "ratio", "cold_ratio", "memory_MB")),
        ),
    ),
    Table(
        BENCHMARKS,
        "checkpoint.json",
        checkpoints,
        columns(" | ms | ratio", None, with_range(key("ms"), median), key("ratio")),
    ),
    Table(
        BENCHMARKS,
        "sharded.json",
        rows,
        columns(
            "hosts | exchange | ms a step | messages | encoding | waiting | exchanging | decoding",
            key("hosts"),
            key("exchange"),
            key("ms"),
            lambda row: row["sent"] / row["message"],
            *map(key, ("encoding", "waiting", "exchanging", "decoding")),
        ),
    ),
    Table(
        BENCHMARKS,
        "scale.json",
        rows,
        columns(
            "workers | exchange | received | decoded | encoding | decoding | network",
            key("workers"),
            key("exchange"),
            relative("received"),
            key("decoded"),
            *map(relative, ("encoding", "decoding", "network")),
        ),
    ),
    Table(
        "advise.md",
        "predict.json",
        predicted,
        columns(
            "model | hosts | link | all_reduce | fp16 | threshold | averaging | server",
            key("model"),
            key("hosts"),
            link,
            *cells(
                "all_reduce",
                "all_reduce:compression=fp16",
                "threshold",
                "parameter_averaging",
                "parameter_server:servers=colocated",
            ),
        ),
    ),
    Table(
        "averaging.md",
        "averaging-network.json",
        averaging,
        columns(
            "averaged | sent a step | sent / expected | link / sent | ms a step | % after epoch 1 | 2 | 3 | "
            "seconds in all | seconds to 85 %",
            None,
            *map(key, ("step", "expected", "link", "ms")),
            *(lambda row, epoch=epoch: row["curve"][epoch][1] for epoch in range(3)),
            key("all"),
            key("reached"),
        ),
    ),
    Table(
        "averaging.md",
        "averaging-question.json",
        rows,
        columns(
            "optimiser | averaged | from dense | divergence | accuracy, %",
            None,
            None,
            *map(key, ("from_dense", "divergence", "accuracy")),
        ),
    ),
    Table(
        "decentralised.md",
        "accuracy.json",
        against_dense,
        columns(
            "strategy | after 3 epochs | mean of the last 3 epochs | after 10 epochs | difference from dense | bytes | "
            "ratio to dense",
            None,
            with_deviation(at("accuracy", 2)),
            with_deviation(lambda run: fmean(run["accuracy"][-3:])),
            with_deviation(at("accuracy", -1)),
            lambda row: fmean(run["accuracy"][-1] for run in row["runs"]) - row["dense"],
            mean(key("bytes")),
            lambda row: 1 / fmean(run["ratio"] for run in row["runs"]),
        ),
    ),
    Table(
        "decentralised.md",
        "local_steps.json",
        best_schemes,
        columns(
            "scheme | bytes of all-reduce | held-out loss after 300 steps | after 600",
            None,
            lambda row: 1 / row["fewer"] if row["fewer"] else 0,
            at("losses", 0),
            at("losses", 1),
        ),
    ),
    Table(
        "decentralised.md",
        "scale.json",
        exchanges,
        columns(
            f"workers | all_gather: {DECODING} | sharded: {DECODING}",
            key("workers"),
            *decoded("all_gather"),
            *decoded("sharded"),
        ),
    ),
    Table(
        "decentralised.md",
        "accuracy-long.json",
        by("strategy"),
        columns(
            f"strategy | bytes of all-reduce | {LONG}",
            None,
            lambda row: 1 / fmean(run["ratio"] for run in row["runs"]),
            *(mean(at("accuracy", index)) for index in range(4)),
            with_range(at("accuracy", 4), fmean),
        ),
    ),
    Table(
        "decentralised.md",
        "stragglers.json",
        rows,
        columns(
            "workers | strategy | s to 85 % | steps a second, of all workers | mean staleness | % after 2,000 steps",
            None,
            None,
            *map(key, ("seconds", "updates_per_second", "mean_staleness", "last")),
        ),
    ),
    Table(
        "parameter-server.md",
        "staleness.json",
        late(slow=True),
        columns(
            "training | s to 85 % | times sooner | steps a second | mean staleness | the slow worker's steps | "
            "% at the end",
            None,
            *map(key, ("seconds", "sooner", "updates_per_second", "mean_staleness", "share", "last")),
        ),
    ),
    Table(
        "parameter-server.md",
        "staleness.json",
        late(slow=False),
        columns(
            "training | s to 85 % | steps a second | mean staleness | % at the end",
            None,
            *map(key, ("seconds", "updates_per_second", "mean_staleness", "last")),
        ),
    ),
    Table(
        "parameter-server.md",
        "servers.json",
        servers,
        columns(
            "servers, on the workers' hosts | steps a second | relative to 1 server | busiest server's link | "
            "workers' links",
            key("servers"),
            key("steps_per_second"),
            key("relative"),
            key("busiest", 100),
            key("workers_busy", 100),
        ),
    ),
    Table(
        "scaling.md",
        "scaling.json",
        scaling,
        columns(
            "workers | strategy | rate | steps | ms a step | kB sent a step | seconds | range | times faster",
            key("hosts"),
            lambda row: STRATEGIES[row["strategy"]],
            *map(key, ("rate", "steps", "ms")),
            key("bytes", 1e-3),
            key("seconds"),
            lambda row: (row["least"], row["most"]),
            key("faster"),
        ),
        which=None,
    ),
    Table(
        "scaling.md",
        "scaling-simulated.json",
        simulated,
        columns(
            "workers | strategy | ms a step | kB sent a step | seconds",
            key("workers"),
            None,
            key("seconds", 1e3),
            key("sent", 1e-3),
            key("reached"),
        ),
    ),
    Table(
        "simulate.md",
        "simulate.json",
        in_lab_and_simulated,
        columns(
            "hosts | link | all_reduce over MPI | all_reduce, fp16 | threshold, all-gather | threshold, sharded",
            key("hosts"),
            link,
            *cells(
                "all_reduce:engine=mpi",
                "all_reduce:engine=mpi,compression=fp16",
                "threshold:target_density=0.01,exchange=all_gather",
                "threshold:target_density=0.01,exchange=sharded",
            ),
        ),
    ),
    Table(
        "split-layers.md",
        "split.json",
        split,
        columns(
            "training | ms a step | / AllReduce | layers send | the strategy sends | formula | "
            "on the link, without headers | / formula",
            None,
            key("milliseconds"),
            key("relative"),
            *map(key, ("layers_sent", "strategy_sent", "formula", "payload")),
            lambda row: row["payload"] / row["formula"] if row["formula"] else None,
        ),
    ),
    Table(
        "split-layers.md",
        "split-memory.json",
        split_memory,
        columns(
            "ranks in the group | weights and momenta, counted | resident memory | / one rank",
            *map(key, ("ranks", "counted", "resident", "relative")),
        ),
    ),
]
STRATEGIES = {
    "one worker": "one worker",
    "horovod": "Horovod's all-reduce",
    "all-reduce": "AllReduce()",
    "fp16": 'AllReduce(compression="fp16")',
    "averaging": "ParameterAveraging(10)",
    "threshold": "Threshold()",
}

#: Tables of figures that no file has, by page and headers, and why.
EXEMPT = {
    ("decentralised.md", "strategy | ms a step | loss after 0.65 s | after 200 steps"): (
        "the command below the table makes it in seconds, on virtual clocks; ADR 43 has it"
    ),
    ("decentralised.md", "strategy | bytes of all-reduce | held-out loss"): "of ADR 20",
    ("decentralised.md", "strategy | 2 workers, five seeds | 4 workers (15 steps, three seeds)"): "of ADR 38",
    ("scaling.md", "training | parameters | samples a step and worker | target"): "describes the trainings",
}
#: Pages whose tables have no measured figures.
SPECIFICATIONS = {"wire-format.md": "tests/codec/test_wire_document.py compares them with the codec"}


@pytest.fixture(scope="module")
def pages() -> dict[str, list[tuple[str, list[str], list[list[str]]]]]:
    """Return the tables of each page of docs, without those of the decision records."""
    names = [path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md")) if "adr" not in path.parts]
    return {str(name): tables((DOCS / name).read_text()) for name in names}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{Path(table.page).stem}-{Path(table.file).stem}")
def test_figures_of_a_page_are_in_its_file(table, pages):
    alike = [lines for _, headers, lines in pages[table.page] if headers == table.headers]
    assert alike, f"docs/{table.page} has no table with the headers {table.headers}"
    items = table.rows(json.loads((DOCS / "benchmarks" / table.file).read_text()))
    expected = [[formula and formula(item) for _, formula in table.columns] for item in items]
    for lines in alike if table.which is None else [alike[table.which]]:
        free, first = list(expected), ""
        for line in lines:
            first = line[0] or first
            if first.startswith(table.without):
                continue
            misfits = [
                sum(not fits(cell, value) for cell, value in zip([first, *line[1:]], values, strict=True))
                for values in free
            ]
            best = misfits.index(min(misfits))
            assert misfits[best] == 0, f"docs/{table.page}: {line}: {table.file} has at best {free[best]}"
            free.pop(best)


def test_each_table_of_figures_has_a_file_or_a_reason(pages):
    known = {(table.page, " | ".join(table.headers)) for table in TABLES}
    found = {
        (page, " | ".join(headers))
        for page, parts in pages.items()
        for _, headers, lines in parts
        if has_figures(lines) and page not in SPECIFICATIONS
    }
    assert len(found) > 30
    assert found - known == EXEMPT.keys()


def numbers(value: Any) -> Iterable[float]:
    """Yield all numbers of a file; and the means of runs whose texts are equal, which differ by their seeds."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        yield value
        return
    parts = list(value.values() if isinstance(value, dict) else value)
    for part in parts:
        yield from numbers(part)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in parts if isinstance(value, list) else []:
        if isinstance(row, dict) and "seed" in row:
            groups.setdefault(tuple(text for text in row.values() if isinstance(text, str)), []).append(row)
    for runs in groups.values():
        for name, first in runs[0].items():
            if isinstance(first, float):
                yield fmean(run[name] or 0.0 for run in runs)
            if name == "accuracy" and isinstance(first, list):
                yield fmean(run[name][-1] for run in runs)


def test_figures_in_tables_of_options_are_in_the_files_of_their_section(pages):
    """Cells that cite a decision record have its figures."""
    checked = 0
    for page, parts in pages.items():
        for section, headers, lines in parts:
            files = set(re.findall(r"benchmarks/([\w-]+\.json)", section))
            if headers[-1] != "measured" or not files:
                continue
            pool = [n for file in files for n in numbers(json.loads((DOCS / "benchmarks" / file).read_text()))]
            for line in lines:
                cell = re.sub(r'\]\(\S+\)|"[^"]*"', "", line[-1])
                for number, half in shown(cell) if "ADR" not in cell and re.search(r"\d\.\d", cell) else []:
                    if number < 0 or number != int(number):  # others are numbers of workers and the like
                        near = any(abs(n - abs(number)) <= half for n in pool)
                        assert near, f"docs/{page}: {cell}: {number:g} is in none of {sorted(files)}"
                        checked += 1
    assert checked > 30


def test_errors_of_predictions_are_those_of_their_file(pages):
    text = " ".join((DOCS / "advise.md").read_text().split())
    cases = predictions(json.loads((DOCS / "benchmarks" / "predict.json").read_text()))
    errors = [abs(case["predicted"] / case["measured"] - 1) for case in cases]
    assert f"The median error is {100 * median(errors):.0f} %" in text
    within = sum(error <= 0.3 for error in errors)
    assert f"{within} of the {len(errors)} predictions are within 30 %" in text


def test_times_faster_on_the_first_page_are_in_their_file():
    """And those below the picture of docs/scaling.md, where some are of a strategy that is slower than one worker."""
    items = scaling(json.loads((DOCS / "benchmarks" / "scaling.json").read_text()))
    readme, page = (ROOT / "README.md").read_text(), (DOCS / "scaling.md").read_text()
    below = re.search(r"^!\[.*\n\n((?:.+\n)+)", page, re.MULTILINE)[1]
    found = set(re.findall(r"([\d.]+) (?:times as fast|and [\d.]+ times)", readme))
    assert found
    assert found <= {f"{row['faster']:.1f}" for row in items}
    slower = {f"{1 / row['faster']:.1f}" for row in items}
    assert set(re.findall(r"\d\.\d", below)) <= {f"{row['faster']:.1f}" for row in items} | slower
