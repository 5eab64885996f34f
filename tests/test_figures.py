"""The tables of the pages have the figures of the JSON files in `docs/benchmarks`.

`SPECIFICATION` names the figures of each column in the rows of a file. Each line of a table must have a row of its own,
from which all its figures follow, rounded to the digits that the page shows. A table of figures that is in neither
`SPECIFICATION` nor `EXEMPT` is an error.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

from tests.launch import ROOT

Row = dict[str, Any]

DOCS = ROOT / "docs"
# The hyphen of a range is no sign. A unit of bytes multiplies.
NUMBER = re.compile(r"(?P<one>\b1/)?(?<![\d.\w])(?P<n>[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(?: (?P<unit>[kMG])B\b)?")
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, None: 1.0}
LINKS = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
LINKS |= {"none": "none", "alone": "alone"}
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
    """Return whether a cell shows the expected value: a text, a number or several numbers."""
    if expected is None or cell in NOTHING:
        return True
    if isinstance(expected, str):
        return cell.strip("*`") == expected
    values = expected if isinstance(expected, tuple | list) else (expected,)
    numbers = shown(cell)
    # JSON files have six digits.
    return len(numbers) == len(values) and all(
        abs(number - value) <= half + 2e-6 * abs(value) if number >= 0 or value < 0 else abs(1 / value + number) <= half
        for (number, half), value in zip(numbers, values, strict=True)
    )


# -- rows of files ----------------------------------------------------------------------------------------------------


def rows(document: Row) -> list[Row]:
    """Return the rows of a file. A function below returns them with figures that follow from them."""
    return document["rows"]


def with_figures(found: Iterable[Row], **formulas: Callable[[Row], Any]) -> list[Row]:
    """Return rows with further figures."""
    return [row | {name: formula(row) for name, formula in formulas.items()} for row in found]


def groups(document: Row, name: str) -> list[list[Row]]:
    """Return the runs of a file, grouped by the value of a key."""
    found: dict[str, list[Row]] = {}
    for run in document.get("runs") or document["rows"]:
        found.setdefault(run[name], []).append(run)
    return list(found.values())


def ranged(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> tuple[float, float, float]:
    return middle(values), min(values), max(values)


def first_steps(document: Row) -> list[Row]:
    return [{"median": median(s), "range": (min(s), max(s))} for s in document["seconds"].values()]


def bits(document: Row) -> list[Row]:
    """Return a row for each density of wire.json: of 10 million elements, with the bits of a million."""
    small = {row["density"]: row["bits"] for row in document["independent"] if row["elements"] == 1_000_000}
    found = [row for row in document["independent"] if row["elements"] == 10_000_000]
    return with_figures(found, small=lambda row: small[row["density"]])


def recorded(document: Row) -> list[Row]:
    return document["recorded"]["all"]


def kernels(document: Row) -> list[Row]:
    def speed(name: str) -> Callable[[Row], Any]:
        return lambda row: tuple(row["ratios"][name][index] for index in (1, 0, 2))

    def extra(row: Row) -> float:
        return max(row["extra_memory_bytes"] - row["message_bytes"], 0) / (4 * row["elements"])

    return with_figures(
        document["figures"],
        encode=speed("encode"),
        ahead=speed("encode_ahead"),
        numpy=lambda row: row["ratios"].get("numpy", [0, 0])[1],
        decode=lambda row: row["seconds"]["decode"] / row["seconds"]["add"],
        extra=extra,
    )


def gpu(document: Row) -> list[Row]:
    """Return a row for each density of gpu.json, with the milliseconds of all operations."""
    found: dict[float, Row] = {}
    for row in document["rows"]:
        first = found.setdefault(
            row["density"], {"decode_ms": None, "on the GPU_ms": None, "through the host_ms": None}
        )
        first |= {name: row[name] for name in row if first.get(name) is None}
    return [*found.values()]


def densities(document: Row) -> list[Row]:
    def network(row: Row) -> str:
        return f"{row['hosts']}, {LINKS[row['bandwidth']]}, {row['burst'].replace('kB', ' kB')}"

    return with_figures(document["rows"], network=network, range=lambda row: (row["lowest"], row["highest"]))


def seconds_by_way(document: Row) -> list[Row]:
    found = [ranged([run["seconds"] for run in runs], median) for runs in groups(document, "way")]
    return [{"median": values[0], "range": values[1:]} for values in found]


def checkpoints(document: Row) -> list[Row]:
    ratios = {"once": 1, "checkpoint": document["checkpoint / once"], "copy": 1, "waited": document["waited / copy"]}
    return [
        {"ms": ranged([1e3 * value for value in document[f"{name} seconds"]], median), "ratio": ratio}
        for name, ratio in ratios.items()
    ]


def sharded(document: Row) -> list[Row]:
    return with_figures(document["rows"], messages=lambda row: row["sent"] / row["message"])


def scale(document: Row) -> list[Row]:
    """Return the rows of scale.json, with (figure, prediction / figure)."""
    parts = ("received", "encoding", "decoding", "network")
    return [
        row | {f"{part} predicted": (row[part], row[f"predicted_{part}"] / row[part]) for part in parts}
        for row in document["rows"]
    ]


def exchanges(document: Row) -> list[Row]:
    """Return a row for each number of workers of scale.json, with the figures of both exchanges."""
    return [
        {"workers": runs[0]["workers"]} | {f"{run['exchange']} {name}": run[name] for run in runs for name in run}
        for runs in groups(document, "workers")
    ]


def settings(cases: Iterable[Row], *keys: str) -> list[Row]:
    """Return a row for each setting: these keys, and (measured, predicted / measured) by the name of the strategy."""
    found: dict[tuple[Any, ...], Row] = {}
    for case in cases:
        setting = tuple(case[name] for name in keys)
        row = found.setdefault(setting, dict(zip(keys, setting, strict=True)))
        row[case["strategy"]] = (case["measured"], case["predicted"] / case["measured"])
    return list(found.values())


def predictions(document: Row) -> list[Row]:
    """Return the cases of predict.json in milliseconds."""
    cases = document["cases"]
    if isinstance(cases, list):
        return [case | {"measured": case["measured_ms"], "predicted": case["predicted_ms"]} for case in cases]
    found = []
    for name, case in cases.items():  # as the benchmark writes them
        row = dict(zip(("model", "hosts", "bandwidth", "strategy"), name.split(" ", 3), strict=True))
        figures = {"measured": 1e3 * case["measured"]["step"], "predicted": 1e3 * case["predicted"]}
        found.append(row | {"hosts": int(row["hosts"])} | figures)
    return found


def predicted(document: Row) -> list[Row]:
    return settings(predictions(document), "model", "hosts", "bandwidth")


def simulated(document: Row) -> list[Row]:
    cases = [row | {"measured": 1e3 * row["measured"], "predicted": 1e3 * row["simulated"]} for row in document["rows"]]
    return settings(cases, "hosts", "bandwidth")


def averaging(document: Row) -> list[Row]:
    """Return the rows of averaging-network.json, with bytes and seconds; on four hosts, to 85 %."""
    dense = 4 * document["parameters"] * 2 * 3 / 4
    found = []
    for row in document["rows"]:
        expected = dense / row["period"] * (2 if row["state"] else 1)
        step, seconds = row["sent"] / row["steps"], row["ms"] / 1e3
        reached = next((steps * seconds for steps, accuracy in row["curve"] if accuracy >= 85), None)
        carried = row["link"] if "link" in row else row["auto"]
        more = {"step": step, "expected": step / expected, "carried": carried / row["sent"], "reached": reached}
        epochs = {f"epoch {epoch}": accuracy for epoch, (_, accuracy) in enumerate(row["curve"], 1)}
        found.append(row | more | epochs | {"all": row["steps"] * seconds})
    return found


def accuracies(document: Row) -> list[Row]:
    """Return a row for each strategy: means and deviations of the accuracies over the seeds."""
    found, dense = [], None
    for runs in groups(document, "strategy"):
        early, late = ([run["accuracy"][epoch] for run in runs] for epoch in (2, -1))
        calm = [fmean(run["accuracy"][-3:]) for run in runs]
        row = {name: (fmean(v), stdev(v)) for name, v in {"early": early, "calm": calm, "late": late}.items()}
        dense = fmean(late) if dense is None else dense
        row |= {"lost": fmean(late) - dense, "bytes": fmean(run["bytes"] for run in runs)}
        found.append(row | {"ratio": 1 / fmean(run["ratio"] for run in runs)})
    return found


def losses(document: Row) -> list[Row]:
    """Return a row for each strategy: the mean losses over the seeds, the last one with its range."""
    found = []
    for runs in groups(document, "strategy"):
        curves = list(zip(*(run["accuracy"] for run in runs), strict=True))
        end = ranged(curves[-1], fmean) if len(runs) > 1 else curves[-1][0]
        row = {"ratio": 1 / fmean(run["ratio"] for run in runs), "end": end}
        found.append(row | {f"loss {index}": fmean(losses) for index, losses in enumerate(curves)})
    return found


def best_schemes(document: Row) -> list[Row]:
    module = importlib.import_module("hvdx.jobs.benchmarks.local_steps")
    found = module.summary(document["rows"])
    return with_figures(found, share=lambda row: 1 / row["fewer"] if row["fewer"] else 0)


def late(document: Row) -> list[Row]:
    """Return the rows of staleness.json, with the share of the last worker; with a slow one, relative to the first."""
    first = document["rows"][0]["seconds"]
    return with_figures(
        document["rows"],
        sooner=lambda row: first / row["seconds"] if row["slow"] and row["seconds"] else None,
        share=lambda row: row["steps"][-1] / sum(row["steps"]),
    )


def servers(document: Row) -> list[Row]:
    one = document["rows"][0]["steps_per_second"]
    return with_figures(document["rows"], relative=lambda row: row["steps_per_second"] / one)


def scaling(document: Row) -> list[Row]:
    module = importlib.import_module("hvdx.jobs.benchmarks.scaling")
    found = []
    for model, bandwidth in {(row["model"], row["bandwidth"]) for row in document["rows"]}:
        found += module.summary(document["rows"], model, bandwidth)
    return with_figures(
        [row for row in found if row["seconds"] and row["faster"]],
        name=lambda row: STRATEGIES[row["strategy"]],
        range=lambda row: (row["least"], row["most"]),
    )


def places(document: Row) -> list[Row]:
    """Return a row for each place of a death, at which all strategies do the same."""
    found: dict[str, Row] = {}
    for row in document["rows"]:
        cells = {f"{name} {row['victim']}": row[name] for name in ("code", "ended")}
        merged = found.setdefault(row["place"], {"place": row["place"]}) | cells
        assert merged.items() >= found[row["place"]].items(), f"{row['place']}: the strategies differ"
        found[row["place"]] = merged
    return list(found.values())


def budgets(document: Row) -> list[Row]:
    """Return a row for each training and number of hosts, with the figures of both strategies."""
    module = importlib.import_module("hvdx.jobs.benchmarks.scaling")
    found = []
    for model in {row["model"] for row in document["rows"]}:
        rows = with_figures(
            module.summary(document["rows"], model, "100mbit"),
            range=lambda row: (row["seconds"], row["least"], row["most"]),
        )
        for usual, half in groups({"rows": rows}, "hosts"):
            ways = [{f"{name} {way}": row[name] for name in row} for way, row in (("usual", usual), ("half", half))]
            found.append({"hosts": usual["hosts"]} | ways[0] | ways[1])
    return found


def scaling_simulated(document: Row) -> list[Row]:
    def reached(case: Row) -> float:
        return next(seconds for seconds, loss in case["losses"] if loss <= 0.15)

    return with_figures(document["cases"], reached=reached)


def split(document: Row) -> list[Row]:
    whole = next(row for row in document["rows"] if row["way"] == "all_reduce")["milliseconds"]
    return with_figures(
        document["rows"],
        relative=lambda row: row["milliseconds"] / whole,
        carried=lambda row: row["payload"] / row["formula"] if row["formula"] else None,
    )


def dense(document: Row) -> list[Row]:
    return with_figures(document["rows"], relative=lambda row: row["mpi"] / row["horovod"] if row["horovod"] else None)


def judged(document: Row) -> list[Row]:
    """Return a row for each training and rate of checked.json, with the losses of all-reduce and of one worker."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for run in document["rows"]:
        way = "alone" if run["workers"] == 1 else run["strategy"]
        found.setdefault((run["case"], run["rate"]), {})[way] = run
    return [
        {
            "case": case,
            "rate": rate,
            "dense": ways["all_reduce"]["loss"],
            "alone": ways["alone"]["loss"],
            "above": ways["target_density=0.02"]["loss"] - ways["all_reduce"]["loss"],
            "share": 1 / ways["target_density=0.02"]["ratio"],
        }
        for (case, rate), ways in found.items()
        if "alone" in ways
    ]


def split_memory(document: Row) -> list[Row]:
    one = document["rows"][0]["resident"]
    return with_figures(document["rows"], relative=lambda row: row["resident"] / one)


def at_sizes(document: Row) -> list[Row]:
    alone = {row["hosts"]: row["step_s"] for row in document["rows"] if row["bandwidth"] == "none"}
    found = with_figures(document["rows"], relative=lambda row: row["step_s"] / alone[row["hosts"]])
    return with_figures(found, peak=lambda row: max(row["GB"]))


# -- which table has which figures ------------------------------------------------------------------------------------

STRATEGIES = {
    "one worker": "one worker",
    "horovod": "Horovod's all-reduce",
    "all-reduce": "AllReduce()",
    "fp16": 'AllReduce(compression="fp16")',
    "averaging": "ParameterAveraging(10)",
    "threshold": "Threshold()",
}

# Three lines for each table: page, file and function of its rows; headers; figure of each column. "-" is a label,
# "name[1]" an element, "name*100" a product. Tables of a page with the same headers may use the rows of each other's
# files.
SPECIFICATION = r"""
benchmarks/README.md first-step.json first_steps
first step | median | range
- | median | range

benchmarks/README.md wire.json bits
density | entropy | hvdx, 1 M elements | hvdx, 10 M | ratio at 10 M | Elias-Fano | Deeplearning4j | zstd of int32
density | entropy | small | bits | ratio | elias_fano | deeplearning4j | zstd

benchmarks/README.md wire.json recorded
target density | entries | share of more than one tau | entropy | hvdx | ratio
density | entries | multiples*100 | entropy | bits | ratio

benchmarks/README.md kernels.json kernels
density | threads | np.add, GB/s | encode | lookahead 3 | NumPy | 5000 arrays | decode 4 | both | memory
density | threads | add_bytes_per_second*1e-9 | encode | ahead | numpy | arrays_per_one | decode | step_per_add | extra*100

benchmarks/README.md gpu.json gpu
density | a + b | encode | ratio | 1000 arrays | decode 16 | step | step through the host
density | plain_ms | checked_ms | checked_to_plain | 1000 arrays_ms | decode_ms | on the GPU_ms | through the host_ms

benchmarks/README.md memory.json rows
1 GB of weights | start | steps | end of an epoch | more | first step, s | later steps, s
strategy | GB[0] | GB[1] | GB[2] | more_GB | first_s | step_s

benchmarks/README.md kernels-110m.json kernels
density | threads | np.add, GB/s | encode | lookahead 3 | NumPy | 5000 arrays | decode 4 | both | memory
density | threads | add_bytes_per_second*1e-9 | encode | ahead | numpy | arrays_per_one | decode | step_per_add | extra*100

benchmarks/README.md memory-table.json rows
table of 1 GB | start | steps | end of an epoch | more | first step, s | later steps, s
strategy | GB[0] | GB[1] | GB[2] | more_GB | first_s | step_s

benchmarks/README.md memory-resnet.json rows
ResNet50V2 | start | steps | end of an epoch | more | first step, s | later steps, s
strategy | GB[0] | GB[1] | GB[2] | more_GB | first_s | step_s

benchmarks/README.md memory-narrow.json rows
402 variables | start | steps | end of an epoch | more | first step, s | later steps, s
strategy | GB[0] | GB[1] | GB[2] | more_GB | first_s | step_s

benchmarks/README.md memory-440.json rows
470 MB between hosts | start | steps | end of an epoch | more | first step, s | later steps, s | MB sent a step
strategy | GB[0] | GB[1] | GB[2] | more_GB | first_s | step_s | step_MB

benchmarks/README.md density.json densities
hosts, link, burst | alone ms | ms | ratio | density | its range | encoding | waiting | exchanging | decoding
network | alone_ms | ms | ratio | density | range | encoding | waiting | exchanging | decoding

benchmarks/README.md budget.json budgets
training | hosts | ms a step, 0.1 | ms, 0.05 | kB sent a step, 0.1 | kB, 0.05 | seconds, 0.1 | seconds, 0.05
- | hosts | ms usual | ms half | bytes usual*1e-3 | bytes half*1e-3 | range usual | range half

benchmarks/README.md checked.json judged
training, workers | rate | all-reduce | one worker | `target_density=0.02`, above all-reduce | bytes
case | rate | dense | alone | above | share

benchmarks/README.md densities.json seconds_by_way
density | median | smallest to largest
- | median | range

benchmarks/README.md dense.json dense
workers | gradients | alone | hvdx over MPI | over Horovod | DDP (gloo) | MPI / Horovod
per_host | - | alone | mpi | horovod | DDP | relative

benchmarks/README.md dense.json dense
hosts x workers | link | limit | MPI | alone | hvdx over MPI | over Horovod | DDP alone | DDP (gloo)
- | bandwidth | limit | MPI | alone | mpi | horovod | DDP alone | DDP

benchmarks/README.md dense-sizes.json rows
hosts x workers | gradients | link | limit | alone | hvdx over MPI | DDP alone | DDP (gloo)
- | - | bandwidth | limit | alone | mpi | DDP alone | DDP

benchmarks/README.md dense.json dense
hosts | link | limit | hvdx over MPI, bf16
hosts | bandwidth | limit | mpi

benchmarks/README.md memory-samples.json rows
samples of 1 GiB | start | steps | end of an epoch | all workers | first step, s
strategy | GB[0] | GB[1] | GB[2] | together_GB | first_s

benchmarks/README.md memory-mapped.json rows
in a file | start | steps | end of an epoch | all workers | first step, s
strategy | GB[0] | GB[1] | GB[2] | together_GB | first_s

benchmarks/README.md overlap.json rows
link | exchange | computing | at once | in buckets | in buckets / the longer
bandwidth | exchange | computing | at_once | buckets | ratio

benchmarks/README.md tcp.json rows
hosts | ideal | with hvdx' setting | Open MPI's default | ratio
hosts | ideal | hvdx | default | ratio

benchmarks/README.md average-files.json rows
format | made by | read whole, s | in blocks, s | average, s | ratio | cold | MB
format | made_by | read_whole_s | read_blocks_s | average_s | ratio | cold_ratio | memory_MB

benchmarks/README.md checkpoint.json checkpoints
 | ms | ratio
- | ms | ratio

benchmarks/README.md sharded.json sharded
hosts | exchange | ms a step | messages | encoding | waiting | exchanging | decoding
hosts | exchange | ms | messages | encoding | waiting | exchanging | decoding

benchmarks/README.md scale.json scale
workers | exchange | received | decoded | encoding | decoding | network
workers | exchange | received predicted | decoded | encoding predicted | decoding predicted | network predicted

advise.md predict.json predicted
model | hosts | link | all_reduce | fp16 | threshold | averaging | server
model | hosts | bandwidth | all_reduce | all_reduce:compression=fp16 | threshold | parameter_averaging | parameter_server:servers=colocated

averaging.md averaging-network.json averaging
averaged | sent a step | sent / expected | link / sent | ms a step | % after epoch 1 | 2 | 3 | seconds in all | seconds to 85 %
- | step | expected | carried | ms | epoch 1 | epoch 2 | epoch 3 | all | reached

averaging.md averaging-question.json rows
optimiser | averaged | from dense | divergence | accuracy, %
- | - | from_dense | divergence | accuracy

decentralised.md accuracy.json accuracies
strategy | after 3 epochs | mean of the last 3 epochs | after 10 epochs | difference from dense | bytes | ratio to dense
- | early | calm | late | lost | bytes | ratio

decentralised.md local_steps.json best_schemes
scheme | bytes of all-reduce | held-out loss after 300 steps | after 600
- | share | losses[0] | losses[1]

decentralised.md scale.json exchanges
workers | all_gather: received | messages decoded | ms decoding | sharded: received | messages decoded | ms decoding
workers | all_gather received | all_gather decoded | all_gather decoding | sharded received | sharded decoded | sharded decoding

decentralised.md accuracy-long.json losses
strategy | bytes of all-reduce | 300 steps | 600 | 900 | 1,200 | 1,500
- | ratio | loss 0 | loss 1 | loss 2 | loss 3 | end

decentralised.md accuracy-rate.json losses
strategy, rate 0.002 | bytes of all-reduce | 100 steps | 200 | 300
- | ratio | loss 1 | loss 3 | end

decentralised.md stragglers.json rows
workers | strategy | s to 85 % | steps a second, of all workers | mean staleness | % after 2,000 steps
- | - | seconds | updates_per_second | mean_staleness | last

parameter-server.md staleness.json late
training | s to 85 % | times sooner | steps a second | mean staleness | the slow worker's steps | % at the end
- | seconds | sooner | updates_per_second | mean_staleness | share*100 | last

parameter-server.md staleness.json late
training | s to 85 % | steps a second | mean staleness | % at the end
- | seconds | updates_per_second | mean_staleness | last

parameter-server.md servers.json servers
servers, on the workers' hosts | steps a second | relative to 1 server | busiest server's link | workers' links
servers | steps_per_second | relative | busiest*100 | workers_busy*100

scaling.md scaling.json scaling
workers | strategy | rate | steps | ms a step | kB sent a step | seconds | range | times faster
hosts | name | rate | steps | ms | bytes*1e-3 | seconds | range | faster

scaling.md scaling-simulated.json scaling_simulated
workers | strategy | ms a step | kB sent a step | seconds
workers | - | seconds*1e3 | sent*1e-3 | reached

simulate.md simulate.json simulated
hosts | link | all_reduce over MPI | all_reduce, fp16 | threshold, all-gather | threshold, sharded
hosts | bandwidth | all_reduce:engine=mpi | all_reduce:engine=mpi,compression=fp16 | threshold:target_density=0.01,exchange=all_gather | threshold:target_density=0.01,exchange=sharded

survive.md edges.json places
a worker dies at | what the others do | exit code, rank 0 | to the end | exit code, another worker | to the end
- | - | code 0 | ended 0 | code 1 | ended 1

split-layers.md split.json split
training | ms a step | / AllReduce | layers send | the strategy sends | formula | on the link, without headers | / formula
- | milliseconds | relative | layers_sent | strategy_sent | formula | payload | carried

scaling.md memory-resnet-hosts.json at_sizes
workers | link | strategy | ms a step | / one worker | MB sent a step | GB | first step, s
hosts | bandwidth | strategy | step_s*1000 | relative | step_MB | peak | first_s

scaling.md memory-encoder.json at_sizes
workers | link | strategy | ms a step | / one worker | MB sent a step | GB | first step, s
hosts | bandwidth | strategy | step_s*1000 | relative | step_MB | peak | first_s

scaling.md memory-table-hosts.json at_sizes
workers | link | strategy | ms a step | / one worker | MB sent a step | GB | first step, s
hosts | bandwidth | strategy | step_s*1000 | relative | step_MB | peak | first_s

split-layers.md split-memory.json split_memory
workers in the group | weights and momenta, counted | resident memory | / one worker
ranks | counted | resident | relative
"""  # noqa: E501

#: Lines of tables that no file has, by page and begin, and why.
ALONE = {("benchmarks/README.md", "`Threshold()`, nothing compiled"): "one start, by `--empty`"}
#: Tables of figures that no file has, by page and headers, and why.
EXEMPT = {
    ("containers.md", "part | seconds | processor time, seconds"): "`make container` prints them",
    ("decentralised.md", "strategy | ms a step | loss after 0.65 s | after 200 steps"): (
        "the command below the table makes it in seconds, on virtual clocks; ADR 43 has it"
    ),
    (
        "decentralised.md",
        "learning rate | all-reduce | `Threshold()`, one host | `Threshold()`, 100 Mbit/s",
    ): "its commands stand below it, a minute each",
    (
        "decentralised.md",
        "strategy | bytes of all-reduce | test accuracy, %",
    ): "its command stands above it, and takes three minutes",
    ("scaling.md", "training | parameters | samples a step and worker | target"): "describes the trainings",
}
#: Pages whose tables have no measured figures.
FORMATS = {"wire-format.md": "tests/codec/test_wire_document.py compares them with the codec"}


def specified() -> dict[tuple[str, str], list[tuple[str, str, list[str]]]]:
    """Return the files of each table, by page and headers: name of the file, function of its rows, columns."""
    found: dict[tuple[str, str], list[tuple[str, str, list[str]]]] = {}
    for part in SPECIFICATION.strip("\n").split("\n\n"):
        about, headers, columns = part.split("\n")
        page, file, function = about.split()
        found.setdefault((page, headers), []).append((file, function, columns.split(" | ")))
    return found


TABLES = specified()


def value(row: Row, column: str) -> Any:
    """Return what a cell of a column shows for a row of a file; None for a label.

    Example:
        >>> value({"ms": [1.0, 2.0]}, "ms[1]"), value({"share": 0.5}, "share*100"), value({"share": None}, "-")
        (2.0, 50.0, None)
    """
    if column == "-":
        return None
    if column in row:
        return LINKS[row[column]] if column == "bandwidth" else row[column]
    name, factor = re.split(r"\*|\[", column.removesuffix("]"))
    if "[" in column:
        return row[name][int(factor)]
    return None if row[name] is None else row[name] * float(factor)


@pytest.fixture(scope="module")
def pages() -> dict[str, list[tuple[str, list[str], list[list[str]]]]]:
    """Return the tables of each page of docs, without those of the decision records."""
    names = [path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md")) if "adr" not in path.parts]
    return {str(name): tables((DOCS / name).read_text()) for name in names}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{Path(table[0]).stem}-{table[1][:20]}")
def test_figures_of_a_page_are_in_its_file(table, pages):
    page, headers = table
    found = [lines for _, names, lines in pages[page] if " | ".join(names) == headers]
    assert found, f"docs/{page} has no table with the headers {headers}"
    expected = []
    for file, function, columns in TABLES[table]:
        items = globals()[function](read(file))
        expected.append([[value(item, column) for column in columns] for item in items])
    for lines in found:
        free, first = [list(values) for values in expected], ""
        for line in lines:
            first = line[0] or first
            if any(page == where and first.startswith(begin) for where, begin in ALONE):
                continue
            candidates = [
                (misfits([first, *line[1:]], values), f, i)
                for f, part in enumerate(free)
                for i, values in enumerate(part)
            ]
            wrong, f, i = min(candidates)
            assert not wrong, f"docs/{page}: {line}: {TABLES[table][f][0]} has at best {free[f][i]}"
            free[f].pop(i)


def misfits(line: Sequence[str], values: Sequence[Any]) -> int:
    """Return the number of cells of a line that do not show the expected value."""
    return sum(not fits(cell, expected) for cell, expected in zip(line, values, strict=True))


def read(file: str) -> Row:
    return json.loads((DOCS / "benchmarks" / file).read_text())


def test_each_table_of_figures_has_a_file_or_a_reason(pages):
    found = {
        (page, " | ".join(headers))
        for page, parts in pages.items()
        for _, headers, lines in parts
        if has_figures(lines) and page not in FORMATS
    }
    assert len(found) > 30
    assert found - TABLES.keys() == EXEMPT.keys()


def numbers(thing: Any) -> Iterable[float]:
    """Yield all numbers of a file; and the means of runs whose texts are equal, which differ by their seeds."""
    if isinstance(thing, bool) or thing is None or isinstance(thing, str):
        return
    if isinstance(thing, int | float):
        yield thing
        return
    parts = list(thing.values() if isinstance(thing, dict) else thing)
    for part in parts:
        yield from numbers(part)
    seeds: dict[tuple[str, ...], list[Row]] = {}
    for row in parts if isinstance(thing, list) else []:
        if isinstance(row, dict) and "seed" in row:
            seeds.setdefault(tuple(text for text in row.values() if isinstance(text, str)), []).append(row)
    for runs in seeds.values():
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
            pool = [n for file in files for n in numbers(read(file))]
            for line in lines:
                cell = re.sub(r'\]\(\S+\)|"[^"]*"', "", line[-1])
                # Files count bytes.
                here = pool + [n / 1e6 for n in pool if n > 1e5] if " MB" in cell else pool
                for number, half in shown(cell) if "ADR" not in cell and re.search(r"\d\.\d", cell) else []:
                    if number < 0 or number != int(number):  # others are numbers of workers and the like
                        near = any(abs(n - abs(number)) <= half for n in here)
                        assert near, f"docs/{page}: {cell}: {number:g} is in none of {sorted(files)}"
                        checked += 1
    assert checked > 30


def test_errors_of_predictions_are_those_of_their_file(pages):
    text = " ".join((DOCS / "advise.md").read_text().split())
    cases = predictions(read("predict.json"))
    errors = [abs(case["predicted"] / case["measured"] - 1) for case in cases]
    assert f"The median error is {100 * median(errors):.0f} %" in text
    within = sum(error <= 0.3 for error in errors)
    assert f"{within} of the {len(errors)} predictions are within 30 %" in text


def test_times_faster_on_the_first_page_are_in_their_file():
    """And those below the picture of docs/scaling.md, where some are of a strategy that is slower than one worker."""
    items = scaling(read("scaling.json"))
    readme, page = (ROOT / "README.md").read_text(), (DOCS / "scaling.md").read_text()
    below = re.search(r"^!\[.*\n\n((?:.+\n)+)", page, re.MULTILINE)[1]
    found = set(re.findall(r"([\d.]+) (?:times as fast|and [\d.]+ times)", readme))
    assert found
    assert found <= {f"{row['faster']:.1f}" for row in items}
    slower = {f"{1 / row['faster']:.1f}" for row in items}
    assert set(re.findall(r"\d\.\d", below)) <= {f"{row['faster']:.1f}" for row in items} | slower
