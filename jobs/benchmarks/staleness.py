"""Time to a test accuracy under each strategy, if one worker is ten times slower than the others.

    python jobs/benchmarks/staleness.py                               four workers on this machine, a quarter of an hour
    python jobs/benchmarks/staleness.py --json staleness.json         also write the figures
    python jobs/benchmarks/staleness.py --ways all_reduce,plain --equal plain --hidden 256
    python jobs/benchmarks/staleness.py --bandwidth 100mbit           workers on emulated hosts of `hvdx lab`
    python jobs/benchmarks/staleness.py --ways step,inf,plain --equal step,inf,plain --bandwidth 100mbit
    python jobs/benchmarks/staleness.py --ways "" --equal "threshold,threshold:target_density=0.01" --pause 0

Workers train a dense network on Fashion-MNIST, 64 images per step on each, SGD with momentum. In every step each worker
sleeps for 20 ms (--pause), which simulates the computation on an accelerator. Otherwise the figures would show how
workers on one machine compete for its cores. The last worker also sleeps for nine times the duration of a step
(measured before, pause included). Four times a second worker 0 stores its weights; they are evaluated after the
training, so that evaluation does not delay it. Seconds count from the third step, when everything is compiled.

The first table shows the variants with the slow worker (--ways), the second those without it (--equal). In the second,
the mean staleness should equal the number of workers. A way is one of those below or a strategy.
"""

import argparse
import sys
import time
from statistics import median

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render

_SERVER = "parameter_server:servers=colocated"
#: Compared ways: name, strategy, and factor of the learning rate ("N" is the number of workers).
WAYS: dict[str, tuple[str, str, str]] = {
    "all_reduce": ("all-reduce", "all_reduce", "1"),
    "all_reduce_n": ("all-reduce, learning rate times N", "all_reduce", "N"),
    "plain": ("asynchronous", _SERVER, "1"),
    "scaled": ("asynchronous, scaled by 1/s", f"{_SERVER},staleness=scale", "1"),
    "soft": ("soft sync, 2 updates", f"{_SERVER},aggregate=2", "1"),
    "soft_scaled": ("soft sync, 2 updates, scaled", f"{_SERVER},aggregate=2,staleness=scale", "1"),
    "bound": ("bounded, 4 steps ahead", f"{_SERVER},staleness=bound,max_staleness=4", "1"),
    "bound_far": ("bounded, 64 steps ahead", f"{_SERVER},staleness=bound,max_staleness=64", "1"),
    "step": ("threshold, in step", "threshold", "1"),
    "inf": ("threshold, without waiting", "threshold:max_staleness=inf", "1"),
}
_DEFAULT = "all_reduce,all_reduce_n,plain,scaled,soft,soft_scaled,bound,bound_far"
# Uncounted first steps, which trace and compile.
_COMPILING = 2
# Time limit of a training, in seconds.
_MOST_SECONDS = 1800


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add, words = parser.add_argument, harness.several(str)
    add("--workers", type=int, default=4, metavar="N", help="number of workers")
    add("--bandwidth", default="", metavar="RATE", help="give each worker an emulated host with a link of this rate")
    add(
        "--ways",
        type=words,
        default=_DEFAULT,
        metavar="WAY,...",
        help="ways or strategies with a slow worker; may be ''",
    )
    add("--pause", type=float, default=20.0, metavar="MS", help="sleep of every worker in each step")
    add(
        "--equal", type=words, default="all_reduce,plain,soft", metavar="WAY,...", help="ways or strategies without one"
    )
    add("--slower", type=float, default=10.0, help="duration of the slow worker's step, relative to the others'")
    add("--steps", type=int, default=500, help="steps of each worker in a training")
    add("--target", type=float, default=85.0, help="test accuracy to reach, in %%")
    add("--hidden", type=int, default=512, help="units in each of two hidden layers")
    add("--learning-rate", type=float, default=0.05, metavar="X", help="learning rate; all_reduce_n multiplies it by N")
    add("--seeds", type=harness.several(int), default="0", metavar="N,N,...", help="seeds of weights and data")
    add("--data", default="fashion-mnist", help="data set: fashion-mnist or digits")
    return harness.run(parser, lambda options: compare(checked(parser, options)), train, argv)


# -- the comparison ---------------------------------------------------------------------------------------------------


def checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Return the options without empty ways; end with an error if a way is unknown."""
    from hvdx.strategies import parse

    options.ways, options.equal = ([way for way in ways if way] for ways in (options.ways, options.equal))
    for way in options.ways + options.equal:
        try:
            parse(way_of(way)[1])
        except ValueError as error:
            parser.error(f"{error}; ways are {', '.join(WAYS)}")
    return options


def way_of(key: str) -> tuple[str, str, str]:
    """Return name, strategy and factor of the learning rate of a way, or of a strategy.

    Example:
        >>> way_of("threshold:tau=0.1")
        ('threshold:tau=0.1', 'threshold:tau=0.1', '1')
    """
    return WAYS.get(key, (key, key, "1"))


def compare(options: argparse.Namespace) -> int:
    """Run the ways with and without a slow worker, and print two tables."""
    step = median(run("alone", 1, 0.0, 0, options)[0]["steps"][_COMPILING:])
    delay = (options.slower - 1) * step
    print(f"a step takes {1e3 * step:.1f} ms; the slow worker sleeps for {1e3 * delay:.0f} ms more", flush=True)
    rows: list[harness.Row] = []
    for slow in (True, False):
        for key in options.ways if slow else options.equal:
            name, spelling, factor = way_of(key)
            for seed in options.seeds:
                ranks = run(spelling, options.workers if factor == "N" else 1, delay if slow else 0.0, seed, options)
                rows.append({"way": key, "name": name, "slow": slow, "seed": seed} | figures(ranks, options))
                print(line(rows[-1], options), file=sys.stderr, flush=True)
    for slow in (True, False):
        if of_table := [row for row in rows if row["slow"] == slow]:
            show(of_table, options)
    harness.write(options.json, {"step": step, "delay": delay, "target": options.target, "rows": rows})
    return 0


def run(spelling: str, factor: int, delay: float, seed: int, options: argparse.Namespace) -> list[harness.Row]:
    """Train once, and return the figures of every worker."""
    chosen = {key: getattr(options, key) for key in ("hidden", "target", "data", "pause")}
    chosen |= {"spelling": spelling, "learning_rate": factor * options.learning_rate, "delay": delay, "seed": seed}
    chosen["steps"] = 30 if spelling == "alone" else options.steps
    one = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    return harness.launch(__file__, chosen, options.workers, options.bandwidth, limit=_MOST_SECONDS, env=one).ranks


def figures(ranks: list[harness.Row], options: argparse.Namespace) -> harness.Row:
    """Combine the workers' figures of one run."""
    from hvdx.strategies.telemetry import StalenessHistogram

    curve = ranks[0]["curve"]
    seen = sum(
        (StalenessHistogram({int(s): times for s, times in r["staleness"].items()}) for r in ranks),
        StalenessHistogram(),
    )
    return {
        "seconds": next((seconds for seconds, accuracy in curve if accuracy >= options.target), None),
        "last": curve[-1][1] if curve else float("nan"),
        "end": curve[-1][0] if curve else None,
        "ends": [r["end"] for r in ranks],
        "updates_per_second": sum(len(r["steps"]) - _COMPILING for r in ranks) / max(r["end"] for r in ranks),
        "steps": [len(rank["steps"]) for rank in ranks],
        "density": [rank["density"] for rank in ranks],
        "mean_staleness": seen.mean if seen else None,
        "staleness": dict(sorted(seen.items())),
    }


def line(row: harness.Row, options: argparse.Namespace) -> str:
    """Return the progress line of a finished run."""
    reached = f"{row['seconds']:.1f} s" if row["seconds"] else "not reached"
    where = "one slow worker" if row["slow"] else "equal workers"
    return f"{where}: {row['name']}: {options.target:g} %: {reached}; steps of the workers: {row['steps']}"


def show(rows: list[harness.Row], options: argparse.Namespace) -> None:
    """Print a table of medians over the seeds."""

    def middle(key: str, way: str) -> float | None:
        values = [row[key] for row in rows if row["way"] == way]
        return None if None in values else median(values)

    base, cells = middle("seconds", rows[0]["way"]), []
    for way in dict.fromkeys(row["way"] for row in rows):
        seconds, staleness = middle("seconds", way), middle("mean_staleness", way)
        last = next(row for row in rows if row["way"] == way)["steps"]
        cells.append(
            [
                way_of(way)[0],
                f"{seconds:.1f}" if seconds else "-",
                f"{base / seconds:.1f}" if seconds and base else "-",
                f"{middle('updates_per_second', way):.0f}",
                f"{staleness:.2f}" if staleness else "-",
                f"{100 * last[-1] / sum(last):.0f} %",
                f"{middle('last', way):.2f}",
            ]
        )
    what = f"one of them {options.slower:g} times slower" if rows[0]["slow"] else "all equal"
    links = f", links of {options.bandwidth}" if options.bandwidth else ""
    print(f"\n{options.workers} workers{links}, {what}")
    header = [
        "way",
        f"s to {options.target:g} %",
        "times sooner",
        "steps/s",
        "mean staleness",
        "last worker's steps",
        "% at the end",
    ]
    print(render(cells, header=header))


# -- one rank ---------------------------------------------------------------------------------------------------------


def train(setting: argparse.Namespace) -> harness.Row:
    """Train, and return the figures of this worker."""
    import hvdx

    alone = setting.spelling == "alone"
    hvdx.init(strategy=None if alone else setting.spelling)
    model, batches, _, data = harness.mlp(setting)
    slow = hvdx.rank() == hvdx.size() - 1
    stored = harness.StoredWeights(model)
    watch = _Watch(setting.pause / 1e3 + (setting.delay if slow else 0.0), stored, hvdx.rank() == 0)
    distribute = None if alone else hvdx.keras.Distribute()
    model.fit(
        batches.repeat(),
        steps_per_epoch=setting.steps,
        shuffle=False,
        verbose=0,
        callbacks=[harness.callback(watch)] if distribute is None else [distribute, harness.callback(watch)],
    )
    if hvdx.rank() == 0:
        stored.store(at_once=True)
    end = stored.copies[-1][0] if stored.copies else time.perf_counter() - stored.start
    curve: list[tuple[float, float]] = []
    for i, (seconds, weights) in enumerate(stored.copies):
        # After the target is reached, only the final weights are evaluated.
        if i < len(stored.copies) - 1 and any(accuracy >= setting.target for _, accuracy in curve):
            continue
        curve.append((seconds, stored.accuracy(weights, data)[1]))
    cost = None if distribute is None else distribute.cost()
    entries, encoded = (cost.entries, cost.encoded) if cost else (0, 0)
    density = entries / encoded if encoded else None
    return {
        "steps": watch.steps, "curve": curve, "end": end, "density": density,
        "staleness": getattr(cost, "staleness", {}),
    }  # fmt: skip


class _Watch:
    """Watch of a `fit` that sleeps before each step, times the steps, and stores weights.

    Args:
        delay: seconds of sleep.
        stored: the weights; seconds count from the first step that does not compile.
        stores: True to store them.
    """

    def __init__(self, delay: float, stored: harness.StoredWeights, stores: bool) -> None:
        self.steps: list[float] = []
        self._delay, self._stored, self._stores = delay, stored, stores
        self._begin = stored.start

    def on_train_batch_begin(self, batch: int, logs: harness.Logs = None) -> None:
        self._begin = time.perf_counter()
        if batch == _COMPILING:
            self._stored.start = self._begin
        if self._delay:
            time.sleep(self._delay)

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        self.steps.append(time.perf_counter() - self._begin)
        if self._stores and batch >= _COMPILING:
            self._stored.store()


if __name__ == "__main__":
    sys.exit(main())
