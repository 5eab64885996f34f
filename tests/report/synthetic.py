"""Records of runs that never were."""

import json
import math
from dataclasses import dataclass, field

from hvdx.report.lines import COLUMNS, PARTS, Writer
from hvdx.report.records import OUTCOME

THREE = ("one worker", "AllReduce()", "Threshold(density=0.01)")
THIRTY = ("one worker", "AllReduce()", *(f"Threshold(density={i / 1000:g}, codec='bf16')" for i in range(1, 29)))


@dataclass
class Criterion:
    """Stand-in of a criterion of the verdict."""

    title: str = "Fastest training"
    winner: str = "Threshold(density=0.01)"
    margin: str = "1.8 times faster than AllReduce()"
    called: bool = True
    why: str = "3 seeds; the margin is 9 times the spread"
    rows: list = field(default_factory=lambda: [("AllReduce()", "23.4 ms", "23.1 to 23.9 ms")])
    setting: str = ""

    @property
    def sentence(self):
        return f"{self.title}: {self.winner}."


@dataclass
class Verdict:
    """Stand-in of the verdict."""

    sentences: list = field(
        default_factory=lambda: ["Threshold trains fastest.", "AllReduce reaches the same accuracy."]
    )
    criteria: list = field(
        default_factory=lambda: [
            Criterion(),
            Criterion("Highest accuracy", called=False, why="noise can explain the differences"),
            Criterion("Highest accuracy in 60 s"),
            Criterion("Highest accuracy in 3 epochs"),
            Criterion("Time to val_accuracy 0.85"),
        ]
    )

    def text(self):
        return "\n".join(self.sentences)


def write_run(folder, strategy, *, workers=2, bandwidth=None, seed=0, epochs=4, quality=0.0, end=True, **options):
    """Write the records of one run, and its outcome.

    Args:
        folder: its folder.
        strategy: its strategy.
        workers: number of ranks.
        bandwidth: of the outcome.
        seed: of the outcome.
        epochs: number of epochs; 10 steps each.
        quality: added to the accuracy and taken from the seconds, from 0 to 1.
        end: False for a run that was killed.
        **options: `metric` (its name), `nan_from` (first epoch with NaN), `outcome` (more of its fields; None for no
            outcome), `header` (more fields of the header).
    """
    for rank in range(workers):
        writer = Writer(folder, rank)
        header = {
            **{"schema": 1, "time": 1.7e9, "rank": rank, "size": workers, "host": f"node{rank}", "strategy": strategy},
            **{"spelling": strategy, "seed": seed, "command": ["python", "train.py"], "epochs": epochs, "steps": 10},
            **{"batch": 64, "model": {"name": "mlp", "parameters": 1863690, "dtype": "float32"}},
            "optimizer": {"name": "SGD"},
            "versions": {"hvdx": "0.1.0", "tensorflow": "2.21.0"},
            "machine": {"cores": 8, "cpu": "Example CPU", "memory": 64e9},
            "link": {"bandwidth": 12.5e6, "latency": 2e-4},
        }
        writer.write("fit", **header | options.get("header", {}))
        time, metric = 0.0, options.get("metric", "val_accuracy")
        for epoch in range(1, epochs + 1):
            parts = {part: 0.004 + 0.002 * place * (1 - quality) for place, part in enumerate(PARTS)}
            seconds = sum(parts.values()) + 0.003
            steps = {name: [0.0] * 10 for name in COLUMNS} | {name: [value] * 10 for name, value in parts.items()}
            steps["step"] = [10 * epoch - 9 + i for i in range(10)]
            steps["time"] = [time + seconds * (i + 1) for i in range(10)]
            steps |= {"seconds": [seconds] * 10, "sent": [(1 - quality) * 7.45e6 + 1000] * 10}
            writer.write("steps", **steps)
            time += 10 * seconds + 0.5
            value = 0.6 + 0.2 * quality + 0.3 * (1 - math.exp(-epoch)) / 2 + 0.01 * seed
            value = math.nan if epoch >= options.get("nan_from", math.inf) else value
            writer.write("epoch", epoch=epoch, step=10 * epoch, time=time, logs={metric: value, "loss": 1 - value})
        if end:
            writer.write("end", time=time, steps=10 * epochs, reason="done")
        writer.close()
    outcome = {"asked": strategy, "workers": workers, "bandwidth": bandwidth, "hosts": None, "seed": seed}
    outcome |= {"exit_code": 0, "reason": "", "seconds": 60.0}
    if options.get("outcome", {}) is not None:
        (folder / OUTCOME).write_text(json.dumps(outcome | options.get("outcome", {})))
    return folder


def write_failure(folder, strategy, reason, log="Traceback"):
    """Write the outcome of a run that failed before it had a record."""
    folder.mkdir(parents=True)
    outcome = {"asked": strategy, "workers": 2, "bandwidth": None, "hosts": None, "seed": 1, "exit_code": 1}
    (folder / OUTCOME).write_text(json.dumps(outcome | {"reason": reason, "seconds": 3.0}))
    (folder / "log.txt").write_text(log)
    return folder


def write_comparison(folder, strategies, workers=(2,), bandwidths=(None,), seeds=3, **options):
    """Write a comparison: each strategy in each setting."""
    number = 0
    for place, strategy in enumerate(strategies):
        alone = strategy == "one worker"
        for size in (1,) if alone else workers:
            for bandwidth in (None,) if alone else bandwidths:
                for seed in range(seeds):
                    quality = place / len(strategies)
                    where = folder / "runs" / f"{number}"
                    chosen = {"workers": size, "bandwidth": bandwidth, "seed": seed, "quality": quality}
                    write_run(where, strategy, **chosen | options)
                    number += 1
    content = {"schema": 1, "hvdx_command": "hvdx compare -n 2 -- python train.py", "target": None}
    (folder / "compare.json").write_text(json.dumps(content))
    return folder
