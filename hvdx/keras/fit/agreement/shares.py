"""Data that each rank hands to `hvdx.shard`: shares are disjoint only if all ranks hand over the same data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdx.errors import ConfigError
from hvdx.keras.backend import is_dataset, tf
from hvdx.keras.fit.agreement import generators, pipeline
from hvdx.keras.fit.agreement.sample import Sample, alike, sample
from hvdx.keras.seams.iterators import OwnBatches
from hvdx.keras.seams.pipelines import cache_file_of
from hvdx.keras.types import Structure
from hvdx.log import Log

_log = Log(__name__)

#: Environment variable; 1 turns the errors of this package into warnings.
VARIABLE = "HVDX_ALLOW_DIFFERENT"
_MARK = "_hvdx_handed"
_REMEDY = (
    "Several ranks would train some samples, and no rank would train others. Every rank must hand over the same data "
    "in the same order: seed what draws it (train_test_split(..., random_state=1), numpy.random.default_rng(1)), or "
    "everything by hvdx.init(seed=1), and sort lists of files. If each rank reads data of its own, do not shard it."
)


class Handed(NamedTuple):
    """What a rank handed to `hvdx.shard`.

    Attributes:
        options: arguments on which the division depends, by name.
        arrays: sample of the arrays, or None.
        order: seeds and sources of the dataset, or None.
    """

    options: dict[str, object]
    arrays: Sample | None
    order: list[pipeline.Step] | None


def allowed() -> bool:
    """Return whether the user asked for warnings in place of errors."""
    return os.environ.get(VARIABLE) == "1"


def check_order(dataset: tf.data.Dataset) -> None:
    """Check that all ranks read a dataset in the same order.

    Raises:
        ConfigError: if each rank reads it in another order.
    """
    cause = pipeline.cause_of_other_order(dataset)
    if cause is None:
        return
    text = (
        f"hvdx.shard: expected a dataset whose order is the same on all ranks, got one with {cause}. Several ranks "
        "would train some samples, and no rank would train others. Leave the shuffling to hvdx.shard; or give each "
        "shuffle, list_files and sample_from_datasets a seed, and remove deterministic=False; or call "
        f"hvdx.init(seed=1) before the dataset is made. Set {VARIABLE}=1 if this is intended."
    )
    if not allowed():
        raise ConfigError(text)
    _log.warning(text, head="hvdx: WARNING: ")


def mark(
    share: tf.data.Dataset | OwnBatches,
    data: tf.data.Dataset | Structure,
    batch: Mapping[str, int | None],
    shuffle: bool | int,
    seed: int,
) -> None:
    """Record on a share what it was cut from.

    Args:
        share: dataset of this rank.
        data: arrays in any structure, or a dataset.
        batch: the samples of a step, with the name of their argument of `hvdx.shard`.
        shuffle, seed: arguments of `hvdx.shard`.
    """
    options: dict[str, object] = {"seed": seed, "shuffle": shuffle}
    if is_dataset(data):
        # A dataset is divided element by element, so ranks may have batches of different sizes.
        handed = Handed(options, None, pipeline.order_of(data))
        generators.record(data)
    else:
        handed = Handed({**options, **batch}, sample(data), None)
    setattr(share, _MARK, handed)


def shares_in(dataset: object) -> list[Handed]:
    """Return what was handed over for each share in a pipeline; [] for anything but a dataset."""
    parts = [dataset] if isinstance(dataset, OwnBatches) else pipeline.datasets(dataset)
    return [getattr(part, _MARK) for part in parts if hasattr(part, _MARK)]


def cache_files(end: object) -> list[str]:
    """Return the files of caches that no other rank of this host may use: of a share, or not filled yet.

    Args:
        end: a `tf.data.Dataset`; anything else has none.
    """
    names = {os.path.abspath(name): part for part in pipeline.datasets(end) if (name := cache_file_of(part))}
    return [name for name, part in names.items() if shares_in(part) or not os.path.exists(f"{name}.index")]


def used_twice(everyone: Sequence[tuple[str, list[str]]]) -> str | None:
    """Compare the files of caches over the ranks.

    Args:
        everyone: on each rank the name of its host, and the result of `cache_files`.

    Returns:
        The text of an error, or None if no file belongs to two ranks of a host.
    """
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (host, names) in enumerate(everyone):
        for name in names:
            users.setdefault((host, name), []).append(rank)
    for (_, name), ranks in users.items():
        if len(ranks) > 1:
            return (
                f"fit: dataset.cache: expected a file of its own for each rank, got {name} on ranks {ranks}. They "
                "would write it at the same time, or read the samples of another rank's share. Do: "
                f'cache(f"...-{{hvdx.rank()}}-of-{{hvdx.size()}}"), and remove files of runs with other shares.'
            )
    return None


def difference(use: str, everyone: Sequence[list[Handed]]) -> str | None:
    """Compare the shares of all ranks.

    Args:
        use: use of the shares for the message, such as "training".
        everyone: result of `shares_in` on each rank.

    Returns:
        The text of an error, or None if the shares are disjoint, or if the ranks have different numbers of shares.
    """
    if len({len(shares) for shares in everyone}) > 1:
        return None
    for first, *others in zip(*everyone, strict=True):
        found: dict[str, list[int]] = {}
        for rank, other in enumerate(others, 1):
            what = _difference(first, other)
            if what is not None:
                found.setdefault(what, []).append(rank)
        if found:
            listed = "; ".join(f"{what} (ranks {', '.join(map(str, ranks))})" for what, ranks in found.items())
            return f"hvdx.shard: the ranks' shares of the {use} data overlap. Not as on rank 0: {listed}. {_REMEDY}"
    return None


def _difference(first: Handed, other: Handed) -> str | None:
    for name, value in first.options.items():
        if other.options.get(name) != value:
            return f"{name}={other.options.get(name)!r} where rank 0 has {value!r}"
    if first.arrays is not None and other.arrays is not None:
        if first.arrays.spec != other.arrays.spec:
            return f"arrays {_spelled(other.arrays)} where rank 0 has {_spelled(first.arrays)}"
        return None if alike(first.arrays, other.arrays) else "other values, or another order, in the arrays"
    if first.order is not None and other.order is not None:
        what = pipeline.same_order(first.order, other.order)
        return {None: None, "seeds": "other seeds of its shuffles", "sources": "other sources of the dataset"}[what]
    return "arrays on one rank, a dataset on the other"


def _spelled(arrays: Sample) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in arrays.spec)
