"""The walk of a reader: which functions of hvdx run, and how often the reader changes files.

    mpirun -n 2 python -m tests.walk        exchanges of the strategies, a start of `fit`, a command
    KERAS_BACKEND=torch (or jax) mpirun -n 2 python -m tests.walk    whole steps of an optimiser there
    python -m tests.walk --sizes            lines, modules with one user, types about one gradient

A walk is the sequence of the Python functions of hvdx that a piece of work calls, in their order. A move is a call
into another file than the one before; a return is a move to a file where the walk has been.
"""

import argparse
import ast
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hvdx.strategies import TensorSpec

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = (
    *("all_reduce:engine=mpi", "parameter_averaging:engine=mpi", "threshold:target_density=0.01,exchange=all_gather"),
    "threshold:target_density=0.01,max_staleness=inf",
)
# Elements of the exchanges, and steps before the one that is traced and after it.
ELEMENTS, WARM, TIMED = 1000, 400, 400


class EndedError(Exception):
    """The fit has begun."""


class Walk(NamedTuple):
    """A walk.

    Attributes:
        calls: number of calls.
        files: number of files.
        moves: number of calls into another file than that of the call before; the first call is one.
        returns: number of moves to a file that an earlier call was in.
    """

    calls: int
    files: int
    moves: int
    returns: int


def walk(work: Callable[[], object]) -> tuple[Walk, list[tuple[str, str]]]:
    """Return the walk of some work in all threads, and its calls as pairs of file and function.

    Example:
        >>> walk(lambda: TensorSpec("a", (2,), 4).elements)[0]
        Walk(calls=1, files=1, moves=1, returns=0)
    """
    calls: list[tuple[str, str]] = []
    rooms = tuple(f"{ROOT / room}{os.sep}" for room in ("hvdx", "kernels"))

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = os.path.realpath(code.co_filename) if event == "call" else ""
        if path.startswith(rooms):
            calls.append((os.path.relpath(path, ROOT), code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = [file for file, _ in calls]
    moves = sum(files[i] != files[i - 1] for i in range(1, len(files))) + bool(files)
    return Walk(len(calls), len(set(files)), moves, moves - len(set(files))), calls


def stepped() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each strategy, and a step of an optimiser under it on JAX or PyTorch. Collective."""
    import keras
    import numpy as np

    import hvdx.keras as hvd
    from hvdx.keras.adapters.optimizer import attach, detach
    from hvdx.strategies import parse

    hvd.init()
    for name in STRATEGIES:
        variables = [keras.Variable(np.zeros(ELEMENTS // 2, np.float32), name=n) for n in "ab"]
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(variables)
        adapter = attach(optimizer, parse(name), "walk")
        adapter.reset()
        adapter.begin_epoch()
        random = np.random.default_rng(hvd.rank())
        values = [keras.ops.convert_to_tensor(random.normal(size=v.shape).astype(np.float32)) for v in variables]

        def step() -> None:
            optimizer.apply(values, variables)  # noqa: B023
            if adapter.due(1):  # noqa: B023
                adapter.meet()  # noqa: B023

        yield name, step
        adapter.flush()
        adapter.close()
        detach(optimizer)


def steps() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each strategy, and an exchange of it on this rank. Collective."""
    import numpy as np
    import tensorflow as tf

    import hvdx.keras as hvd
    from hvdx.comm import world
    from hvdx.strategies import parse

    hvd.init()
    comm = world.current()
    assert comm is not None
    specs = [TensorSpec(name, (ELEMENTS // 2,), 4) for name in "ab"]
    values = [np.random.default_rng(comm.rank).normal(size=s.shape).astype(np.float32) for s in specs]
    for name in STRATEGIES:
        strategy = parse(name)
        if strategy.runs == "graph":
            exchange = strategy.open(world.graph(engine="mpi"), specs)
            tensors = [tf.constant(v) for v in values]
            weights = {tf.float32: tf.constant(1.0 / comm.size)} if strategy.placement == "weights" else True
            yield name, functools.partial(exchange.step, tensors, weights)
        else:
            exchange = strategy.open(comm, specs)
            yield (
                name,
                _weights_step(exchange, values) if strategy.asynchronous else functools.partial(exchange.step, values),
            )
        exchange.flush()
        exchange.close()


def _weights_step(exchange, changes):
    """Return a function that changes weights and exchanges them."""
    weights = list(changes)
    exchange.begin(weights)

    def step() -> None:
        weights[:] = [w - 1e-3 * c for w, c in zip(exchange.step(weights), changes, strict=True)]

    return step


def start_of_fit() -> None:
    """Train a small model up to its first step."""
    import keras
    import numpy as np

    import hvdx.keras as hvd

    class Begun(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            raise EndedError

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    with contextlib.suppress(EndedError):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[hvd.Distribute("threshold"), Begun()])


def average() -> None:
    """Average two saved networks by the command."""
    import keras

    from hvdx.cli.main import main as command

    with tempfile.TemporaryDirectory() as folder:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        for name in "ab":
            model.save(f"{folder}/{name}.keras")
        sys.argv = ["hvdx", "average", f"{folder}/a.keras", f"{folder}/b.keras", "-o", f"{folder}/mean.keras"]
        command()


def times_of_commands() -> dict[str, float]:
    """Return seconds of `hvdx --version` less those of a Python that imports NumPy, medians of eleven pairs."""
    lines = {"--version": ["-m", "hvdx", "--version"], "run --help": ["-m", "hvdx", "run", "--help"]}
    taken: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(11):
        for name, words in lines.items():
            taken[name].append(seconds(words) - seconds(["-c", "import numpy"]))
    return {f"hvdx {name}": statistics.median(found) for name, found in taken.items()}


def seconds(words: list[str]) -> float:
    """Return the seconds that a Python with these arguments takes."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - begin


def users() -> dict[str, set[str]]:
    """Return the modules of the product, each with the modules of the product that import it."""
    files = {_module(path): path for room in ("hvdx", "kernels") for path in (ROOT / room).rglob("*.py")}
    files = {name: path for name, path in files.items() if not name.startswith(("hvdx.jobs", "hvdx.hvdx"))}
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for other in set(wanted) & set(files) - {name}:
                found[other].add(name)
    return found


def _module(path: Path) -> str:
    words = path.relative_to(ROOT).with_suffix("").parts
    words = words[:-1] if words[-1] == "__init__" else words
    return ".".join(words if words[0] == "hvdx" else ("hvdx", *words))


def sizes() -> dict[str, int]:
    """Return lines of product and tests, and the number of modules with one user, packages left out."""
    lines = {
        kind: sum(path.read_text().count("\n") for room in rooms for path in (ROOT / room).rglob("*.py"))
        for kind, rooms in {"lines of product": ("hvdx", "kernels", "jobs"), "lines of tests": ("tests",)}.items()
    }
    once = [name for name, by in users().items() if len(by) == 1]
    return lines | {"modules": len(users()), "modules with one user": len(once)}


def types(calls: list[tuple[str, str]]) -> int:
    """Return the number of classes in the files of a walk."""
    files = {file for file, _ in calls}
    return sum(isinstance(n, ast.ClassDef) for f in files for n in ast.walk(ast.parse((ROOT / f).read_text())))


def main(argv: list[str] | None = None) -> int:
    """Print the walks, or the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action="store_true", help="count lines and modules, and time two commands")
    parser.add_argument("--calls", metavar="STRATEGY", help="print the calls of a step of this strategy, and no more")
    args = parser.parse_args(argv)
    if args.sizes:
        for what, count in sizes().items():
            print(f"{what:<24} {count:,}")
        for what, more in times_of_commands().items():
            print(f"{what:<24} {more:.2f} s more than Python with NumPy")
        return 0
    first = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == 0
    for name, step in stepped() if os.environ.get("KERAS_BACKEND") in ("jax", "torch") else steps():
        for _ in range(WARM):
            step()
        begin = time.perf_counter()
        for _ in range(TIMED):
            step()
        mean = (time.perf_counter() - begin) / TIMED
        # The shortest of some: a step in which a control reviews its density is another walk.
        found, calls = min((walk(step) for _ in range(20)), key=lambda pair: pair[0].calls)
        if not first:
            continue
        if args.calls == name:
            print("\n".join(f"{file:<50} {function}" for file, function in calls))
        print(f"{name:<48} {found}, {1e6 * mean:.0f} us, {types(calls)} types in its files", flush=True)
    for name, work in {"start of fit": start_of_fit, "hvdx average": average}.items():
        found, _ = walk(work)
        if first:
            print(f"{name:<48} {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
