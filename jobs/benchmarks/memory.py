"""Memory, start and steps of each strategy with a large model, beside one process of plain Keras.

    python jobs/benchmarks/memory.py
    python jobs/benchmarks/memory.py --network table
    python jobs/benchmarks/memory.py --network samples --strategies "one process" AllReduce
    python jobs/benchmarks/memory.py --network encoder --hosts 2 --bandwidth 1gbit --pause 300 --steps 20
    python jobs/benchmarks/memory.py --network resnet --batch 4 --hosts 2,4 --bandwidth 1gbit,10gbit --pause 300

One process trains a network in plain Keras, and two workers train it under each strategy, each in new processes. The
network has one dense layer of nearly all weights ("wide"), many dense layers of 4,096 units ("layers"), or a table of
which a batch reads some rows ("table"), or it is small, and the samples are large ("samples", or "mapped" if they stay
in a file that the workers map). Three networks have many variables, and a size of their own: Keras' ResNet50V2
("resnet", 174, 94 MB), an encoder of the size of BERT-base ("encoder", 198, 435 MB) and dense layers of 16 units
("narrow", 402). With several --hosts, there is one worker of one thread on each of so many emulated hosts, and with
--pause the gradients of a step take so long at least, as on an accelerator; "one process" is then as many processes,
each for itself. Memory is the peak resident size of a rank, the largest of the ranks, in each phase: from its start to
the end of the first step, in later steps, and at the end of an epoch. At the end, the benchmark also measures the
memory of all ranks together, and counts shared memory once. The time of a step is the mean over the steps of the second
epoch after the first one.
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hvdx.jobs.benchmarks import harness
from hvdx.jobs.benchmarks.scaling import paced

#: Compared strategies by name, and the optimiser; "" is one process of plain Keras.
STRATEGIES = {
    "one process": ("", "sgd"),
    "AllReduce": ("all_reduce", "sgd"),
    "AllReduce, fp16": ("all_reduce:compression=fp16", "sgd"),
    "ParameterAveraging": ("parameter_averaging:period=2", "sgd"),
    "Threshold": ("threshold", "sgd"),
    "one process, Adam": ("", "adam"),
    "AllReduce, Adam": ("all_reduce", "adam"),
    "Threshold, Adam": ("threshold", "adam"),
}
PHASES = ("start", "steps", "end of an epoch")
_EPOCHS, _UNITS, _WIDTH, _IMAGE = 2, 4096, 64, (64, 64, 3)
# BERT-base: vocabulary, width, blocks, heads; and tokens of a sample, few, since cores compute.
_VOCABULARY, _HIDDEN, _BLOCKS, _HEADS, _TOKENS = 30_522, 768, 12, 12, 4


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=990, metavar="N", help="MB of weights or samples")
    parser.add_argument(
        "--network",
        choices=("wide", "layers", "table", "samples", "mapped", "resnet", "encoder", "narrow"),
        default="wide",
        help="network that is trained",
    )
    numbers, words = harness.several(int), harness.several(str)
    parser.add_argument(
        "--hosts", type=numbers, default="1", metavar="N,N,...", help="numbers of emulated hosts; 1: no emulation"
    )
    parser.add_argument(
        "--bandwidth", type=words, default="1gbit", metavar="RATE,RATE,...", help="bandwidths of their links"
    )
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="samples of a step on each worker")
    parser.add_argument("--pause", type=float, default=0.0, metavar="MS", help="time that gradients take at least")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="number of steps in each of two epochs")
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="NAME", help="some of them"
    )
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Measure every strategy, and print the table."""
    alone: dict[str, harness.Row] = {}
    shared = {"megabytes": options.megabytes, "network": options.network, "pause": options.pause}
    shared |= {"batch": options.batch}
    apart = options.hosts != [1]

    def measure(case: harness.Row) -> harness.Row:
        spelling, optimizer = STRATEGIES[case["strategy"]]
        setting = {"spelling": spelling, "optimizer": optimizer, "steps": options.steps} | shared
        workers, link = (case["hosts"], case["bandwidth"]) if apart else (2 if spelling else 1, "")
        ranks = harness.launch(__file__, setting, workers, link).ranks
        figures = ranks[0] | {"GB": [max(peaks) for peaks in zip(*(rank["GB"] for rank in ranks), strict=True)]}
        figures |= {"together_GB": sum(rank["together_GB"] for rank in ranks)}
        beside = alone.setdefault(optimizer, figures)
        return figures | {"more_GB": max(figures["GB"]) - max(beside["GB"])}

    columns = [
        ("strategy", lambda row: row["strategy"]),
        ("peak GB: start, steps, end of an epoch", lambda row: ", ".join(f"{v:.2f}" for v in row["GB"])),
        *([("hosts, bandwidth", lambda row: f"{row['hosts']}, {row['bandwidth']}")] if apart else []),
        harness.figure("more than alone, GB", "more_GB", ".2f"),
        harness.figure("all workers, GB", "together_GB", ".2f"),
        harness.figure("first step, s", "first_s", ".1f"),
        harness.figure("later steps, s", "step_s", ".3f"),
        harness.figure("MB sent a step", "step_MB", ".3g"),
    ]
    cases = [{"strategy": name} for name in options.strategies]
    if apart:
        # Plain processes, as many as hosts, compute at once on the same cores, and need no link.
        links = {name: options.bandwidth if STRATEGIES[name][0] else ["none"] for name in options.strategies}
        cases = [c | link for c in cases for link in harness.networks(options.hosts, links[c["strategy"]])]
    harness.run_cases(options.json, cases, measure, columns, shared)
    return 0


def train(setting: argparse.Namespace) -> harness.Row:
    """Train for some steps on one of the workers."""
    import hvdx

    if setting.spelling:
        hvdx.init()
    import keras
    import numpy as np
    import tensorflow as tf

    model, inputs = _network(setting)
    model.compile(setting.optimizer, "mse")
    begun = time.perf_counter()
    if setting.pause:
        model = paced(model, lambda: time.sleep(max(0.0, begun + setting.pause / 1e3 - time.perf_counter())))
    large = setting.network in ("samples", "mapped")
    count = round(setting.megabytes * 1e6 / 4 / _UNITS) if large else setting.batch
    values = np.random.default_rng(0).random((count, *inputs.shape), np.float32)
    # With larger inputs of so many units it diverges.
    values *= np.float32(1000 if inputs.dtype == "int32" else 0.1 if large else 1)
    values = values.astype(inputs.dtype, copy=False)
    if setting.network == "mapped":
        file = Path(setting.folder) / "samples.npy"
        if not setting.spelling or hvdx.rank() == 0:
            np.save(file, values)
        if setting.spelling:
            hvdx.keras.broadcast_object("the file is complete")
        values = np.load(file, mmap_mode="r")
    data: Any = values, np.zeros((count, 1), np.float32)
    if not large:
        data = tf.data.Dataset.from_tensors(data).repeat()
    elif setting.spelling:
        data = hvdx.shard(data, setting.batch)
    passed = {"x": data[0], "y": data[1], "batch_size": setting.batch} if isinstance(data, tuple) else {"x": data}
    ends: list[float] = []
    peaks, begin = [0.0] * len(PHASES), time.perf_counter()

    def record(phase: int) -> None:
        peaks[phase] = max(peaks[phase], harness.memory("VmHWM") / 1e9)
        # The kernel begins a new peak.
        Path("/proc/self/clear_refs").write_text("5")

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            nonlocal begun
            begun = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            record(0 if not ends else 1)
            ends.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            record(2)

    callbacks = [hvdx.keras.Distribute(setting.spelling)] if setting.spelling else []
    model.fit(**passed, steps_per_epoch=setting.steps, epochs=_EPOCHS, verbose=0, callbacks=[*callbacks, Watch()])
    record(2)
    together = harness.memory("Pss") / 1e9
    steps = [b - a for i, (a, b) in enumerate(itertools.pairwise(ends), 1) if i % setting.steps]
    # A median would leave out an exchange after every few steps.
    later = statistics.fmean(steps[-(setting.steps - 1) :])
    figures = {"GB": peaks, "together_GB": together, "first_s": ends[0] - begin, "step_s": later}
    return figures | {"step_MB": callbacks[0].counters.bytes_sent / len(ends) / 1e6 if callbacks else 0.0}


def _network(setting: argparse.Namespace) -> Any:
    """Return a model of the size of the setting, and its input for one sample."""
    import keras

    if setting.network == "resnet":
        # Without the sigmoid it diverges.
        build = keras.applications.ResNet50V2
        model = build(weights=None, input_shape=_IMAGE, classes=1, classifier_activation="sigmoid")
        return model, argparse.Namespace(shape=_IMAGE, dtype="float32")
    if setting.network == "encoder":
        return _encoder()
    elements = setting.megabytes * 1e6 / 4
    if setting.network == "table":
        inputs = keras.Input((8,), dtype="int32")
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(int(elements / _WIDTH), _WIDTH)(inputs))
    elif setting.network in ("samples", "mapped"):
        inputs = x = keras.Input((_UNITS,))
    elif setting.network == "narrow":
        inputs = x = keras.Input((16,))
        for _ in range(200):
            x = keras.layers.Dense(16, "relu")(x)
    else:
        units = round(elements**0.5) if setting.network == "wide" else _UNITS
        inputs = x = keras.Input((units,))
        for _ in range(round(elements / units**2)):
            x = keras.layers.Dense(units, "relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    return model, argparse.Namespace(shape=inputs.shape[1:], dtype=inputs.dtype)


def _encoder() -> Any:
    """Return an encoder of the size of BERT-base, and its input."""
    from keras import Input, Model, layers

    inputs = Input((_TOKENS,), dtype="int32")
    x = layers.Embedding(_VOCABULARY, _HIDDEN)(inputs)
    for _ in range(_BLOCKS):
        found = layers.MultiHeadAttention(_HEADS, _HIDDEN // _HEADS)(x, x)
        x = layers.LayerNormalization()(x + found)
        found = layers.Dense(_HIDDEN)(layers.Dense(4 * _HIDDEN, "gelu")(x))
        x = layers.LayerNormalization()(x + found)
    # Without the sigmoid it diverges.
    model = Model(inputs, layers.Dense(1, "sigmoid")(layers.GlobalAveragePooling1D()(x)))
    return model, argparse.Namespace(shape=inputs.shape[1:], dtype=inputs.dtype)


if __name__ == "__main__":
    sys.exit(main())
