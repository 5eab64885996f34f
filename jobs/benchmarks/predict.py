"""The cost model of `hvdx advise` against measured steps, on emulated hosts.

    python jobs/benchmarks/predict.py --json predict.json                     all 18 settings, about half an hour
    python jobs/benchmarks/predict.py --models mlp --hosts 2 --bandwidth 100mbit --json predict.json

For each model, copies of its script run alone, as many at once as there are hosts, since the hosts of the lab share
one machine. Their steps and the speeds of the machine go into the model, as in `hvdx advise --workers-per-host`. The
link is measured as in `hvdx advise --hosts`. Then the script trains in the lab under each strategy, and its record
gives the measured step: the median without the first steps; or, for strategies that exchange at some steps only, the
mean over whole periods. With --json, finished cases are kept in the file, and the next call continues after them.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from hvdx.cli.advising import answer, machine, script
from hvdx.cli.common import processes
from hvdx.comm.launcher import usable_cores
from hvdx.costs.types import Link, Prediction
from hvdx.jobs.benchmarks import harness
from hvdx.report import records
from hvdx.report.table import render
from hvdx.strategies import parse

_JOBS = Path(__file__).resolve().parent.parent
#: Command of each model, and the options that end it after some steps of all workers together: strategies without a
#: common step take no limit of steps.
MODELS = {
    "mlp": (["fashion_mnist.py", "--data", "fashion-mnist", "--quiet"], 64),
    "cnn": (["fashion_mnist.py", "--data", "fashion-mnist", "--model", "cnn", "--quiet"], 64),
    "lm": (["language_model.py", "--held-out", "16"], 16),
}
STRATEGIES = (
    *("all_reduce", "all_reduce:compression=fp16", "threshold"),
    *("parameter_averaging", "parameter_server:servers=colocated"),
)
# Steps of a measured run: as many as take this time by the prediction, between these limits.
_SECONDS, _FEWEST, _MOST = 6.0, 4, 160
# Steps that are left out: of a long run also those in which the codec finds its tau and the density is reviewed.
_WARM, _WARM_LONG = 2, 100
# Seconds of start and end of a run, for its time limit.
_AROUND = 90.0


def main(argv: list[str] | None = None) -> int:
    """Run the cases that are missing, and print the table."""
    parser = harness.parser(__doc__)
    words, numbers = harness.several(str), harness.several(int)
    add = parser.add_argument
    add("--models", type=words, default=",".join(MODELS), metavar="NAME,...", help="models")
    add("--hosts", type=numbers, default="2,4", metavar="N,N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=words, default="10mbit,100mbit,1gbit", metavar="RATE,...", help="bandwidths of the links")
    add("--strategies", default=";".join(STRATEGIES), help="strategies, separated by semicolons")
    add("--again", action="store_true", help="predict the cases of the file again, without measuring them again")
    options = parser.parse_args(argv)
    spellings = options.strategies.split(";")
    done = _load(options.json)
    for model in options.models:
        for hosts in options.hosts:
            training, speeds = _speeds(done, model, hosts, options.json)
            for bandwidth in options.bandwidth:
                link = _link(done, hosts, bandwidth, training.elements, options.json)
                for spelling in spellings:
                    key = f"{model} {hosts} {bandwidth} {spelling}"
                    situation = answer.situation_of(training, speeds, link, hosts, 1, usable_cores() / hosts)
                    predicted = parse(spelling).predict(situation)
                    assert predicted is not None
                    missing = "step" not in done["cases"].get(key, {}).get("measured", {})
                    if missing and not options.again:
                        measured = measure(model, hosts, bandwidth, spelling, predicted)
                        done["cases"][key] = {"measured": measured}
                    if key in done["cases"]:
                        case = done["cases"][key]
                        case |= {"predicted": predicted.seconds, "terms": predicted.terms, "note": predicted.note}
                        print(_line(key, case), flush=True)
                        _save(options.json, done)
    print(f"\n{summary(done['cases'])}")
    return 0


def measure(model: str, hosts: int, bandwidth: str, spelling: str, predicted: Prediction) -> harness.Row:
    """Train in the lab under one strategy for some steps; return the figures of its record.

    Args:
        model: one of `MODELS`.
        hosts: number of hosts.
        bandwidth: bandwidth of the links.
        spelling: the strategy.
        predicted: its prediction, from which the number of steps follows.
    """
    steps = int(min(max(_SECONDS / predicted.seconds, _FEWEST), _MOST))
    if predicted.period > 1:
        steps = max(1, round(steps / predicted.period)) * predicted.period + _WARM
    (name, *words), batch = MODELS[model]
    limit = {"HVDX_LIMIT": f"steps:{steps}"}
    if parse(spelling).asynchronous:
        steps, limit = steps * hosts, {}
        words += ["--epochs", "1"]
        words += ["--steps", str(steps)] if model == "lm" else ["--samples", str(steps * batch)]
    with tempfile.TemporaryDirectory() as folder:
        lab = ["lab", "-n", str(hosts), "--bandwidth", bandwidth, "--json", f"{folder}/lab.json"]
        command = [sys.executable, "-m", "hvdx", *lab, "--", sys.executable, str(_JOBS / name), *words]
        environ = processes.child_environment(HVDX_STRATEGY=spelling, HVDX_RECORD=f"{folder}/record", **limit)
        begin = time.monotonic()
        ended = processes.run(command, _AROUND + 3 * steps * predicted.seconds, environ)
        if ended.code:
            return {"failed": ended.reason()}
        run = records.read(f"{folder}/record")[-1]
        return step_of(run, predicted.period) | {"seconds": time.monotonic() - begin}


def step_of(run: records.Run, period: int) -> harness.Row:
    """Return the seconds of a step of a run, the parts of a step, and its bytes.

    Args:
        run: record of the run.
        period: number of steps between two exchanges.
    """
    found = []
    for rank in run.ranks.values():
        seconds = rank.steps["seconds"] / np.maximum(np.diff(rank.steps["step"], prepend=0), 1)
        if period > 1:
            whole = (len(seconds) - _WARM) // period * period
            found.append(float(np.mean(seconds[len(seconds) - whole :])) if whole else float(np.mean(seconds[_WARM:])))
        else:
            skipped = _WARM_LONG if len(seconds) >= 1.5 * _WARM_LONG else _WARM
            found.append(float(np.median(seconds[skipped:])))
    parts = {name: value for name, value in run.parts(_WARM).items() if value}
    return {"step": float(np.mean(found)), "parts": parts, "bytes": run.bytes_per_step(), "steps": len(seconds)}


# -- what is measured beforehand, once for each model and number of hosts ----------------------------------------------


def _speeds(done: harness.Row, model: str, hosts: int, path: str | None) -> tuple[script.Training, machine.Machine]:
    """Return the training of a copy beside the others, and the speeds of the machine; measure them once."""
    key = f"{model} {hosts}"
    if key not in done["machines"]:
        (name, *words), _ = MODELS[model]
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
        with tempfile.TemporaryDirectory() as folder:
            copies = script.run_copies([sys.executable, str(_JOBS / name), *words], Path(folder), hosts, 300.0)
        chosen = sorted(copies, key=lambda training: training.computing)[len(copies) // 2]
        speeds = machine.as_speeds(machine.measure(chosen.elements, hosts))
        done["machines"][key] = {"training": dataclasses.asdict(chosen), "speeds": speeds}
        print(f"{key} hosts: a step computes {1e3 * chosen.computing:.3g} ms", flush=True)
        _save(path, done)
    found = done["machines"][key]
    trained = found["training"]
    named = {name: tuple(script.Layer(**layer) for layer in trained.get(name, ())) for name in ("layers", "tables")}
    return script.Training(**(trained | named | {"tensors": tuple(trained["tensors"])})), machine.machine_of(
        found["speeds"]
    )


def _link(done: harness.Row, hosts: int, bandwidth: str, elements: int, path: str | None) -> Link:
    """Return the link between the hosts of the lab; measure it once."""
    key = f"{hosts} {bandwidth} {elements}"
    if key not in done["links"]:
        lab = [sys.executable, "-m", "hvdx", "lab", "-n", str(hosts), "--bandwidth", bandwidth, "--"]
        ended = processes.run([*lab, *machine.link_command(elements)], _AROUND)
        reports = processes.parse_reports(ended.out)
        if not reports:
            sys.exit(f"the link of {hosts} hosts at {bandwidth} could not be measured: {ended.reason()}")
        done["links"][key] = reports[0]
        print(f"{key}: {Link(**reports[0])}, all-reduce {reports[0]['reducing']:.0%}", flush=True)
        _save(path, done)
    return Link(**done["links"][key])


def _load(path: str | None) -> harness.Row:
    empty: harness.Row = {"machines": {}, "links": {}, "cases": {}}
    return empty | json.loads(Path(path).read_text()) if path and Path(path).exists() else empty


def _save(path: str | None, done: harness.Row) -> None:
    if path:
        # Whole or not at all: the next call reads it after an interruption.
        temporary = Path(f"{path}.part")
        temporary.write_text(json.dumps(done, indent=1))
        temporary.replace(path)


# -- the answer -------------------------------------------------------------------------------------------------------


def _line(key: str, case: harness.Row) -> str:
    measured = case["measured"]
    if "failed" in measured:
        return f"{key}: failed: {measured['failed']}"
    return (
        f"{key}: measured {1e3 * measured['step']:.3g} ms, predicted {1e3 * case['predicted']:.3g} ms, "
        f"ratio {case['predicted'] / measured['step']:.2f}"
    )


def summary(cases: dict[str, harness.Row]) -> str:
    """Return a table of the settings, the errors, and in how many settings the first-ranked strategy was the fastest.

    Args:
        cases: measured and predicted seconds by "model hosts bandwidth strategy".
    """
    errors = []
    settings: dict[str, list[tuple[float, float, str]]] = {}
    for key, case in cases.items():
        if "predicted" not in case or "step" not in case["measured"]:
            continue
        *setting, spelling = key.split(" ", 3)
        step, predicted = case["measured"]["step"], case["predicted"]
        errors.append(abs(predicted / step - 1))
        settings.setdefault(" ".join(setting), []).append((predicted, step, spelling))
    if not settings:
        return "no finished cases"
    spellings = list(dict.fromkeys(spelling for rows in settings.values() for *_, spelling in rows))
    table = []
    for name, cells in settings.items():
        shown = {spelling: f"{1e3 * step:.3g} ({predicted / step:.2f})" for predicted, step, spelling in cells}
        table.append([*name.split(" "), *(shown.get(spelling, "-") for spelling in spellings)])
    first, near, ranked = right_choices(list(settings.values()))
    within = sum(error <= 0.3 for error in errors)
    lines = [
        render(table, header=["model", "hosts", "bandwidth", *spellings]),
        "",
        "Measured milliseconds a step; in brackets, the predicted ones divided by them.",
        f"median error {median(errors):.0%}; within 30 %: {within} of {len(errors)} ({within / len(errors):.0%})",
        f"the strategy predicted first was measured first in {first} of {ranked} settings, and within 10 % of the "
        f"fastest in {near}",
    ]
    return "\n".join(lines)


def right_choices(settings: Sequence[Sequence[tuple[float, float, str]]]) -> tuple[int, int, int]:
    """Return in how many settings the first-ranked strategy was the fastest, or within 10 % of it; and their number.

    Args:
        settings: for each setting, (predicted seconds, measured seconds, strategy) of at least two strategies.

    Example:
        >>> right_choices([[(1.0, 2.1, "a"), (1.5, 2.0, "b")], [(1.0, 1.0, "a"), (2.0, 2.0, "b")]])
        (1, 2, 2)
    """
    first = near = ranked = 0
    for rows in settings:
        if len(rows) < 2:
            continue
        ranked += 1
        chosen, fastest = min(rows)[1], min(step for _, step, _ in rows)
        first += chosen == fastest
        near += chosen <= 1.1 * fastest
    return first, near, ranked


if __name__ == "__main__":
    sys.exit(main())
