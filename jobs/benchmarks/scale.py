"""Traffic and codec of a step under the two exchanges of `Threshold`, on 4 to 1024 virtual workers.

    python jobs/benchmarks/scale.py                                     25 million parameters, density 0.01
    python jobs/benchmarks/scale.py --elements 2M --density 0.001

`hvdx simulate` (docs/simulate.md) runs the exchanges: their messages, and the work on them, are real. For each number
of workers and each exchange, the table shows the bytes that a worker receives in a step, also in multiples of one
worker's message; the number of messages that it decodes, by their bytes; the milliseconds of encoding and decoding
on one core of this machine; and in brackets what the cost model of `hvdx advise` predicts, divided by the figure. With
--json, finished cases are kept in the file, and the next call continues after them.
"""

import argparse
import sys

from hvdx.cli.advise import given_link
from hvdx.costs.measure import measure_machine
from hvdx.costs.model import Situation
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity
from hvdx.simulation.training import Setting, simulate
from hvdx.simulation.workloads import Made
from hvdx.strategies import Threshold

KINDS = ("all_gather", "sharded")
# Workers that run; the others repeat them.
_RUNNING = 2
# Seconds of computing in a step. It has no influence on the figures, because the density is fixed.
_COMPUTING = 0.02


def main(argv: list[str] | None = None) -> int:
    """Simulate all cases, and print the table."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=harness.several(int), default="4,8,16,64,256,1024", metavar="N,...", help="workers")
    add("--exchanges", type=harness.several(str), default=",".join(KINDS), metavar="NAME,...", help="exchanges")
    add("--elements", type=harness.size, default="25M", metavar="N", help="parameters of the model")
    add("--density", type=float, default=0.01, help="density of a worker's message")
    add("--bandwidth", default="1gbit", metavar="RATE", help="link of each worker")
    add("--steps", type=int, default=30, metavar="N", help="steps, of which the first third is left out")
    add("--limit", type=float, default=400.0, metavar="S", help="seconds of a case, which then has fewer steps")
    return compare(parser.parse_args(argv))


def compare(options: argparse.Namespace) -> int:
    """Simulate every number of workers under both exchanges, and print a table."""
    machine, made, link = measure_machine(options.elements, 1), Made(options.elements), given_link(options.bandwidth)
    shared = {"elements": options.elements, "density": options.density, "bandwidth": options.bandwidth}

    def measure(case: harness.Row) -> harness.Row:
        workers = case["workers"]
        situation = Situation(workers, (options.elements,), _COMPUTING, link, machine, "mpi")
        setting = Setting(situation, options.steps, running=_RUNNING, limit=options.limit)
        strategy = Threshold(target_density=options.density, exchange=case["exchange"], warmup="none")
        found, predicted = simulate(strategy, setting, made), strategy.predict(situation)
        assert predicted is not None  # its density is given
        message, terms = found.message, predicted.terms
        row = {"message": message, "received": found.received, "messages": found.received / message}
        # A worker also decodes its own messages, which it does not receive.
        row["decoded"] = found.received * workers / (workers - 1) / message
        row |= {part: 1e3 * found.parts[part] for part in ("encoding", "network", "decoding", "copying")}
        row |= {"predicted_received": predicted.sent, "predicted_encoding": 1e3 * terms["encoding"]}
        row |= {"predicted_network": 1e3 * (terms["latency"] + terms["transfer"])}
        return row | {"predicted_decoding": 1e3 * terms["decoding"], "steps": found.steps}

    cases = ({"workers": workers, "exchange": kind} for workers in options.workers for kind in options.exchanges)
    harness.run_cases(options.json, cases, measure, _COLUMNS, shared, resumes=True)
    return 0


def _part(part: str) -> harness.Column:
    """Return the column of a part of a step, with the ratio of the prediction."""
    return f"{part}, ms", lambda row: f"{row[part]:.1f} ({row[f'predicted_{part}'] / max(row[part], 1e-9):.2f})"


_COLUMNS = [
    ("case", lambda row: f"{row['workers']} workers, {row['exchange']}"),
    ("received", lambda row: f"{quantity(row['received'], 'B')} ({row['predicted_received'] / row['received']:.2f})"),
    harness.figure("messages", "messages", ".1f"),
    harness.figure("decoded", "decoded", ".1f"),
    *map(_part, ("encoding", "decoding", "network")),
]


if __name__ == "__main__":
    sys.exit(main())
