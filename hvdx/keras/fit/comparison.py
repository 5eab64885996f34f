"""Comparisons over the ranks at the start of a fit and after its first step."""

import functools
import socket
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdx.comm import Comm
from hvdx.errors import ReplicaError
from hvdx.keras.fit.agreement import constants, first_batch, generators, model_state, pipeline, shares
from hvdx.keras.fit.agreement.first_batch import FirstBatch
from hvdx.keras.fit.agreement.sample import sample
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.seams.frames import epoch_iterator, validation_inputs
from hvdx.keras.seams.iterators import EpochIterator, arrays_of, dataset_of, epoch_is_one_pass, read_from
from hvdx.keras.types import Logs
from hvdx.log import Log

_log = Log(__name__)

# Largest number of differences that a message lists.
_LISTED = 3
_SHARES = (
    "Give each rank its share: model.fit(hvdx.shard((x, y), batch_size=...), shuffle=False, ...) in place of "
    "model.fit(x, y, batch_size=...); hvdx.shard(dataset, batch_size) divides a tf.data.Dataset."
)
_ALLOW = f"Set {shares.VARIABLE}=1 if this is intended."


class Comparison(Part):
    """Comparison of what must be alike on all ranks in a fit, or must differ.

    Args:
        comm: the ranks.
        attachment: optimisers of the fit. If it uses the trace of an earlier fit, model and constants were compared.
    """

    def __init__(self, comm: Comm, attachment: Attachment):
        super().__init__()
        self._comm, self._attachment = comm, attachment
        # Training function that this fit traces; None if it uses the trace of an earlier one.
        self._function: Any = None
        self._iterator: EpochIterator | None = None
        self._first_batch: FirstBatch | None = None
        self._dataset: tf.data.Dataset | None = None
        self._configuration: dict[str, str] = {}
        self._pending = False

    def offer(self) -> dict[str, object]:
        """Return what this rank has."""
        self._iterator = epoch_iterator(self)
        traced = self._attachment.traced
        # After the first step, the successor of a provisional strategy may have another function, not traced yet.
        self._function = self.model.train_function if traced else None
        self._pending, self._first_batch = True, None
        self._dataset = dataset = dataset_of(self._iterator)
        validation = validation_inputs(self)
        self._configuration = model_state.configuration(self.model) if traced else {}
        train = shares.shares_in(dataset)
        arrays, one_pass = arrays_of(self._iterator), epoch_is_one_pass(self._iterator)
        whole = arrays is not None and one_pass
        source = pipeline.source_of(dataset) if traced and one_pass and not train and not whole else None
        # A later fit of the same trace has the data of the earlier one, as a rule.
        if traced and not train and not whole and first_batch.can_pass(dataset):
            self._first_batch = FirstBatch(dataset)
            read_from(self._iterator, self._first_batch.dataset)
        return {
            "training": train,
            "validation": shares.shares_in(validation),
            "arrays": sample(arrays).digest() if whole else source,
            "caches": (
                socket.gethostname(),
                [*dict.fromkeys(shares.cache_files(dataset) + shares.cache_files(validation))],
            ),
            "synchronized": model_state.synchronized(self.model),
            "adapted": model_state.adapted(self.model),
            "tables": model_state.tables_of(dataset) + model_state.tables_of(validation),
            "configuration": model_state.digest(self._configuration),
        }

    def agree(self, offered: list[dict[str, Any]]) -> None:
        """Compare what the ranks have before the first step.

        Raises:
            ReplicaError: on all ranks, if something differs that must be alike.
        """
        for use in ("training", "validation"):
            text = shares.difference(use, [theirs[use] for theirs in offered])
            if text is not None:
                self._refuse(text)
        text = shares.used_twice([theirs["caches"] for theirs in offered])
        if text is not None:
            self._refuse(text)
        if offered[0]["synchronized"]:
            self._warn(
                f"BatchNormalization(synchronized=True) takes the statistics of each rank's own batch in layers "
                f"{_listed(offered[0]['synchronized'])}: Keras synchronises only the replicas of tf.distribute. Use "
                "hvdx.keras.SyncBatchNormalization, or leave synchronized out."
            )
        for key in ("adapted", "tables"):
            differing = model_state.differing([theirs[key] for theirs in offered])
            if differing:
                self._refuse(
                    f"fit: expected preprocessing with the same state on all ranks; not as on rank 0: "
                    f"{_listed(differing)}. The same input would mean different things to the ranks. Adapt the layer "
                    "to the same data in the same order on every rank, before the data is divided; sort words from a "
                    "set or a directory; seed shuffles (hvdx.init(seed=1))."
                )
        digests = [theirs["configuration"] for theirs in offered]
        if len(set(digests)) > 1:
            # Only two ranks send theirs: a configuration can be large.
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            mine = self._configuration if self._comm.rank in (0, other) else {}
            sent = self._comm.all_gather_object(mine, "the configurations of the model")
            differing = model_state.differing_values(sent[0], sent[other], other)
            self._refuse(
                f"fit: expected the same model on all ranks, got different configurations: {_listed(differing)}. "
                "Build it from the same values on every rank: look for random choices (hvdx.init(seed=1) seeds "
                "them alike), for sets, and for values that depend on the rank or on its data."
            )
        self._configuration = {}
        self._warn_of_equal([theirs["arrays"] for theirs in offered])

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Compare what the first step shows; workers of an asynchronous strategy meet at the end of an epoch only."""
        if not self._attachment.strategy.asynchronous:
            self.end_steps()

    def begin_late(self, theirs: None) -> None:
        """Compare nothing: the others have taken their first step."""
        self._pending = False
        self._end_first_batch()
        self._function = self._iterator = self._dataset = None

    def _end_first_batch(self) -> FirstBatch | None:
        """Let the fit read its own data again; return the digest of the first batch."""
        first, self._first_batch = self._first_batch, None
        if first is not None and dataset_of(self._iterator) is first.dataset:
            read_from(self._iterator, self._dataset)
        return first

    def end_steps(self) -> None:
        """Compare first batches, elements of generators, and constants of the training function, once in a fit."""
        if not self._pending:
            return
        self._pending = False
        function, self._function = self._function, None
        found = constants.constants_of(function) if function is not None else []
        first = self._end_first_batch()
        elements = generators.recorded(self._dataset)
        components = first.components if first and pipeline.draws_random(self._dataset) else []
        self._iterator = self._dataset = None
        mine = (first.digest if first else None, components, elements, found)
        digests, parts, drawn, traces = zip(*all_gather_at(self._comm, "the first step", mine), strict=True)
        if not self._warn_of_equal(digests) and _have_in_common(parts):
            self._warn(
                f"a part of the first batch, such as its labels, is the same on all {self._comm.size} ranks, and the "
                "random rest differs: they seem to train on the same samples with other augmentation, so an epoch "
                f"takes {self._comm.size} times the work. {_SHARES} If that part is meant to be the same, nothing is "
                "wrong."
            )
        ranks = generators.differing(drawn)
        if ranks:
            self._warn(
                f"hvdx.shard: the dataset is made by a generator that yields other elements on ranks {ranks} than on "
                "rank 0, or the same in another order. Then several ranks train some samples, and no rank trains "
                "others. Seed what the generator draws (random.Random(1), numpy.random.default_rng(1), "
                "hvdx.init(seed=1)), and sort lists of files. If each rank generates its own data, do not shard it."
            )
        differing = constants.differing(traces)
        if differing:
            self._warn(
                f"the training function holds constants that are not those of rank 0: {_listed(differing)}. If they "
                "are random (masks, projections, noise) or a vocabulary, the ranks train different models that share "
                "weights. Make them weights (add_weight(..., trainable=False)), which hvdx gives to all ranks, or draw "
                "them with a seed (numpy.random.default_rng(1), hvdx.init(seed=1)). If each rank is meant to have its "
                "own, nothing is wrong."
            )

    def _warn_of_equal(self, digests: Sequence[int | None]) -> bool:
        """Warn if ranks have the same data, and return whether they have.

        Args:
            digests: digest of the data of each rank, or None if it is unknown.
        """
        groups: dict[int, list[int]] = {}
        for rank, digest in enumerate(digests):
            if digest is not None:
                groups.setdefault(digest, []).append(rank)
        largest = max(groups.values(), key=len, default=[])
        if len(largest) < 2:
            return False
        who = f"all {len(largest)} ranks" if len(largest) == self._comm.size else f"ranks {largest}"
        self._warn(
            f"{who} train on the same data: an epoch takes {len(largest)} times the work for the same samples. "
            f"{_SHARES} If train_step draws other data on each rank, nothing is wrong."
        )
        return True

    def _refuse(self, text: str) -> None:
        if not shares.allowed():
            raise ReplicaError(f"{text} {_ALLOW}")
        self._warn(text)

    def _warn(self, text: str) -> None:
        if self._comm.rank == 0:
            print_once(text)


def _have_in_common(everyone: Sequence[list[int | None]]) -> bool:
    """Return whether a component of the first batch has the same digest on all ranks."""
    return len({len(mine) for mine in everyone}) == 1 and any(
        mine[0] is not None and len(set(mine)) == 1 for mine in zip(*everyone, strict=True)
    )


@functools.cache
def print_once(text: str) -> None:
    """Log a warning once, however many fits the script has."""
    _log.warning(text, head="\nhvdx: WARNING: ")


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return "; ".join(items[:_LISTED]) + more
