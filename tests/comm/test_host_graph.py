"""Collectives on tensors without Horovod, eagerly between virtual ranks; tests/ranks tests them in graphs."""

# Tests: hvdx/comm/memory.py, hvdx/comm/tensors.py

import time

import numpy as np
import pytest
import tensorflow as tf

from hvdx.comm import host_graph
from hvdx.comm.host_graph import HostGraphComm, change, on_host
from hvdx.comm.interfaces import Reduction
from hvdx.comm.local import virtual_world
from hvdx.comm.memory import aligned
from hvdx.comm.tensors import MismatchError
from hvdx.errors import ConfigError, ExchangeError, ReplicaError
from hvdx.keras.adapters.finite import FirstBad
from tests.checks import COMM_CHECKS, GRAPH_CHECKS
from tests.strategies.virtual import on_all, on_hosts


@pytest.fixture(autouse=True)
def _eager():
    # Graphs of all virtual ranks would share one thread pool and could deadlock in it.
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", [*COMM_CHECKS.values(), *GRAPH_CHECKS.values()], ids=[*COMM_CHECKS, *GRAPH_CHECKS])
def test_virtual_ranks_pass(check, size):
    on_all(size, lambda comm: check(HostGraphComm(comm)))


def reduced(tensors, how, hosts="aa"):
    """Return the result of each rank, on hosts of these names, for its tensors(rank)."""
    return on_hosts(hosts, lambda comm: HostGraphComm(comm).all_reduce(tensors(comm.rank), how, "test"))


def test_mixed_dtypes_are_preserved():
    def tensors(rank):
        return [tf.fill([2], tf.cast(rank + 1, dtype)) for dtype in (tf.float64, tf.float16, tf.float32, tf.bfloat16)]

    for wire in ("none", "fp16", "bf16"):
        for got in reduced(tensors, Reduction(wire=wire), "ab"):
            assert [t.dtype for t in got] == [t.dtype for t in tensors(0)]
            np.testing.assert_array_equal([t.numpy().astype(float) for t in got], np.full((4, 2), 1.5))


@pytest.mark.parametrize(("hosts", "wire", "elements"), [("aa", "none", 2), ("abc", "bf16", 2), ("ab", "fp16", 2**20)])
def test_ranks_at_different_steps_get_an_error(hosts, wire, elements):
    how = Reduction(wire=wire, of_step=True, sizes=(elements, elements))

    def step(comm, name):
        return HostGraphComm(comm).all_reduce([tf.ones(elements), tf.ones(elements)], how, name)

    for sums in on_hosts(hosts, lambda comm: step(comm, "alike")):
        assert [t.numpy().tolist() for t in sums] == [[1.0] * elements] * 2

    def fails(comm):
        with pytest.raises(ExchangeError, match="the workers are in different steps"):
            step(comm, f"of rank {comm.rank}")

    on_hosts(hosts, fails)


def test_float64_is_summed_in_float64():
    def tensors(rank):
        return [tf.constant([1.0 + rank * 2.0**-50], tf.float64)]

    for (got,) in reduced(tensors, Reduction(average=False)):
        assert got.numpy()[0] == 2.0 + 2.0**-50


@pytest.mark.parametrize(("wire", "dtype"), [("fp16", np.float16), ("bf16", tf.bfloat16.as_numpy_dtype)])
def test_values_have_the_wire_dtype_and_their_sum_is_rounded_once(wire, dtype):
    def tensors(rank):
        return [tf.constant(np.random.default_rng(rank).normal(size=100), tf.float32)]

    wide = sum(tensors(rank)[0].numpy().astype(dtype).astype(np.float32) for rank in range(3))
    for (got,) in reduced(tensors, Reduction(average=False, wire=wire), "abc"):
        np.testing.assert_array_equal(got.numpy(), wide.astype(dtype).astype(np.float32))


def test_nothing_is_cast_within_a_host():
    rows = tf.IndexedSlices(tf.constant([[1 + 2.0**-20]]), tf.constant([0]), tf.constant([1, 1]))
    for wire in ("fp16", "bf16"):
        for dense, gathered in reduced(lambda rank: [rows.values, rows], Reduction(wire=wire)):
            assert dense.numpy()[0, 0] == 1 + 2.0**-20
            assert gathered.values.numpy().tolist() == [[1 + 2.0**-20]]


def test_predivided_mean_fits_into_float16_although_the_values_do_not():
    for (got,) in reduced(lambda rank: [tf.fill([2], 1e5 * rank)], Reduction(wire="fp16", predivide=4.0), "ab"):
        np.testing.assert_allclose(got.numpy(), 5e4, rtol=1e-3)


def test_device_is_refused_with_a_remedy():
    for how in (Reduction(device="GPU:0"), Reduction(device_sparse="GPU:0")):
        with pytest.raises(ConfigError, match=r"device: expected none .* got 'GPU:0'.*hvdx build-horovod"):
            reduced(lambda rank: [tf.zeros(1)], how, "a")


def test_splits_that_do_not_fit_are_refused_on_all_ranks():
    def call(comm):
        with pytest.raises(tf.errors.OpError, match=r"splits: expected 2 numbers of rows .* others on rank 1"):
            comm.all_to_all(tf.zeros([2]), tf.constant([1, 1 + comm.rank]), "test")

    on_all(2, lambda comm: call(HostGraphComm(comm)))


def test_different_calls_are_refused_on_all_ranks():
    def call(comm):
        comm.check_call("allreduce", [tf.zeros([2, 3])])
        for name, tensor in (
            ("allreduce", tf.zeros([2 + comm.rank])),
            ("allreduce", tf.zeros([2], tf.float32 if comm.rank else tf.float64)),
            ("allgather" if comm.rank else "allreduce", tf.zeros([2])),
        ):
            with pytest.raises(MismatchError, match=r"got allreduce of .*\[2\] on rank 0, all.* on rank 1") as caught:
                comm.check_call(name, [tensor])
            assert isinstance(caught.value, ReplicaError)
            assert isinstance(caught.value, tf.errors.FailedPreconditionError)

    on_all(2, lambda comm: call(HostGraphComm(comm)))


def test_graph_runs_collectives_in_program_order():
    """Test collectives in conditions and loops too: TensorFlow alone may reorder those on different variables."""
    tf.config.run_functions_eagerly(False)
    comm, sizes = HostGraphComm(virtual_world(1)[0]), []
    variables = [tf.Variable(0.0) for _ in range(7)]
    plain = comm._dense.add_up

    def record(vectors, scale, cast):
        sizes.append(sum(v.size for v in vectors))
        return plain(vectors, scale, cast)

    comm._dense.add_up = record

    def late(n):
        time.sleep(0.2 if n == 1 else 0.0)
        return np.float32(1)

    @tf.function
    def step(x):
        def reduced(n):
            one = tf.numpy_function(late, [n], tf.float32, stateful=False)
            (total,) = comm.all_reduce([tf.fill([n], x * one)], Reduction(wire="bf16"), "test")
            return variables[n].assign(tf.reduce_sum(total)) if isinstance(n, int) else tf.reduce_sum(total)

        for n in (1, 2):
            tf.cond(x > 0, lambda n=n: reduced(n), lambda: 0.0)
        reduced(3)
        _, last = tf.while_loop(lambda i, _: i < 6, lambda i, _: (i + 1, reduced(i)), (tf.constant(4), 0.0))
        variables[5].assign(last)
        reduced(6)

    step(tf.constant(1.0))
    assert sizes == [1, 2, 3, 4, 5, 6]
    assert [v.numpy() for v in variables] == [0, 1, 2, 3, 0, 5, 6]


@pytest.mark.parametrize("copy_results", [True, False])
def test_variable_does_not_follow_a_reused_array(copy_results):
    array = aligned(1000)

    def work(value):
        array.fill(value)
        return [array]

    variable = tf.Variable(tf.zeros(1000))

    @tf.function
    def step():
        (result,) = on_host(work, [tf.constant(1.0)], [tf.float32], copy_results)
        variable.assign(tf.ensure_shape(result, [1000]))

    tf.config.run_functions_eagerly(False)
    step()
    work(2.0)
    # Without a copy, the variable has the array's memory.
    assert variable.numpy()[0] == (1.0 if copy_results else 2.0)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_python_code_changes_tensors_and_nothing_else(eager, shares, monkeypatch):
    """Also if TensorFlow should give it copies one day, of scalars, and of a tensor that is given twice."""
    monkeypatch.setattr(host_graph, "_shares_memory", lambda: shares)
    tf.config.run_functions_eagerly(eager)
    kept = tf.Variable(tf.ones([70]))

    def work(arrays, other):
        for i, array in enumerate(arrays):
            np.add(array, 10.0 * (i + 1) + other, out=array)
        return [np.int64(len(arrays))]

    @tf.function
    def step(x):
        made = x + 1.0
        (count,), changed = change(work, [made, made, kept, tf.constant(2.0)], [tf.constant(0.5)], [tf.int64])
        return count, changed, made

    count, changed, made = step(tf.zeros([70]))
    assert count == 4
    assert [float(t.numpy().max()) for t in changed] == [11.5, 21.5, 31.5, 42.5]
    assert [t.shape.as_list() for t in changed] == [[70]] * 3 + [[]]
    assert (made.numpy() == 1).all()
    assert (kept.numpy() == 1).all()


def test_computed_gradients_are_summed_where_they_are():
    """The check for NaN reads them too: a sum that began beside it would have to copy them."""
    tf.config.run_functions_eagerly(False)
    comm, first, summed = HostGraphComm(virtual_world(1)[0]), FirstBad(), []
    add_up = comm._dense.add_up

    def address(array):
        return np.int64(array.__array_interface__["data"][0])

    def record(vectors, scale, cast):
        summed.append(address(vectors[0]))
        return add_up(vectors, scale, cast)

    comm._dense.add_up = record

    @tf.function
    def step(rows):
        gradient = tf.matmul(rows, rows, transpose_a=True)
        # An operation of Python holds the gradient as long as it runs, so the others begin after it.
        place = tf.numpy_function(address, [gradient], tf.int64, stateful=False)
        with tf.control_dependencies([place]):
            seen = first.look([tf.identity(gradient)], tf.constant(1, tf.int64))
        return place, comm.all_reduce(seen, Reduction(), "test")

    computed = [int(step(tf.ones([4, 2048]))[0]) for _ in range(5)]
    assert computed == summed
