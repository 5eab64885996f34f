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
from typing import Any

from hvdx.cli.advise import given_link
from hvdx.costs.measure import measure_machine
from hvdx.costs.model import Situation
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity, render
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
    rows = harness.finished(options.json, **shared)
    for workers in options.workers:
        situation = Situation(workers, (options.elements,), _COMPUTING, link, machine, "mpi")
        setting = Setting(situation, options.steps, running=_RUNNING, limit=options.limit)
        for kind in options.exchanges:
            if any((row["workers"], row["exchange"]) == (workers, kind) for row in rows):
                continue
            strategy = Threshold(target_density=options.density, exchange=kind)
            found, predicted = simulate(strategy, setting, made), strategy.predict(situation)
            assert predicted is not None  # its density is given
            message = found.message
            row = {"workers": workers, "exchange": kind, "message": message, "received": found.received}
            # A worker also decodes its own messages, which it does not receive.
            row |= {"messages": found.received / message, "decoded": found.received * workers / (workers - 1) / message}
            for part in ("encoding", "network", "decoding", "copying"):
                row[part] = 1e3 * found.parts[part]
            terms = predicted.terms
            row |= {"predicted_received": predicted.sent, "predicted_encoding": 1e3 * terms["encoding"]}
            row |= {"predicted_network": 1e3 * (terms["latency"] + terms["transfer"])}
            rows.append(row | {"predicted_decoding": 1e3 * terms["decoding"], "steps": found.steps})
            print(f"{workers} workers, {kind}: {quantity(found.received, 'B')}", file=sys.stderr, flush=True)
            harness.write(options.json, shared | {"rows": rows})
    print(text(sorted(rows, key=lambda row: (row["workers"], row["exchange"]))))
    return 0


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table.

    Example:
        >>> row = {"workers": 4, "exchange": "all_gather", "received": 3e6, "messages": 3.0, "decoded": 4.0}
        >>> row |= {"predicted_received": 3.3e6, "encoding": 5.0, "decoding": 2.0, "network": 10.0, "copying": 0.5}
        >>> row |= {"predicted_encoding": 4.0, "predicted_decoding": 2.0, "predicted_network": 10.0}
        >>> print(text([row]).splitlines()[2])
        4 workers, all_gather  3 MB (1.10)       3.0      4.0    5.0 (0.80)    2.0 (1.00)  10.0 (1.00)
    """
    cells = [
        [
            f"{row['workers']} workers, {row['exchange']}",
            f"{quantity(row['received'], 'B')} ({row['predicted_received'] / row['received']:.2f})",
            f"{row['messages']:.1f}",
            f"{row['decoded']:.1f}",
            *(
                f"{row[part]:.1f} ({row[f'predicted_{part}'] / max(row[part], 1e-9):.2f})"
                for part in ("encoding", "decoding", "network")
            ),
        ]
        for row in rows
    ]
    header = ["case", "received", "messages", "decoded", "encoding, ms", "decoding, ms", "network, ms"]
    return render(cells, header)


if __name__ == "__main__":
    sys.exit(main())
