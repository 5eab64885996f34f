"""What `hvdx run --survive` costs in a step, and how soon the others train on after a death.

    python jobs/benchmarks/survival.py             # steps with and without it, in turns: some four minutes
    python jobs/benchmarks/survival.py --deaths    # deaths of all kinds at all places: some twenty minutes
    python jobs/benchmarks/survival.py --accuracy  # a worker dies in each epoch, and a spare replaces it; or not
    python jobs/benchmarks/survival.py --goodput 30  # a worker is killed each minute, for 30 minutes
    python jobs/benchmarks/survival.py --goodput 10 --stop  # a worker is stopped each minute, and never continued

A death is a signal (SIGKILL, SIGSEGV), `os._exit` or an exception, in the first step, in the middle of a step, inside a
collective, in validation, while a checkpoint is written, at a flush, or at the end of an epoch. Its seconds are the
longest of the others' waits, in the two seconds after it, from the end of a step (or from the death) to the end of the
next one, of training or of validation. After a death in the first step they include compiling. At the end all weights
must be equal, bit for bit. Goodput is the number of samples that the workers trained, of those that all of them would
have trained in this time; a step has a pause, so that those who are left do not become faster.
"""

import argparse
import contextlib
import hashlib
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from hvdx.jobs.benchmarks import harness
from hvdx.jobs.benchmarks.harness import Row, figure
from hvdx.strategies import parse

STRATEGIES = (
    *("all_reduce:engine=mpi", "parameter_averaging:period=4,engine=mpi", "threshold:period=2"),
    *("parameter_server:servers=colocated", "threshold:max_staleness=inf"),
)
PLACES = "first step", "mid-step", "collective", "validation", "checkpoint", "flush", "end of epoch"
KINDS = "SIGKILL", "SIGSEGV", "os._exit", "exception"
#: Seconds after which the others have to train on, and largest ratio of the step times.
GOAL, COST = 1.0, 1.02
#: Points of accuracy that a training may lose in which a worker dies in each epoch.
POINTS = 0.3
#: Smallest goodput with a death in each minute.
SHARE = 0.88
_LIMIT = 180
# Seconds in which a process more starts, on a busy machine.
_START = 10
# Seconds of the pause in a step, and steps of an epoch, for goodput.
_PAUSE, _STEPS = 0.05, 200
# HVDX_TIMEOUT of workers that are stopped.
_PATIENCE = "10"
# Seconds after a death in which no step may take long.
_WATCHED = 2.0
# Steps of a run of the first part that are left out: they compile, and choose a density.
_SETTLING = 40


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, or one of its workers."""
    parser = harness.parser(__doc__)
    parser.add_argument("--deaths", action="store_true", help="measure deaths in place of steps")
    parser.add_argument("--accuracy", action="store_true", help="measure accuracy with deaths, in place of steps")
    parser.add_argument("--goodput", type=int, metavar="MINUTES", help="measure goodput with a death in each minute")
    parser.add_argument("--each", type=float, default=60, metavar="S", help="seconds between two deaths of --goodput")
    parser.add_argument("--stop", action="store_true", help="stop the workers of --goodput, in place of killing them")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds of --accuracy")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="epochs of --accuracy")
    parser.add_argument("--ranks", type=harness.several(int), help="numbers of workers (default: 2, or 4,3,2)")
    parser.add_argument("--hidden", type=int, default=256, metavar="N", help="units of each layer, for --accuracy")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="pairs of runs for each strategy")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of such a run")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Measure, and print the table; return 1 if the goal is missed."""
    columns = [("strategy", lambda row: row["strategy"]), ("workers", lambda row: str(row["ranks"]))]
    if options.goodput:
        return _goodput(options)
    if options.accuracy:
        return _accuracy(options)
    if options.deaths:
        rows = harness.run_cases(
            options.json,
            (case for ranks in options.ranks or (4, 3, 2) for case in _cases(ranks)),
            _deaths,
            [
                *columns,
                ("deaths", lambda row: "; ".join(f"{death[2]}: {death[3]}" for death in row["deaths"])),
                ("seconds", lambda row: ", ".join(f"{value:.3f}" for value in row["seconds"])),
                ("equal", lambda row: "yes" if row["equal"] else "NO"),
            ],
            resumes=True,
        )
        places: dict[bool, list[float]] = {False: [], True: []}
        for row in rows:
            for death, value in zip(row["deaths"], row["seconds"], strict=True):
                places[death[2] == PLACES[0]].append(value)
        met = max(places[False]) <= GOAL and all(row["equal"] for row in rows)
        for first, found in places.items():
            where = "in the first step, which compiles" if first else "later"
            print(f"{len(found)} deaths {where}: {median(found):.3f} s in the median, {max(found):.3f} s at most")
        print(f"the goal after the first step is {GOAL:g} s, with equal weights: {'met' if met else 'missed'}")
        return 0 if met else 1
    cases = ({"strategy": strategy, "ranks": ranks} for ranks in options.ranks or (2,) for strategy in STRATEGIES)
    rows = harness.run_cases(
        options.json,
        cases,
        lambda case: _steps(case, options.rounds, options.steps),
        [
            *columns,
            figure("plain, ms", "plain", ".2f"),
            figure("survives, ms", "survives", ".2f"),
            figure("ratio", "ratio", ".3f"),
            ("ratios of the pairs", lambda row: f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}"),
        ],
    )
    return 0 if all(row["ratio"] <= COST for row in rows) else 1


def _start(ranks: int, survives: bool, spares: int = 0) -> list[str]:
    survival = ["--survive", *(["--spares", str(spares)] if spares else [])] if survives else []
    return [sys.executable, "-m", "hvdx", "run", "-n", str(ranks), *survival]


# -- goodput ----------------------------------------------------------------------------------------------------------


def _goodput(options: argparse.Namespace) -> int:
    """Kill or stop a worker each minute, and print the goodput; return 1 if the goal is missed."""
    (ranks,) = options.ranks or (3,)
    kills = int(60 * options.goodput / options.each) - 1
    left_before = _left_over()
    with tempfile.TemporaryDirectory() as name:
        folder, over = Path(name), threading.Event()
        killer = threading.Thread(target=_kill_workers, args=(folder, kills, over, options.each, options.stop))
        killer.start()
        setting = {"minutes": options.goodput, "shared": name}
        start = _start(ranks, True, spares=kills)
        try:
            limit = 60 * options.goodput + _LIMIT + _START * (ranks + kills)
            patience = {"HVDX_TIMEOUT": _PATIENCE} if options.stop else {}
            ended = harness.launch(__file__, setting, ranks, limit=limit, start=start, env=patience)
        finally:
            over.set()
            killer.join()
        steps = [[float(word) for word in line.split()] for line in (folder / "steps").read_text().splitlines()]
        died = len(list(folder.glob("killed-*")))
    if len({rank["weights"] for rank in ended.ranks}) != 1:
        sys.exit("the weights of the workers differ")
    times, sizes, memory = ([row[i] for row in steps] for i in range(3))
    full = median(end - begin for begin, end, size in zip(times, times[1:], sizes[1:], strict=False) if size == ranks)
    goodput = full * sum(sizes[1:]) / ranks / (times[-1] - times[0])
    figures: Row = {
        "ranks": ranks,
        "each": options.each,
        "stopped": options.stop,
        "minutes": (times[-1] - times[0]) / 60,
        "deaths": died,
        "goodput": goodput,
        "longest_step": max(end - begin for begin, end in itertools.pairwise(times)),
        "memory": [memory[len(memory) // 10], memory[-1]],
        "left_over": sorted(_left_over() - left_before),
    }
    harness.write(options.json, figures)
    print(
        f"{died} {'stops' if options.stop else 'deaths'} of {ranks} workers in {figures['minutes']:.1f} minutes: "
        f"goodput {goodput:.3f}, longest step {figures['longest_step']:.2f} s, memory of rank 0 "
        f"{memory[len(memory) // 10] / 1e6:.0f} MB early and {memory[-1] / 1e6:.0f} MB at the end, left over: "
        f"{', '.join(figures['left_over']) or 'nothing'}"
    )
    # All wait for a worker that is stopped, until it is ended.
    goal = SHARE - (float(_PATIENCE) / options.each if options.stop else 0)
    print(f"the goal is {goal:.2f}: {'met' if goodput >= goal else 'missed'}")
    return 0 if goodput >= goal and not figures["left_over"] else 1


def _left_over() -> set[str]:
    """Return shared memory, folders of Open MPI, and processes that a job may leave."""
    found = {str(path) for path in Path("/dev/shm").iterdir()}
    found |= {str(path) for path in Path(tempfile.gettempdir()).glob("prte.*/*")}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"--worker" in (line := path.read_bytes()) and b"survival.py" in line:
                found.add(path.parent.name)
    return found


def _kill_workers(folder: Path, kills: int, over: threading.Event, each: float, stop: bool) -> None:
    """Kill or stop one of the workers each minute, those with low numbers first: rank 0 is among them."""
    while not over.wait(1) and not (folder / "steps").exists():
        pass
    for number in range(kills):
        if over.wait(each):
            return
        working = sorted(folder.glob("works-*"), key=lambda path: int(path.name.split("-")[1]))
        victim = working[number % len(working)]
        victim.rename(folder / f"killed-{number}")
        os.kill(int(victim.name.split("-")[2]), signal.SIGSTOP if stop else signal.SIGKILL)


def _train_for_minutes(setting: argparse.Namespace) -> Row:
    """Train with a pause in each step; rank 0 writes the time, the number of ranks and its memory after each."""
    import keras
    import numpy as np

    import hvdx
    import hvdx.keras
    from hvdx.comm import start

    hvdx.init()
    keras.utils.set_random_seed(0)
    comm, folder = start(), Path(setting.shared)
    x, y = np.random.default_rng(0).normal(size=(4096, 32)).astype(np.float32), np.zeros((4096, 1), np.float32)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-3), "mse")

    class Steps(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: harness.Logs = None) -> None:
            # A spare is here once it is a rank.
            if not hasattr(self, "file"):
                self.file = os.open(folder / "steps", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
                (folder / f"works-{comm.world_ranks[comm.rank]}-{os.getpid()}").touch()

        def on_train_batch_begin(self, batch: int, logs: harness.Logs = None) -> None:
            time.sleep(_PAUSE)

        def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
            if comm.rank == 0:
                line = f"{time.time()} {comm.size} {harness.memory('VmRSS')}\n"
                os.write(self.file, line.encode())

        def on_epoch_end(self, epoch: int, logs: harness.Logs = None) -> None:
            begin = float((folder / "steps").read_text().split(maxsplit=1)[0])
            self.model.stop_training = comm.any_true(time.time() > begin + 60 * setting.minutes)

    data = hvdx.shard((x, y), 32).repeat()
    model.fit(
        data,
        steps_per_epoch=_STEPS,
        epochs=10**6,
        verbose=0,
        callbacks=[hvdx.keras.Distribute("all_reduce"), Steps()],
    )
    return {"weights": _digest(model)}


# -- accuracy ---------------------------------------------------------------------------------------------------------


def _accuracy(options: argparse.Namespace) -> int:
    """Train with and without deaths, and compare; return 1 if the goal is missed."""
    (ranks,) = options.ranks or (4,)
    cases = (
        {"strategy": strategy, "deaths": deaths, "seed": seed}
        for strategy in (STRATEGIES[0], "threshold")
        for seed in range(options.seeds)
        for deaths in (0, options.epochs - 1)
    )

    def measure(case: Row) -> Row:
        setting = case | {"epochs": options.epochs, "hidden": options.hidden}
        start = _start(ranks, True, spares=case["deaths"])
        ended = harness.launch(__file__, setting, ranks, limit=_LIMIT * options.epochs, start=start)
        if len({rank["weights"] for rank in ended.ranks}) != 1:
            sys.exit(f"{case}: the weights of the workers differ")
        return {"accuracy": 100 * ended.ranks[0]["accuracy"], "workers": len(ended.ranks)}

    rows = harness.run_cases(
        options.json,
        cases,
        measure,
        [
            ("strategy", lambda row: row["strategy"]),
            figure("accuracy, %", "accuracy", ".2f"),
            figure("deaths", "deaths", "d"),
            figure("seed", "seed", "d"),
            figure("workers at the end", "workers", "d"),
        ],
        {"epochs": options.epochs, "hidden": options.hidden, "ranks": ranks},
        resumes=True,
    )
    worst = 0.0
    for strategy in {row["strategy"]: None for row in rows}:
        found = [
            mean(r["accuracy"] for r in rows if r["strategy"] == strategy and bool(r["deaths"]) == d) for d in (0, 1)
        ]
        print(f"{strategy}: {found[0]:.2f} % without deaths, {found[1]:.2f} % with a death in each epoch")
        worst = max(worst, found[0] - found[1])
    print(f"the goal is a loss of at most {POINTS} points: {'met' if worst <= POINTS else 'missed'}")
    return 0 if worst <= POINTS else 1


def _train_to_the_end(setting: argparse.Namespace) -> Row:
    """Train Fashion-MNIST; at the end of each epoch but the last, a rank dies if deaths are wanted."""
    import keras

    import hvdx
    import hvdx.keras
    from hvdx.comm import start

    hvdx.init()
    model, train_data, _, data = harness.mlp(setting)
    comm = start()

    class Deaths(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: harness.Logs = None) -> None:
            if epoch < setting.deaths and comm.rank == epoch % comm.size:
                os.kill(os.getpid(), signal.SIGKILL)

    # A spare joins when an epoch begins.
    callbacks = [hvdx.keras.Distribute(setting.strategy), Deaths()]
    model.fit(train_data, epochs=setting.epochs, verbose=0, callbacks=callbacks)
    weights = _digest(model)
    _, accuracy = model.evaluate(data.test_x, data.test_y, batch_size=500, verbose=0)
    return {"accuracy": accuracy, "weights": weights}


# -- steps ------------------------------------------------------------------------------------------------------------


def _steps(case: Row, rounds: int, steps: int) -> Row:
    """Return the median milliseconds of a step without and with survival, from pairs of runs in alternating order."""
    found: dict[bool, list[float]] = {False: [], True: []}
    setting = {"strategy": case["strategy"], "steps": steps, "deaths": []}
    for number in range(rounds):
        for survives in (False, True) if number % 2 else (True, False):
            ended = harness.launch(
                __file__, setting, case["ranks"], limit=_LIMIT, start=_start(case["ranks"], survives)
            )
            found[survives].append(median(rank["step"] for rank in ended.ranks))
    ratios = [with_it / plain for plain, with_it in zip(found[False], found[True], strict=True)]
    medians = {"plain": 1e3 * median(found[False]), "survives": 1e3 * median(found[True])}
    return medians | {"ratio": median(ratios), "ratios": ratios}


# -- deaths -----------------------------------------------------------------------------------------------------------


def _cases(ranks: int) -> list[Row]:
    """Return the runs: with four workers each kind at each place, two deaths a run; with fewer each place, one a run.

    A death is a list of the rank, the epoch, the place and the kind.
    """
    cases: list[Row] = []
    for number, strategy in enumerate(STRATEGIES):
        if ranks >= 4:
            pairs = [(place, kind) for kind in KINDS for place in PLACES if _is_possible(place, kind)]
            # A death in the first step is the first of its run.
            pairs.sort(key=lambda pair: pair[0] != PLACES[0])
            half = (len(pairs) + 1) // 2
            runs = [[first, *later] for first, later in zip(pairs, [[p] for p in pairs[half:]] + [[]], strict=False)]
            runs = runs[:half]
        else:
            kinds = [KINDS[(place + number) % len(KINDS)] for place in range(len(PLACES))]
            chosen = zip(PLACES, kinds, strict=True)
            runs = [[(place, kind if _is_possible(place, kind) else KINDS[0])] for place, kind in chosen]
        for index, run in enumerate(runs):
            victims = (0, 2) if index % 2 else (1, 0)
            deaths = [[victims[i], i, place, kind] for i, (place, kind) in enumerate(run)]
            cases.append({"strategy": strategy, "ranks": ranks, "deaths": deaths})
    return cases


def _is_possible(place: str, kind: str) -> bool:
    # A checkpoint is written in a thread, whose exception is an error of the file system to all ranks.
    return (place, kind) != ("checkpoint", "exception")


def _deaths(case: Row) -> Row:
    """Return the seconds after each death, and whether all weights are equal at the end."""
    # Where workers do not wait for each other, some take few of the steps.
    steps = 48 if parse(case["strategy"]).asynchronous else 12
    setting = {"strategy": case["strategy"], "steps": steps, "deaths": case["deaths"]}
    ranks = case["ranks"]
    ended = harness.launch(__file__, setting, ranks, limit=_LIMIT, start=_start(ranks, survives=True))
    if len(ended.ranks) != ranks - len(case["deaths"]):
        sys.exit(f"{case}: expected {ranks - len(case['deaths'])} workers at the end, got:\n{ended.out}")
    seconds = [max(rank["seconds"][i] for rank in ended.ranks) for i in range(len(case["deaths"]))]
    return {"seconds": seconds, "equal": len({rank["weights"] for rank in ended.ranks}) == 1}


def train(setting: argparse.Namespace) -> Row:
    """Train on one worker, which may die; return the milliseconds of a step, or the seconds after each death."""
    if hasattr(setting, "minutes"):
        return _train_for_minutes(setting)
    if hasattr(setting, "epochs"):
        return _train_to_the_end(setting)
    import keras
    import numpy as np

    import hvdx
    import hvdx.keras
    from hvdx.comm import start

    hvdx.init()
    keras.utils.set_random_seed(0)
    x, y = np.random.default_rng(0).normal(size=(4096, 784)).astype(np.float32), np.arange(4096) % 10
    model = keras.Sequential(
        [keras.Input((784,)), *(keras.layers.Dense(512, "relu") for _ in range(2)), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    data = hvdx.shard((x, y), 64)
    folder, me = Path(setting.folder), start().world_ranks[start().rank]
    clock = _clock()
    callbacks: list[Any] = [hvdx.keras.Distribute(setting.strategy), clock]
    if setting.deaths:
        callbacks += [hvdx.keras.Checkpoint(folder / "checkpoints"), _victim(setting.deaths, me, folder)]
    model.fit(
        data.repeat(),
        steps_per_epoch=setting.steps,
        epochs=len(setting.deaths) + 1,
        verbose=0,
        validation_data=hvdx.shard((x[:512], y[:512]), 64) if setting.deaths else None,
        callbacks=callbacks,
    )
    if not setting.deaths:
        return {"step": float(np.median(np.diff(clock.times)[_SETTLING:]))}
    seconds = []
    for number in range(len(setting.deaths)):
        died = float((folder / f"death-{number}").read_text())
        ends = itertools.pairwise(clock.times)
        waits = [end - max(begin, died) for begin, end in ends if end > died and begin < died + _WATCHED]
        # A worker that has not taken a step waits from the death on.
        seconds.append(max([*waits, clock.times[0] - died]))
    weights = _digest(model)
    return {"seconds": seconds, "weights": weights}


def _digest(model: Any) -> str:
    """Return a text that is the same for equal weights only."""
    return hashlib.sha256(b"".join(w.numpy().tobytes() for w in model.weights)).hexdigest()


def _clock() -> Any:
    """Return a callback with the `times` of the ends of steps."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
            self.times.append(time.time())

        def on_test_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
            self.times.append(time.time())

    return Clock()


def _victim(deaths: list[list[Any]], me: int, folder: Path) -> Any:
    """Return a callback that ends this process at its place."""
    import keras

    from hvdx.comm.surviving import SurvivingComm
    from hvdx.keras.checkpoint.writer import Writer
    from hvdx.keras.distribute import Distribute

    mine = {(epoch, place): (number, kind) for number, (rank, epoch, place, kind) in enumerate(deaths) if rank == me}

    class Victim(keras.callbacks.Callback):
        epoch, batch = 0, 0

        def die(self, place: str, batch: int = 0) -> None:
            """Die, if this is the place, from a step of the epoch on."""
            number, kind = mine.get((self.epoch, place), (-1, ""))
            if number < 0 or self.batch < batch:
                return
            (folder / f"death-{number}").write_text(repr(time.time()))
            if kind == "exception":
                raise ValueError(place)
            if kind == "os._exit":
                os._exit(3)
            os.kill(os.getpid(), signal.Signals[kind])

        def on_epoch_begin(self, epoch: int, logs: harness.Logs = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: harness.Logs = None) -> None:
            self.batch = batch
            self.die("first step")
            kind = mine.get((self.epoch, "mid-step"), (-1, ""))[1]
            if kind == "exception":
                self.die("mid-step", 5)
            elif kind and batch == 5:
                threading.Timer(0.002, self.die, ["mid-step"]).start()

        def on_test_batch_begin(self, batch: int, logs: harness.Logs = None) -> None:
            self.die("validation")

        def on_epoch_end(self, epoch: int, logs: harness.Logs = None) -> None:
            self.die("end of epoch")

    victim = Victim()

    def before(cls: type, name: str, place: str, batch: int = 0) -> None:
        original = getattr(cls, name)

        def wrapped(*args: object, **options: object) -> object:
            victim.die(place, batch)
            return original(*args, **options)

        setattr(cls, name, wrapped)

    before(SurvivingComm, "_agree", "collective", 3)
    before(Writer, "_write_own", "checkpoint")
    before(Distribute, "end_steps", "flush")
    return victim


if __name__ == "__main__":
    sys.exit(main())
