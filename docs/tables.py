"""Tables of the pages, made from the JSON files in docs/benchmarks; `make tables` writes them into the pages.

cogapp puts a table between two marks of a page, `<!--[[[cog show("tcp") ]]]-->` and `<!--[[[end]]]-->`. `TABLES` has
three lines for each table: its name and an expression for its rows; the headers; the cells of a row. Headers and cells
are f-strings. Their names are the arguments of `show`; in cells also the keys of the row, with "_" for a space, `row`,
and `every` for all rows. A null in a file is NaN, and a cell with NaN stays empty.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from math import nan
from pathlib import Path
from statistics import fmean, median, stdev  # noqa: F401, used in `TABLES`
from typing import Any

from cogapp import Cog

from hvdx.jobs.benchmarks import harness, local_steps, scaling  # noqa: F401
from hvdx.report.table import quantity  # noqa: F401

Row = dict[str, Any]

DOCS = Path(__file__).resolve().parent

TABLES = r"""
first step: [{"way": way, "s": s} for way, s in (read("first-step")["seconds"] | {"empty": [23.1]}).items()]
first step | median | range
{STARTS[way]} | {short(median(s))} s | {span(s)}

wire: rows("wire", "independent", elements=10_000_000)
density | entropy | hvdx, 1 M elements | hvdx, 10 M | ratio at 10 M | Elias-Fano | Deeplearning4j | zstd of int32
{DENSITIES[density]} | {entropy:.2f} | {only(r["bits"] for r in rows("wire", "independent", elements=1_000_000, density=density)):.2f} | {bits:.2f} | **{ratio:.3f}** | {elias_fano:.2f} | {deeplearning4j:.1f} | {zstd:.1f}

recorded: read("wire")["recorded"]["all"]
target density | entries | share of more than one tau | entropy | hvdx | ratio
{DENSITIES[density]} | {entries} | {100 * multiples:.1f} % | {entropy:.2f} | {bits:.2f} | **{ratio:.3f}**

kernels: read(file)["figures"]
density | threads | np.add, GB/s | encode | lookahead 3 | NumPy | 5000 arrays | decode 4 | both | memory
{DENSITIES[density]} | {threads} | {add_bytes_per_second / 1e9:.1f} | {quartiles(ratios["encode"])} | {quartiles(ratios["encode_ahead"])} | {ratios.get("numpy", [nan, nan])[1]:.3f} | {arrays_per_one:.2f} | {seconds["decode"] / seconds["add"]:.2f} | {step_per_add:.2f} | {100 * max(extra_memory_bytes - message_bytes, 0) / (4 * elements):.2f} %

gpu: together(rows("gpu"), "density")
density | a + b | encode | ratio | 1000 arrays | decode 16 | step | step through the host
{DENSITIES[density]} | {plain_ms[what.index("encode")]:.2f} | {checked_ms[0]:.2f} | {checked_to_plain[0]:.2f} | {row["1000 arrays_ms"][0]:.2f} | {decode_ms[0]:.1f} | {on_the_GPU_ms[0]:.1f} | {through_the_host_ms[0]:.0f}

memory: rows(file)
{network} | start | steps | end of an epoch | more | first step, s | later steps, s
{strategy} | {GB[0]:.2f} | {GB[1]:.2f} | {GB[2]:.2f} | {more_GB:.2f} | {first_s:.1f} | {short(step_s)}

memory between hosts: rows("memory-440")
470 MB between hosts | start | steps | end of an epoch | more | first step, s | later steps, s | MB sent a step
{strategy} | {GB[0]:.2f} | {GB[1]:.2f} | {GB[2]:.2f} | {more_GB:.2f} | {first_s:.1f} | {short(step_s)} | {short(step_MB)}

memory of data: rows(file)
{data} | start | steps | end of an epoch | all workers | first step, s
{strategy} | {GB[0]:.2f} | {GB[1]:.2f} | {GB[2]:.2f} | {together_GB:.2f} | {first_s:.1f}

density: rows("density")
hosts, link, burst | alone ms | ms | ratio | density | its range | encoding | waiting | exchanging | decoding
{hosts}, {LINKS[bandwidth]}, {burst.replace("kB", " kB")} | {alone_ms:.1f} | {ms:.1f} | {ratio:.2f} | {density:.2g} | {lowest:.2f} to {highest:.2f} | {encoding:.2f} | {waiting:.2f} | {exchanging:.2f} | {decoding:.2f}

densities: together(rows("densities"), "way")
density | median | smallest to largest
{way.partition("target_density=")[2] or "automatic"} | {median(seconds):.1f} | {span(seconds, ".1f")}

budget: together([row | {"training": name} for model, name in MODELS.items() for row in sorted(summary("budget", model, "100mbit"), key=lambda row: row["strategy"])], "training", "hosts")
training | hosts | ms a step, 0.1 | ms, 0.05 | kB sent a step, 0.1 | kB, 0.05 | seconds, 0.1 | seconds, 0.05
{training} | {hosts} | {ms[0]:.0f} | {ms[1]:.0f} | {bytes[0] / 1e3:.0f} | {bytes[1] / 1e3:.0f} | {seconds[0]:.1f} ({least[0]:.1f} to {most[0]:.1f}) | {seconds[1]:.1f} ({least[1]:.1f} to {most[1]:.1f})

dense on a host: rows("dense", hosts=1)
workers | gradients | alone | hvdx over MPI | over Horovod | DDP (gloo) | MPI / Horovod
{per_host} | {gradients(hidden)} | {short(alone)} | {short(mpi)} | {short(horovod)} | {short(DDP)} | {mpi / horovod:.2f}

dense between hosts: [row for row in rows("dense", wire="none") if row["hosts"] > 1]
hosts x workers | link | limit | MPI | alone | hvdx over MPI | over Horovod | DDP alone | DDP (gloo)
{hosts} x {per_host} | {LINKS[bandwidth]} | {short(limit)} | {short(MPI)} | {short(alone)} | {short(mpi)} | {short(horovod)} | {short(DDP_alone)} | {short(DDP)}

dense sizes: sorted(rows("dense-sizes"), key=lambda row: (row["hidden"], harness.bits(row["bandwidth"])))
hosts x workers | gradients | link | limit | alone | hvdx over MPI | DDP alone | DDP (gloo)
{hosts} x {per_host} | {gradients(hidden)} | {LINKS[bandwidth]} | {short(limit)} | {short(alone)} | {short(mpi)} | {short(DDP_alone)} | {short(DDP)}

dense bf16: sorted(rows("dense", wire="bf16"), key=lambda row: (harness.bits(row["bandwidth"]), row["hosts"]))
hosts | link | limit | hvdx over MPI, bf16
{hosts} | {LINKS[bandwidth]} | {short(limit)} | {short(mpi)}

balance: rows(file)
way | s, an epoch | ms a step | / even | ideal / it | rows of a step in the end | held-out loss | %
{BALANCED[way]} | {short(seconds)} | {short(1e3 * settled)} | {bold(f"{settled / next(r['settled'] for r in every if r['way'] == way.removeprefix('balanced ')):.3f}") if "balanced" in way else ""} | {"" if way == "one process" else f"{ideal / settled:.2f}"} | {", ".join(map(str, rows_at_the_end))} | {loss:.4f} | {accuracy:.1f}

spreads: spreads()
workers | `AllReduce()`, even rows | `AllReduce()` | `Threshold()` | `Threshold(max_staleness="inf")` | `ParameterServer("colocated")` | simulated, even | simulated
{spread} | {gained(row["all_reduce"])} | {gained(row["balanced all_reduce"])} | {gained(row.get("balanced threshold"))} | {gained(row["threshold:max_staleness=inf"])} | {gained(row["parameter_server:servers=colocated"])} | {short(row["all_reduce"]["simulated"])} | {short(row["balanced all_reduce"]["simulated"])}

balance in time: together([run for file in files for run in rows(file)], "data", "way")
data | way | samples a second | % after {seconds / 4:g} s | after {seconds / 2:g} s | after {seconds:g} s
{data} | {BALANCED[way]} | {short(median(samples))} | {deviation(at[0][1] for at in curve)} | {deviation(at[1][1] for at in curve)} | {deviation(at[2][1] for at in curve)}

peers: rows("peers")
backend | hosts | link | network | DataParallel or DDP, ms a step | `AllReduce()` | / peer | `Threshold()` | peer, s to the target | `Threshold()`, s | / peer
{BACKENDS[backend]} | {hosts} | {LINKS[bandwidth]} | {MODELS[model]} | {short(peer_ms)} | {short(all_reduce_ms)} | {bold(f"{all_reduce_ms / peer_ms:.2f}")} | {short(threshold_ms)} | {short(peer_s)} | {short(threshold_s)} | {bold(f"{threshold_s / peer_s:.2f}")}

overlap: rows("overlap")
link | exchange | computing | at once | in buckets | in buckets / the longer
{LINKS[bandwidth]} | {short(exchange)} | {short(computing)} | {short(at_once)} | {short(buckets)} | {ratio:.2f}

tcp: rows("tcp")
hosts | ideal | with hvdx' setting | Open MPI's default | ratio
{hosts} | {ideal:.2f} s | {hvdx:.2f} s | {default:.2f} s | {ratio:.2f}

average files: rows("average-files")
format | made by | read whole, s | in blocks, s | average, s | ratio | cold | MB
{format} | {made_by} | {read_whole_s:.2f} | {read_blocks_s:.2f} | {average_s:.2f} | **{ratio:.2f}** | {cold_ratio:.2f} | {memory_MB:.0f}

checkpoint: [{"what": what, "ms": [1e3 * s for s in c[f"{what} seconds"]], "ratio": c.get(f"{what} / {above}", 1)} for c in [read("checkpoint")] for what, above in zip(SAVINGS, ["", *SAVINGS])]
 | ms | ratio
{SAVINGS[what]} | {median(ms):.0f} ({span(ms, ".0f")}) | {bold(f"{ratio:.3g}", ratio != 1)}

checked: checked()
training, workers | rate | all-reduce | one worker | `target_density=0.02`, above all-reduce | bytes
{case} | {rate:g} | {all_reduce["loss"]:.3f} | {alone["loss"]:.3f} | {row["target_density=0.02"]["loss"] - all_reduce["loss"]:+.3f} | {part(1 / row["target_density=0.02"]["ratio"])}

sharded: rows("sharded")
hosts | exchange | ms a step | messages | encoding | waiting | exchanging | decoding
{hosts if exchange == "all_gather" else ""} | {exchange} | {ms:.1f} | {sent / message:.2f} | {encoding:.2f} | {waiting:.2f} | {exchanging:.2f} | {decoding:.2f}

scale: rows("scale")
workers | exchange | received | decoded | encoding | decoding | network
{workers if exchange == "all_gather" else ""} | {exchange} | {quantity(received, "B")} ({predicted_received / received:.2f}) | {decoded:.1f} | {predicted(encoding, predicted_encoding)} | {predicted(decoding, predicted_decoding)} | {predicted(network, predicted_network)}

exchanges: together(sorted(rows("scale"), key=lambda row: row["exchange"]), "workers")
workers | all_gather: received | messages decoded | ms decoding | sharded: received | messages decoded | ms decoding
{workers} | {quantity(received[0], "B")} | {short(decoded[0])} | {short(decoding[0])} | {quantity(received[1], "B")} | {short(decoded[1])} | {short(decoding[1])}

predict: together(predictions(), "model", "hosts", "bandwidth")
model | hosts | link | all_reduce | fp16 | threshold | averaging | server
{model} | {hosts} | {LINKS[bandwidth]} | {" | ".join(predicted(measured_ms[i], predicted_ms[i]) for i in map(strategy.index, PREDICTED))}

simulate: sorted(together(rows("simulate"), "hosts", "bandwidth"), key=lambda row: (row["hosts"], harness.bits(row["bandwidth"])))
hosts | link | all_reduce over MPI | all_reduce, fp16 | threshold, all-gather | threshold, sharded
{hosts} | {LINKS[bandwidth]} | {" | ".join(predicted(1e3 * seconds, 1e3 * guess) for _, seconds, guess in sorted(zip(strategy, measured, simulated)))}

averaging network: rows("averaging-network")
averaged | sent a step | sent / expected | link / sent | ms a step | % after epoch 1 | 2 | 3 | seconds in all | seconds to 85 %
{averaged(name)} | {quantity(sent / steps, "B")} | {sent / steps / (6 * read("averaging-network")["parameters"]) * period / (1 + state):.3f} | {row.get("link", row.get("auto")) / sent:.3f} | {ms:.0f} | {curve[0][1]:.2f} | {curve[1][1]:.2f} | {curve[2][1]:.2f} | {ms * steps / 1e3:.0f} | {ms * next((n for n, accuracy in curve if accuracy >= 85), nan) / 1e3:.0f}

averaging question: rows("averaging-question")
optimiser | averaged | from dense | divergence | accuracy, %
{OPTIMIZERS[optimizer] if way == "gradients" else ""} | {averaged(way)} | {from_dense:.2g} | {divergence:.2g} | {accuracy:.2f}

accuracy: together(rows("accuracy", "runs"), "spelling")
strategy | after 3 epochs | mean of the last 3 epochs | after 10 epochs | difference from dense | bytes | ratio to dense
{options(spelling, "dense, float32")} | {deviation(a[2] for a in accuracy)} | {deviation(fmean(a[-3:]) for a in accuracy)} | {deviation(a[-1] for a in accuracy)} | {fmean(a[-1] for a in accuracy) - fmean(a[-1] for a in every[0]["accuracy"]):+.2f} | {short(fmean(bytes) / 1e6)} MB | {part(1 / fmean(ratio))}

long losses: rows("accuracy-long", "runs")
strategy | bytes of all-reduce | 300 steps | 600 | 900 | 1,200 | 1,500
{options(spelling, "all-reduce")} | {part(1 / ratio)} | {" | ".join(f"{loss:.3f}" for loss in accuracy)}

losses by rate: together(rows("accuracy-rate", "runs"), "spelling")
strategy, rate 0.002 | bytes of all-reduce | 100 steps | 200 | 300
{options(spelling, "all-reduce")} | {part(1 / fmean(ratio))} | {fmean(a[1] for a in accuracy):.3f} | {fmean(a[3] for a in accuracy):.3f} | {fmean(a[5] for a in accuracy):.3f} ({span([a[5] for a in accuracy], ".3f")})

schemes: sorted(local_steps.summary(rows("local_steps")), key=lambda row: [*SCHEMES].index(row["scheme"]))
scheme | bytes of all-reduce | held-out loss after 300 steps | after 600
{SCHEMES[scheme]} | {part(1 / fewer if bytes_per_step else 0)} | {losses[0]:.3f} | {losses[1]:.3f}

stragglers: [row for row in rows("stragglers") if row["way"] in WAYS]
workers | strategy | s to 85 % | steps a second, of all workers | mean staleness | % after 2,000 steps
{("one ten times slower" if slow else "all equal") if way == "step" else ""} | {bold(WAYS[way], slow and way == "inf")} | {bold(f"{seconds:.1f}", slow and way == "inf")} | {updates_per_second:.0f} | {mean_staleness:.1f} | {last:.1f}

staleness: rows("staleness", slow=True)
training | s to 85 % | times sooner | steps a second | mean staleness | the slow worker's steps | % at the end
{name} | {reached(seconds)} | {every[0]["seconds"] / seconds:.1f} | {updates_per_second:.0f} | {mean_staleness:.2f} | {100 * steps[-1] / sum(steps):.0f} % | {last:.2f}

staleness of equals: rows("staleness", slow=False)
training | s to 85 % | steps a second | mean staleness | % at the end
{name} | {reached(seconds)} | {updates_per_second:.0f} | {mean_staleness:.2f} | {last:.2f}

servers: rows("servers")
servers, on the workers' hosts | steps a second | relative to 1 server | busiest server's link | workers' links
{servers} | {steps_per_second:.2f} | {steps_per_second / every[0]["steps_per_second"]:.2f} | {100 * busiest:.0f} % | {100 * workers_busy:.0f} %

scaling: summary("scaling", model, bandwidth)
workers | strategy | rate | steps | ms a step | kB sent a step | seconds | range | times faster
{hosts} | {STRATEGIES[strategy]} | {rate} | {steps:.0f} | {ms:.0f} | {bytes / 1e3:.0f} | {seconds:.1f} | {span([least, most], ".1f")} | {faster:.2f}

sizes: sorted(rows(file), key=lambda row: row["hosts"])
workers | link | strategy | ms a step | / one worker | MB sent a step | GB | first step, s
{hosts} | {LINKS[bandwidth]} | {bold(strategy, strategy.startswith("Threshold"))} | {1e3 * step_s:,.0f} | {step_s / next(row["step_s"] for row in every if (row["hosts"], row["bandwidth"]) == (hosts, "none")):.2f} | {short(step_MB)} | {max(GB):.2f} | {first_s:.1f}

scaling, simulated: [c for i, c in enumerate(read("scaling-simulated")["cases"]) if i == 0 or c["workers"] in (8, 16, 64)]
workers | strategy | ms a step | kB sent a step | seconds
{workers} | {STRATEGIES[strategy] if workers > 1 else "one worker"} | {1e3 * seconds:.0f} | {sent / 1e3:.0f} | {next(s for s, loss in losses if loss <= 0.15):.1f}

edges: together(together(sorted(rows("edges"), key=lambda row: row["victim"]), "place", "victim"), "place")
a worker dies at | what the others do | exit code, rank 0 | to the end | exit code, another worker | to the end
{place} | {PLACES[place]} | {only(code[0])} | {only(ended[0])} | {only(code[1])} | {only(ended[1])}

split: sorted(rows("split"), key=lambda row: [*SPLITS].index(row["way"]))
training | ms a step | / AllReduce | layers send | the strategy sends | formula | on the link, without headers | / formula
{SPLITS[way]} | {milliseconds:.0f} | {bold(f"{milliseconds / every[0]['milliseconds']:.2g}", layers_sent)} | {quantity(layers_sent or nan, "B")} | {quantity(strategy_sent, "B")} | {quantity(formula, "B")} | {quantity(payload, "B")} | {bold(f"{payload / formula:.3f}", layers_sent)}

split memory: rows("split-memory")
workers in the group | weights and momenta, counted | resident memory | / one worker
{ranks} | {counted / 1e9:.2f} GB | {resident / 1e9:.2f} GB | {bold(f"{resident / every[0]['resident']:.3f}", ranks > 1)}
"""  # noqa: E501
BLOCKS = dict(block.split(": ", 1) for block in TABLES.strip().split("\n\n"))

# -- words ------------------------------------------------------------------------------------------------------------

DENSITIES = {1e-4: "1e-4", 1e-3: "1e-3", 1e-2: "1e-2", 1 / 16: "1/16", 0.1: "0.1"}
LINKS = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "none": "none"}
MODELS = {"lm": "transformer", "cnn": "CNN", "mlp": "MLP"}
BACKENDS = {"jax": "JAX", "torch": "PyTorch"}
PREDICTED = ["all_reduce", "all_reduce:compression=fp16", "threshold", "parameter_averaging"]
PREDICTED += ["parameter_server:servers=colocated"]
OPTIMIZERS = {"sgd": "SGD 0.1", "momentum": "SGD 0.05, momentum 0.9", "adam": "Adam 0.001"}
STRATEGIES = {
    "one worker": "one worker",
    "horovod": "Horovod's all-reduce",
    "all-reduce": "`AllReduce()`",
    "all_reduce:engine=mpi": "`AllReduce()`",
    "fp16": '`AllReduce(compression="fp16")`',
    "all_reduce:engine=mpi,compression=fp16": '`AllReduce(compression="fp16")`',
    "averaging": "`ParameterAveraging(10)`",
    "parameter_averaging:period=10,engine=mpi": "`ParameterAveraging(10)`",
    "threshold": "**`Threshold()`**",
}
# No file has the seconds of "empty".
STARTS = {
    "plain": "plain Keras",
    "threshold": "`Threshold()`, kernels compiled before (`hvdx build-kernels`)",
    "empty": "`Threshold()`, nothing compiled on this machine (`--empty`, one start)",
}
SAVINGS = {
    "once": "writing the same bytes to one file, with fsync",
    "checkpoint": "a checkpoint, from the decision to save until it has its final name, all on the disk",
    "copy": "a copy into fresh memory",
    "waited": "the time that training waits",
}
SCHEMES = {
    "one worker": "one worker",
    "all-reduce": "all-reduce",
    "DiLoCo": "DiLoCo",
    "Threshold, bytes of DiLoCo": "`Threshold(target_density=0.06)`",
    "SparseLoCo": "SparseLoCo",
    "Threshold, bytes of SparseLoCo": "`Threshold(target_density=0.018, period=30)`",
}
BALANCED = {
    "one process": "one process, without pauses",
    "all_reduce": "`AllReduce()`, even rows",
    "balanced all_reduce": "`AllReduce()`",
    "threshold": "`Threshold()`, even rows",
    "balanced threshold": "`Threshold()`",
    "all_reduce:compression=bf16": '`AllReduce(compression="bf16")`, even rows',
    "balanced all_reduce:compression=bf16": '`AllReduce(compression="bf16")`',
    "threshold:max_staleness=inf": '`Threshold(max_staleness="inf")`',
    "parameter_server:servers=colocated": '`ParameterServer("colocated")`',
}
WAYS = {
    "step": "`Threshold()`",
    "inf": '`Threshold(max_staleness="inf")`',
    "plain": '`ParameterServer("colocated")`',
}
SPLITS = {
    "all_reduce": "whole layers, `AllReduce()`",
    "threshold": "whole layers, `Threshold()`",
    "pair": "a split pair, `AllReduce()`",
    "single": "two split layers, `AllReduce()`",
}
PLACES = {
    "the first import": "nothing: `hvdx run` ends the job after five seconds, since none of them can join without it",
    "before init": "the same",
    "after init": "they train on; its samples of the first epoch are lost, as in all rows to the end of `fit`",
    "the beginning of fit": "the same",
    "a step": "the same; they repeat the exchange without it",
    "validation": "the same; they end the validation without its samples",
    "the end of an epoch": "the same; the next rank 0 runs the callbacks that write again",
    "the end of fit": "the same; what callbacks of yours write there as rank 0 may be missing, so the exit code is 1",
    "after fit": "they predict all samples without it",
    "predict": "they begin again, and predict all samples",
    "evaluate": "they begin again, and evaluate all samples",
    "the last line": "nothing: what rank 0 would have written is missing",
    "an exit handler": "nothing: the script has ended",
}


def averaged(way: str) -> str:
    """Return in words what is averaged."""
    words = re.sub(r"every 1\b", "every step", way).replace("every", "weights, every").replace("with", "and")
    return words.replace("all_reduce", "gradients (`AllReduce`)")


def options(spelling: str, dense: str) -> str:
    """Return the options of a `Threshold`, or the name of all-reduce."""
    return f"`{spelling.removeprefix('threshold:')}`" if ":" in spelling else dense


def reached(seconds: float) -> str:
    """Return the seconds to a target that may not have been reached."""
    return f"{seconds:.1f}" if seconds > 0 else "not reached"


# -- figures ----------------------------------------------------------------------------------------------------------


def bold(text: str, condition: Any = True) -> str:
    """Return a text in bold, if a condition holds."""
    return f"**{text}**" if condition else text


def deviation(values: Iterable[float]) -> str:
    """Return mean and standard deviation."""
    values = list(values)
    return f"{fmean(values):.2f} ± {stdev(values):.2f}"


def gradients(hidden: int) -> str:
    """Return the size of the gradients of the benchmarks' MLP."""
    return f"{float(f'{4e-6 * harness.parameters(hidden):.2g}'):g} MB"


def gained(run: Row | None) -> str:
    """Return samples a second, and the accuracy in brackets; nothing for a way that was not measured."""
    return f"{short(run['samples'])} ({run['accuracy']:.1f})" if run else ""


def only(values: Iterable[Any]) -> Any:
    """Return the value that all values are equal to."""
    (value,) = set(values)
    return value


def part(share: float) -> str:
    """Return a share as 1/n.

    Example:
        >>> part(0.0005), part(1.0), part(0)
        ('1/2,000', '1', '0')
    """
    return f"1/{1 / share:,.0f}" if 0 < share < 1 else f"{share:g}"


def predicted(value: float, prediction: float) -> str:
    """Return a figure, and its prediction relative to it."""
    return f"{short(value)} ({prediction / value:.2f})"


def quartiles(figures: Sequence[float]) -> str:
    """Return the median in bold, and the other quartiles."""
    low, middle, high = figures
    return f"**{middle:.2f}** ({low:.2f}-{high:.2f})"


def short(value: float) -> str:
    """Return a number with three digits, or with all before its point.

    Example:
        >>> short(6466.3), short(0.4567), short(80.0), short(0.0)
        ('6,466', '0.457', '80.0', '0')
    """
    return f"{value:,.0f}" if value >= 100 or not value else f"{value:#.3g}".rstrip(".")


def span(values: Sequence[float], form: str = ".2f") -> str:
    """Return the smallest and the largest of several values."""
    return f"{min(values):{form}} to {max(values):{form}}" if min(values) < max(values) else ""


# -- rows -------------------------------------------------------------------------------------------------------------


def read(file: str) -> Row:
    """Return the document in a file of docs/benchmarks."""
    return json.loads((DOCS / "benchmarks" / f"{file}.json").read_text())


def rows(file: str, key: str = "rows", **where: Any) -> list[Row]:
    """Return the rows of a file that have the given values."""
    return [row for row in read(file)[key] if where.items() <= row.items()]


def together(found: Sequence[Row], *keys: str) -> list[Row]:
    """Return a row for each group of rows with equal values of these keys; its other values are lists.

    Example:
        >>> together([{"n": 1, "ms": 2.0}, {"n": 1, "ms": 3.0}, {"n": 2}], "n")
        [{'n': 1, 'ms': [2.0, 3.0]}, {'n': 2, 'ms': [nan]}]
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    others = dict.fromkeys(key for row in found for key in row if key not in keys)
    return [
        {key: group[0][key] for key in keys}
        | {key: [row[key] for row in group if key in row] or [nan] for key in others}
        for group in groups.values()
    ]


def checked() -> list[Row]:
    """Return a row for each training and rate of checked.json: its runs by strategy, and that of one worker."""
    found: dict[tuple[str, float], Row] = {}
    for run in rows("checked"):
        row = found.setdefault((run["case"], run["rate"]), {"case": run["case"], "rate": run["rate"]})
        row["alone" if run["workers"] == 1 else run["strategy"]] = run
    cases = [case for case, _ in found]
    return [found[key] for key in sorted(found, key=lambda key: (cases.index(key[0]), key[1])) if "alone" in found[key]]


def predictions() -> list[Row]:
    """Return the cases of predict.json, with milliseconds."""
    cases = read("predict")["cases"]
    if isinstance(cases, list):
        return cases
    found = []
    for name, case in cases.items():  # as the benchmark writes them
        row = dict(zip(("model", "hosts", "bandwidth", "strategy"), name.split(" ", 3), strict=True))
        found.append(row | {"measured_ms": 1e3 * case["measured"]["step"], "predicted_ms": 1e3 * case["predicted"]})
    return found


def spreads() -> list[Row]:
    """Return a row for each spread of the workers' speeds: its runs by way."""
    found: dict[str, Row] = {}
    ten_times = [r for f in ("balance_time", "balance_threshold") for r in rows(f, data="fashion-mnist", seed=0)]
    for run in rows("balance_spread") + rows("balance_jitter") + ten_times:
        times, jitter = max(run["times"]), run["jitter"]
        name = f"one {times:g} times slower" if times > 1 else f"equal, jitter {jitter:g}" if jitter else "equal"
        found.setdefault(name, {"spread": name})[run["way"]] = run
    return sorted(found.values(), key=lambda row: row["all_reduce"]["times"] + [row["all_reduce"]["jitter"]])


def summary(file: str, model: str, bandwidth: str) -> list[Row]:
    """Return the rows of a training that reached its target in each run."""
    found = scaling.summary(rows(file), model, bandwidth)
    return [row for row in found if row["seconds"] and row["faster"] is not None]


# -- tables -----------------------------------------------------------------------------------------------------------


def show(name: str, **given: Any) -> None:
    """Print a table in Markdown.

    Args:
        name: name of the table in `TABLES`.
        given: further names for its expressions.
    """
    source, headers, cells = BLOCKS[name].split("\n")
    every = eval(source, globals() | given)
    lines = [filled(headers, given)]
    for row in every:
        values = {key.replace(" ", "_"): nan if value is None else value for key, value in row.items()}
        lines.append(filled(cells, given | values | {"row": row, "every": every}))
    for number, line in enumerate(lines):
        if len(line) != len(lines[0]):
            raise ValueError(f"{name}: expected {len(lines[0])} cells, got {line}")
        print(f"| {' | '.join(line)} |" + f"\n{'|---' * len(line)}|" * (number == 0))


def filled(template: str, values: Row) -> list[str]:
    """Return the cells of a line."""
    cells = eval(f"f'''{template} '''", globals() | values).split(" | ")
    return ["" if re.search(r"\bnan\b", cell) else cell.strip() for cell in cells]


def main(*options: str) -> int:
    """Call cogapp with options for all pages that have a mark."""
    pages = [str(page) for page in sorted(DOCS.rglob("*.md")) if "<!--[[[cog" in page.read_text()]
    return Cog().main(["cog", "-P", "-I", str(DOCS), "-p", "from tables import show", *options, *pages])


if __name__ == "__main__":
    sys.exit(main("-r"))
