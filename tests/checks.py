"""Checks that every communicator passes, at any number of ranks."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.comm import Comm, GraphComm, Mailbox, Message
from hvdx.comm.interfaces import HEADER_WORDS, Reduction
from hvdx.comm.waiting import until

# Time limit of a check for a message.
_SECONDS = 30.0
# Mailboxes of the checks. Servers and threads of earlier trainings in the process still read theirs, 0 to 2.
_BOX, _OTHER = 40, 41


def check_place(comm: Comm) -> None:
    """Check that ranks are 0..size-1, each once."""
    assert comm.all_gather_object(comm.rank, "ranks") == list(range(comm.size))
    assert 0 <= comm.local_rank < comm.local_size <= comm.size


def check_objects(comm: Comm) -> None:
    """Check that objects of different sizes, including None, arrive in rank order."""
    mine = (comm.rank, "x" * (1000 * comm.rank))
    everyone = comm.all_gather_object(mine, "objects")
    assert [rank for rank, _ in everyone] == list(range(comm.size))
    assert [len(padding) for _, padding in everyone] == [1000 * r for r in range(comm.size)]
    assert comm.all_gather_object(None, "nothing") == [None] * comm.size


def check_sums(comm: Comm) -> None:
    """Check that float64 sums of integers beyond float32's precision are exact."""
    vector = np.arange(5.0) + 2.0**40 * (comm.rank + 1)
    expected = comm.size * np.arange(5.0) + 2.0**40 * sum(range(1, comm.size + 1))
    np.testing.assert_array_equal(comm.all_reduce_sum(vector, "sum"), expected)


def check_flags(comm: Comm) -> None:
    """Check that a flag of any single rank reaches all ranks."""
    answers = [comm.any_true(comm.rank == rank) for rank in range(-1, comm.size)]
    # Asserted after all exchanges: a rank that fails earlier would leave the others waiting.
    assert answers == [False, *[True] * comm.size]


def check_broadcast(comm: Comm) -> None:
    """Check that every dtype of a model's variables arrives unchanged, from the last rank."""
    for dtype in (tf.float32, tf.float16, tf.int64, tf.int32, tf.bool, tf.uint8):
        value = tf.cast(tf.fill([2, 3], comm.rank % 2), dtype)
        (got,) = comm.broadcast([value], comm.size - 1, f"broadcast {dtype.name}")
        np.testing.assert_array_equal(np.asarray(got), np.full([2, 3], (comm.size - 1) % 2, dtype.as_numpy_dtype))
    assert comm.broadcast([], 0, "nothing") == []


def check_gather(comm: GraphComm) -> None:
    """Check tensors whose first dimensions differ between ranks and may be 0."""
    mine = tf.fill([comm.rank, 2], float(comm.rank))
    expected = np.concatenate([np.full([r, 2], r) for r in range(comm.size)])
    np.testing.assert_array_equal(np.asarray(comm.all_gather(mine, "gather")), expected)


def check_integers(comm: GraphComm) -> None:
    """Check that integers are summed exactly, beyond those that float64 holds."""
    (total,) = comm.all_reduce([tf.constant([2**53 + 1, comm.rank], tf.int64)], Reduction(average=False), "integers")
    assert np.asarray(total).tolist() == [comm.size * (2**53 + 1), sum(range(comm.size))]


def check_parts(comm: GraphComm) -> None:
    """Check an all-to-all of parts of different lengths, of which some are empty."""
    splits = [comm.rank * to for to in range(comm.size)]
    mine = tf.repeat(tf.constant([[100 * comm.rank + to, 0] for to in range(comm.size)]), splits, axis=0)
    rows, counts = comm.all_to_all(mine, tf.constant(splits), "parts")
    assert np.asarray(counts).tolist() == [sender * comm.rank for sender in range(comm.size)]
    expected = [[100 * s + comm.rank, 0] for s in range(comm.size) for _ in range(s * comm.rank)]
    np.testing.assert_array_equal(rows, np.reshape(expected, (-1, 2)))


def check_subset(comm: GraphComm) -> None:
    """Check that some of the ranks sum among themselves."""
    if type(comm).__name__ == "HorovodComm":
        return  # it must be started with process sets
    ranks = list(range(comm.size // 2, comm.size))
    some = comm.subset(ranks)
    if comm.rank not in ranks:
        assert some is None or comm.size == 1
        return
    assert some is not None
    assert (some.rank, some.size) == (ranks.index(comm.rank), len(ranks))
    (total,) = some.all_reduce([tf.constant([float(comm.rank)])], Reduction(average=False), "some")
    assert np.asarray(total).tolist() == [sum(ranks)]


def check_reductions(comm: GraphComm) -> None:
    """Check that all reductions agree with NumPy, eagerly and in a graph, with the same bits on all ranks."""
    everyone = [_tensors(rank) for rank in range(comm.size)]
    sums = [sum(ts[i].astype(np.float64) for ts in everyone) for i in range(3)]
    cases = {
        "plain": (Reduction(), 1e-6),
        "sum": (Reduction(average=False), 1e-6),
        "fp16": (Reduction(wire="fp16"), 2e-3),
        "bf16": (Reduction(wire="bf16"), 2e-2),
        "bf16 sum": (Reduction(wire="bf16", average=False), 2e-2),
        "two groups": (Reduction(groups=2), 1e-6),
        "more groups than tensors": (Reduction(groups=9), 1e-6),
        "named groups": (Reduction(groups=((2, 0),)), 1e-6),
        # The factor after the sum, predivide / size, is not 1 at any number of ranks.
        "predivided": (Reduction(predivide=0.5), 1e-6),
    }
    for name, (how, tolerance) in cases.items():
        factor = 1 / comm.size if how.average else 1.0
        mine = [tf.constant(t) for t in _tensors(comm.rank)]
        eager = comm.all_reduce(mine, how, f"eager {name}")
        graph = tf.function(lambda ts, how=how, name=name: comm.all_reduce(ts, how, f"graph {name}"))(mine)
        for got in (eager, graph):
            for tensor, total in zip(got, sums, strict=True):
                np.testing.assert_allclose(np.asarray(tensor), total * factor, rtol=tolerance, atol=tolerance)
            bits = [np.asarray(t).tobytes() for t in got]
            assert all(other == bits for other in comm.all_gather_object(bits, f"bits of {name}")), name


def check_slices(comm: GraphComm) -> None:
    """Check the rows of embeddings, gathered or dense, with repeated rows and with no rows."""
    rows = [] if comm.rank == comm.size - 1 and comm.size > 1 else [0, comm.rank % 4, 3, 3]
    mine = tf.IndexedSlices(tf.ones([len(rows), 2]) * (comm.rank + 1), tf.constant(rows, tf.int64), tf.constant([4, 2]))
    dense = np.zeros([4, 2])
    np.add.at(dense, rows, comm.rank + 1.0)
    expected = comm.all_reduce_sum(dense.ravel(), "expected").reshape(4, 2) / comm.size
    for sparse in ("gather", "dense"):
        for wire in ("none", "fp16", "bf16"):
            (got,) = comm.all_reduce([mine], Reduction(sparse=sparse, wire=wire), f"slices {sparse} {wire}")
            np.testing.assert_allclose(
                tf.convert_to_tensor(got).numpy(), expected, rtol=1e-6 if wire == "none" else 1e-2
            )


def check_equal_lookups(comm: GraphComm) -> None:
    """Check that rows of the same indices on all ranks, each once, are added up, and that others stay apart."""
    others = [2, 0, 2][: comm.rank + 1] if comm.size < 4 else [comm.rank]
    for number, (rows, added) in enumerate((([2, 0, 3], True), ([2, 0, 2], False), (others, False))):
        mine = tf.IndexedSlices(tf.ones([len(rows), 2]), tf.constant(rows), tf.constant([4, 2]))
        got: Any = comm.all_reduce([mine], Reduction(average=False), f"equal lookups {number}")[0]
        everyone = [row for theirs in comm.all_gather_object(rows, "rows") for row in theirs]
        alike = added or comm.size == 1
        assert got.indices.numpy().tolist() == (rows if alike else everyone)
        np.testing.assert_array_equal(got.values.numpy(), np.full([len(got.indices), 2], comm.size if added else 1))

    def width_in_graph(slices: tf.IndexedSlices) -> tf.Tensor:
        mean: Any = comm.all_reduce([slices], Reduction(), "lookups in a graph")[0]
        # Keras' optimisers ask for it.
        return tf.reduce_sum(mean.values) * mean.values.shape[1]

    np.testing.assert_allclose(float(tf.function(width_in_graph)(mine)), 2 * 2 * len(everyone) / comm.size, rtol=1e-6)


def _tensors(rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [random.normal(size=shape).astype(np.float32) for shape in ((7, 3), (), (11,))]


def check_messages_come_in_order(comm: Comm) -> None:
    """Check that messages from each rank to each arrive once and in order, with bodies of many sizes and without."""
    box = comm.mailbox(_BOX)
    sizes = [0, 1, 7, None, 5000, 0, 300_000, None, 3]
    bodies = [None if n is None else np.full(n, comm.rank + i, np.uint8) for i, n in enumerate(sizes)]
    for i, body in enumerate(bodies):
        for to in range(comm.size):
            box.send(to, _BOX, [i, comm.rank, -(2**62), to], body)
    expected = dict.fromkeys(range(comm.size), 0)
    for message in _messages(box, comm.size * len(sizes)):
        i = expected[message.sender]
        expected[message.sender] += 1
        assert message.header == (i, message.sender, -(2**62), comm.rank, *[0] * (HEADER_WORDS - 4))
        size = sizes[i]
        if size is None:
            assert message.body is None
        else:
            assert message.body is not None
            assert message.body.dtype == np.uint8
            np.testing.assert_array_equal(message.body, np.full(size, message.sender + i, np.uint8))
    assert set(expected.values()) == {len(sizes)}
    assert box.fetch() is None
    assert until(box.all_sent, _SECONDS)
    assert not box.receiving
    comm.all_gather_object(None, "the end of a check")


def check_boxes_are_separate(comm: Comm) -> None:
    """Check that a message reaches only its own box, although the same ranks send to both; bodies are read-only."""
    boxes, neighbour = {n: comm.mailbox(n) for n in (_BOX, _OTHER)}, (comm.rank + 1) % comm.size
    for i in range(20):
        for number in (_OTHER, _BOX):
            boxes[_BOX].send(neighbour, number, [number, i], np.frombuffer(bytes([number, i] * 50), np.uint8))
    for number in (_BOX, _OTHER):
        for i, message in enumerate(_messages(boxes[number], 20)):
            assert message.header[:2] == (number, i)
            assert message.body is not None
            assert message.body.tobytes() == bytes([number, i] * 50)
        assert boxes[number].fetch() is None
    assert until(boxes[_BOX].all_sent, _SECONDS)
    comm.all_gather_object(None, "the end of a check")


def check_bodies_are_put_in_their_place(comm: Comm) -> None:
    """Check that `buffer_for` is called once for each body, and that the mailbox allocates a buffer for None."""
    places = np.zeros((comm.size, 1000), np.uint8)
    calls = []

    def buffer_for(sender: int, header: tuple[int, ...], size: int) -> np.ndarray | None:
        calls.append((sender, header[0], size))
        return places[sender] if header[0] == 1 else None

    box = comm.mailbox(_BOX, buffer_for)
    for to in range(comm.size):
        box.send(to, _BOX, [0])
        box.send(to, _BOX, [1], np.full(1000, comm.rank + 1, np.uint8))
        box.send(to, _BOX, [2], np.full(10, comm.rank + 1, np.uint8))
    for message in _messages(box, 3 * comm.size):
        if message.header[0] == 1:
            np.testing.assert_array_equal(places[message.sender], np.full(1000, message.sender + 1))
        if message.header[0] == 2:
            assert message.body is not None
            np.testing.assert_array_equal(message.body, np.full(10, message.sender + 1))
    assert sorted(calls) == sorted((s, k, n) for s in range(comm.size) for k, n in ((1, 1000), (2, 10)))
    assert until(box.all_sent, _SECONDS)
    comm.all_gather_object(None, "the end of a check")


def check_messages_pass_collectives(comm: Comm) -> None:
    """Check that messages are delivered during a collective, while another thread answers them."""
    mine, answers = comm.mailbox(_BOX), comm.mailbox(_OTHER)
    rounds, failures = 20, []

    def answer() -> None:
        try:
            for message in _messages(mine, rounds * comm.size):
                mine.send(message.sender, _OTHER, message.header, message.body)
            assert until(mine.all_sent, _SECONDS)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for i in range(rounds):
        body = np.full(2000, i, np.uint8)
        for to in range(comm.size):
            answers.send(to, _BOX, [i, to], body)
        assert comm.all_gather_object(i, "meanwhile") == [i] * comm.size
        for message in _messages(answers, comm.size):
            assert message.header[:2] == (i, message.sender)
            np.testing.assert_array_equal(message.body, body)
    thread.join(_SECONDS)
    assert not thread.is_alive()
    assert not failures
    comm.all_gather_object(None, "the end of a check")


def _messages(box: Mailbox, count: int) -> Iterator[Message]:
    """Yield the next `count` messages of a box."""
    for i in range(count):
        found: list[Message] = []

        def poll(found: list[Message] = found) -> bool:
            message = box.fetch()
            found += [message] if message is not None else []
            return bool(found)

        assert until(poll, _SECONDS), f"message {i} of {count} did not arrive"
        yield found[0]


COMM_CHECKS = {
    check.__name__: check for check in (check_place, check_objects, check_sums, check_flags, check_broadcast)
}

GRAPH_CHECKS = {
    check.__name__: check
    for check in (
        check_gather,
        check_reductions,
        check_slices,
        check_equal_lookups,
        check_integers,
        check_parts,
        check_subset,
    )
}

#: Checks of communicators with mailboxes.
MAILBOX_CHECKS = {
    check.__name__: check
    for check in (
        check_messages_come_in_order,
        check_boxes_are_separate,
        check_bodies_are_put_in_their_place,
        check_messages_pass_collectives,
    )
}
