"""Cost of a step with split layers on a slow network, beside data parallelism on the same model.

    python jobs/benchmarks/split.py                                     two hosts at 100mbit
    python jobs/benchmarks/split.py --ways pair,single --steps 20       only some ways

Emulated hosts (`hvdx lab`) train the network of `jobs/hybrid.py`: convolutions, then dense layers of 4096, 4096 and 10
units, 40.7 million parameters, SGD with momentum. Under "pair" and "single", groups of two hosts share the two large
layers, and `AllReduce` combines the other gradients.

The counters of the links are read after the second and after the last step. The table shows their difference beside the
bytes that `hvdx.keras.summary` predicts. "Payload" is what the link carried without the headers of its packets.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from hvdx.jobs import hybrid
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity

if TYPE_CHECKING:
    import keras

#: Options of `jobs/hybrid.py` for each way to train.
WAYS = {
    "all_reduce": ["--strategy", "all_reduce"],
    "fp16": ["--strategy", "all_reduce:compression=fp16"],
    "threshold": ["--strategy", "threshold"],
    "pair": ["--split", "2", "--layers", "pair"],
    "single": ["--split", "2", "--layers", "single"],
    "pair_threshold": ["--split", "2", "--layers", "pair", "--strategy", "threshold"],
}
#: Most steps of a way whose steps take long.
_FEW = {"all_reduce": 4, "fp16": 4}
# Steps before the counters are read.
_OPENING = 2


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=int, default=2, metavar="N", help="number of emulated hosts")
    add("--bandwidth", default="100mbit", metavar="RATE", help="bandwidth of the links")
    add("--ways", type=harness.several(str), default=",".join(WAYS), metavar="NAME,...", help="ways to train")
    add("--steps", type=int, default=20, metavar="N", help="number of steps")
    add("--batch", type=int, default=32, metavar="N", help="samples per step and host")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Run every way, and print a table."""

    def measure(case: harness.Row) -> harness.Row:
        steps = min(options.steps, _FEW.get(case["way"], options.steps))
        setting = {
            "options": [*WAYS[case["way"]], "--steps", str(steps), "--batch", str(options.batch)],
            "steps": steps,
        }
        return harness.launch(__file__, setting, options.hosts, options.bandwidth).ranks[0]

    shared = {"hosts": options.hosts, "bandwidth": options.bandwidth, "batch": options.batch}
    harness.run_cases(options.json, [{"way": way} for way in options.ways], measure, COLUMNS, shared)
    return 0


def _bytes(header: str, key: str) -> harness.Column:
    return header, lambda row: quantity(row[key], "B") if row[key] else ""


COLUMNS = [
    ("way", lambda row: row["way"]),
    harness.figure("ms a step", "milliseconds", ".0f"),
    _bytes("layers", "layers_sent"),
    _bytes("strategy", "strategy_sent"),
    _bytes("formula", "formula"),
    _bytes("link", "link"),
    _bytes("payload", "payload"),
    ("/ formula", lambda row: f"{row['payload'] / row['formula']:.3f}" if row["formula"] else ""),
]


def train(setting: argparse.Namespace) -> harness.Row:
    """Train one way, and return the figures of this rank."""
    import hvdx

    args = hybrid.arguments(setting.options)
    hvdx.init(split=args.split)
    counter = _Counter(setting.steps)
    model, figures = hybrid.train(args, *hybrid.images(args), [harness.callback(counter)])
    link, payload = ((b - a) / (setting.steps - _OPENING) for a, b in zip(*counter.read, strict=True))
    return figures | {"formula": predicted(model, args), "link": link, "payload": payload}


def predicted(model: "keras.Model", args: argparse.Namespace) -> float | None:
    """Return the bytes that a rank sends in a step by the formula, which is that of `AllReduce` in float32."""
    from hvdx.keras.costs import layer_costs, setting_of

    if args.strategy not in (None, "all_reduce"):
        return None
    return sum(costs.present.sent for costs in layer_costs(model, setting_of(model, args.batch, None, None)))


class _Counter:
    """Watch of a `fit` that reads the counter of the link after the opening steps and after the last one."""

    def __init__(self, steps: int) -> None:
        self.read: list[tuple[int, int]] = []
        self._steps = steps

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        if batch + 1 in (_OPENING, self._steps):
            self.read.append((harness.link_bytes("tx"), harness.link_payload("tx")))


if __name__ == "__main__":
    sys.exit(main())
