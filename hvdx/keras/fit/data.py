"""Each rank's share of the data."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import keras
import numpy as np

from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import backend
from hvdx.keras.adapters.stepped import Count
from hvdx.keras.backend import is_a, is_dataset, tf
from hvdx.keras.fit import arrays
from hvdx.keras.fit.agreement import shares
from hvdx.keras.fit.array_batches import ArrayBatches, loses_one, shuffled
from hvdx.keras.fit.divisions import Division, Position, even, even_part
from hvdx.keras.joining import join
from hvdx.keras.seams.frames import is_build
from hvdx.keras.seams.pipelines import batch_size_of_dataset, dataset_before, keeps_steps, set_batch_size
from hvdx.keras.types import Arrays, Structure

#: What `shard` returns.
Share: TypeAlias = "tf.data.Dataset | ArrayBatches"

# Positions in the order of a share of arrays that NumPy draws at a time: a call takes some milliseconds.
_POSITIONS = 1 << 14
# Steps whose rows a pipeline of TensorFlow divides at a time: a call of Python takes as long as a small step. Where
# ranks may die it divides single steps, since the others take over the rows of those that are not divided yet.
_AHEAD = 8
# First steps of a pass that are divided one by one in any case.
_SINGLE = 16
# Size of the shuffle buffer, in elements, for a dataset of unknown or large size.
_BUFFER = 10_000

# The orders of this process's shuffled shares, and divisions of rows, depend on these: for arrays the epoch counter of
# each share, for datasets the pair of TensorFlow's global seed and the seed of `shard`.
_shares: list[_Share] = []
_seeds: list[tuple[int, int]] = []
# The shares whose rows may be divided unevenly.
_divisions: weakref.WeakKeyDictionary[Share, Division] = weakref.WeakKeyDictionary()


class _Share(NamedTuple):
    """A shuffled share of arrays.

    Attributes:
        epoch: int64 variable or `Count`, number of the last order that was drawn.
        steps: number of steps in a pass.
        samples: number of samples in a step of all ranks together.
        ranks: number of ranks; 0 if a step of fewer ranks has as many samples.
    """

    epoch: weakref.ref[tf.Variable | Count]
    steps: int
    samples: int
    ranks: int


class _Numbers(list[int]):
    """Numbers with the method of a variable of TensorFlow."""

    def assign(self, values: Sequence[int]) -> None:
        """Set all numbers."""
        self[:] = values


# The places of this process's shares, where ranks may die.
_places: list[weakref.ref[tf.Variable | _Numbers]] = []


class _Place(NamedTuple):
    """Rank whose share it is, and number of ranks: integers, or those that `deal` has set, read when a pass begins."""

    own_rank: int
    ranks: int
    both: tf.Variable | _Numbers | None = None

    @classmethod
    def of(cls, rank: int, size: int, in_pipeline: bool) -> _Place:
        """Return a place that `deal` can change, for a pipeline of TensorFlow or for Python code."""
        both = _Numbers([rank, size])
        if in_pipeline:
            both = tf.Variable(both, dtype=tf.int64, trainable=False)
        _places.append(weakref.ref(both))
        return cls(rank, size, both)

    @property
    def changes(self) -> bool:
        return self.both is not None

    @property
    def rank(self) -> int | tf.Tensor:
        return self.own_rank if self.both is None else self.both[0]

    @property
    def size(self) -> int | tf.Tensor:
        return self.ranks if self.both is None else self.both[1]


def deal(rank: int, size: int) -> None:
    """Deal the samples of the next pass through each share among the ranks that are left.

    Args:
        rank, size: this rank, and the number of ranks.
    """
    before = [both for place in _places if (both := place()) is not None]
    _places[:] = [weakref.ref(both) for both in before]
    for both in before:
        both.assign([rank, size])
    _shares[:] = [
        share._replace(samples=share.samples // share.ranks * size, ranks=size) if share.ranks else share
        for share in _living_shares()
    ]
    for division in divisions():
        division.deal(rank, size)


def shard(
    data: tf.data.Dataset | Arrays,
    batch_size: int | None = None,
    *,
    global_batch_size: int | None = None,
    validation_split: float | None = None,
    shuffle: bool | int = True,
    seed: int = 0,
    drop_remainder: bool = True,
    steps: int | None = None,
    initial_epoch: int = 0,
    balance: Literal["auto", "off"] | Sequence[tuple[Position, Sequence[int]]] = "auto",
    max_batch: int | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> Any:
    """Return this rank's share of the data: disjoint from the other shares, in a new order each epoch.

    All shares have the same number of steps, unless `drop_remainder` is False. All ranks draw the same order, which
    depends on the seed and the number of the epoch. Step t of N ranks with batches of b therefore holds the same
    samples as step t of one process with batches of N*b.

    Args:
        data: arrays of one length as `fit` takes them: an array, or a tuple, list or dictionary of arrays, such as
            `(x, y)`; or a `tf.data.Dataset`; or a map-style dataset, of PyTorch, Grain or others, which has `len` and a
            sample at each position. As in `fit`, floating-point arrays are cast to `keras.config.floatx()`.
            NumPy arrays of 64 MiB or more are not copied, and a `numpy.memmap` stays in its file: do not change them.
        batch_size: samples a step on this rank; required for arrays. For a dataset, None leaves its elements as they
            are, and each element is a step.
        global_batch_size: samples a step on all ranks together, in place of `batch_size`. If the ranks do not divide
            them, some take one more, which `fit` weighs, and a loop with `hvdx.keras.count_samples`. A multiple of the
            ranks with balance="off", and for a dataset with drop_remainder=False.
        validation_split: share of the arrays, above 0 and below 1, that is for validation. As in `fit`, it is the last
            part of them, before they are shuffled.
        shuffle: draw a new order each epoch. For a dataset, a number is the size of the shuffle buffer (by default
            10,000, or the size of a smaller dataset). A dataset is shuffled before it is sharded, so every rank reads
            all of it, and does what was mapped before: map augmentation after this call.
        seed: seed of the orders; the same on all ranks.
        drop_remainder: leave out samples that do not fill a step on all ranks. False keeps every sample; the last
            batches are then smaller, and the numbers of steps may differ by one between ranks.
        steps: steps an epoch; required for a dataset of unknown size.
        initial_epoch: number of the first epoch, on which its order depends; arrays only.
        balance: "auto": with `global_batch_size` and full steps, a rank that computes more slowly than others
            takes fewer of the rows of each step, which stays the same step; where workers may die, the others take
            theirs. "off": all take as many. Or the changes
            of an earlier run: pairs of a position (number of the order, step in it) and each rank's rows from there on.
        max_batch: most samples a step that this rank may take, for example because its memory is smaller; it may be
            another number on each rank. Needs balance="auto" and `global_batch_size`; the other ranks take the rest.
        rank, size: rank whose share is returned, and number of ranks; by default those of this process.

    Returns:
        A dataset of known size, for `fit`; with `validation_split`, two of them: one for training, and one for
        validation, which is not shuffled and keeps every sample. On JAX and PyTorch, arrays become batches of NumPy
        arrays in the same order, which `fit`, `evaluate`, `predict` and a loop take.

    Raises:
        ConfigError: if the data are no arrays, if lengths differ, if there are too few samples, if the size is unknown,
            or if an argument is out of range.

    Example:
        >>> x, y = tf.range(8.0), tf.range(8)
        >>> [b[1].numpy().tolist() for b in shard((x, y), 2, shuffle=False, rank=1, size=2)]
        [[2, 3], [6, 7]]
    """
    joined = join()
    # Shares of ranks that may die are dealt anew among those that are left.
    dealt = joined.survives and rank is None and size is None
    rank, size = joined.rank if rank is None else rank, joined.size if size is None else size
    if not 0 <= rank < size:
        raise ConfigError(f"shard: rank: expected 0 to {size - 1}, got {rank}.")
    batch = _batch(batch_size, global_batch_size, max_batch, size)
    compared = size == joined.size > 1
    whole = drop_remainder and (not dealt or isinstance(balance, str))
    division = _division(balance, global_batch_size if whole else None, rank, size, compared, max_batch)
    # Without a division, "off" keeps the samples of each rank, also after a death; others keep those of a step.
    total = None if balance == "off" else global_batch_size
    undivided = division is None and (total is None or is_dataset(data))
    if undivided and global_batch_size is not None and global_batch_size % size and not joined.recoveries:
        below, above = global_batch_size // size * size, -(-global_batch_size // size) * size
        raise ConfigError(
            f"shard: global_batch_size: expected a multiple of the {size} ranks, got {global_batch_size}. Do: give "
            f'{below} or {above}, or leave out balance="off" and drop_remainder=False.'
        )
    in_pipeline = is_a(data, "data.Dataset") or backend.name() == "tensorflow"
    place = _Place.of(rank, size, in_pipeline) if dealt else _Place(rank, size)

    def marked(share: Share, whole: tf.data.Dataset | Structure, shuffled: bool | int) -> Share:
        if compared:
            batches = {"batch_size": batch} if global_batch_size is None else {"global_batch_size": global_batch_size}
            shares.mark(share, whole, batches, shuffled, seed)
        return share

    if is_dataset(data):
        if validation_split is not None:
            raise ConfigError(
                "shard: validation_split: expected arrays, got a dataset. Do: divide it before, by "
                "hvdx.shard(dataset.skip(n), ...) for training and hvdx.shard(dataset.take(n), ...) for validation."
            )
        if compared:
            shares.check_order(data)
        own = _shard_dataset(data, batch, shuffle, seed, drop_remainder, steps, place, size, division)
        if division is not None:
            _divisions[own] = division
        return marked(own, data, shuffle)
    tensors = arrays.tensors_of(data)
    if batch is None:
        raise ConfigError("shard: batch_size: expected the samples a step on each rank, got None.")
    training, validation = (tensors, None) if validation_split is None else arrays.split(tensors, validation_split)
    own = _shard_arrays(
        training, batch, total, bool(shuffle), seed, drop_remainder, steps, initial_epoch, place, rank, size, division
    )
    if division is not None:
        _divisions[own] = division
    if validation is None:
        return marked(own, training, shuffle)
    held_out = _shard_arrays(validation, batch, total, False, seed, False, None, 0, place, rank, size, None)
    return marked(own, training, shuffle), marked(held_out, validation, False)


def _batch(batch_size: int | None, global_batch_size: int | None, max_batch: int | None, size: int) -> int | None:
    """Return the samples a step on each rank; None if neither number is given."""
    given = {"batch_size": batch_size, "global_batch_size": global_batch_size, "max_batch": max_batch}
    for name, number in given.items():
        if number is not None and (not isinstance(number, numbers.Integral) or isinstance(number, bool) or number < 1):
            raise ConfigError(f"shard: {name}: expected an integer of 1 or more, got {number!r}.")
    if global_batch_size is None:
        return None if batch_size is None else int(batch_size)
    if batch_size is not None:
        raise ConfigError("shard: expected batch_size or global_batch_size, got both. Leave one out.")
    if global_batch_size < size:
        raise ConfigError(
            f"shard: global_batch_size: expected a sample for each of {size} ranks, got {global_batch_size}. Do: give "
            f"{size} or more, or start fewer ranks."
        )
    return int(global_batch_size) // size


def _division(
    balance: object, total: int | None, rank: int, size: int, measured: bool, most: int | None
) -> Division | None:
    """Return the division of the rows of a step; None if it never changes.

    Args:
        total: rows of each step on all ranks; None if they are not the same number in all steps.
        rank, size: rank of the share, and number of ranks.
        measured: whether the ranks of this share train together.
        most: most rows of this rank.
    """
    if most is not None and (total is None or balance != "auto"):
        raise ConfigError(
            'shard: max_batch: expected global_batch_size=, full steps and balance="auto" beside it, got others. Do: '
            "give them, and leave drop_remainder out."
        )
    if balance == "off" or (balance == "auto" and (total is None or not (measured or total % size))):
        return None
    if total is None and not isinstance(balance, str):
        raise ConfigError(
            "shard: balance: expected global_batch_size= and full steps beside changes, got others. Do: give "
            "it, leave drop_remainder out, and start without --survive."
        )
    rows = even(total or size, size)
    if balance == "auto":
        # A share of other ranks than those that train together never changes.
        return Division(rows, rank, [] if measured else [((0, 0), rows)], most)
    try:
        changes = [((int(at[0]), int(at[1])), [int(r) for r in rows]) for at, rows in balance]  # type: ignore[attr-defined]
    except (TypeError, ValueError, IndexError):
        changes = [((0, 0), [])]
    if any(len(rows) != size or sum(rows) != total or min(rows) < 1 for _, rows in changes):
        raise ConfigError(
            f'shard: balance: expected "auto", "off", or pairs such as ((0, 100), {[*rows]}) of an order and a step, '
            f"and rows of {size} ranks that add up to {total}; got {balance!r}."
        )
    return Division(rows, rank, sorted(changes))


def division_in(dataset: object) -> Division | None:
    """Return the division of the share whose steps are those of a dataset; None if there is none."""
    while is_dataset(dataset) and dataset not in _divisions and keeps_steps(dataset):
        dataset = dataset_before(dataset)
    return _divisions.get(dataset) if isinstance(dataset, ArrayBatches) or is_dataset(dataset) else None


def _shard_arrays(
    tensors: Structure,
    batch: int,
    total: int | None,
    shuffle: bool,
    seed: int,
    drop_remainder: bool,
    steps: int | None,
    initial_epoch: int,
    place: _Place,
    rank: int,
    size: int,
    division: Division | None,
) -> Share:
    count = arrays.length_of(tensors)

    def rows_with(size: int | tf.Tensor) -> int | tf.Tensor:
        return batch * size if total is None else total

    whole = int(rows_with(size))
    possible = count // whole if drop_remainder else _steps_with_remainder(count, whole, rank, size)
    if drop_remainder and not possible:
        raise ConfigError(
            f"shard: expected {whole} samples or more, for one step of {size} ranks, got {count}. Use a smaller batch, "
            "fewer ranks or drop_remainder=False."
        )
    steps = possible if steps is None else steps
    if drop_remainder and not 0 < steps <= possible:
        raise ConfigError(
            f"shard: steps: expected 1 to {possible}, the steps of {count} samples, {whole} in each, got {steps}."
        )
    # Otherwise the ranks that are left when a pass begins decide on its length.
    is_fixed = drop_remainder or not place.changes
    numpy = backend.name() != "tensorflow"
    own = even(whole, size)[rank]
    epochs = Count() if numpy else tf.Variable(0, dtype=tf.int64, trainable=False)
    epochs.assign(initial_epoch - 1)
    if shuffle or division is not None:
        _shares.append(_Share(weakref.ref(epochs), steps, whole, size if total is None else 0))
    if numpy:
        together = -(-_POSITIONS // (batch if division is None else whole))

        def positions() -> Iterator[np.ndarray]:
            key, rank, size = (seed, epochs.numpy() + 1), int(place.rank), int(place.size)
            if not is_build():
                epochs.assign_add(1)
            if division is not None:
                yield from divided(division, key)
                return
            of_all = int(rows_with(size))
            taken = steps if is_fixed else int(_steps_of(count, of_all, rank, size))
            for first in range(0, taken, together):
                at = [rows_of(step, of_all, rank, size) for step in range(first, min(first + together, taken))]
                all_at = shuffled(np.concatenate(at), key, count) if shuffle else np.concatenate(at)
                yield from np.split(all_at, np.cumsum([len(a) for a in at])[:-1])

        def rows_of(step: int, of_all: int, rank: int, size: int) -> np.ndarray:
            begin = step * of_all
            low, high = even_part(min(of_all, count - begin), rank, size)
            return np.arange(begin + low, begin + high)

        def divided(division: Division, key: tuple[int, int]) -> Iterator[np.ndarray]:
            for first in range(0, steps, together):
                at = np.arange(first * whole, min(first + together, steps) * whole)
                at = shuffled(at, key, count) if shuffle else at
                for step, of_all in enumerate(at.reshape(-1, whole), first):
                    low, high = division.bounds(key[1], step)
                    yield of_all[low:high]

        known = steps if is_fixed else None
        low, high = even_part(min(whole, count - (steps - 1) * whole), rank, size)
        return ArrayBatches(tensors, positions, known, own, high - low)

    def ends_of(
        step: tf.Tensor, of_all: int | tf.Tensor, rank: int | tf.Tensor, size: int | tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        begin = step * of_all
        low, high = even_part(tf.minimum(tf.cast(of_all, tf.int64), count - begin), rank, size)
        return begin + low, begin + high

    def batch_of(low: tf.Tensor, high: tf.Tensor, epoch: tf.Tensor) -> Structure:
        positions = tf.range(low, high)
        if shuffle:
            key = tf.stack([tf.constant(seed, tf.int64), epoch])
            if loses_one(count):
                order = tf.numpy_function(lambda at, key: shuffled(at, key, count), [positions, key], tf.int64)
                positions = tf.ensure_shape(order, [None])
            else:
                positions = tf.random.experimental.index_shuffle(positions, key, count - 1)
        positions = tf.ensure_shape(positions, [batch if is_fixed and drop_remainder and division is None else None])
        return arrays.rows_at(tensors, positions)

    def epoch_of(_: tf.Tensor) -> tf.data.Dataset:
        epoch = epochs.assign_add(1)
        rank, size = place.rank, place.size
        of_all = rows_with(size)
        taken = steps if is_fixed else _steps_of(count, of_all, rank, size)
        numbered = tf.data.Dataset.range(taken)
        if division is None:
            return numbered.map(
                lambda step: batch_of(*ends_of(step, of_all, rank, size), epoch),
                num_parallel_calls=2,
                deterministic=True,
            )
        ends = _bounds(division, numbered, epoch, place)
        return ends.map(lambda pair: batch_of(pair[0], pair[1], epoch), num_parallel_calls=2, deterministic=True)

    dataset = tf.data.Dataset.range(1).flat_map(epoch_of)
    if is_fixed:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    made = untuned(dataset.prefetch(2))
    # TensorFlow does not know the length of the gathered rows; `batch_size` reads it here.
    set_batch_size(made, own)
    return made


def _bounds(division: Division, steps: tf.data.Dataset, epoch: tf.Tensor, place: _Place) -> tf.data.Dataset:
    """Return the first of this rank's samples in each step, counted over all steps, and the one after its last."""
    ahead = 1 if place.changes else _AHEAD

    def divided(epoch: np.ndarray, some: np.ndarray) -> np.ndarray:
        return np.array([division.bounds(int(epoch), int(step)) for step in some]) + some[:, None] * division.total

    # The ranks first know their speeds after a few steps, and those that are drawn by then keep their rows.
    several = steps.take(_SINGLE).batch(1).concatenate(steps.skip(_SINGLE).batch(ahead))
    ends = several.map(lambda some: tf.numpy_function(divided, [epoch, some], tf.int64))
    return ends.map(lambda pairs: tf.ensure_shape(pairs, [None, 2])).unbatch()


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turn off TensorFlow's tuning of a dataset that has nothing to tune.

    The tuning thread can delay the end of an iteration by up to a minute: TensorFlow waits until the thread wakes up
    next, and it wakes up rarely in a long training.

    Args:
        dataset: a dataset whose parallelism and buffer sizes are all fixed numbers.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _steps_with_remainder(count: int, whole: int, rank: int, size: int) -> int:
    """Return the number of steps of a rank if the samples of the last step are distributed evenly."""
    if count < size:
        raise ConfigError(f"shard: {count} samples for {size} ranks: expected at least one for each.")
    return int(_steps_of(count, whole, rank, size))


def _steps_of(count: int, whole: int | tf.Tensor, rank: int | tf.Tensor, size: int | tf.Tensor) -> int | tf.Tensor:
    full, rest = count // whole, count % whole
    low, high = even_part(rest, rank, size)
    more = high > low
    return full + (tf.cast(more, tf.int64) if is_a(more, "Tensor") else int(more))


def _shard_dataset(
    data: tf.data.Dataset,
    batch: int | None,
    shuffle: bool | int,
    seed: int,
    drop_remainder: bool,
    steps: int | None,
    place: _Place,
    size: int,
    division: Division | None,
) -> tf.data.Dataset:
    count = int(data.cardinality())
    if count < 0 and steps is None:
        raise ConfigError(
            "shard: the size of the dataset is unknown, so the ranks might take different numbers of steps. Give "
            "steps=, the steps an epoch on each rank."
        )
    per_step = size * (batch or 1) if division is None else division.total
    if shuffle:
        buffer = shuffle if shuffle is not True else min(count, _BUFFER) if count > 0 else _BUFFER
        _seeds.append(tuple(tf.compat.v1.get_seed(seed)))
        data = data.shuffle(buffer, seed=seed, reshuffle_each_iteration=True)
    if steps is not None:
        if 0 <= count < steps * per_step:
            raise ConfigError(
                f"shard: {count} elements make {count // per_step} steps on {size} ranks, got steps={steps}."
            )
        data = data.take(steps * per_step)
    elif drop_remainder:
        if count < per_step:
            raise ConfigError(
                f"shard: {count} elements do not fill one step of {per_step} on {size} ranks. Do: start fewer ranks, "
                "or use a smaller batch_size; if the elements are names of files, write the data to more files."
            )
        data = data.take(count // per_step * per_step)
    if division is not None:
        return _divided_share(data, division, steps or count // per_step, place)
    if place.changes:
        return _changing_share(
            data, place, batch, drop_remainder, steps or (count // per_step if drop_remainder else 0)
        )
    data = data.shard(size, place.rank)
    if batch is not None:
        data = data.batch(batch, drop_remainder=drop_remainder)
    if steps is not None and count < 0:
        data = data.apply(tf.data.experimental.assert_cardinality(steps))
    return data.prefetch(2)


def _changing_share(
    data: tf.data.Dataset, place: _Place, batch: int | None, drop_remainder: bool, steps: int
) -> tf.data.Dataset:
    """Return a share that is dealt when a pass begins; `steps` is 0 if it may differ between ranks."""

    def share(_: tf.Tensor) -> tf.data.Dataset:
        mine = data.shard(place.size, place.rank)
        mine = mine if batch is None else mine.batch(batch, drop_remainder=drop_remainder)
        return mine.take(steps) if steps else mine

    dataset = tf.data.Dataset.range(1).flat_map(share)
    return (dataset.apply(tf.data.experimental.assert_cardinality(steps)) if steps else dataset).prefetch(2)


def _divided_share(data: tf.data.Dataset, division: Division, steps: int, place: _Place) -> tf.data.Dataset:
    """Return a share with this rank's rows of each step."""
    passes = tf.Variable(-1, dtype=tf.int64, trainable=False)
    _shares.append(_Share(weakref.ref(passes), steps, division.total, 0))
    spec = data.element_spec
    absent = [type(part).__name__ == "NoneTensorSpec" for part in tf.nest.flatten(spec)]
    if any(absent):
        # TensorFlow has no windows of these.
        data = data.map(lambda *parts: tuple(part for part in tf.nest.flatten(parts) if part is not None))
    # A window holds the samples themselves: only those of this rank are copied to a batch.
    windows = data.window(division.total, drop_remainder=True)

    def cut(window: Structure, pair: tf.Tensor) -> tf.data.Dataset:
        first, rows = pair[0] % division.total, pair[1] - pair[0]
        return tf.data.Dataset.zip(tf.nest.map_structure(lambda d: d.skip(first).take(rows).batch(rows), window))

    def whole(*parts: tf.Tensor) -> Structure:
        present = iter(parts)
        return tf.nest.pack_sequence_as(spec, [None if is_none else next(present) for is_none in absent])

    def ends_of_pass(_: tf.Tensor) -> tf.data.Dataset:
        return _bounds(division, tf.data.Dataset.range(steps), passes.assign_add(1), place)

    ends = tf.data.Dataset.range(1).flat_map(ends_of_pass)
    # A shuffled dataset has a new order for each iterator that is made, and Keras makes one more than it reads. The
    # windows are in no function, so that they are made with it, as on one process.
    dataset = tf.data.Dataset.zip((windows, ends)).flat_map(cut)
    dataset = dataset.map(whole) if any(absent) else dataset
    made = dataset.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2)
    set_batch_size(made, division.latest[division.rank])
    return made


def batch_size(dataset: tf.data.Dataset | ArrayBatches | None) -> int | None:
    """Return the samples of an element of a batched dataset; None if they are unknown.

    Args:
        dataset: a `tf.data.Dataset`, or None.

    Example:
        >>> batch_size(tf.data.Dataset.range(10).batch(4).prefetch(1))
        4
    """
    if isinstance(dataset, ArrayBatches):
        return dataset.batch_size
    while dataset is not None:
        # A dataset whose last batch may be smaller has elements of no fixed shape; its transformation has the size.
        size = batch_size_of_dataset(dataset)
        if size is not None:
            return size
        shapes = [spec.shape for spec in keras.tree.flatten(dataset.element_spec) if hasattr(spec, "shape")]
        if shapes and shapes[0].rank and shapes[0][0]:
            return int(shapes[0][0])
        dataset = dataset_before(dataset)
    return None


def state() -> tuple[list[int], list[tuple[int, int]]]:
    """Return the state on which the orders of this process's shuffled shares depend.

    Returns:
        The epoch of each share of arrays, and the pair of seeds of each dataset.
    """
    return [int(share.epoch().numpy()) for share in _living_shares()], list(_seeds)  # type: ignore[union-attr]


def hold_shares() -> list[tf.Variable | Count | None]:
    """Return references to the shuffled shares; while they are held, `state` lists the same shares."""
    return [share.epoch() for share in _living_shares()]


def _living_shares() -> list[_Share]:
    _shares[:] = [share for share in _shares if share.epoch() is not None]
    return _shares


def divisions() -> list[Division]:
    """Return the divisions of the shares that are in use, the newest last."""
    return list(_divisions.values())


def samples_per_step(share: int | None) -> int | None:
    """Return the number of samples that all ranks together take in a step from a shuffled share.

    Args:
        share: index of the share, or None; a negative index counts from the newest share.

    Returns:
        Number of samples, or None if the share does not exist.
    """
    alive = _living_shares()
    return alive[share].samples if share is not None and -len(alive) <= share < len(alive) else None


def started_share(drawn: Sequence[int]) -> int | None:
    """Return the index of the share whose next pass has begun, or None unless there is exactly one such share.

    Args:
        drawn: earlier epochs of the shares, from `state`.
    """
    now, _ = state()
    found = [i for i, (epoch, before) in enumerate(zip(now, drawn, strict=False)) if epoch > before]
    return found[0] if len(now) == len(drawn) and len(found) == 1 else None


def position_after(drawn: Sequence[int], batches: int, share: int | None) -> tuple[list[int], int]:
    """Return the position in the data of a training whose epochs are not single passes through a share.

    Args:
        drawn: epochs of the shares when the training began, from `state`.
        batches: number of batches trained since.
        share: index of the share, or None if unknown.

    Returns:
        Epochs for `set_orders`, and the number of batches of the following order that were trained. These are the
        current epochs and 0 if the share is unknown, or if the number of shares has changed.
    """
    now, _ = state()
    if share is None or len(now) != len(drawn):
        return now, 0
    passes, rest = divmod(batches, _shares[share].steps)
    # The batches of the other shares are not counted, so these shares keep their current epochs.
    return [drawn[i] + passes if i == share else epoch for i, epoch in enumerate(now)], rest


def agree_on_orders(states: list[tuple[list[int], list[tuple[int, int]]]]) -> None:
    """Make all ranks draw the same orders, so that their shares stay disjoint.

    Args:
        states: result of `state` on each rank.

    Raises:
        ReplicaError: on all ranks, if they shuffle a dataset with different seeds.
    """
    if any(seeds != states[0][1] for _, seeds in states):
        raise ReplicaError(
            "hvdx.shard: the ranks shuffle a dataset with different seeds, so their shares overlap. "
            "tf.random.set_seed and keras.utils.set_random_seed change these seeds: call them with the same seed on "
            "every rank, or after hvdx.shard."
        )
    # If one rank iterates over its share alone, for example by next(iter(...)), its epoch is ahead of the others.
    if len({len(epochs) for epochs, _ in states}) == 1:
        for share, *epochs in zip(_shares, *(epochs for epochs, _ in states), strict=True):
            variable = share.epoch()
            if variable is not None and len(set(epochs)) > 1:
                variable.assign(max(epochs))


def set_orders(epochs: Sequence[int]) -> None:
    """Set the epochs of this process's shuffled shares, so that each draws the following order next.

    Args:
        epochs: saved epochs, from `state`. They are assigned from the newest share backwards, since a notebook may have
            older shares.
    """
    alive = [variable for variable in (share.epoch() for share in _shares) if variable is not None]
    for variable, epoch in zip(reversed(alive), reversed(epochs), strict=False):
        variable.assign(epoch)
