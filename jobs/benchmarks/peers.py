"""Data parallelism of Keras on JAX, and of PyTorch, beside hvdx on the same backend: a step, and seconds to a target.

    python jobs/benchmarks/peers.py --json peers.json         two and four hosts at 100mbit and 1gbit: ten minutes
    python jobs/benchmarks/peers.py --quick                   one small case: a minute

Each host of `hvdx lab` has one worker, which runs on one core with one thread. All ways train the same Keras model on
the same batches, one after another in the same processes:

    DataParallel     on JAX: `fit` under `keras.distribution.DataParallel`, over gloo
    DDP              on PyTorch: the loop of Keras' guide, by DistributedDataParallel over gloo, PyTorch's optimiser
    AllReduce        on both: `fit` under hvdx
    Threshold        on both: `fit` under hvdx, which trains at the rate of the others

The networks are those of scaling.py. A training ends when its evaluation after every 10 steps reaches the target.
The milliseconds of a step are the median over these spans; seconds to the target are the sum of them, without the first
two steps, in which everything is compiled, and without evaluations.
"""

import argparse
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hvdx.comm import launcher
from hvdx.jobs.benchmarks import harness, scaling

if TYPE_CHECKING:
    import keras
    import numpy as np

#: What hvdx is compared with, by backend, and its own strategies.
PEERS = {"jax": "DataParallel", "torch": "DDP"}
STRATEGIES = {"AllReduce": "all_reduce", "Threshold": "threshold"}
#: Targets that are reached within a minute: test accuracy in %, or held-out loss in nats per character; and rates.
TARGETS = {"mlp": (80.0, 0.05), "cnn": (80.0, 0.01), "lm": (2.6, 0.002)}
# Steps between two evaluations; first steps that are not timed.
_SPAN, _COMPILING = 10, 2


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add, words = parser.add_argument, harness.several(str)
    add("--backends", type=words, default="jax,torch", metavar="NAME,...", help="backends of Keras")
    add("--models", type=words, default=",".join(TARGETS), metavar="NAME,...", help="networks")
    add("--hosts", type=harness.several(int), default="2,4", metavar="N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=words, default="100mbit,1gbit", metavar="RATE,...", help="bandwidths of the links")
    add("--ways", type=words, metavar="WAY,...", help="ways of training (default: all)")
    add("--most-steps", type=int, default=600, metavar="N", help="steps after which a training ends in any case")
    add("--quick", action="store_true", help="the transformer on two hosts at 100mbit, 20 steps")
    return harness.run(parser, compare, work, argv)


def compare(options: argparse.Namespace) -> int:
    """Train in all ways, and print the table."""
    if options.quick:
        options.models, options.hosts, options.bandwidth, options.most_steps = ["lm"], [2], ["100mbit"], 2 * _SPAN
    rows: list[harness.Row] = []
    for backend in options.backends:
        ways = [way for way in (PEERS[backend], *STRATEGIES) if not options.ways or way in options.ways]
        for case in harness.networks(options.hosts, options.bandwidth):
            setting = {"models": options.models, "ways": ways, "steps": options.most_steps}
            ended = harness.launch(__file__, setting, case["hosts"], case["bandwidth"], env={"KERAS_BACKEND": backend})
            found = [{"backend": backend} | case | row for row in ended.ranks[0]["rows"]]
            print(harness.table(found, _COLUMNS), file=sys.stderr, flush=True)
            rows += found
            harness.write(options.json, {"rows": rows})
    print(harness.table(rows, _COLUMNS))
    return 0


_COLUMNS = [
    ("backend", lambda row: row["backend"]),
    ("hosts", lambda row: str(row["hosts"])),
    ("link", lambda row: row["bandwidth"]),
    ("model", lambda row: row["model"]),
    ("way", lambda row: row["way"]),
    harness.figure("ms a step", "ms", ".1f"),
    harness.figure("steps", "steps", ".0f"),
    harness.figure("seconds", "seconds", ".2f"),
]


# -- one rank ---------------------------------------------------------------------------------------------------------


def work(setting: argparse.Namespace) -> harness.Row:
    """Train all models in all ways."""
    import hvdx

    # XLA has a thread for each core of its process. Threads have the core of the one that starts them.
    cores, found = sorted(os.sched_getaffinity(0)), launcher.detect()
    os.sched_setaffinity(0, {cores[(found.rank if found else 0) % len(cores)]})
    hvdx.init()
    import keras

    from hvdx.comm import world

    with socket.create_server(("", 0)) as free:
        mine = f"{socket.gethostname()}:{free.getsockname()[1]}"
    address = world.start().all_gather_object(mine, "addresses")[0]
    if "DataParallel" in setting.ways:
        keras.distribution.initialize(address, hvdx.size(), hvdx.rank())
    if "DDP" in setting.ways:
        import torch

        if Path("/sys/class/net/eth0").exists():
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.distributed.init_process_group("gloo", f"tcp://{address}", rank=hvdx.rank(), world_size=hvdx.size())
    rows = []
    for model in setting.models:
        target, rate = TARGETS[model]
        task = dataclasses.replace(scaling.TASKS[model], target=target)
        for way in setting.ways:
            watch = _Watch(task)
            how = argparse.Namespace(model=model, rate=rate, seed=0, steps=setting.steps)
            keras.utils.set_random_seed(0)
            if way == "DDP":
                in_pytorch(how, task, watch)
            else:
                in_keras(how, task, watch, way)
            rows.append({"model": model, "way": way} | watch.result())
    return {"rows": rows}


def in_keras(how: argparse.Namespace, task: scaling.Task, watch: "_Watch", way: str) -> None:
    """Train by `fit`, under hvdx or a distribution of Keras."""
    import keras

    import hvdx

    distribution = keras.distribution.DataParallel(auto_shard_dataset=False) if way == "DataParallel" else None
    keras.distribution.set_distribution(distribution)
    watch.model, train, test = task.build(how, task)
    watch.model.fit(
        train.repeat(),
        steps_per_epoch=_SPAN,
        epochs=how.steps // _SPAN,
        validation_data=test,
        shuffle=False,
        verbose=0,
        callbacks=[*([] if distribution else [hvdx.keras.Distribute(STRATEGIES[way])]), harness.callback(watch)],
    )
    keras.distribution.set_distribution(None)


def in_pytorch(how: argparse.Namespace, task: scaling.Task, watch: "_Watch") -> None:
    """Train by a loop as in Keras' guide to several GPUs with PyTorch."""
    import torch
    from torch.nn.functional import cross_entropy

    network, train, test = task.build(how, task)
    watch.model = network
    network.stop_training = False
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), how.rate, momentum=0.9)
    if how.model == "lm":
        # The numbers of Keras.
        optimizer = torch.optim.AdamW(network.parameters(), how.rate, eps=1e-7, weight_decay=0.004)
    model = torch.nn.parallel.DistributedDataParallel(network)

    def tensors(batch: "Sequence[np.ndarray]") -> "tuple[torch.Tensor, torch.Tensor]":
        x, y = batch
        return torch.from_numpy(x), torch.from_numpy(y).flatten().long()

    batches = map(tensors, train.repeat().as_numpy_iterator())
    for epoch in range(how.steps // _SPAN):
        watch.on_epoch_begin(epoch)
        for step in range(_SPAN):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = cross_entropy(model(x, training=True).flatten(0, -2), y)
            loss.backward()
            optimizer.step()
            watch.on_train_batch_end(step, {"loss": float(loss.detach())})
        sums = torch.zeros(3)
        with torch.no_grad():
            for x, y in map(tensors, test.as_numpy_iterator()):
                predicted = network(x, training=False).flatten(0, -2)
                sums[0] += cross_entropy(predicted, y, reduction="sum")
                sums[1] += (predicted.argmax(1) == y).sum()
                sums[2] += len(y)
        torch.distributed.all_reduce(sums)
        loss, right = (sums[:2] / sums[2]).tolist()
        watch.on_epoch_end(epoch, {"val_loss": loss} | ({} if how.model == "lm" else {"val_accuracy": right}))
        if network.stop_training:
            break


class _Watch:
    """Watch of a training that times its steps, and stops it at the target.

    Args:
        task: what is trained.

    Attributes:
        model: the model in training.
    """

    model: "keras.Model"

    def __init__(self, task: scaling.Task) -> None:
        self._task = task
        self._steps, self._begun, self._begin = 0, 0, 0.0
        self._spans: list[tuple[int, float]] = []
        self._reached = False

    def on_epoch_begin(self, epoch: int, logs: harness.Logs = None) -> None:
        self._begun, self._begin = self._steps, time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        self._steps += 1
        if self._steps == _COMPILING or batch == _SPAN - 1:
            # A step of JAX ends when its results are read.
            float((logs or {})["loss"])
            now = time.perf_counter()
            if self._steps > _COMPILING:
                self._spans.append((self._steps - self._begun, now - self._begin))
            self._begun, self._begin = self._steps, now

    def on_epoch_end(self, epoch: int, logs: harness.Logs = None) -> None:
        if self._task.reached(logs):
            self._reached = self.model.stop_training = True

    def result(self) -> harness.Row:
        """Return the figures of the training."""
        return {
            "ms": 1e3 * median(seconds / steps for steps, seconds in self._spans),
            "steps": self._steps if self._reached else None,
            "seconds": sum(seconds for _, seconds in self._spans) if self._reached else None,
        }


if __name__ == "__main__":
    sys.exit(main())
