"""Each rank's share of the data."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.joining import join

# Elements held back for shuffling a dataset of unknown or large size.
_BUFFER = 10_000

# What decides the order of this process's shuffled shares: the epoch counters of arrays, and for datasets the pair of
# TensorFlow's global seed and ours.
_epochs: list["_Share"] = []
_seeds: list[tuple[int, int]] = []


class _Share(NamedTuple):
    """A share of arrays that is shuffled.

    Attributes:
        epoch: the number of the order that was drawn last.
        steps: of a pass.
        samples: of a step of all ranks together.
    """

    epoch: weakref.ref[tf.Variable]
    steps: int
    samples: int


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | int = True,
    seed: int = 0,
    drop_remainder: bool = True,
    steps: int | None = None,
    initial_epoch: int = 0,
    rank: int | None = None,
    size: int | None = None,
) -> tf.data.Dataset:
    """This rank's share of the data: disjoint from the others', of as many steps, in a new order each epoch.

    All ranks draw the same order from the seed and the number of the epoch, and step t of N ranks with batches of b
    holds the samples that step t of one process with batches of N*b would.

    Args:
        data: an array, or a tuple or dictionary of arrays with one length, `(x, y)` say; or a `tf.data.Dataset`.
        batch_size: samples a step on this rank; needed for arrays. A dataset without it keeps its elements.
        shuffle: draw a new order each epoch. For a dataset a number is the size of the shuffle buffer (10,000 by
            default, or all of a smaller one); it is shuffled before it is dealt out, so every rank reads all of it.
        seed: alike on all ranks.
        drop_remainder: leave out samples that do not fill a step on all ranks; False keeps every sample, for
            validation, and the ranks may then differ by a step.
        steps: steps an epoch; needed for a dataset that does not know its size.
        initial_epoch: arrays only: the number of the first epoch, which decides its order.
        rank, size: another rank's share; this one's by default.

    Returns:
        A dataset of known size, for `fit`.

    Raises:
        ConfigError: lengths that differ, too few samples, an unknown size.

    Example:
        >>> x, y = tf.range(8.0), tf.range(8)
        >>> [b[1].numpy().tolist() for b in shard((x, y), 2, shuffle=False, rank=1, size=2)]
        [[2, 3], [6, 7]]
    """
    joined = join()
    rank, size = joined.rank if rank is None else rank, joined.size if size is None else size
    if not 0 <= rank < size:
        raise ConfigError(f"shard: rank: expected 0 to {size - 1}, got {rank}.")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"shard: batch_size: expected 1 or more, got {batch_size}.")
    if isinstance(data, tf.data.Dataset):
        return _shard_dataset(data, batch_size, shuffle, seed, drop_remainder, steps, rank, size)
    if batch_size is None:
        raise ConfigError("shard: batch_size: expected the samples a step on each rank, got None.")
    return _shard_arrays(data, batch_size, bool(shuffle), seed, drop_remainder, steps, initial_epoch, rank, size)


def _shard_arrays(
    data: Any,
    batch: int,
    shuffle: bool,
    seed: int,
    drop_remainder: bool,
    steps: int | None,
    initial_epoch: int,
    rank: int,
    size: int,
) -> tf.data.Dataset:
    with tf.device("CPU:0"):
        tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
    lengths = {int(t.shape[0]) for t in tf.nest.flatten(tensors)}
    if len(lengths) != 1:
        raise ConfigError(f"shard: expected arrays of one length, got {sorted(lengths)}.")
    (count,) = lengths
    whole = batch * size
    possible = count // whole if drop_remainder else _steps_with_remainder(count, batch, rank, size)
    steps = possible if steps is None else steps
    if drop_remainder and not 0 < steps <= possible:
        raise ConfigError(
            f"shard: {count} samples make {possible} steps of {size} ranks times {batch}; expected 1 to {possible} "
            f"steps, got {steps}. Use a smaller batch_size, fewer ranks or drop_remainder=False."
        )
    epochs = tf.Variable(initial_epoch - 1, dtype=tf.int64, trainable=False)
    if shuffle:
        _epochs.append(_Share(weakref.ref(epochs), steps, whole))

    def batch_of(step: Any, epoch: Any) -> Any:
        begin = step * whole
        length = tf.minimum(tf.cast(whole, tf.int64), count - begin)
        positions = tf.range(begin + rank * length // size, begin + (rank + 1) * length // size)
        if shuffle:
            key = tf.stack([tf.constant(seed, tf.int64), epoch])
            positions = tf.random.experimental.index_shuffle(positions, key, count - 1)
        return tf.nest.map_structure(lambda t: tf.gather(t, positions), tensors)

    def epoch_of(_: Any) -> tf.data.Dataset:
        epoch = epochs.assign_add(1)
        numbered = tf.data.Dataset.range(steps)
        return numbered.map(lambda step: batch_of(step, epoch), num_parallel_calls=2, deterministic=True)

    dataset = tf.data.Dataset.range(1).flat_map(epoch_of)
    return untuned(dataset.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2))


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turn off TensorFlow's tuning of a dataset that has nothing to tune.

    The thread that tunes can delay the end of an iteration by up to a minute: TensorFlow waits for the thread's next
    turn, and turns become rare in a long training.

    Args:
        dataset: whose parallelism and buffers are numbers.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _steps_with_remainder(count: int, batch: int, rank: int, size: int) -> int:
    """Steps of a rank when the samples of the last step are dealt out as evenly as they can be."""
    if count < size:
        raise ConfigError(f"shard: {count} samples for {size} ranks: expected at least one for each.")
    full, rest = divmod(count, batch * size)
    return full + int((rank + 1) * rest // size > rank * rest // size)


def _shard_dataset(
    data: tf.data.Dataset,
    batch: int | None,
    shuffle: bool | int,
    seed: int,
    drop_remainder: bool,
    steps: int | None,
    rank: int,
    size: int,
) -> tf.data.Dataset:
    count = int(data.cardinality())
    if count < 0 and steps is None:
        raise ConfigError(
            "shard: the dataset does not know its size, so the ranks might take different numbers of steps. Give "
            "steps=, the steps an epoch on each rank."
        )
    per_step = size * (batch or 1)
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
            raise ConfigError(f"shard: {count} elements do not fill one step of {per_step} on {size} ranks.")
        data = data.take(count // per_step * per_step)
    data = data.shard(size, rank)
    if batch is not None:
        data = data.batch(batch, drop_remainder=drop_remainder)
    if steps is not None and count < 0:
        data = data.apply(tf.data.experimental.assert_cardinality(steps))
    return data.prefetch(2)


def state() -> tuple[list[int], list[tuple[int, int]]]:
    """What decides the order of this process's shares that are shuffled: epochs, and pairs of seeds."""
    return [int(share.epoch().numpy()) for share in _alive()], list(_seeds)  # type: ignore[union-attr]


def _alive() -> list[_Share]:
    _epochs[:] = [share for share in _epochs if share.epoch() is not None]
    return _epochs


def samples_a_step(share: int | None) -> int | None:
    """How many samples all ranks together take a step from a share that is shuffled.

    Args:
        share: its number; a negative one counts from the newest, as lists do.

    Returns:
        So many; None where there is no such share.
    """
    alive = _alive()
    return alive[share].samples if share is not None and -len(alive) <= share < len(alive) else None


def begun(drawn: Sequence[int]) -> int | None:
    """Which share was gone into; its number, or None where that is not exactly one.

    Args:
        drawn: what `state` said of the epochs before.
    """
    now, _ = state()
    found = [i for i, (epoch, before) in enumerate(zip(now, drawn, strict=False)) if epoch > before]
    return found[0] if len(now) == len(drawn) and len(found) == 1 else None


def after(drawn: Sequence[int], batches: int, share: int | None) -> tuple[list[int], int]:
    """Where a training is that goes through a share again and again, and not once an epoch.

    Args:
        drawn: what `state` said of the epochs when it began.
        batches: that it has trained since.
        share: which share, by its number; None where nobody knows.

    Returns:
        What to `go_on` from, and how many batches of the order that then comes have been trained. Where the share is
        not known, or not there any more, the orders that come next, and 0.
    """
    now, _ = state()
    if share is None or len(now) != len(drawn):
        return now, 0
    passes, rest = divmod(batches, _epochs[share].steps)
    # The others have gone on by themselves.
    return [drawn[i] + passes if i == share else epoch for i, epoch in enumerate(now)], rest


def agree(states: list[tuple[list[int], list[tuple[int, int]]]]) -> None:
    """Have the ranks draw the same orders, so that their shares stay disjoint.

    Args:
        states: what `state` says on each rank.

    Raises:
        ReplicaError: on all ranks, if their datasets were shuffled with different seeds.
    """
    if any(seeds != states[0][1] for _, seeds in states):
        raise ReplicaError(
            "hvdx.shard: the ranks shuffle a dataset with different seeds, so their shares overlap. "
            "tf.random.set_seed and keras.utils.set_random_seed count: give every rank the same, or call them "
            "after hvdx.shard."
        )
    # A look into a dataset on one rank, next(iter(...)) say, takes it an epoch ahead of the others.
    if len({len(epochs) for epochs, _ in states}) == 1:
        for share, *epochs in zip(_epochs, *(epochs for epochs, _ in states), strict=True):
            variable = share.epoch()
            if variable is not None and len(set(epochs)) > 1:
                variable.assign(max(epochs))


def go_on(epochs: Sequence[int]) -> None:
    """Have this process's shuffled shares draw the orders that come after those which were drawn already.

    Args:
        epochs: what `state` said of them then. The newest share goes with the last: a notebook may hold older ones.
    """
    alive = [variable for variable in (share.epoch() for share in _epochs) if variable is not None]
    for variable, epoch in zip(reversed(alive), reversed(epochs), strict=False):
        variable.assign(epoch)
