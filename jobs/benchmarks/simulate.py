"""Steps of `hvdx simulate` beside the same steps between emulated hosts.

    python jobs/benchmarks/simulate.py                                       2, 4 and 8 hosts, three rates
    python jobs/benchmarks/simulate.py --hosts 2 --bandwidth 100mbit --strategies threshold:target_density=0.01

In the lab, processes exchange the updates that the simulation exchanges, by the same exchanges over MPI. In place of
computing they sleep, so that hosts of one machine do not take its cores from each other. Their codecs do: so the
processes first measure the link between them, and the codec while all of them use it at once. The simulation takes
this link, and cores that are slower by what the codec took longer than alone.

The table shows the median milliseconds of a step in the lab, those of the simulation, their ratio, and the bytes that a
worker sends in a step. With --json, finished cases are kept in the file, and the next call continues after them.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, cast

import numpy as np

from hvdx.cli.advise import given_link
from hvdx.costs.measure import measure_memory
from hvdx.costs.model import Situation
from hvdx.costs.types import Link, Machine
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity
from hvdx.simulation.training import Outcome, Setting, simulate, window
from hvdx.simulation.workloads import Made
from hvdx.strategies import parse

STRATEGIES = (
    *("all_reduce:engine=mpi", "all_reduce:engine=mpi,compression=fp16"),
    *("threshold:target_density=0.01,exchange=all_gather", "threshold:target_density=0.01,exchange=sharded"),
)
# Seconds of a case's steps in the lab, by the prediction, and its smallest number of steps.
_SECONDS, _FEWEST = 5.0, 4
# Rounds of the measurement of the codec, and its density.
_ROUNDS, _DENSITY = 15, 0.01
# Measurements of the link, of which the fastest counts.
_PROBES = 2
# Ratio of simulated and measured steps up to which they agree.
_NEAR = 0.2


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add, words = parser.add_argument, harness.several(str)
    add("--hosts", type=harness.several(int), default="2,4,8", metavar="N,N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=words, default="10mbit,100mbit,1gbit", metavar="RATE,...", help="bandwidths of the links")
    add("--strategies", default=";".join(STRATEGIES), metavar="S;S", help="strategies, separated by semicolons")
    add("--elements", type=harness.size, default="2M", metavar="N", help="parameters of the model")
    add("--computing", type=float, default=20.0, metavar="MS", help="milliseconds of computing in a step")
    add("--steps", type=int, default=60, metavar="N", help="largest number of steps")
    add("--seconds", type=float, default=math.inf, metavar="S", help="time after which no further network is begun")
    return harness.run(parser, compare, work, argv)


def compare(options: argparse.Namespace) -> int:
    """Run every case in the lab and in the simulation, and print a table."""
    begin, made = time.monotonic(), Made(options.elements)
    alone = codec_seconds(options.elements, lambda: None)
    memory = measure_memory(options.elements)
    shared = {"elements": options.elements, "computing_ms": options.computing}
    rows = harness.finished(options.json, **shared)
    for hosts in options.hosts:
        for bandwidth in options.bandwidth:
            done = {row["strategy"] for row in rows if (row["hosts"], row["bandwidth"]) == (hosts, bandwidth)}
            spellings = [spelling for spelling in options.strategies.split(";") if spelling not in done]
            if not spellings or time.monotonic() - begin > options.seconds:
                continue
            situation = Situation(
                hosts, (options.elements,), options.computing / 1e3, given_link(bandwidth), engine="mpi"
            )
            steps = [_steps(spelling, situation, options.steps) for spelling in spellings]
            job = {"cases": list(zip(spellings, steps, strict=True)), "elements": options.elements}
            ended = harness.launch(
                __file__,
                job | {"computing": situation.computing},
                hosts,
                bandwidth,
                limit=300,
                env={"OMP_NUM_THREADS": "1"},
            )
            facts = {name: median(rank[name] for rank in ended.ranks) for name in ("latency", "bandwidth", "codec")}
            link, speed = Link(facts["latency"], facts["bandwidth"]), alone / max(facts["codec"], alone)
            for spelling, count in job["cases"]:
                measured = {key: median(r["found"][spelling][key] for r in ended.ranks) for key in ("seconds", "sent")}
                simulated = _simulated(spelling, situation, link, speed, memory, count, made)
                row = {"hosts": hosts, "bandwidth": bandwidth, "strategy": spelling, "steps": count}
                row |= {"measured": measured["seconds"], "simulated": simulated.seconds, "parts": simulated.parts}
                row |= {"sent": simulated.sent, "measured_sent": measured["sent"]}
                rows.append(row | {"latency": link.latency, "rate": link.bandwidth, "core_speed": speed})
                print(harness.table(rows[-1:], _COLUMNS).splitlines()[-1], file=sys.stderr, flush=True)
                harness.write(options.json, shared | {"rows": rows})
    print(harness.table(rows, _COLUMNS))
    near = sum(abs(row["simulated"] / row["measured"] - 1) <= _NEAR for row in rows)
    print(f"\n{near} of {len(rows)} simulated steps are within {_NEAR:.0%} of the measured ones.")
    return 0


def _steps(spelling: str, situation: Situation, most: int) -> int:
    """Return the number of steps that fit the time of a case."""
    predicted = parse(spelling).predict(situation)
    return most if predicted is None else int(min(max(_SECONDS / predicted.seconds, _FEWEST), most))


def _simulated(
    spelling: str, situation: Situation, link: Link, speed: float, memory: float, steps: int, made: Made
) -> Outcome:
    """Simulate the steps of a case.

    Args:
        spelling: the strategy.
        situation: number of hosts, elements and computing.
        link: link between the hosts; its latency includes the work on small messages.
        speed: speed of a core that the hosts share, relative to one that a host has for itself.
        memory: bytes per second of a pass over arrays alone.
        steps: number of steps.
        made: the updates.
    """
    strategy = parse(spelling)
    # The workers of the benchmark copy no tensors of TensorFlow to an exchange on the host.
    reading = math.inf if strategy.runs == "host" else speed * memory
    measured = Situation(
        situation.workers,
        situation.tensors,
        situation.computing,
        link,
        Machine(reading),
        "mpi",
        slots=1.0,
    )
    return simulate(strategy, Setting(measured, max(steps, 12), core_speed=speed), made)


_COLUMNS = [
    ("case", lambda row: f"{row['hosts']} hosts, {row['bandwidth']}, {row['strategy']}"),
    ("ratio", lambda row: f"{row['simulated'] / row['measured']:.2f}"),
    harness.figure("lab, ms", "measured", ".1f", 1e3),
    harness.figure("simulation", "simulated", ".1f", 1e3),
    ("lab B", lambda row: quantity(row["measured_sent"], "B")),
    ("simulation B", lambda row: quantity(row["sent"], "B")),
]


def codec_seconds(elements: int, meet: Callable[[], object]) -> float:
    """Return the median seconds of encoding and decoding an update.

    Args:
        elements: number of elements.
        meet: waits for other ranks that do the same; it is called before and after, and the time includes it.
    """
    from hvdx import codec

    threshold = codec.Threshold(target_density=_DENSITY, threads=1)
    threshold.prepare()
    state, out, replica = threshold.init([elements]), [np.zeros(elements, np.float32)], Made(elements).replica(0)
    seconds = []
    for _ in range(_ROUNDS):
        update = replica.gradients(0)
        meet()
        begin = time.perf_counter()
        message, state = threshold.encode(update, state)
        threshold.decode_sum([message], out)
        meet()
        seconds.append(time.perf_counter() - begin)
    return median(seconds[_ROUNDS // 3 :])


def work(setting: argparse.Namespace) -> harness.Row:
    """Measure link and codec between the hosts of the lab, then exchange updates; return the figures of this rank."""
    from hvdx import comm as communication
    from hvdx.costs.link import probe

    comm = communication.start()
    channel = comm.channel("the benchmark")
    found = max((probe(channel) for _ in range(_PROBES)), key=lambda each: each.bandwidth)
    codec = codec_seconds(setting.elements, lambda: channel.exchange([])) - found.latency
    made, steps = Made(setting.elements), {}
    for spelling, count in setting.cases:
        steps[spelling] = _exchange(spelling, count, made, setting.computing)
    channel.close()
    communication.stop()
    return {"latency": found.latency, "bandwidth": found.bandwidth, "codec": codec, "found": steps}


def _exchange(spelling: str, count: int, made: Made, computing: float) -> dict[str, float]:
    """Take some steps under a strategy; return the median seconds of a step, and the bytes that this rank sent."""
    from hvdx import comm as communication

    strategy = parse(spelling)
    comm = communication.start()
    place: Callable[[Sequence[np.ndarray]], list[object]] = list
    if strategy.runs == "graph":
        import tensorflow as tf

        comm, place = communication.graph(engine="mpi"), lambda update: [tf.constant(array) for array in update]
    replica, exchange = made.replica(comm.rank), strategy.open(comm, made.specs, "benchmark")
    seconds, (first, _), before = [], window(count, 1), 0.0
    counts = getattr(exchange, "telemetry", None)
    for step in range(count):
        if counts is not None and step == first:
            before = counts.sent
        update = place(replica.gradients(0))
        begin = time.perf_counter()
        time.sleep(computing)
        exchange.step(cast(Any, update))
        seconds.append(time.perf_counter() - begin)
    exchange.flush()
    exchange.close()
    sent = exchange.sent if counts is None else (counts.sent - before) / (count - first)
    return {"seconds": float(np.median(seconds[first:])), "sent": float(sent)}


if __name__ == "__main__":
    sys.exit(main())
