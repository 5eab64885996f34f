"""Cost of recording a training step, compared with the step itself.

    python jobs/benchmarks/record.py                 the digits MLP of jobs/fashion_mnist.py, batches of 64
    python jobs/benchmarks/record.py --json out.json

The difference of two trainings would be lost in their spread. So the calls of the recorder are timed by themselves, in
turns with steps of `fit` without a record. A turn writes as many rows in a line as a training writes in a second, to a
real file. "One worker" has no counters; the others read the counters of one or two exchanges on the host.
"""

import argparse
import sys
import tempfile
import time
from statistics import median
from typing import Any

from hvdx.jobs.benchmarks import harness

#: Largest cost of recording, as a share of a step.
GOAL = 0.005
_EXCHANGES = {"one worker": 0, "an exchange on the host": 1, "two exchanges on the host": 2}


def main(argv: list[str] | None = None) -> int:
    """Measure the step and the recorder in turns, and print the table; return 1 if the goal is missed."""
    parser = harness.parser(__doc__)
    parser.add_argument("--turns", type=int, default=15, metavar="N", help="turns of each measurement")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of fit in a turn")
    options = parser.parse_args(argv)
    from hvdx.report.table import render

    step, micros, rows = measure(options)
    shares = {name: [m / s for m, s in zip(values, step, strict=True)] for name, values in micros.items()}
    cells = [["a step of fit", f"{median(step):.1f}", ""]]
    cells += [
        [f"recording: {name}", f"{median(values):.2f}", f"{100 * median(shares[name]):.2f}"]
        for name, values in micros.items()
    ]
    print(f"medians of {options.turns} turns; {rows} rows in a line")
    print(render(cells, header=["", "microseconds", "% of a step"]))
    worst = max(median(shares[name]) for name in ("one worker", "an exchange on the host"))
    print(f"the goal is at most {100 * GOAL:.1f} %: {'met' if worst <= GOAL else 'missed'}")
    harness.write(options.json, {"step_us": step, "recording_us": micros, "rows": rows})
    return 0 if worst <= GOAL else 1


def measure(options: argparse.Namespace) -> tuple[list[float], dict[str, list[float]], int]:
    """Return microseconds of a step and of its recording, one for each turn, and the rows in a line."""
    import keras

    from hvdx.jobs.benchmarks.step import FitSteps

    model, train, _, _ = harness.mlp(argparse.Namespace(hidden=128, seed=0), "digits")
    import hvdx

    steps = FitSteps(model, train.repeat(), [hvdx.keras.Distribute(), keras.callbacks.Callback()])
    time_of(steps, 50)
    rows = max(round(1 / time_of(steps, options.steps)), 10)
    step: list[float] = []
    micros: dict[str, list[float]] = {name: [] for name in _EXCHANGES}
    with tempfile.TemporaryDirectory() as folder:
        recorders = {name: Recorder(f"{folder}/{number}", number, rows) for name, number in _EXCHANGES.items()}
        for _ in range(options.turns):
            step.append(1e6 * time_of(steps, options.steps))
            for name, recorder in recorders.items():
                micros[name].append(1e6 * recorder.turn())
    steps.close()
    return step, micros, rows


def time_of(step: Any, steps: int) -> float:
    """Return the median seconds of a step."""
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


class Recorder:
    """Recorder of a fit without training.

    Args:
        folder: folder of the record.
        exchanges: number of exchanges on the host.
        rows: rows in a turn, which one line holds.
    """

    def __init__(self, folder: str, exchanges: int, rows: int):
        from types import SimpleNamespace

        from hvdx.keras.fit.recording import Recording
        from hvdx.strategies.telemetry import Telemetry

        self._counters, self._rows, self._step = [Telemetry() for _ in range(exchanges)], rows, 0
        self._adapters: Any = [SimpleNamespace(telemetries=[counts]) for counts in self._counters]
        self._recording = Recording(folder, interval=1e9)

    def turn(self) -> float:
        """Return the seconds for the recording of a step, the write of the line included."""
        recording, total = self._recording, 0.0
        # One recording at a time: this ends that of the other recorders.
        recording.begin(0, lambda: self._adapters, dict)
        for number in range(self._rows):
            self._step += 1
            for counts in self._counters:
                counts.computing, counts.sent = counts.computing + 1.23e-3, counts.sent + 12345
                counts.exchanging, counts.waiting = counts.exchanging + 2.34e-4, counts.waiting + 3.45e-5
            if number == self._rows - 1:
                recording.write_now()
            begin = time.perf_counter()
            if recording.on:
                recording.step_begins()
            if recording.on:
                recording.step_ends(self._step)
            if recording.on:
                recording.write_if_due()
            total += time.perf_counter() - begin
        return total / self._rows


if __name__ == "__main__":
    sys.exit(main())
