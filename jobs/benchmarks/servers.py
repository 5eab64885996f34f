"""How many servers does a parameter server need? Steps a second on a slow network, for several numbers of servers.

    python jobs/benchmarks/servers.py                       four hosts at 100mbit, of which 1, 2 and 4 serve too
    python jobs/benchmarks/servers.py --dedicated           four workers, and hosts of their own for the servers
    python jobs/benchmarks/servers.py --json servers.json   and keep the figures

Emulated hosts (`hvdx lab`) train a dense network of 1.86 million parameters on Fashion-MNIST, 64 pictures a step on
each, SGD with momentum, asynchronously, as many steps on each. Steps a second are those of all workers, from the time
when the first has warmed up until the last has finished: a worker whose server is in its own process needs no link, and
is through before the others. How busy a link was: the bits that its interface counted while its worker took steps, in
the fuller direction, over what it can carry; of the busiest server, and of the workers on average. Links that are used
in both directions at once do not get to 100 %: TCP's acknowledgements wait behind the data.
"""

import argparse
import sys
import time
from typing import Any

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render

# Steps that are not counted: tracing, compiling, opening connections.
_WARM = 3


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; see `--help`."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=4, metavar="N", help="how many")
    add("--servers", type=harness.several(int), default="1,2,4", metavar="N,N,...", help="numbers of servers")
    add("--dedicated", action="store_true", help="servers on hosts of their own")
    add("--bandwidth", default="100mbit", help="of each link")
    add("--codec", default="none", help="of the updates")
    add("--steps", type=int, default=20, help="steps that each worker is timed for")
    add("--hidden", type=int, default=1024, help="units in each of two hidden layers")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Time every number of servers, and print the table."""
    rows: list[dict[str, Any]] = []
    for servers in options.servers:
        rows.append({"servers": servers} | launch(servers, options))
        print(f"{servers} server(s): {rows[-1]['steps_per_second']:.2f} steps/s", file=sys.stderr, flush=True)
    show(rows, options)
    harness.write(options.json, {"rows": rows})
    return 0


def launch(servers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train on emulated hosts, and put the workers' figures together."""
    where = str(servers) if options.dedicated else f"colocated:{servers}"
    hosts = options.workers + (servers if options.dedicated else 0)
    strategy = f"parameter_server:servers={where},codec={options.codec}"
    given = {"strategy": strategy, "steps": options.steps, "hidden": options.hidden, "seed": 0}
    ended = harness.launch(__file__, given, hosts, options.bandwidth)
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


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table."""
    cells = [
        [
            str(row["servers"]),
            f"{row['steps_per_second']:.2f}",
            f"{row['steps_per_second'] / rows[0]['steps_per_second']:.2f}",
            server_link(row, options),
            f"{100 * row['workers_busy']:.0f} %",
            f"{row['mean_staleness']:.2f}",
        ]
        for row in rows
    ]
    where = "on hosts of their own" if options.dedicated else "on the workers' hosts"
    print(f"\n{options.workers} workers, {options.bandwidth} a link, servers {where}")
    header = ["servers", "steps/s", f"/ {rows[0]['servers']}", "busiest server's link", "workers' links", "staleness"]
    print(render(cells, header=header))
    if options.dedicated:
        print("*: over the whole run, start and end included: nothing runs on those hosts that could read a clock")


def server_link(row: dict[str, Any], options: argparse.Namespace) -> str:
    """How busy the busiest server's link was."""
    if row["busiest"] is not None:
        return f"{100 * row['busiest']:.0f} %"
    return f"{100 * max(row['whole_run'][options.workers :]):.0f} %*"


# -- one rank ---------------------------------------------------------------------------------------------------------


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train, and count what the interface of this rank carried meanwhile."""
    import hvdx

    hvdx.init(strategy=given.strategy)
    from hvdx.keras.adapters.optimizer import adapter_of

    model, data, _, _ = harness.mlp(given)
    # Without `Distribute`, which would deal out the steps to whoever is ready.
    optimizer = hvdx.keras.DistributedOptimizer(model.optimizer)
    watch = make_watch(given.steps + _WARM)
    model.fit(
        data.repeat(),
        steps_per_epoch=given.steps + _WARM,
        shuffle=False,
        verbose=0,
        callbacks=[hvdx.keras.callbacks.BroadcastGlobalVariablesCallback(0), watch],
    )
    return watch.figures | {"staleness": adapter_of(optimizer).cost().staleness.mean}


def make_watch(last: int) -> Any:
    """A callback that counts seconds and bytes, from the first steps to the last."""
    import keras

    class Watch(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.figures: dict[str, float] = {}
            self._begin: list[float] = []

        def now(self) -> list[float]:
            return [time.time(), *map(harness.link_bytes, ("tx", "rx"))]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 == _WARM:
                self._begin = self.now()
            elif batch + 1 == last:
                end = self.now()
                seconds, sent, received = (b - a for a, b in zip(self._begin, end, strict=True))
                self.figures = {"begin": self._begin[0], "end": end[0], "steps": last - _WARM}
                self.figures |= {"seconds": seconds, "sent": sent, "received": received}

    return Watch()


if __name__ == "__main__":
    sys.exit(main())
