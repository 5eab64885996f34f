"""Collectives of the ranks that split a layer, on tensors of the TensorFlow graph.

Each rank of a group has rows of its own batch, and one part of the columns of a layer. The rows of all ranks, in rank
order, are the rows of the group. MPI carries the tensors on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdx.comm.host_graph import on_host
from hvdx.comm.interfaces import Channel
from hvdx.errors import ConfigError

Arrays = list[np.ndarray]


class Lookup(NamedTuple):
    """Ids whose rows this rank reads from a split table, and the rows that its group reads from this rank's part.

    An id may occur several times. Its row travels once to each rank that reads it.

    Attributes:
        order: int64[ids], permutation that sorts this rank's ids.
        place: int64[ids], position of each id among this rank's distinct ids in ascending order.
        distinct, ids: int64[ranks], number of distinct ids, and of ids, that this rank reads from each rank.
        rows: int64[asked], rows of this rank's part, one for each id of the group, those of rank 0 first.
        first: int64[distinct asked], positions in `rows` where a rank reads a row for the first time.
        distinct_asked, asked: int64[ranks], number of distinct rows, and of rows, that each rank reads from this one.
    """

    order: tf.Tensor
    place: tf.Tensor
    distinct: tf.Tensor
    ids: tf.Tensor
    rows: tf.Tensor
    first: tf.Tensor
    distinct_asked: tf.Tensor
    asked: tf.Tensor


class SplitTensors:
    """Collectives of one group. All its ranks call them in the same order; sizes of batches may differ.

    Args:
        channel: channel of the group.

    Attributes:
        rank, size: position of this rank in the group, and number of ranks in it.
        sent: bytes that this rank has sent to the others in these collectives.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self.rank, self.size, self.sent = channel.rank, channel.size, 0
        self._counts: tf.Tensor | None = None

    def remember_counts(self, counts: tf.Tensor) -> None:
        """Keep the numbers of rows for a layer whose input has the rows of the group.

        Args:
            counts: int64[size].
        """
        self._counts = counts

    def counts_for(self, rows: tf.Tensor, layer: str) -> tf.Tensor:
        """Return the numbers of rows that were kept last.

        Args:
            rows: [rows of the group, columns], the input of a layer.
            layer: name of the layer, for the error message.

        Raises:
            ConfigError: if there are none in this graph, or they are of another tensor.
        """
        counts = self._counts
        if (
            counts is None
            or getattr(counts, "graph", None) is not getattr(rows, "graph", None)
            or (tf.executing_eagerly() and int(tf.reduce_sum(counts)) != rows.shape[0])
        ):
            raise ConfigError(
                f"layer {layer}: input_is_split=True: expected the output of a layer with gather_output=False, got "
                "another input. Give the layer before it gather_output=False, or leave input_is_split out."
            )
        return counts

    def gather_rows(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the rows of the group, and int64[size], the number of rows from each rank.

        Args:
            tensor: [rows, k], the rows of this rank.
        """
        rows, counts = on_host(self._gather, [tensor], [tensor.dtype, tf.int64])
        rows.set_shape([None, tensor.shape[1]])
        counts.set_shape([self.size])
        return rows, counts

    def _gather(self, mine: np.ndarray) -> Arrays:
        received = self._channel.exchange([len(mine)], _bytes(mine))
        self.sent += (self.size - 1) * mine.nbytes
        counts = received.headers[:, 0]
        parts = [_array(m, mine, (n, mine.shape[1])) for n, m in zip(counts, received.messages, strict=True)]
        return [np.concatenate(parts), np.array(counts, np.int64)]

    def sum_rows(self, tensor: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Sum the ranks' tensors, and return the rows of this rank's batch: the transpose of `gather_rows`.

        Args:
            tensor: [rows of the group, k], a term of the sum.
            counts: int64[size], number of rows of each rank.

        Returns:
            [rows of this rank, k]; the terms are added in rank order, half precision in float32.
        """
        (total,) = on_host(self._sum, [tensor, counts], [tensor.dtype])
        total.set_shape([None, tensor.shape[1]])
        return total

    def _sum(self, terms: np.ndarray, counts: np.ndarray) -> Arrays:
        if counts.sum() != len(terms):
            raise ConfigError(f"a split layer: expected {counts.sum()} rows, those of its group, got {len(terms)}.")
        shape = (int(counts[self.rank]), terms.shape[1])
        received = self._swap(np.split(terms, np.cumsum(counts)[:-1]), [shape] * self.size)
        wide = np.promote_types(terms.dtype, np.float32) if terms.dtype.itemsize < 4 else terms.dtype
        with np.errstate(over="ignore", invalid="ignore"):
            total = received[0].astype(wide)
            for other in received[1:]:
                total += other.astype(wide, copy=False)
            return [total.astype(terms.dtype, copy=False)]

    def columns_to_rows(self, tensor: tf.Tensor, counts: tf.Tensor, bounds: Sequence[int]) -> tf.Tensor:
        """Exchange this rank's columns of all rows for all columns of this rank's rows.

        Args:
            tensor: [rows of the group, columns of this rank].
            counts: int64[size], number of rows of each rank.
            bounds: bounds of the ranks' columns, size + 1.

        Returns:
            [rows of this rank, all columns].
        """
        widths = np.diff(bounds)

        def work(mine: np.ndarray, counts: np.ndarray) -> Arrays:
            shapes = [(int(counts[self.rank]), int(width)) for width in widths]
            return [np.concatenate(self._swap(np.split(mine, np.cumsum(counts)[:-1]), shapes), axis=1)]

        (rows,) = on_host(work, [tensor, counts], [tensor.dtype])
        rows.set_shape([None, bounds[-1]])
        return rows

    def rows_to_columns(self, tensor: tf.Tensor, counts: tf.Tensor, bounds: Sequence[int]) -> tf.Tensor:
        """Exchange all columns of this rank's rows for this rank's columns of all rows: undo `columns_to_rows`.

        Args:
            tensor: [rows of this rank, all columns].
            counts: int64[size], number of rows of each rank.
            bounds: bounds of the ranks' columns, size + 1.

        Returns:
            [rows of the group, columns of this rank].
        """
        width = int(bounds[self.rank + 1] - bounds[self.rank])

        def work(mine: np.ndarray, counts: np.ndarray) -> Arrays:
            parts = [np.ascontiguousarray(part) for part in np.split(mine, bounds[1:-1], axis=1)]
            return [np.concatenate(self._swap(parts, [(int(count), width) for count in counts]))]

        (columns,) = on_host(work, [tensor, counts], [tensor.dtype])
        columns.set_shape([None, width])
        return columns

    def send_rows(self, tensor: tf.Tensor, counts: tf.Tensor, received: tf.Tensor) -> tf.Tensor:
        """Send rows of this rank's tensor to each rank (an all-to-all), and return the rows received, in rank order.

        Args:
            tensor: [rows, k]; the first `counts[0]` rows are for rank 0, the next ones for rank 1, and so on.
            counts: int64[size].
            received: int64[size], number of rows from each rank.
        """

        def work(mine: np.ndarray, counts: np.ndarray, received: np.ndarray) -> Arrays:
            shapes = [(int(n), mine.shape[1]) for n in received]
            return [np.concatenate(self._swap(np.split(mine, np.cumsum(counts)[:-1]), shapes))]

        (rows,) = on_host(work, [tensor, counts, received], [tensor.dtype])
        rows.set_shape([None, tensor.shape[1]])
        return rows

    def send_ids(self, ids: tf.Tensor, bounds: Sequence[int], layer: str) -> Lookup:
        """Send each id to the rank that holds its row.

        Args:
            ids: int64[ids] of this rank.
            bounds: bounds of the ranks' rows, size + 1.
            layer: name of the layer, for the error message.

        Raises:
            ConfigError: on all ranks of the group, if there is no row for an id.
        """

        def work(mine: np.ndarray) -> Arrays:
            wrong = mine[(mine < 0) | (mine >= bounds[-1])]
            distinct, place, times = np.unique(mine, return_inverse=True, return_counts=True)
            counts = np.diff(np.searchsorted(distinct, bounds))
            headers = self._channel.exchange([*counts, len(wrong), wrong[0] if len(wrong) else 0]).headers
            for rank in np.flatnonzero(headers[:, -2])[:1]:
                raise ConfigError(
                    f"layer {layer}: expected ids from 0 to {bounds[-1] - 1}, got {headers[rank, -1]} on rank {rank} "
                    f"of its group. Give a larger input_dim, or correct the data."
                )
            parts = np.split(np.stack([distinct, times], axis=1), np.cumsum(counts)[:-1])
            received = self._swap(parts, [(int(n), 2) for n in headers[:, self.rank]])
            rows, repeats = np.concatenate(received).T
            return [
                np.argsort(place, kind="stable"),
                place,
                counts,
                np.array([part[:, 1].sum() for part in parts]),
                np.repeat(rows - bounds[self.rank], repeats),
                np.cumsum(repeats) - repeats,
                headers[:, self.rank].copy(),
                np.array([part[:, 1].sum() for part in received]),
            ]

        lookup = Lookup(*on_host(work, [ids], [tf.int64] * len(Lookup._fields)))
        for tensor, extent in zip(lookup, [None, None, self.size, self.size] * 2, strict=True):
            tensor.set_shape([extent])
        return lookup

    def gather_labels(
        self, labels: tf.Tensor, logits: tf.Tensor, ignored: int | None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Gather the labels of the group's rows.

        Args:
            labels: int64[rows of this rank].
            logits: [rows of the group, classes of this rank].
            ignored: label that stands for no class; None if all labels are classes.

        Returns:
            int64[rows of the group]; int64[size], the number of rows of each rank; int64, the first class of this rank.

        Raises:
            ConfigError: on all ranks of the group, if the logits have other rows, or a label is no class.
        """

        def work(mine: np.ndarray, shape: np.ndarray) -> Arrays:
            received = self._channel.exchange([len(mine), *shape], _bytes(mine))
            self.sent += (self.size - 1) * mine.nbytes
            counts, rows, classes = (np.array(column) for column in received.headers.T)
            everyone = np.concatenate([message.view(np.int64) for message in received.messages])
            if (rows != len(everyone)).any():
                raise ConfigError(
                    f"a split softmax: expected the logits of the {len(everyone)} rows of the group, got "
                    f"{rows.tolist()} on its ranks. Make the last layer SplitDense(classes, gather_output=False), "
                    "without an activation."
                )
            wrong = everyone[((everyone < 0) | (everyone >= classes.sum())) & (everyone != ignored)]
            if len(wrong):
                raise ConfigError(
                    f"a split softmax: expected labels from 0 to {classes.sum() - 1}, got {wrong[0]}. Correct the "
                    "data, give the last layer more units, or the loss ignore_class."
                )
            return [everyone, counts, np.array(classes[: self.rank].sum())]

        kinds = [tf.int64] * 3
        everyone, counts, first = on_host(work, [labels, tf.shape(logits, tf.int64)], kinds)
        everyone.set_shape([logits.shape[0]])
        counts.set_shape([self.size])
        first.set_shape([])
        return everyone, counts, first

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum of the ranks' tensors, the same bits on all ranks.

        Args:
            tensor: small tensor, of the same shape on all ranks.
        """

        def work(mine: np.ndarray) -> Arrays:
            received = self._channel.exchange([], _bytes(mine))
            self.sent += (self.size - 1) * mine.nbytes
            return [np.sum([_array(m, mine, mine.shape) for m in received.messages], axis=0, dtype=mine.dtype)]

        (total,) = on_host(work, [tensor], [tensor.dtype])
        total.set_shape(tensor.shape)
        return total

    def _swap(self, parts: Sequence[np.ndarray], shapes: Sequence[tuple[int, int]]) -> Arrays:
        """Send each rank its part; return the parts received, of the given shapes."""
        like = parts[0]
        sizes = [rows * columns * like.itemsize for rows, columns in shapes]
        received = self._channel.all_to_all([_bytes(part) for part in parts], sizes)
        self.sent += sum(part.nbytes for i, part in enumerate(parts) if i != self.rank)
        return [_array(r, like, shape) for r, shape in zip(received, shapes, strict=True)]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _array(data: np.ndarray, like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return data.view(like.dtype).reshape(shape)
