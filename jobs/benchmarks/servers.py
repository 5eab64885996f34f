"""Steps per second of a parameter server on a slow network, for several numbers of servers.

    python jobs/benchmarks/servers.py                       four hosts at 100mbit, of which 1, 2 and 4 also serve
    python jobs/benchmarks/servers.py --dedicated           four workers, and separate hosts for the servers
    python jobs/benchmarks/servers.py --json servers.json   also write the figures

Emulated hosts (`hvdx lab`) train a dense network of 1.86 million parameters on Fashion-MNIST, 64 images per step on
each, SGD with momentum, asynchronously, with the same number of steps on each. Steps per second count all workers, from
the end of the first worker's warm-up to the end of the last worker. A worker whose process also serves needs no link to
that server, and finishes earlier. The load of a link is the number of bits that its interface counted during its
worker's steps, in the busier direction, divided by its capacity. The table shows the load of the busiest server's link,
and the workers' mean. Links that are used in both directions at once do not reach 100 %, because TCP's acknowledgements
wait behind the data.
"""

import argparse
import sys
import time

from hvdx.jobs.benchmarks import harness
from hvdx.strategies.telemetry import ServerTelemetry

# Uncounted first steps, which trace, compile and open connections.
_WARM_UP = 3


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=4, metavar="N", help="number of workers")
    add("--servers", type=harness.several(int), default="1,2,4", metavar="N,N,...", help="numbers of servers")
    add("--dedicated", action="store_true", help="run the servers on separate hosts")
    add("--bandwidth", default="100mbit", help="bandwidth of each link")
    add("--codec", default="none", help="codec of the updates")
    add("--steps", type=int, default=20, help="timed steps of each worker")
    add("--hidden", type=int, default=1024, help="units in each of two hidden layers")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Time every number of servers, and print the table."""
    where = "on separate hosts" if options.dedicated else "on the workers' hosts"
    print(f"{options.workers} workers, {options.bandwidth} a link, servers {where}")
    columns = [
        ("servers", lambda row: str(row["servers"])),
        harness.figure("steps/s", "steps_per_second", ".2f"),
        ("busiest server's link", lambda row: server_link(row, options)),
        harness.figure("workers' links, %", "workers_busy", ".0f", 100),
        harness.figure("staleness", "mean_staleness", ".2f"),
    ]
    cases = [{"servers": servers} for servers in options.servers]
    harness.run_cases(options.json, cases, lambda case: launch(case["servers"], options), columns)
    if options.dedicated:
        print("*: over the whole run, including start and end, since no worker on those hosts measures the time")
    return 0


def launch(servers: int, options: argparse.Namespace) -> harness.Row:
    """Train on emulated hosts, and combine the workers' figures."""
    where = str(servers) if options.dedicated else f"colocated:{servers}"
    hosts = options.workers + (servers if options.dedicated else 0)
    strategy = f"parameter_server:servers={where},codec={options.codec}"
    setting = {"strategy": strategy, "steps": options.steps, "hidden": options.hidden, "seed": 0}
    ended = harness.launch(__file__, setting, hosts, options.bandwidth)
    ranks, counted = ended.ranks, ended.lab
    rate = harness.bits(options.bandwidth)
    busy = [8 * max(r["sent"], r["received"]) / r["seconds"] / rate for r in ranks]
    whole = [8 * max(link["sent"], link["received"]) / counted["seconds"] / rate for link in counted["links"]]
    return {
        "steps_per_second": sum(r["steps"] for r in ranks)
        / (max(r["end"] for r in ranks) - min(r["begin"] for r in ranks)),
        "busiest": max(busy[:servers]) if not options.dedicated else None,
        "workers_busy": sum(busy) / len(busy),
        "mean_staleness": sum(r["staleness"] for r in ranks) / len(ranks),
        "whole_run": whole,
        "ranks": [{key: r[key] for key in ("seconds", "sent", "received", "staleness")} for r in ranks],
    }


def server_link(row: harness.Row, options: argparse.Namespace) -> str:
    """Return the load of the busiest server's link."""
    if row["busiest"] is not None:
        return f"{100 * row['busiest']:.0f} %"
    return f"{100 * max(row['whole_run'][options.workers :]):.0f} %*"


# -- one rank ---------------------------------------------------------------------------------------------------------


def train(setting: argparse.Namespace) -> harness.Row:
    """Train, and count the bytes on the interface of this rank."""
    import hvdx

    hvdx.init(strategy=setting.strategy)
    from hvdx.keras.adapters.optimizer import adapter_of

    model, data, _, _ = harness.mlp(setting)
    # Without `Distribute`, which would hand out the steps of an epoch to workers that are ready.
    optimizer = hvdx.keras.DistributedOptimizer(model.optimizer)
    watch = _Watch(setting.steps + _WARM_UP)
    model.fit(
        data.repeat(),
        steps_per_epoch=setting.steps + _WARM_UP,
        shuffle=False,
        verbose=0,
        callbacks=[hvdx.keras.callbacks.BroadcastGlobalVariablesCallback(0), harness.callback(watch)],
    )
    adapter = adapter_of(optimizer)
    assert adapter is not None
    cost = adapter.cost()
    assert isinstance(cost, ServerTelemetry)
    return watch.figures | {"staleness": cost.staleness.mean}


class _Watch:
    """Watch of a `fit` that counts seconds and bytes, from the end of the warm-up to step `last`."""

    def __init__(self, last: int) -> None:
        self.figures: dict[str, float] = {}
        self._last = last
        self._begin: list[float] = []

    def now(self) -> list[float]:
        return [time.time(), *map(harness.link_bytes, ("tx", "rx"))]

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        if batch + 1 == _WARM_UP:
            self._begin = self.now()
        elif batch + 1 == self._last:
            end = self.now()
            seconds, sent, received = (b - a for a, b in zip(self._begin, end, strict=True))
            self.figures = {"begin": self._begin[0], "end": end[0], "steps": self._last - _WARM_UP}
            self.figures |= {"seconds": seconds, "sent": sent, "received": received}


if __name__ == "__main__":
    sys.exit(main())
