"""Defaults of the special mode, judged by trainings that differ: networks, optimisers, rates, workers, steps.

    python jobs/benchmarks/defaults.py --json docs/benchmarks/defaults.json        the half of the cases for choosing
    python jobs/benchmarks/defaults.py --half check --json checked.json            the other half: once, at the end
    python jobs/benchmarks/defaults.py --cases "LSTM, AdamW, 2; mlp, Muon, 2" --strategies "tau=0.001; period=4"

All-reduce trains each case at rates that are a factor of 2 apart, until the best lies between two others. Then the
strategies train at a half, one and two times that rate. The figure is the held-out loss less that of all-reduce at the
same rate. A default is judged by its worst case, and then by its bytes. The workers are virtual ranks, as in
accuracy.py. Runs that are in the JSON file are not repeated.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdx.jobs.benchmarks import accuracy, harness

if TYPE_CHECKING:
    import keras


class Case(NamedTuple):
    """A training.

    Attributes:
        problem: name of a function of this file that makes the network and its data.
        optimizer: name in `OPTIMIZERS`.
        rate: learning rate at which the search for the best one begins.
        workers, batch, steps: number of virtual ranks, samples of a step of each, and steps.
        half: "choose" or "check".
    """

    problem: str
    optimizer: str
    rate: float
    workers: int
    batch: int
    steps: int
    half: str


CASES = {
    "mlp, momentum, 4": Case("mlp", "momentum", 0.05, 4, 32, 300, "choose"),
    "mlp, Muon, 2": Case("mlp", "muon", 0.01, 2, 32, 300, "check"),
    "mlp, Adam, 8, 100 steps": Case("mlp", "adam", 0.001, 8, 16, 100, "check"),
    "CNN, AdamW, 4": Case("cnn", "adamw", 0.001, 4, 16, 300, "choose"),
    "CNN, momentum, 2": Case("cnn", "momentum", 0.05, 2, 32, 300, "check"),
    "residual CNN, momentum, 4": Case("residual", "momentum", 0.05, 4, 16, 300, "choose"),
    "residual CNN, Lamb, 2": Case("residual", "lamb", 0.01, 2, 32, 300, "check"),
    "LSTM, AdamW, 2": Case("lstm", "adamw", 0.004, 2, 16, 300, "choose"),
    "LSTM, momentum, 4": Case("lstm", "momentum", 0.5, 4, 16, 300, "check"),
    "transformer 0.1 M, AdamW, 4": Case("transformer_s", "adamw", 0.001, 4, 16, 300, "choose"),
    "transformer 0.6 M, AdamW, 2": Case("transformer_m", "adamw", 0.001, 2, 16, 300, "check"),
    "transformer 0.1 M, Lion, 2": Case("transformer_s", "lion", 0.0003, 2, 16, 300, "choose"),
    "transformer 0.1 M, Muon, 4": Case("transformer_s", "muon", 0.01, 4, 16, 300, "choose"),
    "transformer 0.1 M, Adam, 2, 1000 steps": Case("transformer_s", "adam", 0.001, 2, 16, 1000, "check"),
    "vision transformer, AdamW, 4": Case("vit", "adamw", 0.001, 4, 16, 300, "check"),
    "vision transformer, Adam, 2": Case("vit", "adam", 0.001, 2, 32, 300, "choose"),
    "autoencoder, Adam, 4": Case("autoencoder", "adam", 0.001, 4, 32, 300, "choose"),
    "autoencoder, momentum, 2": Case("autoencoder", "momentum", 0.5, 2, 32, 300, "check"),
    "recommender, Adam, 4": Case("recommender", "adam", 0.004, 4, 64, 300, "check"),
    "contrastive, AdamW, 2": Case("contrastive", "adamw", 0.001, 2, 32, 300, "choose"),
    "GAN, Adam, 4": Case("gan", "adam_half", 0.001, 4, 32, 300, "check"),
}
#: Optimisers: class of `keras.optimizers` and its options.
OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "adam_half": ("Adam", {"beta_1": 0.5}),  # as GANs are trained
    "adamw": ("AdamW", {}),
    "lion": ("Lion", {}),
    "muon": ("Muon", {}),
    "lamb": ("Lamb", {}),
}
#: Strategies that are compared, in the spelling of `Threshold`.
STRATEGIES = ("target_density=0.02",)
# Optimisers that `Threshold` refuses. Their cases have the losses of all-reduce and of one worker alone.
_REFUSED = ("lion",)
#: Multiples of the best rate of all-reduce.
RATES = (0.5, 1.0, 2.0)
# The figure is the mean of three evaluations: one alone varies by 0.02 at high rates.
_EVALUATED = (0.8, 0.9, 1.0)
# The search for the best rate ends here: rates are 2**-_FAR to 2**_FAR times the first.
_FAR = 4


def main(argv: list[str] | None = None) -> int:
    """Run the missing trainings, and print the tables."""
    parser = harness.parser(__doc__)
    parser.add_argument("--half", default="choose", choices=("choose", "check"), help="half of the cases")
    parser.add_argument("--cases", help="names of cases, separated by semicolons, in place of a half")
    parser.add_argument("--strategies", help="spellings of options of threshold, separated by semicolons")
    parser.add_argument("--rates", type=harness.several(float), default=list(RATES), help="multiples of the best rate")
    parser.add_argument("--steps", type=int, default=0, help="steps, in place of those of the cases")
    parser.add_argument("--processes", type=int, default=2, help="trainings at once")
    parser.add_argument("--show", action="store_true", help="only print the tables of the runs in the --json file")
    options = parser.parse_args(argv)
    names = _listed(options.cases) or [name for name, case in CASES.items() if case.half == options.half]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"--cases: expected some of {'; '.join(CASES)}, got {'; '.join(unknown)}")
    strategies = _listed(options.strategies) or list(STRATEGIES)
    # Of each training, as there are several at once.
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    runs = harness.finished(options.json)
    while not options.show:
        wanted = [run for name in names for run in _next(name, strategies, options.rates, options.steps, runs)]
        if not wanted:
            break
        begin = time.perf_counter()
        # A new process for each, since TensorFlow keeps memory and state of earlier runs.
        with ProcessPoolExecutor(
            options.processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool:
            for number, run in enumerate(pool.map(train, wanted), 1):
                runs.append(run)
                print(
                    f"{number} of {len(wanted)}, {time.perf_counter() - begin:.0f} s: {run['case']}, rate "
                    f"{run['rate']:g}, {run['strategy']}: {run['loss']:.4f}, 1/{run['ratio']:.0f} of the bytes",
                    flush=True,
                )
                harness.write(options.json, {"rows": runs})
    for line in tables(names, strategies, options.rates, runs):
        print(line)
    return 0


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(";")] if text else []


def _next(
    name: str, strategies: Sequence[str], rates: Sequence[float], steps: int, runs: Sequence[harness.Row]
) -> list[harness.Row]:
    """Return the trainings of a case that can begin now: the search for the best rate, and then all others."""
    case = CASES[name]
    common = {"case": name, "steps": steps or case.steps}
    mine = [run for run in runs if common.items() <= run.items()]

    def missing(strategy: str, workers: int, rate: float) -> list[harness.Row]:
        wanted = common | {"strategy": strategy, "workers": workers, "rate": rate}
        return [] if any(wanted.items() <= run.items() for run in mine) else [wanted]

    best = best_rate(case, mine)
    around = [best * factor for factor in (0.5, 1.0, 2.0) if 2.0**-_FAR <= best * factor / case.rate <= 2.0**_FAR]
    search = [run for rate in around for run in missing("all_reduce", case.workers, rate)]
    if search:
        return search
    return [
        run
        for rate in (best * factor for factor in rates)
        for strategy, workers in [
            ("all_reduce", case.workers),
            ("all_reduce", 1),
            *((s, case.workers) for s in strategies if case.optimizer not in _REFUSED),
        ]
        for run in missing(strategy, workers, rate)
    ]


def best_rate(case: Case, runs: Sequence[harness.Row]) -> float:
    """Return the rate at which all-reduce has the lowest loss so far; the first one without runs."""
    found = {r["rate"]: r["loss"] for r in runs if (r["strategy"], r["workers"]) == ("all_reduce", case.workers)}
    return min(found, key=lambda rate: found[rate] if np.isfinite(found[rate]) else np.inf, default=case.rate)


def tables(
    names: Sequence[str], strategies: Sequence[str], rates: Sequence[float], runs: Sequence[harness.Row]
) -> Iterator[str]:
    """Yield the lines of two Markdown tables: each case at each rate, and the worst and the median of each strategy."""
    yield f"| case | rate | all-reduce | alone | {' | '.join(strategies)} |"
    yield "|---" * (4 + len(strategies)) + "|"
    lost: dict[str, list[tuple[float, float]]] = {s: [] for s in strategies}
    for name in names:
        case, mine = CASES[name], [run for run in runs if run["case"] == name]
        best = best_rate(case, mine)
        for factor in rates:
            at = [run for run in mine if np.isclose(run["rate"], best * factor)]
            found = {(run["strategy"], run["workers"]): run for run in at}
            dense, alone = found.get(("all_reduce", case.workers)), found.get(("all_reduce", 1))
            if dense is None or alone is None:
                continue
            cells = []
            for strategy in strategies:
                run = found.get((strategy, case.workers))
                cells.append("" if run is None else f"{run['loss'] - dense['loss']:+.3f} at 1/{run['ratio']:.0f}")
                if run is not None:
                    lost[strategy].append((run["loss"] / dense["loss"] - 1, run["ratio"]))
            yield f"| {name} | {best * factor:g} | {dense['loss']:.3f} | {alone['loss']:.3f} | {' | '.join(cells)} |"
    yield ""
    yield "| strategy | worst | median | bytes, median |"
    yield "|---|---|---|---|"
    for strategy, values in lost.items():
        if values:
            relative, ratio = np.array(values).T
            yield (
                f"| {strategy} | {100 * np.max(relative):+.1f} % | {100 * np.median(relative):+.1f} % | "
                f"1/{np.median(ratio):.0f} |"
            )


def train(run: harness.Row) -> harness.Row:
    """Train one case under one strategy; return the held-out loss, and the share of all-reduce's bytes."""
    import keras

    from hvdx.strategies import parse

    case, workers = CASES[run["case"]], run["workers"]
    keras.utils.set_random_seed(0)
    networks, batch, evaluate = globals()[case.problem]()
    kind, more = OPTIMIZERS[case.optimizer]
    dense = run["strategy"] == "all_reduce"
    strategy = parse("all_reduce" if dense else f"threshold:{run['strategy']}")
    steps = []
    for network in networks:
        network.optimizer = getattr(keras.optimizers, kind)(run["rate"], **more)
        network.optimizer.build(network.trainable_variables)
        steps.append((accuracy.dense_step if dense else accuracy.host_step)(network, strategy, workers))
    # A worker alone has the samples of one worker.
    samples = [np.random.default_rng([1, rank]) for rank in range(workers)]
    losses = []
    evaluated = {round(share * run["steps"]) for share in _EVALUATED}
    for done in range(1, run["steps"] + 1):
        batches = [batch(random, case.batch) for random in samples]
        for step, _ in steps:
            step(batches)
        if done in evaluated:
            losses.append(evaluate())
    elements = sum(int(np.prod(v.shape)) for network in networks for v in network.trainable_variables)
    ratio = 4.0 * elements * run["steps"] / max(sum(cost() for _, cost in steps), 1.0)
    return run | {"loss": float(np.mean(losses)), "ratio": ratio, "elements": elements}


# -- problems: networks with their samples ----------------------------------------------------------------------------

#: Networks that take a step in turn, samples of a step from a generator of random numbers, and the held-out loss.
Problem = tuple[Sequence["keras.Model"], Callable[[np.random.Generator, int], accuracy.Batch], Callable[[], float]]


def _problem(network: "keras.Model", loss: object, training: accuracy.Batch, held_out: accuracy.Batch) -> Problem:
    network.compile(loss=loss)

    def batch(random: np.random.Generator, count: int) -> accuracy.Batch:
        rows = random.integers(0, len(training[0]), count)
        return training[0][rows], training[1][rows]

    return [network], batch, lambda: float(network.evaluate(*held_out, batch_size=256, verbose=0))


def _classes() -> "keras.losses.Loss":
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _images(network: "keras.Model", loss: object, reconstruct: bool = False) -> Problem:
    """Return a problem on Fashion-MNIST: its classes, or its images."""
    from hvdx.jobs.data import load

    data = load("fashion-mnist")
    y, held_out_y = (data.train_x, data.test_x) if reconstruct else (data.train_y, data.test_y)
    return _problem(network, loss, (data.train_x, y), (data.test_x[:2000], held_out_y[:2000]))


def _shape() -> tuple[int, ...]:
    return 28, 28, 1


def mlp() -> Problem:
    import keras
    from keras import layers

    body = [layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(256, "relu"), layers.Dense(10)]
    return _images(keras.Sequential([keras.Input(_shape()), *body]), _classes())


def cnn() -> Problem:
    """Convolutions with batch normalisation."""
    import keras
    from keras import layers

    x = image = keras.Input(_shape())
    for width in (16, 32):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.Dense(64, "relu")(layers.Flatten()(x))
    return _images(keras.Model(image, layers.Dense(10)(x)), _classes())


def residual() -> Problem:
    """Residual blocks, batch normalisation and a mean over positions, as in a ResNet."""
    import keras
    from keras import layers

    image = keras.Input(_shape())
    x = layers.Conv2D(16, 3, strides=2, padding="same")(image)
    for width in (16, 32):
        strides = 1 if width == x.shape[-1] else 2
        inner = layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x))
        short = x if strides == 1 else layers.Conv2D(width, 1, strides=strides)(inner)
        inner = layers.Conv2D(width, 3, strides=strides, padding="same", use_bias=False)(inner)
        inner = layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(inner))
        x = short + layers.Conv2D(width, 3, padding="same", use_bias=False)(inner)
    x = layers.GlobalAveragePooling2D()(layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x)))
    return _images(keras.Model(image, layers.Dense(10)(x)), _classes())


def autoencoder() -> Problem:
    import keras
    from keras import layers

    widths = (128, 32, 128)
    body = [layers.Flatten(), *(layers.Dense(width, "relu") for width in widths), layers.Dense(784)]
    network = keras.Sequential([keras.Input(_shape()), *body, layers.Reshape(_shape())])
    # The sum over the pixels is of the size of a cross-entropy.
    return _images(network, lambda y, p: keras.ops.mean(keras.ops.square(y - p), axis=(1, 2, 3)) * 10.0, True)


def vit() -> Problem:
    """Vision transformer: patches of 7 x 7 pixels, positions that do not depend on the batch."""
    import keras
    from keras import layers, ops

    image = keras.Input(_shape())
    x = layers.Reshape((16, 64))(layers.Conv2D(64, 7, strides=7)(image))
    x = x + ops.expand_dims(layers.Embedding(16, 64)(ops.arange(16)), 0)
    for _ in range(2):
        inner = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16)(inner, inner)
        x = x + layers.Dense(64)(layers.Dense(256, "gelu")(layers.LayerNormalization()(x)))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return _images(keras.Model(image, layers.Dense(10)(x)), _classes())


def _text(network: "keras.Model") -> Problem:
    """Return a problem on the sources of Python's standard library: the next character."""
    from hvdx.jobs.data import load_text

    texts = load_text()
    network.compile(loss=_classes())

    def batch(random: np.random.Generator, count: int) -> accuracy.Batch:
        return accuracy.random_windows(texts.train, random, count)

    held_out = accuracy.held_out_windows(texts.held_out)
    return [network], batch, lambda: float(network.evaluate(*held_out, batch_size=64, verbose=0))


def transformer_s() -> Problem:
    """0.1 M parameters."""
    return _text(harness.transformer(0.001))


def transformer_m() -> Problem:
    """0.6 M parameters."""
    from hvdx.jobs.data import VOCABULARY
    from hvdx.jobs.language_model import build

    return _text(build(VOCABULARY, harness.CONTEXT, layers=3, width=128, heads=4, learning_rate=0.001))


def lstm() -> Problem:
    import keras
    from keras import layers

    from hvdx.jobs.data import VOCABULARY

    body = [layers.Embedding(VOCABULARY, 48), layers.LSTM(128, return_sequences=True), layers.Dense(VOCABULARY)]
    return _text(keras.Sequential([keras.Input((harness.CONTEXT,), dtype="int32"), *body]))


def recommender() -> Problem:
    """Two tables, whose inner products and an MLP explain ratings that were drawn from hidden factors."""
    import keras
    from keras import layers

    users, items, random = 2000, 1000, np.random.default_rng(0)
    factors = random.normal(size=(users, 4)), random.normal(size=(items, 4))

    def ratings(count: int) -> accuracy.Batch:
        pairs = np.stack([random.zipf(1.3, count) % users, random.zipf(1.3, count) % items], 1).astype(np.int32)
        products = (factors[0][pairs[:, 0]] * factors[1][pairs[:, 1]]).sum(1) / 2
        return pairs, (products + 0.3 * random.normal(size=count)).astype(np.float32)[:, None]

    pair = keras.Input((2,), dtype="int32")
    user, item = layers.Embedding(users, 16)(pair[:, 0]), layers.Embedding(items, 16)(pair[:, 1])
    x = layers.Dense(64, "relu")(layers.Concatenate()([user, item, user * item]))
    return _problem(keras.Model(pair, layers.Dense(1)(x)), "mse", ratings(60_000), ratings(4000))


def contrastive() -> Problem:
    """Embeddings of images that lie nearer to those of their class than to the others of the batch."""
    import keras
    from keras import layers, ops

    body = [layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(32), layers.UnitNormalization()]

    def loss(y: "keras.KerasTensor", embedded: "keras.KerasTensor") -> "keras.KerasTensor":
        alike = ops.cast(ops.equal(y[:, None], y[None]), "float32") - ops.eye(ops.shape(y)[0])
        logits = 5.0 * embedded @ ops.transpose(embedded) - 1e9 * ops.eye(ops.shape(y)[0])
        log_share = logits - ops.logsumexp(logits, axis=1, keepdims=True)
        return -ops.sum(alike * log_share, axis=1) / ops.maximum(ops.sum(alike, axis=1), 1.0)

    def flat(y: "keras.KerasTensor", embedded: "keras.KerasTensor") -> "keras.KerasTensor":
        return loss(ops.reshape(y, [-1]), embedded)

    return _images(keras.Sequential([keras.Input(_shape()), *body]), flat)


def gan() -> Problem:
    """Generator and discriminator, each with an optimiser; the distance of generated images from held-out ones.

    It is the sliced Wasserstein distance (Bonneel et al. 2015): along random directions, that of the sorted values.
    """
    import keras
    from keras import layers, ops

    from hvdx.jobs.data import load

    data, noise, pixels = load("fashion-mnist"), 32, 784

    def mlp(inputs: int, outputs: int) -> "keras.Model":
        return keras.Sequential(
            [keras.Input((inputs,)), layers.Dense(256), layers.LeakyReLU(), layers.Dense(256), layers.LeakyReLU()]
            + [layers.Dense(outputs)]
        )

    generator, discriminator = mlp(noise, pixels), mlp(pixels, 1)

    class Player(keras.Model):
        """The discriminator's outputs for real and for generated images. Only one of the two networks is trained."""

        def __init__(self, trained: "keras.Model", loss: object) -> None:
            super().__init__()
            self.compile(loss=loss)
            self._trained = trained

        @property
        def trainable_variables(self) -> "list[keras.Variable]":
            return list(self._trained.trainable_variables)

        def call(self, x: "keras.KerasTensor", training: bool = False) -> "keras.KerasTensor":
            images = ops.concatenate([x[:, :pixels], generator(x[:, pixels:])])
            return ops.transpose(ops.reshape(discriminator(images), (2, -1)))

    # Least squares (Mao et al. 2017), of columns of real and of generated images.
    judge = Player(discriminator, lambda y, said: ops.square(said[:, 0] - 1) + ops.square(said[:, 1]))
    forger = Player(generator, lambda y, said: ops.square(said[:, 1] - 1))

    def batch(random: np.random.Generator, count: int) -> accuracy.Batch:
        images = data.train_x[random.integers(0, len(data.train_x), count)].reshape(count, pixels)
        drawn = random.normal(size=(count, noise))
        return np.concatenate([images, drawn], 1).astype(np.float32), np.zeros((count, 2), np.float32)

    random = np.random.default_rng(0)
    directions = random.normal(size=(pixels, 100))
    directions /= np.linalg.norm(directions, axis=0)
    drawn = random.normal(size=(2000, noise)).astype(np.float32)
    real = np.sort(data.test_x[:2000].reshape(-1, pixels) @ directions, 0)

    def distance() -> float:
        return float(np.abs(np.sort(np.asarray(generator(drawn)) @ directions, 0) - real).mean())

    return [judge, forger], batch, distance


if __name__ == "__main__":
    sys.exit(main())
