"""A step, and seconds to a target, of Keras' DataParallel on JAX and of PyTorch's DDP, beside hvdx on these backends.

    python jobs/benchmarks/peers.py --json peers.json         two and four hosts at 100mbit and 1gbit: 15 minutes
    python jobs/benchmarks/peers.py --quick                   one small case for each backend: a minute

Each host of `hvdx lab` has one worker, which runs on one core with one thread. All ways train the same Keras model on
the same batches, one after another in the same processes:

    peer             on JAX: `fit` under `keras.distribution.DataParallel`, over gloo; on PyTorch: the loop of Keras'
                     guide to several GPUs, by DistributedDataParallel over gloo, with PyTorch's optimiser
    AllReduce        `fit` under hvdx, for 30 steps
    Threshold        `fit` under hvdx, with the learning rate of the others

The networks and data are those of scaling.py. A training ends when its evaluation, after every 10 steps, reaches the
target. The milliseconds of a step are the median over these spans. The seconds to the target are their sum, without
evaluations and the first two steps, in which everything is compiled.
"""

import argparse
import dataclasses
import itertools
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

#: Ways of training by the names of their figures, with the strategies of hvdx.
WAYS = {"peer": "", "all_reduce": "all_reduce", "threshold": "threshold"}
#: Targets that are reached within minutes, test accuracy in % or held-out loss, and rates.
TARGETS = {"mlp": (80.0, 0.05), "cnn": (78.0, 0.01), "lm": (2.7, 0.004)}
# Steps between two evaluations; first steps that are not timed; steps of the training that is timed only; and samples
# of an evaluation, full batches on each of up to four hosts.
_SPAN, _COMPILING, _TIMED, _TESTED = 10, 2, 30, 2_000


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add, words = parser.add_argument, harness.several(str)
    add("--backends", type=words, default="jax,torch", metavar="NAME,...", help="backends of Keras")
    add("--models", type=words, default=",".join(TARGETS), metavar="NAME,...", help="networks")
    add("--hosts", type=harness.several(int), default="2,4", metavar="N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=words, default="100mbit,1gbit", metavar="RATE,...", help="bandwidths of the links")
    add("--most-steps", type=int, default=400, metavar="N", help="steps after which a training ends in any case")
    add("--quick", action="store_true", help="only 20 steps of the MLP on two hosts at 100mbit")
    return harness.run(parser, compare, work, argv)


def compare(options: argparse.Namespace) -> int:
    """Train in all ways, and print the table."""
    if options.quick:
        options.models, options.hosts, options.bandwidth, options.most_steps = ["mlp"], [2], ["100mbit"], 2 * _SPAN
    rows: list[harness.Row] = []
    for backend in options.backends:
        for case in harness.networks(options.hosts, options.bandwidth):
            setting = {"models": options.models, "steps": options.most_steps}
            ended = harness.launch(__file__, setting, case["hosts"], case["bandwidth"], env={"KERAS_BACKEND": backend})
            rows += [{"backend": backend} | case | row for row in ended.ranks[0]["rows"]]
            harness.write(options.json, {"rows": rows})
            print(f"{backend}: {case['hosts']} hosts, {case['bandwidth']}", file=sys.stderr, flush=True)
    print(harness.table(rows, _COLUMNS))
    return 0


def ratio(row: harness.Row, above: str, below: str) -> str:
    """Return a figure relative to another one; nothing if a target was not reached."""
    return "" if None in (row[above], row[below]) else f"{row[above] / row[below]:.2f}"


_COLUMNS = [
    ("backend", lambda row: row["backend"]),
    ("hosts", lambda row: str(row["hosts"])),
    ("link", lambda row: row["bandwidth"]),
    ("network", lambda row: row["model"]),
    harness.figure("peer, ms a step", "peer_ms", ".1f"),
    harness.figure("AllReduce", "all_reduce_ms", ".1f"),
    ("/ peer", lambda row: ratio(row, "all_reduce_ms", "peer_ms")),
    harness.figure("Threshold", "threshold_ms", ".1f"),
    harness.figure("peer, s to the target", "peer_s", ".1f"),
    harness.figure("Threshold, s", "threshold_s", ".1f"),
    ("/ peer, s", lambda row: ratio(row, "threshold_s", "peer_s")),
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
    in_torch = keras.backend.backend() == "torch"
    if in_torch:
        import torch

        if Path("/sys/class/net/eth0").exists():
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.distributed.init_process_group("gloo", f"tcp://{address}", rank=hvdx.rank(), world_size=hvdx.size())
    else:
        keras.distribution.initialize(address, hvdx.size(), hvdx.rank())
    rows = []
    for model in setting.models:
        target, rate = TARGETS[model]
        task, row = scaling.TASKS[model], {"model": model, "target": target}
        task = dataclasses.replace(task, target=target, tested=min(task.tested, _TESTED))
        for way, strategy in WAYS.items():
            watch = _Watch(task)
            steps = min(setting.steps, _TIMED) if way == "all_reduce" else setting.steps
            how = argparse.Namespace(model=model, rate=rate, seed=0, steps=steps)
            keras.utils.set_random_seed(0)
            if in_torch and not strategy:
                in_pytorch(how, task, watch)
            else:
                in_keras(how, task, watch, strategy)
            row |= {f"{way}_{name}": value for name, value in watch.result().items()}
        rows.append(row)
    return {"rows": rows}


def in_keras(how: argparse.Namespace, task: scaling.Task, watch: "_Watch", strategy: str) -> None:
    """Train by `fit`: under a strategy of hvdx, or, without one, under a distribution of Keras."""
    import keras

    import hvdx

    callbacks = [hvdx.keras.Distribute(strategy)] if strategy else []
    keras.distribution.set_distribution(None if strategy else keras.distribution.DataParallel(auto_shard_dataset=False))
    watch.model, train, test = task.build(how, task)
    watch.model.fit(
        train,  # a pass has more steps than a training here
        steps_per_epoch=_SPAN,
        epochs=how.steps // _SPAN,
        validation_data=test,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, harness.callback(watch)],
    )
    keras.distribution.set_distribution(None)


def in_pytorch(how: argparse.Namespace, task: scaling.Task, watch: "_Watch") -> None:
    """Train by a loop as in Keras' guide to several GPUs with PyTorch."""
    import keras
    import torch
    from torch.nn.functional import cross_entropy

    network, train, test = task.build(how, task)
    watch.model = network
    network.stop_training = False
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), how.rate, momentum=0.9)
    if of_text := isinstance(network.optimizer, keras.optimizers.AdamW):
        decay = network.optimizer.weight_decay
        optimizer = torch.optim.AdamW(network.parameters(), how.rate, eps=1e-7, weight_decay=decay)
    model = torch.nn.parallel.DistributedDataParallel(network)

    def tensors(batch: "Sequence[np.ndarray]") -> "tuple[torch.Tensor, torch.Tensor]":
        x, y = batch
        return torch.from_numpy(x), torch.from_numpy(y).flatten().long()

    batches = map(tensors, itertools.chain.from_iterable(itertools.repeat(train)))
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
            for x, y in map(tensors, test):
                predicted = network(x, training=False).flatten(0, -2)
                sums[0] += cross_entropy(predicted, y, reduction="sum")
                sums[1] += (predicted.argmax(1) == y).sum()
                sums[2] += len(y)  # of images, or of characters
        torch.distributed.all_reduce(sums)
        loss, right = (sums[:2] / sums[2]).tolist()
        watch.on_epoch_end(epoch, {"val_loss": loss} | ({} if of_text else {"val_accuracy": right}))
        if network.stop_training:
            break


class _Watch:
    """Watch of a training that times its steps, and stops it at the target.

    Args:
        task: network, data and target of the training.

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
            "s": sum(seconds for _, seconds in self._spans) if self._reached else None,
        }


if __name__ == "__main__":
    sys.exit(main())
