"""Steps of `hvdx simulate` beside the same steps between emulated hosts.

    python jobs/benchmarks/simulate.py                                       2 and 4 hosts, two rates, two strategies
    python jobs/benchmarks/simulate.py --hosts 2 --bandwidth 100mbit --strategies threshold:target_density=0.01

In the lab, processes exchange the updates that the simulation exchanges, by the same exchanges over MPI. In place of
computing they sleep, so that hosts of one machine do not take its cores from each other. The table shows the median
milliseconds of a step in the lab, those of the simulation, their ratio, and the bytes that a worker sends in a step.
"""

import argparse
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from hvdx.cli.advise import given_link
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity, render
from hvdx.simulation.training import Setting, simulate, window
from hvdx.simulation.workloads import MOMENTUM, Made
from hvdx.strategies import parse
from hvdx.strategies.prediction import Machine, Situation, measure_memory, measure_network

#: Milliseconds one way between two hosts of the lab, as `hvdx lab --check` measures them.
LATENCY = 0.01


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add, words = parser.add_argument, harness.several(str)
    add("--hosts", type=harness.several(int), default="2,4", metavar="N,N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=words, default="100mbit,1gbit", metavar="RATE,...", help="bandwidths of the links")
    add("--strategies", default="all_reduce:engine=mpi;threshold:target_density=0.01", metavar="S;S", help="strategies")
    add("--elements", type=harness.size, default="2M", metavar="N", help="parameters of the model")
    add("--computing", type=float, default=20.0, metavar="MS", help="milliseconds of computing in a step")
    add("--steps", type=int, default=40, metavar="N", help="steps")
    return harness.run(parser, compare, work, argv)


def compare(options: argparse.Namespace) -> int:
    """Run every case in the lab and in the simulation, and print a table."""
    (memory, half), (message, transport) = measure_memory(options.elements), measure_network()
    machine, made = Machine(memory, half, message, transport), Made(options.elements)
    rows: list[dict[str, Any]] = []
    for hosts in options.hosts:
        for bandwidth in options.bandwidth:
            for spelling in options.strategies.split(";"):
                given = {"spelling": spelling, "steps": options.steps, "elements": options.elements}
                given |= {"computing": options.computing / 1e3}
                ended = harness.launch(__file__, given, hosts, bandwidth, OMP_NUM_THREADS="1")
                link = given_link(bandwidth, LATENCY)
                situation = Situation(
                    hosts, (options.elements,), options.computing / 1e3, link, machine, "mpi", slots=1.0
                )
                found = simulate(parse(spelling), Setting(situation, options.steps), made)
                measured = median(rank["seconds"] for rank in ended.ranks)
                row = {"hosts": hosts, "bandwidth": bandwidth, "strategy": spelling, "measured": measured}
                row |= {"simulated": found.seconds, "parts": found.parts, "sent": found.sent}
                rows.append(row | {"measured_sent": median(rank["sent"] for rank in ended.ranks)})
                harness.write(options.json, {"rows": rows})
    print(text(rows))
    return 0


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table.

    Example:
        >>> row = {"hosts": 2, "bandwidth": "1gbit", "strategy": "threshold", "measured": 0.02, "simulated": 0.018}
        >>> print(text([row | {"sent": 2000.0, "measured_sent": 2000.0}]).splitlines()[2])
        2 hosts, 1gbit, threshold  20.0  18.0   0.90   2 kB   2 kB
    """
    cells = [
        [
            f"{row['hosts']} hosts, {row['bandwidth']}, {row['strategy']}",
            f"{1e3 * row['measured']:.1f}",
            f"{1e3 * row['simulated']:.1f}",
            f"{row['simulated'] / row['measured']:.2f}",
            quantity(row["measured_sent"], "B"),
            quantity(row["sent"], "B"),
        ]
        for row in rows
    ]
    return render(cells, ["case", "lab", "sim", "ratio", "lab B", "sim B"])


def work(given: argparse.Namespace) -> dict[str, Any]:
    """Exchange updates between the hosts of the lab; return the median step of this rank."""
    from hvdx import comm as communication

    strategy = parse(given.spelling)
    comm: Any = communication.start()
    if strategy.runs == "graph":
        comm = communication.graph(engine="mpi")
    made = Made(given.elements)
    replica = made.replica(comm.rank)
    exchange = strategy.open(comm, made.specs, MOMENTUM if strategy.placement == "update" else 0.0, "benchmark")
    seconds = []
    for _ in range(given.steps):
        update = replica.gradients()
        begin = time.perf_counter()
        time.sleep(given.computing)
        exchange.step(update)
        seconds.append(time.perf_counter() - begin)
    exchange.flush()
    exchange.close()
    first, _ = window(given.steps, 1)
    counts = getattr(exchange, "telemetry", None)
    sent = exchange.sent if counts is None else counts.sent / given.steps
    communication.stop()
    return {"seconds": float(np.median(seconds[first:])), "sent": float(sent)}


if __name__ == "__main__":
    sys.exit(main())
