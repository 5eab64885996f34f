"""Steps alone between two exchanges: `Threshold` beside DiLoCo and SparseLoCo, at equal bytes.

    python jobs/benchmarks/local_steps.py --json local_steps.json          4 workers, four rates: a quarter of an hour
    python jobs/benchmarks/local_steps.py --steps 120 --rates 0.002        a short run
    python jobs/benchmarks/local_steps.py --json local_steps.json --show   the table of the recorded runs

Every worker trains the transformer of 0.12 M parameters by AdamW on windows of the sources of Python's standard
library. Printed is the held-out loss after half of the steps and after all, at the best rate of each scheme, and the
bytes that a worker sends in a step, relative to all-reduce.

DiLoCo (arXiv 2311.08105): each worker takes 30 steps alone; the mean of the changes goes through Nesterov's momentum
with rate 0.7 and momentum 0.9. SparseLoCo (arXiv 2508.15706): of the changes of 30 steps, added to 0.95 times what was
not sent before, each 4,096 elements send the largest 64, with 2 bits for sign and magnitude; outer rate 1. Both run as
strategies of this file by the adapter that runs `Threshold`. Their messages are counted by formula: 4 bytes an element,
and 14 bits an entry.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdx.jobs.benchmarks import harness, scaling
from hvdx.strategies import HostExchange, StepInput, Strategy, Telemetry, views

if TYPE_CHECKING:
    from hvdx.codec.base import Array
    from hvdx.comm import Comm
    from hvdx.strategies.contract import TensorSpec

#: Steps alone of DiLoCo and SparseLoCo.
PERIOD = 30
#: Compared schemes. The densities of the last two rows give about the bytes of SparseLoCo and of DiLoCo.
SCHEMES = {
    "one worker": "",
    "all-reduce": "all_reduce:engine=mpi",
    "DiLoCo": "diloco",
    "SparseLoCo": "sparse_loco",
    "Threshold, bytes of SparseLoCo": "threshold:target_density=0.018,period=30",
    "Threshold, bytes of DiLoCo": "threshold:target_density=0.06",
}
_CHUNK, _KEPT, _DECAY = 4096, 64, 0.95
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9


class _LocalSteps(Strategy):
    placement, runs, may_wait = "update", "host", True
    exchange: "type[LocalExchange]"

    def open(self, comm: "Comm", specs: "Sequence[TensorSpec]", name: str = "") -> "LocalExchange":
        return self.exchange(comm, specs)


class LocalExchange(HostExchange):
    """Mean of what the workers send of the changes of a period.

    The first exchange is that of one step, in which the exchange is opened; it passes the plain mean on.

    Args:
        comm: the workers.
        specs: the weights.
    """

    def __init__(self, comm: "Comm", specs: "Sequence[TensorSpec]"):
        super().__init__(specs, Telemetry())
        self.period = PERIOD
        self._channel, self._size = comm.channel("the changes of a period"), comm.size

    def combine(self, step_input: StepInput) -> "Sequence[Array]":
        change = np.concatenate([np.ravel(t) for t in step_input.tensors]).astype(np.float32)
        whole = step_input.steps > 1
        mean = self.message(change) if whole else change
        self._channel.all_reduce(mean)
        mean /= np.float32(self._size)
        self.telemetry.steps += 1
        return views(self.advanced(mean) if whole else mean, self.specs)

    def message(self, change: np.ndarray) -> np.ndarray:
        """Return the part of this worker's change that it sends, float32[n]."""
        raise NotImplementedError

    def advanced(self, mean: np.ndarray) -> np.ndarray:
        """Return the change of the shared weights, float32[n]."""
        return mean


class _DiLoCoExchange(LocalExchange):
    def __init__(self, comm: "Comm", specs: "Sequence[TensorSpec]"):
        super().__init__(comm, specs)
        self._velocity = np.zeros(self._n, np.float32)

    def message(self, change: np.ndarray) -> np.ndarray:
        self.telemetry.sent += 2 * (self._size - 1) * change.nbytes // self._size
        return change

    def advanced(self, mean: np.ndarray) -> np.ndarray:
        self._velocity = _OUTER_MOMENTUM * self._velocity + mean
        moved: np.ndarray = np.float32(_OUTER_RATE) * (mean + _OUTER_MOMENTUM * self._velocity)
        return moved


class _SparseLoCoExchange(LocalExchange):
    def __init__(self, comm: "Comm", specs: "Sequence[TensorSpec]"):
        super().__init__(comm, specs)
        chunks = -(-self._n // _CHUNK)
        self._left = np.zeros((chunks, _CHUNK), np.float32)

    def message(self, change: np.ndarray) -> np.ndarray:
        self._left *= _DECAY
        self._left.reshape(-1)[: self._n] += change
        chosen = two_bits(self._left)
        self._left -= chosen
        self.telemetry.sent += (self._size - 1) * len(chosen) * (_KEPT * 14 // 8 + 8)
        return chosen.reshape(-1)[: self._n].copy()


def two_bits(values: np.ndarray) -> np.ndarray:
    """Return the largest elements of each row with 2 bits: the sign, and one of two magnitudes; the others are 0.

    The magnitudes are the means of the smaller and of the larger half of those elements.

    Args:
        values: float32[rows, _CHUNK].

    Example:
        >>> row = np.zeros((1, 4096), np.float32)
        >>> row[0, :64] = np.repeat([1, 3, -5, -7], 16)
        >>> np.unique(two_bits(row)).tolist()
        [-6.0, 0.0, 2.0]
    """
    where = np.argpartition(np.abs(values), -_KEPT, axis=1)[:, -_KEPT:]
    chosen = np.take_along_axis(values, where, 1)
    order = np.argsort(np.abs(chosen), axis=1)
    where, chosen = np.take_along_axis(where, order, 1), np.take_along_axis(chosen, order, 1)
    halves = np.abs(chosen).reshape(len(values), 2, -1).mean(2).repeat(_KEPT // 2, 1)
    result = np.zeros_like(values)
    np.put_along_axis(result, where, np.sign(chosen) * halves.astype(np.float32), 1)
    return result


class DiLoCo(_LocalSteps):
    """Momentum on the mean of the changes of 30 steps."""

    name, exchange = "diloco", _DiLoCoExchange


class SparseLoCo(_LocalSteps):
    """Mean of the largest changes of 30 steps, in 2 bits."""

    name, exchange = "sparse_loco", _SparseLoCoExchange


_OWN: dict[str, type[_LocalSteps]] = {kind.name: kind for kind in (DiLoCo, SparseLoCo)}


def main(argv: list[str] | None = None) -> int:
    """Run the missing trainings and print the table, or run one worker."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=4, metavar="N", help="workers on this machine")
    add("--rates", type=harness.several(float), default="0.001,0.002,0.004,0.008", metavar="X,...", help="rates")
    add("--steps", type=int, default=600, metavar="N", help="steps of a training")
    add("--batch", type=int, default=8, metavar="N", help="windows of text in a step of a worker")
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights and the batches")
    add("--show", action="store_true", help="only print the table of the runs in the --json file")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Run every training that is missing, and print the table."""
    setting = {name: getattr(options, name) for name in ("workers", "steps", "batch", "seed")}
    rows = harness.finished(options.json, **setting)
    for name in [] if options.show else SCHEMES:
        done = {row["rate"] for row in rows if row["scheme"] == name}
        rates = [rate for rate in options.rates if rate not in done]
        if not rates:
            continue
        ranks = 1 if name == "one worker" else options.workers
        ended = harness.launch(__file__, setting | {"scheme": name, "rates": rates}, ranks)
        rows.extend(ended.ranks[0]["runs"])
        harness.write(options.json, setting | {"rows": rows})
        for row in ended.ranks[0]["runs"]:
            print(f"{name}, rate {row['rate']:g}: {row['losses'][-1]:.3f}", file=sys.stderr, flush=True)
    print(harness.table(summary(rows), _COLUMNS))
    return 0


def summary(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """Return the row of each scheme whose last loss is the lowest, with its bytes relative to all-reduce."""
    best = [
        min((row for row in rows if row["scheme"] == name), key=lambda row: row["losses"][-1])
        for name in dict.fromkeys(row["scheme"] for row in rows)
    ]
    dense = next((row["bytes_per_step"] for row in best if row["scheme"] == "all-reduce"), 0)
    return [row | {"fewer": dense / row["bytes_per_step"] if row["bytes_per_step"] else None} for row in best]


_COLUMNS = [
    ("scheme", lambda row: row["scheme"]),
    harness.figure("rate", "rate", "g"),
    harness.figure("fewer bytes, times", "fewer", ".0f"),
    ("loss at half", lambda row: f"{row['losses'][0]:.3f}"),
    ("loss at end", lambda row: f"{row['losses'][-1]:.3f}"),
]


# -- one rank -----------------------------------------------------------------------------------------------------


def train(setting: argparse.Namespace) -> harness.Row:
    """Train with each rate one after another."""
    import hvdx

    hvdx.init()
    return {"runs": [train_once(setting, rate) for rate in setting.rates]}


def train_once(setting: argparse.Namespace, rate: float) -> harness.Row:
    """Train once, and return the held-out losses."""
    import keras

    import hvdx

    keras.utils.set_random_seed(setting.seed)
    task = replace(scaling.TASKS["lm"], batch=setting.batch)
    at = argparse.Namespace(rate=rate, seed=setting.seed, steps=setting.steps)
    model, data, test = scaling.text(at, task)
    spelling = SCHEMES[setting.scheme]
    strategy: Any = _OWN[spelling]() if spelling in _OWN else spelling
    distribute = hvdx.keras.Distribute(strategy) if spelling else None
    history = model.fit(
        data.repeat(),
        steps_per_epoch=setting.steps // 2,
        epochs=2,
        validation_data=test,
        shuffle=False,
        verbose=0,
        callbacks=[distribute] if distribute else [],
    ).history
    sent = distribute.counters.bytes_sent if distribute else 0
    return {
        "scheme": setting.scheme,
        "rate": rate,
        "losses": [float(loss) for loss in history["val_loss"]],
        "bytes_per_step": sent / setting.steps,
    }


if __name__ == "__main__":
    sys.exit(main())
